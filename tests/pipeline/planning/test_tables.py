"""`longhaul plan` against published numbers and against what is really allocated."""

import re

import pytest
import torch
from attention_cases import groups_keys

from longhaul.configs import load_run_config
from longhaul.modules.attention import attention_config, registered_variants
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.modules.meta_device import build_on_meta
from longhaul.pipeline.cli import main
from longhaul.pipeline.planning.sizes import allocated_bytes, attention_layers

PAPER = "run/paper/conformal-sympow-p2-1024.yaml"
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[list[str]]]:
    """The tables that a plan prints: rows of cells, names of columns first."""
    assert main(["plan", *arguments]) == 0
    parts = capsys.readouterr().out.strip().split("\n\n")
    return [[re.split(" {2,}", line.strip()) for line in part.splitlines()] for part in parts[1::2]]


def test_the_table_of_degrees_is_of_the_models_own_shape(
    capsys: pytest.CaptureFixture[str],
) -> None:
    costs, states = plan(capsys, PAPER)
    assert states[0] == [
        *("degree", "tensor power", "<= 80 GB", "symmetric power", "<= 80 GB", "saving"),
        *("state / weights", "allocated"),
    ]
    assert states[1][:-1] == ["2", "77 MB", "yes", "39 MB", "yes", "49%", "0.16"]
    assert states[2][:-1] == ["4", "314 GB", "no", "14 GB", "yes", "95%", "58"]
    assert len(costs) == 2
    row = dict(zip(*costs, strict=True))
    assert (row["kind"], row["context"]) == ("conformal_sympow", "1,024")
    assert (row["parameters"], row["state"]) == ("124M", "39 MB")
    assert row["allocated"] == states[1][-1]


def test_kinds_and_contexts_make_a_grid(capsys: pytest.CaptureFixture[str]) -> None:
    (costs,) = plan(capsys, "run/demo.yaml", "model.attention.kind=softmax", "--contexts", "7,700")
    assert [row[:2] for row in costs[1:]] == [["softmax", "7"], ["softmax", "700"]]
    kinds = registered_variants()
    options = ("--kinds", ",".join(kinds), "--contexts", "1024,65536")
    costs, states = plan(capsys, "run/demo.yaml", *options)
    contexts = ("1,024", "65,536")
    assert [row[:2] for row in costs[1:]] == [[kind, T] for kind in kinds for T in contexts]
    assert len(states) == 5  # of the first symmetric-power kind
    rows = [dict(zip(costs[0], row, strict=True)) for row in costs[1:]]
    for short, long in zip(rows[::2], rows[1::2], strict=True):
        grows = load_run_config("run/demo.yaml", kind=short["kind"]).model.attention.cost
        assert (short["state"] != long["state"]) == (grows == "quadratic"), short["kind"]
    # 4 layers x 2 x 192 numbers a token, in half precision.
    assert [row["state"] for row in rows if row["kind"] == "softmax"] == ["3.1 MB", "201 MB"]


def test_flops_are_those_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    (_, values), _ = plan(capsys, PAPER, "--contexts", "65536")
    with torch.device("meta"):
        model = LanguageModel(load_run_config(PAPER).model)
    assert values[3] == f"{model.weight_flops() / 1e6:.0f}M"
    assert values[4] == f"{model.mixing_flops(65_536, 'triton') / 1e6:.0f}M"
    ratio = model.mixing_flops(65_536, "triton") / model.weight_flops()
    assert float(values[5]) == pytest.approx(ratio, 0.1)
    forms = [model.blocks[0].attention.form(65_536, backend) for backend in ("triton", "torch")]
    assert values[8:] == forms
    assert forms[0] != forms[1]


