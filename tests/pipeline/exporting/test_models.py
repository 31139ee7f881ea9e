"""Exported models, loaded by transformers in a process that has no longhaul."""

import dataclasses
import json
import os
import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from everyday import everyday
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from longhaul.configs import RunConfig, load_run_config, to_yaml
from longhaul.datamodules.tokenizer import JsonTokenizer, build_tokenizer
from longhaul.modules.attention import attention_config, registered_variants
from longhaul.modules.attention.power import PowerConfig
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.modules.progress import Progress
from longhaul.modules.rotary import RotaryScaling
from longhaul.pipeline.checkpoints.store import CheckpointStore
from longhaul.pipeline.exporting.folder import export
from longhaul.pipeline.exporting.tokenizer_files import write_tokenizer

CHECKOUT = Path(__file__).parents[3]
LOADER = Path(__file__).parent / "load_exported.py"
LEARNED = {"initial_state": "learned", "rank": 3}
# Options that change what a kind computes. A new kind needs no entry.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "cartan": [
        {"generator": "additive", "negative_diagonal": True},
        {"generator": "product"},
        {"bilinear": False},
        LEARNED,
        {"bilinear": False, "generator_per": "pair", **LEARNED},
    ],
    "coca": [{"mode": "slack"}, {"longest_document": 64}],
    "complex": [{"decay": True}, {"learned_rates": True, "learned_sizes": True, **LEARNED}],
    "conformal_sympow": [{"qk_norm": True}, {"degree": 4, **LEARNED}],
    "linear": [
        {"feature_map": "relu", **LEARNED},
        {"feature_map": "identity", "normalizer": "head_norm"},
    ],
    "retention": [{"swish_gate": True}, {"group_norm": False, **LEARNED}],
    "softmax": [{"longest_document": 64}],
    # A state of 2 coordinates to the eighth is kept, one of 32 to the sixth would be too large.
    "sympow": [{"degree": 8, "heads": 16}],
    "sympow_gated": [{"degree": 6, "heads": 1}],
    "zeros": [
        {"zeroth": "first_layer", "ordered": True, "second_order": True},
        {"form": "notes", "bilinear": False},
        LEARNED,
    ],
}
CASES = {
    ",".join([kind, *(f"{key}={value}" for key, value in options.items())]): (kind, options)
    for kind in registered_variants()
    for options in ({}, *OPTIONS.get(kind, []))
}
MIXED = "layers of three kinds"
SHAPES: dict[str, dict[str, Any]] = {
    "shape of GPT-NeoX": {
        "embedding_norm": False,
        "parallel_residual": True,
        "biases": True,
        "tied_head": False,
    },
    "shape of Gemma": {
        "embedding_norm": False,
        "norm": "rms_offset",
        "norm_eps": 1e-6,
        "norm_order": "sandwich",
        "mlp": "geglu",
        "mlp_width": 72,
        "biases": ["qkv"],
        "embedding_scale": 3.0,
        "logit_softcap": 5.0,
    },
}
GROUPED = "shared keys in layers with windows, scaled rotations and learned positions"
SHAPES[GROUPED] = {"kv_heads": 2, "head_dim": 10, "qk_norm": "full", "learned_positions": 1000}
NAMES = [*CASES, MIXED, *SHAPES]
LINEAR = [
    name for name, (kind, _) in CASES.items() if issubclass(attention_config(kind), PowerConfig)
]
LENGTHS = (1, 63, 150)  # more than a chunk
TEXTS = (
    "",
    "Hello world\n\n\tdef f(x):  return 'é' \\ \"q\" / ",
    "<|endoftext|> a<|endoftext|>b</s>",
    "日本語 🙂 \x00\x1f\x7f",
    "  don't I'll 100 3.14",
    r"\u0041 \n \q \ud83d\ude00 \ud83d",
)


def model_of(name: str) -> LanguageModelConfig:
    kind, options = CASES.get(name, ("conformal_sympow", {}))
    heads = options.get("heads", 4)
    options = {key: value for key, value in options.items() if key != "heads"}
    layers = {}
    if name == MIXED:
        layers = {
            "1::2": attention_config("softmax")(),
            "3": attention_config("zeros")(zeroth="first_layer"),
            "0": attention_config("zeros")(zeroth="first_layer", **LEARNED),
        }
    if name == GROUPED:
        scaling = RotaryScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
        options = {"longest_document": None, "rotary_base": 500.0}
        options |= {"rotary_share": 0.8, "rotary_scaling": scaling}
        layers = {"1": attention_config("softmax")(window=40, softcap=2.0, **options)}
    return LanguageModelConfig(
        attention=attention_config(kind)(**options),
        layer_attention=layers,
        layers=4 if layers else 2,
        width=32,
        heads=heads,
        vocabulary=320,
        **SHAPES.get(name, {}),
    )


