"""Learning rates as functions of tokens."""

import itertools

import pytest

from longhaul.modules.optim import (
    LargerUpdateConfig,
    OptimConfig,
    ScheduleConfig,
    learning_rate_factor,
)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"name": "constant"}, {0: 1, 500: 1, 1000: 1}),
        ({"name": "constant", "warmup_tokens": 100}, {0: 0, 50: 0.5, 100: 1, 1000: 1}),
        (
            {"name": "linear", "warmup_tokens": 200, "start_factor": 0.5, "final_factor": 0.1},
            {0: 0.5, 100: 0.75, 200: 1, 600: 0.55, 1000: 0.1, 2000: 0.1},
        ),
        ({"name": "cosine"}, {0: 1, 500: 0.5, 1000: 0, 250: 0.853553}),
        ({"name": "wsd", "decay_tokens": 400}, {0: 1, 600: 1, 800: 0.5, 1000: 0}),
    ],
)
def test_rate_at_chosen_tokens(options: dict[str, object], wanted: dict[int, float]) -> None:
    config = ScheduleConfig(**options)  # type: ignore[arg-type]
    for tokens, factor in wanted.items():
        assert learning_rate_factor(config, tokens, 1000) == pytest.approx(factor, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"name": "step"}, "name"),
        ({"final_factor": 2.0}, "final_factor"),
        ({"warmup_tokens": -1}, "warmup_tokens"),
        ({"name": "wsd"}, "decay_tokens"),
        ({"name": "cosine", "decay_tokens": 5}, "decay_tokens"),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_bad_values_are_named(options: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=f"optim.schedule.{field}: found"):
        ScheduleConfig(**options)  # type: ignore[arg-type]


def test_steps_of_a_budget_are_those_of_update_after_update() -> None:
    """Also where a stage ends within an update of the one before, or is passed by it."""
    for starts in ((1,), (7,), (5, 6, 40), (10, 50), (90, 91)):
        for factors in itertools.combinations((2, 3, 5, 7), len(starts)):
            larger = [
                LargerUpdateConfig(at_tokens=start, factor=factor)
                for start, factor in zip(starts, factors, strict=True)
            ]
            optim = OptimConfig(tokens_per_update=4, larger_updates=larger)
            for budget in range(1, 100):
                step = 0
                while 4 * step < budget:
                    begun = [one.factor for one in larger if one.at_tokens <= 4 * step]
                    assert optim.update_factor(4 * step) == (begun or [1])[-1]
                    step += (begun or [1])[-1]
                assert optim.num_steps(budget) == step
    assert OptimConfig(tokens_per_update=4).num_steps(9) == 3


def test_bad_larger_updates_are_named() -> None:
    for (at_tokens, factor), message in {
        (9, 1): "factor: found 1, wanted 2 or more",
        (0, 4): "at_tokens: found 0, wanted 1 or more",
        (5, 4): "at_tokens: found 5, wanted more than the 5 before it",
        (9, 3): "factor: found 3, wanted more than the 3 before it",
    }.items():
        larger = [LargerUpdateConfig(at_tokens=5, factor=3)]
        larger += [LargerUpdateConfig(at_tokens=at_tokens, factor=factor)]
        with pytest.raises(ValueError, match=f"optim.larger_updates.1.{message}"):
            OptimConfig(tokens_per_update=4, larger_updates=larger)
