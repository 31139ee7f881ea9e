"""The presets: each builds, is planned, says how to launch it, and quotes what was published."""

import re
from importlib import resources
from pathlib import Path

import pytest
import torch
from everyday import everyday

from longhaul.configs import RunConfig, load_run_config, to_yaml
from longhaul.modules.attention import registered_variants
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.optim import learning_rate_factor
from longhaul.pipeline.cli import main
from longhaul.pipeline.planning.capacity import num_parameters

CONFIGS = Path(str(resources.files("longhaul.configs")))
RUNS = sorted(
    str(path.relative_to(CONFIGS))
    for path in (CONFIGS / "run").rglob("*.yaml")
    if not path.stem.endswith("recipe")
)
# One preset of each kind of recipe; `make test-all` has all.
EVERYDAY = (
    *("run/demo.yaml", "run/two-sources.yaml", "run/llama-124m.yaml"),
    *("run/hybrid-conformal-sympow-124m.yaml", "run/paper/conformal-sympow-p2-1024.yaml"),
    *("run/paper/coca-strict.yaml", "run/paper/complex-1.3b.yaml"),
)
SIZES = {"gpt2-124m": 124e6, "gpt2-354m": 354e6, "gpt2-772m": 772e6, "gpt2-1.6b": 1.56e9}
SIZES |= {"gpt-1.3b": 1.31e9, "gpt-neox-350m": 406e6}
SIZES |= {"llama-124m": 124e6, "llama-340m": 360e6, "llama-1.3b": 1.336e9}
# Optimizer, schedule, and the last rate over the peak, by the end of a preset's name.
RECIPES = {
    "": ("adamw", "cosine", 0.1),
    "-wsd": ("adamw", "wsd", 0.0),
    "-muon": ("muon", "wsd", 0.0),
}
LLAMA = ("124m", "340m", "1.3b")

KINDS = ("softmax", "sympow", "sympow_gated", "conformal_sympow")
# Published training losses by context and degree, kinds in this order: means of the last ten
# points of the data behind the conformal-sympow paper's curves.
PUBLISHED = {
    (256, 2): (2.571, 2.586, 2.572, 2.525),
    (1024, 2): (2.410, 2.492, 2.438, 2.376),
    (4096, 2): (2.387, 2.472, 2.370, 2.292),
    (8192, 2): (2.372, 2.491, 2.374, 2.309),
    (1024, 4): (2.410, 2.410, 2.399, 2.343),
    (4096, 4): (2.387, 2.332, 2.326, 2.261),
    (16_384, 4): (2.391, 2.348, 2.307, 2.236),
    (65_536, 4): (2.413, 2.585, 2.468, 2.477),
}
# The updates of the last of those points: 99,919 but for these.
ENDS = {"sympow": 52_687, "sympow_gated": 51_019, "conformal_sympow": 50_919}
# Their means from update 40,000 to 50,000, at context 65,536.
IN_COMMON = (2.518, 2.639, 2.515, 2.490)
# Figure 1, whose values for softmax are the same at both degrees.
FIGURE_1 = {
    (256, 2): (6.263, 6.058, 6.060, 6.058),
    (1024, 2): (4.885, 4.573, 4.752, 4.747),
    (4096, 2): (3.660, 3.679, 3.549, 3.455),
    (8192, 2): (3.113, 3.535, 3.121, 3.044),
    (1024, 4): (4.885, 4.794, 4.724, 4.737),
    (4096, 4): (3.660, 3.553, 3.438, 3.327),
    (16_384, 4): (2.969, 2.901, 2.784, 2.727),
    (65_536, 4): (2.540, 2.584, 2.459, 2.435),
}
# Figure 2: the last ten of its points, of the runs trained at 16,384.
FIGURE_2 = (2.753, 7.142, 2.295, 2.176)
# The sympow paper, at context 4,096: loss, relative loss, and the relative loss in its table.
SYMPOW_PAPER = {2: ("2.470", "1.036", "1.03x"), 4: ("2.354", "0.987", "0.98x"),
                6: ("2.324", "0.975", "0.97x")}  # fmt: skip
