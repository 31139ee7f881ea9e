"""Writes config.json, generation_config.json, and the model code that config.json may name."""

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
from longhaul.pipeline.architectures.architecture import Architecture
from longhaul.pipeline.exporting.source import file_of

# A layer whose state has more bytes than this for one sequence makes the cache hold tokens instead.
_LARGEST_STATE = 1 << 28


def write_model_files(
    folder: Path,
    config: RunConfig,
    corpus: Corpus,
    model: LanguageModel,
    architecture: Architecture | None,
    code: Mapping[str, str],
    pad_id: int,
) -> None:
    """Write all of them into `folder`.

    Args:
        folder: to write to.
        config: of the run.
        corpus: that the model was trained on.
        model: on `meta`.
        architecture: of transformers, by which the folder is loaded; None: by `code`.
        code: of `source.model_code`; none goes with an architecture.
        pad_id: the token of the padding.
    """
    ids = {
        "bos_token_id": corpus.bos_id,
        "eos_token_id": corpus.eot_id,
        "pad_token_id": pad_id,
    }
    if architecture is None:
        described = _own_config(config, model, code)
    else:
        described = architecture.config_of(config.model)
    described |= {
        "dtype": "float32",
        # Without learned positions the context in training, which limits no kind of attention.
        "max_position_embeddings": config.model.learned_positions or config.data.context,
        "use_cache": True,
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


def _own_config(config: RunConfig, model: LanguageModel, code: Mapping[str, str]) -> dict[str, Any]:
    """What config.json says of a model that brings its code."""
    return {
        "architectures": ["LonghaulForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{_module(code, 'configuration_longhaul')}.LonghaulConfig",
            "AutoModelForCausalLM": f"{_module(code, 'modeling_longhaul')}.LonghaulForCausalLM",
        },
        "model_type": "longhaul",
        "longhaul": to_dict(config.model),
        # What transformers and its tools look for, by their names.
        "vocab_size": config.model.vocabulary,
        "hidden_size": config.model.width,
        "num_attention_heads": config.model.heads,
        "num_key_value_heads": config.model.shape_of(0).key_heads,
        "head_dim": config.model.shape_of(0).head_dim,
        "num_hidden_layers": config.model.layers,
        "tie_word_embeddings": config.model.tied_head,
        "caches_tokens": has_large_states(model),
    }


def _module(code: Mapping[str, str], name: str) -> str:
    return file_of(code, name).removesuffix(".py")


def has_large_states(model: LanguageModel) -> bool:
    """Whether a layer's state is too large to be cached."""
    attentions = [cast(Block, block).attention for block in model.blocks]
    return any(one.allocated_bytes(1, torch.float32) > _LARGEST_STATE for one in attentions)
