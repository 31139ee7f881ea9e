"""Which backend runs a call: the one chosen, what is available, and what it supports."""

import inspect
import logging
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import longhaul.kernels.power
from longhaul.kernels import PowerState, backend, power_attention, power_attention_step
from longhaul.kernels.backend import resolve_backend
from longhaul.kernels.power import op
from longhaul.kernels.power.cost import Form
from longhaul.kernels.power.torch import backend as torch_backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with Triton, which is not interpreted, and without a GPU."""
    has = SimpleNamespace(triton=True, interpreter=False, cuda=False)
    monkeypatch.setattr(backend, "_is_interpreted", lambda: has.interpreter)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has.cuda)
    return has


def test_auto_chooses_triton_only_on_a_gpu(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_backend("auto", CUDA) == "triton"
    assert resolve_backend("auto", CPU) == "torch"
    machine.interpreter = True
    assert resolve_backend("auto", CPU) == "torch"
    monkeypatch.setattr(backend, "_HAS_TRITON", False)
    assert resolve_backend("auto", CUDA) == "torch"


def test_a_backend_chosen_by_name_runs_or_says_why_not(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_backend("torch", CUDA) == "torch"
    assert resolve_backend("reference", CPU) == "reference"
    assert resolve_backend("triton", CUDA) == "triton"
    with pytest.raises(ValueError, match="'triton' cannot run: there is no CUDA device; wanted"):
        resolve_backend("triton", CPU)
    machine.cuda = True
    with pytest.raises(ValueError, match="the tensors are on cpu"):
        resolve_backend("triton", CPU)
    machine.interpreter = True
    assert resolve_backend("triton", CPU) == "triton"
    monkeypatch.setattr(backend, "_HAS_TRITON", False)
    with pytest.raises(ValueError, match="triton is not installed"):
        resolve_backend("triton", CPU)


class FakeTriton(ModuleType):
    """A fake Triton backend that counts calls and runs them in torch."""

    def __init__(self, reason: str | None) -> None:
        super().__init__("triton")
        self.reason, self.calls = reason, 0

    def why_not(self, call: Any, K: int, V: int, has_state: bool) -> str | None:
        return self.reason

    def forward(self, *args: Any) -> Any:
        self.calls += 1
        return torch_backend.forward(*args)

    def step(self, state: PowerState, *token: Any, **settings: Any) -> Any:
        self.calls += 1
        return power_attention_step(state, *token, **settings, backend="torch")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> FakeTriton:
    """Triton appears to be available on this machine."""
    fake = FakeTriton(None)
    monkeypatch.setattr(longhaul.kernels.power, "triton", fake, raising=False)
    monkeypatch.setattr(
        op, "resolve_backend", lambda name, _: "torch" if name == "torch" else "triton"
    )
    backend._log_once.cache_clear()
    return fake


def tensors(T: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return list(torch.randn(3, 1, T, 2, 4, dtype=dtype))


def test_calls_go_to_triton_where_it_supports_them(kernels: FakeTriton) -> None:
    x = tensors(20)
    out, _ = power_attention(*x)
    assert kernels.calls == 1
    torch.testing.assert_close(out, power_attention(*x, backend="torch")[0])
    power_attention(*tensors(20, torch.float64))
    assert kernels.calls == 1


def test_auto_falls_back_and_logs_it_once(
    kernels: FakeTriton, caplog: pytest.LogCaptureFixture
) -> None:
    kernels.reason = "it has no degree 12"
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            power_attention(*tensors(20))
    assert kernels.calls == 0
    assert [record.message for record in caplog.records] == [
        "power attention runs in torch, not Triton: it has no degree 12"
    ]


def test_a_compiled_call_logs_it_too(kernels: FakeTriton, caplog: pytest.LogCaptureFixture) -> None:
    choose = inspect.unwrap(backend.triton_unless)  # without the checks that pytest adds
    compiled = torch.compile(
        lambda x: x + len(choose("power attention", "auto", "it has no degree 12")),
        fullgraph=True,
        backend="eager",
    )
    with caplog.at_level(logging.WARNING):
        assert compiled(torch.zeros(1)) == len("torch")
    assert [record.message for record in caplog.records] == [
        "power attention runs in torch, not Triton: it has no degree 12"
    ]


def test_triton_chosen_by_name_says_what_it_does_not_support(kernels: FakeTriton) -> None:
    with pytest.raises(ValueError, match="backend: 'triton' cannot run: it has no float64"):
        power_attention(*tensors(20, torch.float64), backend="triton")
    kernels.reason = "it has no degree 12"
    with pytest.raises(ValueError, match="'triton' cannot run: it has no degree 12"):
        power_attention(*tensors(20), backend="triton")


@pytest.mark.usefixtures("machine")
def test_kernels_that_are_not_interpreted_refuse_the_cpu() -> None:
    with pytest.raises(ValueError, match="'triton' cannot run: there is no CUDA device"):
        power_attention(*tensors(20), backend="triton")


@pytest.mark.parametrize("form", ["attention", "chunked", "recurrent"])
def test_the_interpreter_refuses_16_bits(form: Form) -> None:
    """It would compute with their raw bits without raising."""
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(ValueError, match="'triton' cannot run: its interpreter is silently"):
            power_attention(*tensors(20, dtype), form=form, backend="triton")


def test_kernels_on_a_gpu_take_16_bits(machine: SimpleNamespace) -> None:
    assert backend.why_dtype_unsupported(torch.bfloat16) is None
    assert backend.why_dtype_unsupported(torch.float16) is None
    assert backend.why_dtype_unsupported(torch.float64) == "it has no float64"
    machine.interpreter = True
    assert backend.why_dtype_unsupported(torch.float32) is None


def test_a_step_of_triton_refuses_what_it_does_not_support() -> None:
    x = [y.requires_grad_() for y in tensors(3)]
    with pytest.raises(ValueError, match="its kernel for one token has no backward"):
        power_attention(*x, form="recurrent", backend="triton")
    state = PowerState(torch.zeros(1, 2, 84, 4), torch.zeros(1, 2, 84))
    token = [y.detach()[:, :1, :, :4] for y in x]
    with torch.no_grad(), pytest.raises(ValueError, match="degree 1, 2 and 4, found 6"):
        power_attention_step(state, *token, degree=6, backend="triton")


@pytest.mark.parametrize(("K", "V"), [(257, 4), (4, 257)])
def test_triton_refuses_widths_above_256(K: int, V: int) -> None:
    q, k, v = torch.randn(1, 3, 2, K), torch.randn(1, 3, 2, K), torch.randn(1, 3, 2, V)
    with pytest.raises(ValueError, match=f"K and V up to 256, found {K} and {V}"):
        power_attention(q, k, v, degree=1, normalize=False, backend="triton")


def test_triton_steps_where_no_gradient_is_needed(kernels: FakeTriton) -> None:
    x = tensors(5)
    how: dict[str, Any] = {"form": "recurrent", "output_final_state": True}
    wanted, state = power_attention(*x, backend="torch", **how)
    assert kernels.calls == 0
    start = PowerState(torch.zeros(1, 2, 64, 4), torch.zeros(1, 2, 64))
    out, after = power_attention(*x, initial_state=start, **how)
    assert kernels.calls == 5
    assert state is not None
    assert after is not None
    assert not start.kv.any()
    torch.testing.assert_close((out, *after), (wanted, *state))
    x[0].requires_grad_()
    power_attention(*x, **how)[0].sum().backward()
    power_attention_step(start, *(y[:, :1] for y in x))[0].sum().backward()
    assert kernels.calls == 5
    with torch.no_grad():
        power_attention_step(start, *(y[:, :1] for y in x), inplace=True)
    assert kernels.calls == 6
    assert start.kv.any()
    assert start.kv._version > 0


@pytest.mark.usefixtures("kernels")
def test_triton_refuses_a_step_in_float64() -> None:
    state = PowerState(torch.zeros(1, 2, 64, 4).double(), torch.zeros(1, 2, 64).double())
    with pytest.raises(ValueError, match="it has no float64"):
        power_attention_step(state, *tensors(1, torch.float64), backend="triton")