def write_run(folder: Path, config: RunConfig, model: LanguageModel) -> None:
    """A run folder with one checkpoint, as training leaves it."""
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    store = CheckpointStore(folder / "checkpoints", keep_last=1)
    progress = dataclasses.asdict(Progress(step=3, tokens=1536))
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    store.start(3, tensors, {"progress": progress, "shards_sha256": ""})
    store.wait()


@dataclass
class Exports:
    """What the runs' models computed, and what the exported ones did."""

    folder: Path
    inputs: dict[str, Tensor]
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    wanted: dict[str, Tensor]


@pytest.fixture(scope="module")
def exports(
    make_run: Any, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Exports:
    """Exports of the models that selected tests of this file name, or of all if they name none."""
    own = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec for item in own if hasattr(item, "callspec")]
    chosen = [case.params["name"] for case in cases if "name" in case.params]
    names = [name for name in NAMES if name in chosen] or NAMES
    folder = tmp_path_factory.mktemp("exports")
    base = load_run_config(make_run(1).path / "small.yaml")
    generator = torch.Generator().manual_seed(0)
    inputs = {str(T): torch.randint(256, (2, T), generator=generator) for T in LENGTHS}
    save_file(inputs, folder / "inputs.safetensors")
    wanted = {}
    paths = {}
    for name in names:
        number = NAMES.index(name)
        torch.manual_seed(zlib.crc32(name.encode()))  # the same, whatever other kinds there are
        model = LanguageModel(model_of(name)).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # large enough for every part to matter
                parameter.add_(0.1 * torch.randn_like(parameter))
        write_run(folder / f"run-{number}", dataclasses.replace(base, model=model.config), model)
        paths[name] = str(folder / f"exported-{number}")
        # Of several shards each.
        export(folder / f"run-{number}", paths[name], shard_bytes=40_000)
        for dtype in (torch.float32, torch.float64):
            model.to(dtype)
            for T, tokens in inputs.items():
                with torch.inference_mode():
                    holder = model.embedding if model.config.tied_head else model.lm_head
                    logits = model.activations(tokens)[0] @ holder.weight.T
                    if cap := model.config.logit_softcap:
                        logits = cap * (logits / cap).tanh()
                wanted[f"{name}/{T}/{str(dtype).removeprefix('torch.')}"] = logits
    tokenizers = {}
    for name, tokenizer in every_tokenizer().items():
        tokenizers[name] = str(folder / name)
        (folder / name).mkdir()
        write_tokenizer(folder / name, tokenizer, tokenizer.vocab_size + 1)
    work = {"models": paths, "beams": [MIXED], "tokenizers": tokenizers, "texts": TEXTS}
    (folder / "work.json").write_text(json.dumps(work))
    load(sys.executable, folder)
    facts = json.loads((folder / "found.json").read_bytes())
    return Exports(folder, inputs, load_file(folder / "found.safetensors"), facts, wanted)


