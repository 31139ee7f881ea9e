"""Tables of architectures against transformers: tiny models, disturbed, in and out and in again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from longhaul.modules.attention import attention_config
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.pipeline.architectures.architecture import canonical
from longhaul.pipeline.architectures.registry import ARCHITECTURES, architecture_of
from longhaul.pipeline.runs.exported import exported_model, exported_weights

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e4, "factor": 4.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 16}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
GPT2 = {"num_key_value_heads": ..., "intermediate_size": ...}
NEOX = {"num_key_value_heads": ..., "intermediate_size": 96}
BY_TYPE = {"full_attention": YARN, "sliding_attention": PLAIN}
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 24, "sliding_window": 8}
TYPES = ["sliding_attention"] * 5 + ["full_attention"]
# What differs from the sizes, by the name of a case; the name begins with that of the config.
CASES: dict[str, dict[str, Any]] = {
    "Llama": {"head_dim": 12, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    "Llama tied": {"tie_word_embeddings": True},
    "Qwen2": {"tie_word_embeddings": True, "use_sliding_window": True, "max_window_layers": 1,
              "sliding_window": 8},
    "Qwen3 yarn": {"head_dim": 16, "rope_parameters": YARN},
    "Qwen3 linear": {"head_dim": 16, "rope_parameters": LINEAR, "attention_bias": True},
    "Olmo2": {},
    "Olmo3": {"num_hidden_layers": 4, "sliding_window": 8, "rope_parameters": BY_TYPE},
    "Gemma2": GEMMA,
    "Gemma3Text": {**GEMMA, "num_hidden_layers": 6, "layer_types": TYPES},
    "SmolLM3": {"num_hidden_layers": 8},
    "Starcoder2": {"sliding_window": 8},
    "GPT2": {**GPT2, "n_inner": 96},
    "GPT2 untied": {**GPT2, "activation_function": "gelu", "tie_word_embeddings": False},
    "GPTNeoX": {**NEOX, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
    "GPTNeoX in turn": {**NEOX, "use_parallel_residual": False, "attention_bias": False,
                        "tie_word_embeddings": True},
}  # fmt: skip


def build(name: str) -> Any:
    """The model of transformers, with weights so far from their starts that errors show."""
    fields = {k: v for k, v in {**SIZES, **CASES[name]}.items() if v is not ...}
    config = getattr(transformers, f"{name.partition(' ')[0]}Config")(**fields)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.2 * torch.randn_like(parameter)
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    return model.eval()


def tokens() -> Tensor:
    return torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(1))


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()


# `make test` runs one case of each architecture.
every_case = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.wide)
        if name in ("Llama tied", "Qwen3 linear", "GPT2 untied", "GPTNeoX in turn")
        else name
        for name in CASES
    ],
)


@torch.no_grad()
@every_case
def test_a_model_computes_the_same_in_and_out(name: str, tmp_path: Path) -> None:
    theirs = build(name)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=20_000)
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    config = exported_model(tmp_path / "theirs")
    model = LanguageModel(config).eval()
    model.load_state_dict(exported_weights(tmp_path / "theirs"))
    close(model(tokens()), theirs(tokens()).logits)
    # Longer than every window, and again in float64, where the rotations of transformers are
    # those of float32.
    found = model.double()(tokens())
    close(found, theirs.double()(tokens()).logits, 2e-6)
    model.float()
    # Out: as the first architecture that expresses it, which loads without its code.
    architecture = architecture_of(config)
    assert architecture is not None
    assert architecture.name == type(theirs).__name__
    folder = tmp_path / "ours"
    folder.mkdir()
    others = {"dtype": "float32", "max_position_embeddings": 64, "pad_token_id": 0}
    described = architecture.config_of(config) | others
    (folder / "config.json").write_text(json.dumps(described))
    state = model.state_dict()
    parts = {}
    for name, place in architecture.tensors(model).items():
        rows = torch.cat([state[place.name][begin:end] for begin, end in place.rows])
        parts[name] = rows.T.contiguous() if place.is_transposed else rows
    save_file(parts, folder / "model.safetensors", {"format": "pt"})
    again = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    close(again.eval()(tokens()).logits, model(tokens()))
    assert canonical(exported_model(folder)) == canonical(config)
    # Fields of before version 5, which other programs read, say the same alone.
    if described.get("rope_parameters"):
        old = {key: value for key, value in described.items() if key != "rope_parameters"}
        assert canonical(architecture.model_of(old)) == canonical(config)
    # Greedily, beyond every window.
    text = tokens()[:, :5]
    found = again.generate(text, max_new_tokens=12, do_sample=False, eos_token_id=-1)
    for _ in range(12):
        text = torch.cat([text, model(text)[:, -1:].argmax(dim=-1)], dim=1)
    assert torch.equal(found, text)


def test_every_architecture_is_tested() -> None:
    tested = {getattr(transformers, f"{name.partition(' ')[0]}Config").model_type for name in CASES}
    assert tested == ARCHITECTURES.keys()


def test_biases_everywhere_are_without_those_of_norms_where_norms_have_none() -> None:
    model = LanguageModelConfig(
        attention=attention_config("softmax")(), norm="rms", mlp="swiglu", embedding_norm=False,
        biases=True,
    )  # fmt: skip
    found = ARCHITECTURES["llama"].config_of(model)
    assert (found["attention_bias"], found["mlp_bias"]) == (True, True)
