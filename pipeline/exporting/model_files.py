"""Writes config.json, generation_config.json and the model code that config.json names."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from longhaul.configs import RunConfig
from longhaul.configs.loader import to_dict
from longhaul.datamodules.corpus import Corpus
from longhaul.modules.block import Block
from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.exporting.source import file_of

# A layer whose state has more bytes than this for one sequence makes the cache hold tokens instead.
_LARGEST_STATE = 1 << 28


def write_model_files(
    folder: Path,
    config: RunConfig,
    corpus: Corpus,
    model: LanguageModel,
    code: Mapping[str, str],
    pad_id: int,
) -> None:
    """Write all of them into `folder`.

    Args:
        folder: to write to.
        config: of the run.
        corpus: that the model was trained on.
        model: on `meta`.
        code: of `source.model_code`.
        pad_id: the token of the padding.
    """
    ids = {
        "bos_token_id": corpus.bos_id,
        "eos_token_id": corpus.eot_id,
        "pad_token_id": pad_id,
    }
    described = {
        "architectures": ["LonghaulForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{_module(code, 'configuration_longhaul')}.LonghaulConfig",
            "AutoModelForCausalLM": f"{_module(code, 'modeling_longhaul')}.LonghaulForCausalLM",
        },
        "model_type": "longhaul",
        "dtype": "float32",
        "longhaul": to_dict(config.model),
        # What transformers and its tools look for, by their names.
        "vocab_size": config.model.vocabulary,
        "hidden_size": config.model.width,
        "num_attention_heads": config.model.heads,
        "num_key_value_heads": config.model.shape_of(0).key_heads,
        "head_dim": config.model.shape_of(0).head_dim,
        "num_hidden_layers": config.model.layers,
        "tie_word_embeddings": config.model.tied_head,
        # Without learned positions the context in training, which limits no kind of attention.
        "max_position_embeddings": config.model.learned_positions or config.data.context,
        "use_cache": True,
        "caches_tokens": has_large_states(model),
        **ids,
    }
    generation: dict[str, Any] = dict(ids)
    # Rows of the embedding beyond the tokenizer's ids are padding, and must not be generated.
    if padding := list(range(corpus.vocab_size, config.model.vocabulary)):
        generation["suppress_tokens"] = padding
    (folder / "config.json").write_text(json.dumps(described, indent=1) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation) + "\n")
    for name, text in code.items():
        (folder / name).write_text(text, encoding="utf-8")


def _module(code: Mapping[str, str], name: str) -> str:
    return file_of(code, name).removesuffix(".py")


def has_large_states(model: LanguageModel) -> bool:
    """Whether a layer's state is too large to be cached."""
    attentions = [cast(Block, block).attention for block in model.blocks]
    return any(one.allocated_bytes(1, torch.float32) > _LARGEST_STATE for one in attentions)
