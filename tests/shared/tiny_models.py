"""Tiny models of transformers, one of each architecture and of each option that changes it."""

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": 95,
    "eos_token_id": 96,
    "max_position_embeddings": 64,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e4, "factor": 4.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 16}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
PLAIN = {"rope_type": "default", "rope_theta": 5e3}
HALF = {**PLAIN, "partial_rotary_factor": 0.5}
BY_TYPE = {"full_attention": YARN, "sliding_attention": PLAIN}
LLAMA = {"head_dim": 12, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 24, "sliding_window": 8, "tied": True}
TYPES = ["sliding_attention"] * 5 + ["full_attention"]
NEOX = {"num_key_value_heads": ..., "intermediate_size": 96, "tied": False}
GPT2 = {"num_key_value_heads": ..., "intermediate_size": ..., "n_inner": 96}
HYBRID = {"num_key_value_heads": 4, "num_hidden_layers": 3, "linear_conv_kernel_dim": 3,
          "layer_types": ["linear_attention", "full_attention", "linear_attention"],
          "rope_parameters": {"rope_type": "default", "rope_theta": None}}  # fmt: skip
MAMBA2 = {"num_key_value_heads": ..., "num_attention_heads": ..., "intermediate_size": ...,
          "max_position_embeddings": ..., "num_heads": 8, "head_dim": 8, "state_size": 12,
          "n_groups": 2, "chunk_size": 16, "conv_kernel": 3, "num_hidden_layers": 3}  # fmt: skip

# What differs from the sizes; the name of a case begins with that of its config.
CASES: dict[str, dict[str, Any]] = {
    "Llama": {**LLAMA, "tied": False},
    "Llama tied": {**LLAMA, "tied": True},
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8,
              "tied": True},
    "Qwen3 yarn": {"head_dim": 16, "rope_parameters": YARN, "tied": False},
    "Qwen3 linear": {"head_dim": 16, "rope_parameters": LINEAR, "attention_bias": True,
                     "tied": True},
    "Olmo2": {"tied": False},
    "Olmo3": {"num_hidden_layers": 4, "sliding_window": 8, "rope_parameters": BY_TYPE,
              "tied": False},
    "Gemma2": GEMMA,
    "Gemma3Text": {**GEMMA, "num_hidden_layers": 6, "layer_types": TYPES},
    "SmolLM3": {"num_hidden_layers": 8, "tied": True},
    "GPTNeoX": {**NEOX, "rope_parameters": HALF},
    "GPTNeoX in turn": {**NEOX, "rope_parameters": HALF, "use_parallel_residual": False,
                        "attention_bias": False},
    "GPTNeoX old names": {**NEOX, "rope_parameters": HALF, "hidden_act": "gelu_new"},
    "GPT2": {**GPT2, "tied": True},
    "Starcoder2": {"sliding_window": 8, "tied": True},
    "OlmoHybrid": {**HYBRID, "tied": False},
    "OlmoHybrid rotated": {**HYBRID, "rope_parameters": YARN, "linear_allow_neg_eigval": False,
                           "linear_num_key_heads": 2, "linear_value_head_dim": 8, "tied": True},
    "Mamba2": {**MAMBA2, "tied": True},
}  # fmt: skip

# The same in files before version 5; ... stands for a field that they lack.
_LLAMA3, _YARN = ({k: v for k, v in one.items() if k != "rope_theta"} for one in (LLAMA3, YARN))
OLD_NAMES: dict[str, dict[str, Any]] = {
    "Llama": {"rope_parameters": ..., "rope_theta": 5e4, "rope_scaling": _LLAMA3},
    "Qwen2": {"rope_parameters": ..., "rope_theta": 1e4, "layer_types": ...,
              "max_window_layers": 1},
    "Qwen3 yarn": {"rope_parameters": ..., "rope_theta": 1e4, "layer_types": ...,
                   "rope_scaling": {"type": "yarn", **_YARN, "rope_type": ...}},
    "Qwen3 linear": {"rope_parameters": ..., "rope_theta": 1e4,
                     "rope_scaling": {"type": "linear", "factor": 2.0}},
    "Olmo2": {"rope_parameters": ..., "rope_theta": 3e5, "rope_scaling": None},
    "Olmo3": {"rope_parameters": ..., "rope_theta": 3e5, "layer_types": ...,
              "rope_scaling": _YARN},
    "Gemma2": {"rope_parameters": ..., "rope_theta": 2e4, "layer_types": ...,
               "hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"},
    "Gemma3Text": {"rope_parameters": ..., "rope_theta": 2e6, "rope_local_base_freq": 3e4,
                   "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "layer_types": ...,
                   "sliding_window_pattern": 3},
    "SmolLM3": {"rope_parameters": ..., "rope_theta": 3e6, "layer_types": ...,
                "no_rope_layers": ..., "no_rope_layer_interval": 3, "use_sliding_window": True,
                "sliding_window": 8},
    "GPTNeoX old names": {"rope_parameters": ..., "rotary_emb_base": 5000, "rotary_pct": 0.5,
                          "rope_scaling": None},
    "Starcoder2": {"rope_parameters": ..., "rope_theta": 2e4, "norm_type": "layer_norm"},
}  # fmt: skip


def config_of(name: str, **changes: Any) -> Any:
    """The config of a case, as transformers makes it."""
    given = {**SIZES, **CASES[name], **changes}
    given["tie_word_embeddings"] = given.pop("tied")
    config = config_class(name)(**without_gaps(given))
    config._attn_implementation = "eager"
    return config


def config_class(name: str) -> Any:
    return getattr(transformers, f"{name.partition(' ')[0]}Config")


def without_gaps(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that are there, in nested ones too."""
    return {
        name: without_gaps(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if value is not ...
    }


def describe(folder: Path, changes: Mapping[str, Any]) -> None:
    """Change fields of the config.json in a folder."""
    described = json.loads((folder / "config.json").read_bytes()) | changes
    (folder / "config.json").write_text(json.dumps(without_gaps(described)))


def build(config: Any) -> Any:
    """The model of transformers, with weights so far from their starts that errors show."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.2 * torch.randn_like(parameter)
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    return model.eval()


class _Float64ForFloat32(TorchFunctionMode):
    """What is cast to float32, or made in it, is of float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = [torch.float64 if one is torch.float32 else one for one in args]
        options = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **options)


@contextmanager
def exactly(model: Any) -> Iterator[Any]:
    """A model of transformers in float64 throughout.

    Models in float64 compute norms, softmax and rotations in float32 all the same.
    """
    with _Float64ForFloat32():
        config = copy.deepcopy(model.config)
        exact = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        exact.load_state_dict(model.state_dict())
        yield exact.eval()


def tokens(T: int = 40, B: int = 2) -> Tensor:
    """Longer than every window."""
    return torch.randint(95, (B, T), generator=torch.Generator().manual_seed(1))