# CoCA, tables 4 and 5, at these lengths.
LENGTHS = "512 2,048 4,096 5,632 6,656 7,680 8,192"
COCA = {
    "perplexity, NTK 2": "18.41 26.78 44.84 56.76 62.92 70.18 70.84",
    "perplexity, NTK 4": "18.41 26.23 35.19 39.25 45.10 54.73 58.49",
    "perplexity, NTK 8": "18.41 29.44 38.27 46.11 51.68 56.04 57.51",
    "passkey, NTK 2": "1.0 0.95 0.7 0.65 0.63 0.54 0.6",
    "passkey, NTK 4": "1.0 0.97 0.89 0.77 0.74 0.67 0.61",
    "passkey, NTK 8": "1.0 0.96 0.92 0.68 0.5 0.47 0.45",
}
ORIGIN = {
    "perplexity, NTK 2": "17.96 104.90 511.78 745.80 755.78 802.25 144.48",
    "perplexity, NTK 4": "17.96 27.77 85.38 276.57 327.77 345.06 384.34",
    "perplexity, NTK 8": "17.96 39.17 78.01 102.71 117.51 136.75 840.95",
    "passkey, NTK 2": "0.99 0.95 0.68 0.62 0.59 0.44 0.58",
    "passkey, NTK 4": "0.99 0.99 0.84 0.67 0.51 0.52 0.44",
    "passkey, NTK 8": "0.99 0.92 0.67 0.44 0.29 0.21 0.28",
}


def comment(name: str) -> list[str]:
    """The lines of comment that a preset of a paper begins with."""
    lines = (CONFIGS / f"run/paper/{name}.yaml").read_text().splitlines()
    return [line for line in lines if line.startswith("# ")]


def of_experiment(experiment: str) -> list[RunConfig]:
    runs = map(load_run_config, (one for one in RUNS if one.startswith("run/paper/")))
    return [run for run in runs if run.tracking.experiment == experiment]


@pytest.mark.parametrize("preset", everyday(RUNS, EVERYDAY))
def test_a_preset_builds_and_is_the_same_after_yaml(preset: str, tmp_path: Path) -> None:
    config = load_run_config(preset)
    assert (CONFIGS / preset).read_text().startswith(f"# longhaul train {preset}\n")
    assert config.name == Path(preset).stem
    with torch.device("meta"):
        model = LanguageModel(config.model)
    assert model.num_parameters() > 0
    config = load_run_config(preset, ["name=a b"])
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert load_run_config(file) == config


