"""Tables of architectures against transformers: tiny models, disturbed, in and out and in again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from everyday import everyday
from tiny_models import (
    CASES,
    LINEAR,
    LLAMA3,
    OLD_NAMES,
    YARN,
    build,
    config_of,
    describe,
    exactly,
    tokens,
)
from tokenizer_files import characters
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from longhaul.modules.attention import attention_config
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.pipeline.architectures.architecture import canonical
from longhaul.pipeline.architectures.registry import ARCHITECTURES, architecture_of
from longhaul.pipeline.cli import main
from longhaul.pipeline.generation.decoding import Sampling, Session, decode
from longhaul.pipeline.runs.exported import exported_model, exported_weights
from longhaul.pipeline.runs.trained_model import load_trained_model

# As in its row, `make test` has these.
EVERYDAY = ("Llama", "Qwen3 yarn", "Gemma3Text", "GPT2", "OlmoHybrid")
# The head is another one than in its row: tied or not.
TURNED = [
    pytest.param(name, True, marks=pytest.mark.wide if name in EVERYDAY else pytest.mark.soak)
    for name in CASES
    if name != "Llama tied"
]
every_case = pytest.mark.parametrize(
    ("name", "is_turned"),
    everyday([(name, False) for name in CASES], [(name, False) for name in EVERYDAY]) + TURNED,
)


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    assert found.dtype == wanted.dtype
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()


def in_three_files(folder: Path, model: Any) -> None:
    """What transformers saves of a model, with a tokenizer of as many ids."""
    size = sum(one.nbytes for one in model.parameters())
    model.save_pretrained(folder, max_shard_size=size * 2 // 5)
    assert len(list(folder.glob("*.safetensors"))) == 3
    characters("<s>", "</s>").save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def read(folder: Path) -> LanguageModel:
    """Our model of a folder of theirs, as it is."""
    model = LanguageModel(exported_model(folder)).eval()
    model.load_state_dict(exported_weights(folder))
    return model


def greedy(theirs: Any, prompt: Tensor, count: int) -> Tensor:
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
    return theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **options)  # type: ignore[no-any-return]


def run_command(*words: object) -> None:
    assert main([str(word) for word in words]) == 0


@torch.no_grad()
@every_case
def test_a_model_is_the_same_in_and_out_and_in_again(
    name: str, is_turned: bool, tmp_path: Path
) -> None:
    theirs = build(config_of(name, tied=CASES[name]["tied"] != is_turned))
    in_three_files(tmp_path / "theirs", theirs)
    if name == "GPTNeoX old names":
        describe(tmp_path / "theirs", OLD_NAMES[name])
    run_command("import", tmp_path / "theirs", tmp_path / "run")
    ours = load_trained_model(tmp_path / "run").model
    close(ours(tokens()), theirs(tokens()).logits)
    prompt, count = tokens(5), 12  # beyond every window
    wanted = greedy(theirs, prompt, count)
    sessions = [Session(row.tolist()) for row in prompt]
    found = list(decode(ours, sessions, num_tokens=count, sampling=Sampling(vocabulary=97)))
    for row in range(len(prompt)):
        assert [one for place, one in found if place == row] == wanted[row, 5:].tolist()
    found = ours.double()(tokens())
    with exactly(theirs) as exact:
        close(found, exact(tokens()).logits, 1e-10)
    if ARCHITECTURES[theirs.config.model_type].cut:
        assert architecture_of(ours.config) is None  # it is exported with longhaul's code
        run_command("export", tmp_path / "run", tmp_path / "out")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
        assert torch.equal(greedy(again, prompt, count), wanted)
        return
    # Out: as the same class of transformers, which loads without code.
    run_command("export", tmp_path / "run", tmp_path / "out", "--as", "auto")
    assert not list((tmp_path / "out").glob("*.py"))
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert type(again) is type(theirs)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights = again.state_dict()
    assert weights.keys() == theirs.state_dict().keys()
    assert all(torch.equal(weights[key], one) for key, one in theirs.state_dict().items())
    close(again(tokens()).logits, theirs(tokens()).logits)
    assert torch.equal(greedy(again, prompt, count), wanted)
    # Fields of before version 5, which other programs read, say the same alone.
    described = json.loads((tmp_path / "out" / "config.json").read_bytes())
    if described.get("rope_parameters"):
        old = {key: value for key, value in described.items() if key != "rope_parameters"}
        architecture = ARCHITECTURES[described["model_type"]]
        assert canonical(architecture.model_of(old)) == canonical(ours.config)
    # And in again, to the bit.
    run_command("import", tmp_path / "out", tmp_path / "second")
    second = load_trained_model(tmp_path / "second").model
    assert canonical(second.config) == canonical(ours.config)
    weights = second.state_dict()
    assert all(torch.equal(weights[key], one) for key, one in ours.float().state_dict().items())


@pytest.mark.parametrize("name", OLD_NAMES)
def test_old_names_of_fields_mean_what_they_do_in_transformers(name: str, tmp_path: Path) -> None:
    config_of(name).save_pretrained(tmp_path)
    describe(tmp_path, OLD_NAMES[name])
    found = exported_model(tmp_path)
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert exported_model(tmp_path) == found


ROTATIONS: dict[str, dict[str, Any]] = {
    "linear": LINEAR,
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with betas": {**YARN, "beta_fast": 8.0, "beta_slow": 0.5, "attention_factor": 1.3},
    "yarn without truncation": {**YARN, "truncate": False},
    "yarn without a context": {key: YARN[key] for key in ("rope_type", "rope_theta", "factor")},
    "longrope": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0,
                 "original_max_position_embeddings": 16},
}  # fmt: skip


@torch.no_grad()
@pytest.mark.wide
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize(
    "name", ["Llama", "Qwen2", "Qwen3 yarn", "Olmo2", "Gemma2", "SmolLM3", "GPTNeoX", "Starcoder2"]
)
def test_every_rotation_in_every_architecture(name: str, rotation: str, tmp_path: Path) -> None:
    config = config_of(name)
    rope = dict(ROTATIONS[rotation])
    share = config.rope_parameters.get("partial_rotary_factor")
    if share is not None:
        rope["partial_rotary_factor"] = share
    if rotation == "longrope":
        head_dim = getattr(config, "head_dim", None) or 8
        divisors = torch.linspace(1, 3, int(head_dim * (share or 1)) // 2)
        # A window's cache cannot follow rates that change with the length.
        more = 1 if name in ("Qwen2", "Gemma2", "Starcoder2") else 2
        rope |= {"short_factor": divisors.tolist(), "long_factor": (more * divisors).tolist()}
    theirs = build(config_of(name, rope_parameters=rope))
    theirs.save_pretrained(tmp_path)
    ours = read(tmp_path)
    for T in (10, 40):  # of which the first is shorter than the original context
        close(ours(tokens(T)), theirs(tokens(T)).logits)
    with exactly(theirs) as exact:
        wanted = exact(tokens()).logits
    close(ours.double()(tokens()), wanted, 1e-10)


def test_every_architecture_is_tested() -> None:
    assert {config_of(name).model_type for name in CASES} == ARCHITECTURES.keys()
    assert {"tied", "untied"} == {"tied" if one["tied"] else "untied" for one in CASES.values()}


def test_biases_everywhere_are_without_those_of_norms_where_norms_have_none() -> None:
    model = LanguageModelConfig(
        attention=attention_config("softmax")(), norm="rms", mlp="swiglu", embedding_norm=False,
        biases=True,
    )  # fmt: skip
    found = ARCHITECTURES["llama"].config_of(model)
    assert (found["attention_bias"], found["mlp_bias"]) == (True, True)
