"""Learning rates as functions of tokens."""

import pytest

from longhaul.modules.optim import ScheduleConfig, learning_rate_factor


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
