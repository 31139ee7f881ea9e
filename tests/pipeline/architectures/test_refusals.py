"""What longhaul cannot express of a folder of transformers is refused by its name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CASES, LINEAR, YARN, build, config_class, config_of, describe
from torch import Tensor

from longhaul.pipeline.architectures.architecture import canonical
from longhaul.pipeline.architectures.registry import ARCHITECTURES
from longhaul.pipeline.runs.exported import exported_model, exported_weights

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
# The case, what its config.json says in place of what it did, and the line.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Llama", {"rope_scaling": DYNAMIC}, "rope_parameters.rope_type: found 'dynamic', wanted one "),
    ("Llama", {"rope_parameters": PROPORTIONAL}, "rope_parameters.rope_type: found 'proportional'"),
    ("Qwen3 yarn", {"rope_parameters": {**YARN, "mscale": 1.0}}, "rope_parameters.mscale: found 1"),
    ("Gemma3Text", {"rope_parameters": {"full_attention": DYNAMIC}},
     "rope_parameters.full_attention.rope_type: found 'dynamic', wanted one of default, linear, l"),
    ("Gemma3Text", {"rope_parameters": LINEAR}, "rope_parameters.rope_type"),
    ("Olmo3", {"rope_parameters": {"full_attention": {**YARN, "truncate": False}}},
     "rope_parameters.truncate: found False in that of a type of layers, which transformers does"),
    ("GPTNeoX", {"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters.factor: found none"),
    ("GPTNeoX", {"rope_parameters": {"rope_theta": "high"}}, "rope_parameters.rope_theta: found '"),
    ("Llama", {"model_type": "qwen3_moe"}, "model_type: found 'qwen3_moe', wanted one that l"),
    ("Llama", {"model_type": "qwen3_moe", "num_experts": 128},
     "num_experts: found 128, wanted dense MLPs; model_type: found 'qwen3_moe', wanted one that l"),
    ("Llama", {"model_type": "deepseek_v3", "n_routed_experts": "\n", "n_shared_experts": 1},
     r"n_routed_experts: found '\\n', wanted dense MLPs; model_type: found 'deepseek_v3', wanted"),
    ("Llama", {"model_type": "granitemoehybrid", "num_local_experts": 0},
     "model_type: found 'granitemoehybrid', wanted one that l"),
    ("Llama", {"num_local_experts": 8}, "num_local_experts: found 8, which no model of longhaul h"),
    ("Gemma3Text", {"model_type": "gemma3"}, "model_type: found 'gemma3', wanted one that l"),
    ("Gemma3Text", {"vision_config": {}}, "vision_config: found {}, which no model of longhaul ha"),
    ("Qwen2", {"use_mrope": True}, "use_mrope: found True, wanted None"),
    ("Llama", {"quantization_config": {}}, "quantization_config: found {}, which no model of long"),
    ("Llama", {"auto_map": {}}, "auto_map: found {}, which no model of longhaul has"),
    ("GPT2", {"model_type": "bloom"}, "model_type: found 'bloom', wanted one that l"),
    ("GPT2", {"alibi": True}, "alibi: found True, which no model of longhaul has"),
    ("GPT2", {"scale_attn_by_inverse_layer_idx": True},
     "scale_attn_by_inverse_layer_idx: found True, wanted False"),
    ("GPT2", {"scale_attn_weights": False}, "scale_attn_weights: found False, wanted True"),
    ("GPT2", {"add_cross_attention": True}, "add_cross_attention: found True, wanted False"),
    ("Gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention: found True, w"),
    ("Gemma3Text", {"use_bidirectional_attention": True}, "use_bidirectional_attention: found Tru"),
    ("Olmo2", {"clip_qkv": 8.0}, "clip_qkv: found 8.0, which no model of longhaul has"),
    ("Qwen2", {"layer_types": ["chunked_attention"] * 2}, "layer_types: found 'chunked_attention'"),
    ("Qwen2", {"layer_types": ["full_attention"]}, "layer_types: found 1 layers, wanted 2"),
    ("SmolLM3", {"no_rope_layers": [1, 0]}, "no_rope_layers: found 2 layers, wanted 8"),
    ("GPTNeoX", {"hidden_act": "silu"}, "hidden_act: found 'silu', wanted one of gelu_pytorch_tan"),
    ("GPTNeoX", {"layer_norm_eps": 0.0}, "model.norm_eps: found 0.0, wanted more than 0"),
    ("GPTNeoX", {"attention_bias": 1}, "attention_bias: found 1, wanted a valid boolean"),
    ("GPTNeoX", {"num_hidden_layers": 10**9}, "model.layers: found 1000000000, wanted"),
    ("GPTNeoX", {"head_dim": 8}, "head_dim: found 8, which no model of longhaul has; wanted no su"),
    ("GPTNeoX", {"hidden_size": "32"}, "hidden_size: found '32', wanted a valid integer"),
    ("OlmoHybrid", {"num_key_value_heads": 2}, "num_key_value_heads: found 2, wanted 4"),
    ("OlmoHybrid", {"linear_num_value_heads": 8}, "linear_num_value_heads: found 8, wanted 4 as"),
    ("OlmoHybrid", {"linear_num_key_heads": 3}, "linear_num_key_heads: found 3, wanted a divisor"),
    ("OlmoHybrid", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim: found 1"),
    ("OlmoHybrid", {"layer_types": ["linear_attention"] * 3}, "layer_types: found no full_atten"),
    ("OlmoHybrid", {"layer_types": ["sliding_attention"] * 3}, "layer_types: found 'sliding_atte"),
    ("OlmoHybrid", {"attention_bias": True}, "attention_bias: found True, wanted False"),
    ("OlmoHybrid", {"hidden_act": "gelu"}, "hidden_act: found 'gelu', wanted one of silu"),
    ("Mamba2", {"expand": 3}, "expand: found 3, wanted 2, the width of all heads over hidden_siz"),
    ("Mamba2", {"n_groups": 3}, "n_groups: found 3, wanted a divisor of 8 heads"),
    ("Mamba2", {"use_bias": True}, "use_bias: found True, wanted False"),
    ("Mamba2", {"time_step_limit": [0.0, 0.1]}, "time_step_limit: found \\[0.0, 0.1\\], wanted"),
    ("GPTNeoX", {"hidden_size": 33}, "model.width: found 33, wanted a multiple of 2 x model.heads"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_a_field_that_cannot_be_expressed_is_refused_by_name(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    config_of(name).save_pretrained(tmp_path)
    exported_model(tmp_path)
    describe(tmp_path, changes)
    with pytest.raises(ValueError, match=f": {message}") as error:
        exported_model(tmp_path)
    assert "\n" not in str(error.value)


# Fields that change no logit: of training, of dropout, of other heads than that of tokens, of how
# the same is computed, and those whose values others repeat.
HARMLESS = {
    *("attention_dropout", "hidden_dropout", "residual_dropout", "embedding_dropout"),
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "classifier_dropout", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "is_decoder", "pretraining_tp"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "reorder_and_upcast_attn", "max_window_layers"),
    *("no_rope_layer_interval", "_sliding_window_pattern", "chunk_size_feed_forward", "id2label"),
    *("label2id", "problem_type", "is_encoder_decoder", "output_attentions", "return_dict"),
    *("output_hidden_states", "architectures", "dtype", "transformers_version", "_name_or_path"),
    *("max_position_embeddings", "model_type"),
    *("linear_a_log_min", "linear_a_log_max"),
    *("linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
    *("time_step_rank", "time_step_min", "time_step_max", "time_step_floor"),
    *("rescale_prenorm_residual", "chunk_size", "residual_in_fp32"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_field_changes_the_model_is_refused_or_is_harmless(name: str) -> None:
    described = json.loads(config_of(name).to_json_string(use_diff=False))
    if "use_sliding_window" in described:  # else other fields of windows mean nothing
        types = ["sliding_attention"] * described["num_hidden_layers"]
        described |= {"use_sliding_window": True, "sliding_window": 8, "layer_types": types}
    architecture = ARCHITECTURES[described["model_type"]]
    model = architecture.model_of(described)
    harmless = {"attn_logit_softcapping"} if name == "Gemma3Text" else set()  # none reads it
    for field in sorted(described.keys() - HARMLESS - harmless):
        for value in (True, False, 3, 0.5, "other", ["other"], {"other": 1}):
            if value == described[field] or (value, described[field]) == (False, None):
                continue
            found: Any
            try:
                found = architecture.model_of({**described, field: value})
            except (TypeError, ValueError) as error:
                found = str(error)
            assert found != model, (field, value)
            if isinstance(found, str):
                assert found.startswith(("model.", *described)), (field, value)


@pytest.mark.parametrize("name", {name.partition(" ")[0]: name for name in CASES}.values())
def test_an_absent_field_has_the_default_of_transformers(name: str) -> None:
    config = config_class(name)()
    architecture = ARCHITECTURES[config.model_type]
    absent, given = {"model_type": config.model_type}, config.to_json_string(use_diff=False)
    found, wanted = (architecture.model_of(one) for one in (absent, json.loads(given)))
    assert canonical(found) == canonical(wanted)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    build(config_of("GPTNeoX", tied=True)).save_pretrained(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")

    def read_with(changes: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        tensors = {k: v for k, v in {**whole, **changes}.items() if v is not None}
        save_file(tensors, tmp_path / "model.safetensors")
        return exported_weights(tmp_path)

    bias = "gpt_neox.layers.1.attention.dense.bias"
    embedding = whole["gpt_neox.embed_in.weight"]
    for changes, message in (
        ({bias: None}, f"{bias}: found no such tensor, wanted that of GPTNeoXForCausalLM"),
        ({"gpt_neox.more": torch.ones(2)}, "gpt_neox.more: found an unknown tensor of GPTNeoXF"),
        ({bias: torch.ones(33)}, rf"{bias}: found shape \(33,\), wanted \(32,\) as in config.json"),
        ({"embed_out.weight": embedding + 1}, "embed_out.weight: found another matrix than gpt_n"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            read_with(changes)
        assert "\n" not in str(error.value)
    wanted = read_with({})
    ignored = {
        "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 4, 4),
        "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(4),
        "lm_head.weight": embedding.clone(),  # which is tied
    }
    found = read_with(ignored)
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight), name


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    config_of("Llama").save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    message = "the weights cannot be read, found pytorch_model.bin, a pickle, wanted model.safeten"
    with pytest.raises(ValueError, match=message):
        exported_weights(tmp_path)