def test_what_muon_adds_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["optim.name=muon", "model.layers=1", "model.width=64", "model.heads=2"]
    assert main(["plan", "run/demo.yaml", *options]) == 0
    # Per iteration 2 r r c + 2 r r r + 2 r r c for r x c: q, k, v and out, and both of the MLP.
    flops = 5 * (4 * 6 * 64**3 + 2 * (4 * 4 + 2) * 64**3)
    config = load_run_config("run/demo.yaml", options)
    with torch.device("meta"):
        passes = 3 * LanguageModel(config.model).flops_per_token(512, "triton") * 8192
    wanted = f"Muon: {flops / 1e6:.0f}M FLOPs an update, {100 * flops / passes:.2g}% of what its"
    assert wanted in capsys.readouterr().out


def test_a_hybrid_sums_its_layers(capsys: pytest.CaptureFixture[str]) -> None:
    override = "model.layer_attention.1::2={kind: softmax}"
    (names, values), states = plan(capsys, "run/demo.yaml", override)
    row = dict(zip(names, values, strict=True))
    assert row["kind"] == "conformal_sympow,softmax"
    assert row["form on GPU"] == row["on CPU"] == "attention, fused softmax"
    (_, whole), whole_states = plan(capsys, "run/demo.yaml")
    half = [size_of(cells[3]) / size_of(whole_cells[3])
            for cells, whole_cells in zip(states[1:], whole_states[1:], strict=True)]  # fmt: skip
    assert half == [pytest.approx(0.5, rel=0.05)] * 4
    cache = 2 * 512 * 2 * 192 * 2  # layers, tokens, keys and values, bytes
    assert size_of(row["state"]) == pytest.approx(size_of(whole[6]) / 2 + cache, rel=0.05)


def size_of(text: str) -> float:
    number, unit = text.split()
    return float(number) * UNITS[unit]


@pytest.mark.parametrize("kind", ["softmax", "conformal_sympow"])
def test_what_is_allocated_is_what_a_model_holds(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    T = 100
    options = ("--kinds", kind, "--contexts", f"{T}")
    (names, values), *_ = plan(capsys, "run/demo.yaml", *options)
    model = LanguageModel(load_run_config("run/demo.yaml", kind=kind).model).bfloat16()
    _, state = model.prefill(torch.zeros(1, T, dtype=torch.int64))
    allocated = size_of(dict(zip(names, values, strict=True))["allocated"])
    assert allocated == pytest.approx(num_bytes(state), rel=0.05)


@pytest.mark.parametrize("kind", registered_variants())
def test_states_of_shared_keys_have_the_planned_bytes_while_they_are_decoded(kind: str) -> None:
    config = LanguageModelConfig(
        attention=attention_config(kind)(),
        layers=2,
        width=24,
        heads=4,
        kv_heads=2 if groups_keys(kind) else 4,
        head_dim=10,
        qk_norm="head",
        vocabulary=64,
    )
    layers = attention_layers(build_on_meta(config))
    model, tokens = LanguageModel(config).bfloat16(), torch.randint(64, (1, 32))
    _, state = model.prefill(tokens[:, :30])
    for T in (30, 31):
        assert num_bytes(state) == allocated_bytes(layers, T)
        _, state = model.step(tokens[:, T], state)


def num_bytes(state: object) -> int:
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        state = list(state.values())
    return sum(map(num_bytes, state)) if isinstance(state, list | tuple) else 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--kinds", "softmax,"],
            "--kinds: found 'softmax,', wanted kinds, such as softmax,sympow",
        ),
        (["--contexts", "1x"], "--contexts: found '1x', wanted tokens, such as 1024,64k"),
        (["--contexts", "0"], "--contexts: found '0', wanted tokens"),
        (["--kinds", "softmax,sofmax"], "model.attention.kind: found 'sofmax', wanted one of"),
        (["model.attention.degre=4"], "model.attention.degre: unknown key"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "run/demo.yaml", *arguments]) == 2
    out, error = capsys.readouterr()
    assert error.startswith(f"longhaul: {message}")
    assert len(error.splitlines()) == 1
    assert out == ""
