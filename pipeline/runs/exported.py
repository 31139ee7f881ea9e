"""Reads a folder that `longhaul export` wrote: the model's shape, tokenizer and weights."""

import dataclasses
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict
from safetensors.torch import load_file
from torch import Tensor

from longhaul.datamodules.files.untrusted import (
    Count,
    PlainName,
    one_line,
    parse_json,
    read_regular,
)
from longhaul.datamodules.native import foreign_content
from longhaul.datamodules.tokenizer import LongCrawl64Tokenizer, Tokenizer, build_tokenizer
from longhaul.modules.language_model import LanguageModelConfig
from longhaul.pipeline.checkpoints.integrity import reason
from longhaul.pipeline.checkpoints.tensor_header import read_header

WEIGHTS = "model.safetensors"
"""The file of all weights. If there are several files, their names are derived from this one."""

WEIGHTS_INDEX = f"{WEIGHTS}.index.json"
"""If there are several files, the index that says which one holds a tensor."""

_MOST_BYTES = 16 << 20


# Attention configs as in JSON; which fields they have depends on the kind.
_OPTIONS: dict[str, Any] = {
    "attention": dict[str, Any],
    "layer_attention": dict[str, dict[str, Any]],
}


def _default(option: "dataclasses.Field[Any]") -> Any:
    """That of an option which exports of earlier versions lack."""
    if option.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=option.default_factory)
    return dataclasses.field(default=option.default)


_Shape = dataclasses.make_dataclass(
    "_Shape",
    [
        (one.name, _OPTIONS.get(one.name, one.type), _default(one))
        for one in fields(LanguageModelConfig)
    ],
    kw_only=True,
    # A key of a later version would mean another model.
    namespace={"__pydantic_config__": ConfigDict(extra="forbid")},
)


@dataclass(frozen=True)
class _ExportedConfig:
    """The part of config.json that decides what the weights mean."""

    model_type: Literal["longhaul"]
    # transformers may have changed these: a resized embedding, a head untied from it.
    vocab_size: Count
    tie_word_embeddings: bool
    longhaul: _Shape | None = None  # type: ignore[valid-type]  # exports of earlier versions: none


@dataclass(frozen=True)
class _TokenizerSettings:
    tokenizer_class: str


@dataclass(frozen=True)
class _SpecialIds:
    """The part of config.json that names the tokens around a text."""

    bos_token_id: Count
    eos_token_id: Count


@dataclass(frozen=True)
class _Index:
    weight_map: dict[str, PlainName]


def is_exported(path: str | Path) -> bool:
    """Whether a folder holds an exported model rather than a run."""
    return (Path(path) / "config.json").is_file()


def exported_model(folder: Path) -> LanguageModelConfig:
    """The model that an exported folder describes. Raises ValueError for any other folder."""
    path = folder / "config.json"
    what = f"{path}: not the config of an exported model"
    try:
        content = read_regular(path, _MOST_BYTES)
    except (ValueError, OSError) as error:
        raise ValueError(f"{what}: {one_line(error)}") from error
    values = parse_json(_ExportedConfig, content, what)
    try:
        if values.longhaul is None:
            raise ValueError(
                "longhaul: found nothing, as in earlier versions; export the run again"
            )
        changed = {"vocabulary": values.vocab_size, "tied_head": values.tie_word_embeddings}
        return LanguageModelConfig.from_dict({**dataclasses.asdict(values.longhaul), **changed})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{what}: {one_line(error)}") from error


def exported_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in an exported folder. Raises ValueError if it is missing or damaged."""
    try:
        path = folder / "tokenizer_config.json"
        settings = parse_json(_TokenizerSettings, read_regular(path, _MOST_BYTES), path)
        if settings.tokenizer_class == "LonghaulTokenizer":
            return LongCrawl64Tokenizer()
        config = folder / "config.json"
        ids = parse_json(_SpecialIds, read_regular(config, _MOST_BYTES), config)
        return build_tokenizer(
            str(folder / "tokenizer.json"), bos=ids.bos_token_id, eos=ids.eos_token_id
        )
    except (ValueError, OSError) as error:
        raise ValueError(f"{folder}: found no tokenizer of an export, {one_line(error)}") from error


def exported_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of an exported folder. Raises ValueError if a file is missing or damaged."""
    try:
        index = folder / WEIGHTS_INDEX
        names = {WEIGHTS}
        if index.is_file():
            content = read_regular(index, _MOST_BYTES)
            names = set(parse_json(_Index, content, index).weight_map.values())
        weights: dict[str, Tensor] = {}
        for name in sorted(names):
            read_header(folder / name)
            with foreign_content(name, "not readable as safetensors"):
                weights |= load_file(folder / name)
    except (OSError, ValueError) as error:
        message = one_line(reason(error))
        raise ValueError(f"{folder}: the weights cannot be read, {message}") from error
    return weights
