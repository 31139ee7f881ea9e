"""Steps that overwrite the state, and steps that are recorded once: against plain steps.

A CUDA graph repeats the same operations on the same memory. `Recording` does that on a CPU, so that
whatever a step would take from the host anew (a position, a size, a new tensor) shows.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from everyday_kinds import every_kind
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from longhaul.modules.attention import attention_config, registered_variants
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.pipeline.generation import steps
from longhaul.pipeline.generation.steps import Steps

KINDS = registered_variants()
LINEAR = [kind for kind in KINDS if attention_config(kind).cost == "linear"]
LINEAR.remove("sliding_window")  # whose state grows up to its window
TOKENS = 12


class Recording(TorchDispatchMode):
    """All operations, to be done again on the tensors they were done on; nothing is done yet."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.written: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        assert op not in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
        )
        for parameter, x in zip(op._schema.arguments, args, strict=False):
            if parameter.alias_info is not None and parameter.alias_info.is_write:
                self.written.setdefault(x.data_ptr(), (x, x.clone()))
        result = op(*args, **kwargs)
        self.calls.append((op, args, kwargs, result))
        return result

    @torch.no_grad()
    def undo(self) -> None:
        for x, before in self.written.values():
            x.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        for op, args, kwargs, result in self.calls:
            again = op(*args, **kwargs)
            for old, new in zip(pytree.tree_leaves(result), pytree.tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def record(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    recording = Recording()
    with recording:
        result = run()
    recording.undo()
    return result, recording.replay


def model_of(kind: str) -> LanguageModel:
    torch.manual_seed(0)
    config = LanguageModelConfig(
        attention=attention_config(kind)(), layers=2, width=32, heads=2, vocabulary=64
    )
    return LanguageModel(config).eval()


def plain_logits(model: LanguageModel, tokens: Tensor) -> list[Tensor]:
    _, state = model.prefill(tokens[:, :5])
    found = []
    for t in range(5, TOKENS):
        logits, state = model.step(tokens[:, t], state)
        found.append(logits)
    return found


@pytest.mark.parametrize("is_recorded", [False, True])
@every_kind
def test_steps_have_the_logits_of_plain_steps(
    kind: str, is_recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(kind)
    tokens = torch.randint(64, (2, TOKENS))
    wanted = plain_logits(model, tokens)
    recorded = []

    def counted(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        recorded.append(run)
        return record(run)

    if is_recorded:
        monkeypatch.setattr(steps, "can_record", lambda tokens: True)
        monkeypatch.setattr(steps, "record", counted)
    _, state = model.prefill(tokens[:, :5])
    step = Steps(model)
    first = state
    for t, logits in enumerate(wanted, 5):
        found, state = step(tokens[:, t], state)
        torch.testing.assert_close(found, logits)
    kept = [x.data_ptr() for x in pytree.tree_leaves(first)]
    assert (kept == [x.data_ptr() for x in pytree.tree_leaves(state)]) == (kind in LINEAR)
    assert len(recorded) == (is_recorded and kind in LINEAR)


def test_another_batch_is_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "can_record", lambda tokens: True)
    monkeypatch.setattr(steps, "record", record)
    model = model_of("conformal_sympow")
    tokens = torch.randint(64, (2, TOKENS))
    wanted = plain_logits(model, tokens)
    _, state = model.prefill(tokens[:, :5])
    step = Steps(model)
    for t in range(5, 8):
        _, state = step(tokens[:, t], state)
    state = pytree.tree_map(lambda x: x[1:].clone(), state)  # the first sequence has ended
    for t in range(8, TOKENS):
        logits, state = step(tokens[1:, t], state)
        torch.testing.assert_close(logits, wanted[t - 5][1:])


def test_steps_that_cannot_be_recorded_run_one_by_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(run: Callable[[], Tensor]) -> Any:
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(steps, "can_record", lambda tokens: True)
    monkeypatch.setattr(steps, "record", refuse)
    model = model_of("sympow")
    tokens = torch.randint(64, (2, TOKENS))
    _, state = model.prefill(tokens[:, :5])
    step = Steps(model)
    for t, logits in enumerate(plain_logits(model, tokens), 5):
        found, state = step(tokens[:, t], state)
        torch.testing.assert_close(found, logits)
    (warning,) = caplog.messages
    assert warning.endswith("without a CUDA graph: operation not permitted")