def load(python: str | Path, folder: Path) -> None:
    """Load what was exported in a process of its own, which is not told where longhaul is."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    result = subprocess.run(
        [python, "-P", str(LOADER), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr


def every_tokenizer() -> dict[str, Any]:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    trained = Tokenizer(models.BPE(unk_token="[UNK]"))
    trained.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[UNK]", "<s>", "</s>"]
    trained.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=200, special_tokens=special))
    # What training does not do with it: ends, cuts, fills up.
    ends = [("<s>", 1), ("</s>", 2)]
    trained.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=ends
    )
    trained.enable_truncation(4)
    trained.enable_padding(length=9)
    own = JsonTokenizer(trained.to_str().encode(), "tokenizer.json")
    return {name: build_tokenizer(name) for name in ("bytes", "gpt2", "longcrawl64")} | {"own": own}


# What `make test` exports; `make test-all` has all kinds, options and shapes.
EVERYDAY = ("conformal_sympow", "softmax", "gated_deltanet", MIXED, "shape of Gemma")


every_model = pytest.mark.parametrize("name", everyday(NAMES, EVERYDAY))


def furthest(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found.double() - wanted.double()).abs().max())


@every_model
def test_logits_are_the_runs(exports: Exports, name: str) -> None:
    for T in LENGTHS:
        wanted = exports.wanted[f"{name}/{T}/float64"]
        assert furthest(exports.tensors[f"{name}/{T}/float64"], wanted) < 1e-6
        single = exports.wanted[f"{name}/{T}/float32"]
        # Where sums cancel, as in zeros, a run's own rounding is more than that.
        allowed = max(1e-5, 4 * furthest(single, wanted))
        assert furthest(exports.tensors[f"{name}/{T}/float32"], single) < allowed


@every_model
def test_reading_in_parts_changes_nothing(exports: Exports, name: str) -> None:
    whole = exports.wanted[f"{name}/{LENGTHS[-1]}/float64"]
    assert furthest(exports.tensors[f"{name}/parts/float64"], whole) < 1e-6
    swapped = exports.tensors[f"{name}/swapped/float64"]
    assert furthest(swapped, whole[:, -swapped.shape[1] :].flip(0)) < 1e-6
    kept = exports.tensors[f"{name}/kept/float32"]
    assert torch.equal(kept, exports.tensors[f"{name}/{LENGTHS[-1]}/float32"][:, -2:])


@every_model
def test_tokens_that_fill_up_leave_nothing_behind(exports: Exports, name: str) -> None:
    for count in (9, 4):
        found = exports.tensors[f"{name}/padded {count}/float64"]
        assert furthest(found, exports.tensors[f"{name}/alone {count}/float64"]) < 1e-6


@every_model
def test_generation_with_the_cache_is_generation_without(exports: Exports, name: str) -> None:
    facts = exports.facts["models"][name]
    assert facts["cached"] == facts["uncached"]
    assert facts["padded"] == facts["cached"]
    assert facts.get("beams") == facts.get("beams uncached")
    assert facts["cached"][0] != facts["cached"][1]
    # Rows of the embedding that are no token's are never chosen.
    assert max(max(row) for row in facts["cached"]) <= 256


@pytest.mark.parametrize("name", everyday(LINEAR, set(LINEAR) & set(EVERYDAY)))
def test_linear_kinds_keep_a_state_of_constant_size(exports: Exports, name: str) -> None:
    short, long = exports.facts["models"][name]["cache_bytes"]
    grows = name == "sympow_gated,degree=6,heads=1"
    assert long > 10 * short if grows else long == short


@every_model
def test_the_loss_is_that_of_the_next_tokens(exports: Exports, name: str) -> None:
    logits = exports.wanted[f"{name}/{LENGTHS[-1]}/float32"]
    target = exports.inputs[str(LENGTHS[-1])][:, 1:]
    wanted = cross_entropy(logits[:, :-1].flatten(0, 1), target.flatten())
    assert exports.facts["models"][name]["loss"] == pytest.approx(float(wanted), abs=1e-4)


@pytest.mark.parametrize("name", ["bytes", "gpt2", "longcrawl64", "own"])
def test_ids_are_those_of_training(exports: Exports, name: str) -> None:
    tokenizer, found = every_tokenizer()[name], exports.facts["tokenizers"][name]
    ids = [tokenizer.encode(text).tolist() for text in TEXTS]
    # As every sequence of training begins.
    assert found["ids"] == found["together"] == [[tokenizer.bos_id, *one] for one in ids]
    assert found["bare"] == found["unbegun"] == ids
    assert found["decoded"] == [tokenizer.decode(one) for one in ids]


@pytest.mark.soak
def test_a_fresh_environment_computes_the_same(exports: Exports, tmp_path: Path) -> None:
    """With torch and transformers alone, installed from the package index in minutes."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    pins = ("-c", CHECKOUT / "constraints.txt")
    needed = ("torch", "transformers")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *pins, *needed], check=True)
    code = "import importlib.util as u; print(u.find_spec('longhaul'), u.find_spec('jaxtyping'))"
    found = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "None None\n"
    load(python, exports.folder)
    facts = json.loads((exports.folder / "found.json").read_bytes())
    assert facts == exports.facts
    for name, value in load_file(exports.folder / "found.safetensors").items():
        assert torch.equal(value, exports.tensors[name]), name