@pytest.mark.wide
@pytest.mark.parametrize("preset", RUNS)
def test_a_preset_is_planned(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", preset]) == 0
    assert ",".join(load_run_config(preset).model.kinds) in capsys.readouterr().out


def test_no_papers_run_trains_on_cpus_unless_it_is_asked_to() -> None:
    papers = [load_run_config(one) for one in RUNS if one.startswith("run/paper/")]
    assert {one.trainer.accelerator for one in papers} == {"gpu"}


@pytest.mark.parametrize("size", SIZES)
def test_a_shape_has_the_parameters_of_its_name(size: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"inherits: [run/paper/softmax-1024.yaml, model/{size}.yaml]\n")
    with torch.device("meta"):
        model = LanguageModel(load_run_config(file).model)
    assert model.num_parameters() == pytest.approx(SIZES[size], rel=0.005)


@pytest.mark.parametrize("size", everyday(LLAMA, ["124m"]))
def test_a_run_of_llamas_block_has_any_kind(size: str) -> None:
    for kind in registered_variants():
        config = load_run_config(f"run/llama-{size}.yaml", kind=kind)
        assert config.model.kinds == (kind,)
        more = num_parameters(config.model) / SIZES[f"llama-{size}"]
        # These have half again as many in a layer of attention, as published.
        most = 1.18 if kind in ("gated_deltanet", "mamba2") else 1.1
        assert 0.995 <= more <= most, (kind, more)


@pytest.mark.parametrize("size", LLAMA)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_of_llamas_block_has_its_recipe(size: str, recipe: str) -> None:
    config = load_run_config(f"run/llama-{size}{recipe}.yaml", kind="sympow")
    optim, schedule = config.optim, config.optim.schedule
    assert (optim.name, schedule.name, schedule.final_factor) == RECIPES[recipe]
    assert (optim.beta1, optim.beta2, optim.epsilon) == (0.9, 0.95, 1e-8)
    assert (optim.weight_decay, optim.gradient_clip, optim.z_loss) == (0.1, 1.0, 1e-5)
    assert schedule.warmup_tokens == 2000 * optim.tokens_per_update
    share = schedule.decay_tokens / config.trainer.max_tokens
    assert share == (0.2 if schedule.name == "wsd" else 0.0)


@pytest.mark.wide
@pytest.mark.parametrize("size", LLAMA)
def test_a_run_of_llamas_block_is_planned_with_every_kind(
    size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = registered_variants()
    assert main(["plan", f"run/llama-{size}.yaml", "--kinds", ",".join(kinds)]) == 0
    rows = re.findall(r"^(\w+) +4,096 +[\d.]+[MB] ", capsys.readouterr().out, re.MULTILINE)
    assert tuple(rows) == kinds


def test_the_grid_of_the_conformal_sympow_paper_has_its_recipe() -> None:
    found = set()
    for config in of_experiment("conformal-sympow"):
        assert config.optim.tokens_per_update == 524_288
        assert (config.optim.name, config.optim.learning_rate) == ("adam", 6e-4)
        assert config.optim.schedule.name == "constant"
        assert config.optim.gradient_clip is None
        assert (config.trainer.precision, config.trainer.devices) == ("bf16-mixed", 8)
        attention = config.model.attention
        assert getattr(attention, "gate_init", "plain") == "plain"
        found.add((attention.kind, getattr(attention, "degree", None), config.data.context))
    wanted = {("softmax", None, context) for context, _ in PUBLISHED}
    wanted |= {(kind, p, context) for kind in KINDS[1:] for context, p in PUBLISHED}
    assert found == wanted | {("sympow", 6, 4096)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("context", "degree"), PUBLISHED)
def test_a_preset_quotes_the_curve_of_its_run(kind: str, context: int, degree: int) -> None:
    number = KINDS.index(kind)
    name = kind.replace("_", "-") if kind != "sympow_gated" else "sympow-gated"
    name += f"-{context}" if kind == "softmax" else f"-p{degree}-{context}"
    _, first, *others = comment(name)
    end = ENDS.get(kind, 99_919) if context == 65_536 else 99_919
    loss = PUBLISHED[context, degree][number]
    assert f"published loss {loss:.3f} (mean of the last ten points, up to update {end:,}" in first
    text = "\n".join(others)
    after = f"Figure 1: {FIGURE_1[context, degree][number]:.3f}, after about 384,000 sequences"
    assert f"{after} (update {384_000 * context // 524_288:,})." in text
    if context == 16_384:
        assert f"Figure 2: {FIGURE_2[number]:.3f} at positions 59,625 to 65,520" in text
    if context == 65_536:
        assert (
            f"40,000 to 50,000, which all runs of this context have: {IN_COMMON[number]:.3f}."
            in text
        )
    assert (", up to update 52,687; NaN at 53,219)." in first) == (name == "sympow-p4-65536")


@pytest.mark.parametrize("degree", SYMPOW_PAPER)
def test_a_preset_quotes_the_sympow_paper(degree: int) -> None:
    loss, relative, told = SYMPOW_PAPER[degree]
    text = "\n".join(comment(f"sympow-p{degree}-4096"))
    assert all(
        one in text for one in (f"{loss} (", f"{relative} of its softmax", f"table: {told}.")
    )
    assert "its own run of this: 2.384 (" in "\n".join(comment("softmax-4096"))
    assert float(loss) / 2.384 == pytest.approx(float(relative), abs=1e-3)


def test_the_presets_of_coca_have_its_recipe() -> None:
    runs = {run.name: run for run in of_experiment("coca")}
    kinds = {name: run.model.attention.kind for name, run in runs.items()}
    assert kinds == {
        **{"coca-origin": "softmax", "coca-alibi": "alibi"},
        **{"coca-strict": "coca", "coca-slack": "coca"},
    }
    assert [runs[f"coca-{mode}"].model.attention.mode for mode in ("strict", "slack")] == [
        "strict",
        "slack",
    ]
    for run in runs.values():
        optim, model = run.optim, run.model
        assert (model.layers, model.width, model.heads) == (24, 1024, 16)
        assert (model.parallel_residual, model.biases) == (True, True)
        assert (model.tied_head, model.embedding_norm) == (False, False)
        assert (run.data.context, run.samples_per_update, run.accumulation) == (512, 256, 2)
        assert (optim.name, optim.beta1, optim.beta2) == ("adamw", 0.9, 0.95)
        assert (run.trainer.strategy, run.trainer.devices) == ("fsdp", 8)
        budget = run.trainer.max_tokens
        for part, rate in ((0, 1e-7), (0.005, 5.005e-5), (0.01, 1e-4), (0.505, 5.5e-5), (1, 1e-5)):
            factor = learning_rate_factor(optim.schedule, int(part * budget), budget)
            assert optim.learning_rate * factor == pytest.approx(rate, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "wanted"), [("coca-origin", ORIGIN), ("coca-strict", COCA), ("coca-slack", COCA)]
)
def test_the_presets_of_coca_quote_its_tables(name: str, wanted: dict[str, str]) -> None:
    pairs = [re.split(r" {2,}", line.removeprefix("# "), maxsplit=1) for line in comment(name)]
    tables = {pair[0].strip(): " ".join(pair[1].split()) for pair in pairs if len(pair) == 2}
    assert tables == {"": LENGTHS, **wanted}


def test_the_three_models_of_the_note_differ_in_their_attention_alone() -> None:
    runs = of_experiment("complex")
    assert {run.model.attention.kind for run in runs} == {"complex", "retention", "softmax"}
    shapes = {(one.model.layers, one.model.width, one.model.heads, one.data.context, str(one.optim))
              for one in runs}  # fmt: skip
    assert len(shapes) == 1
