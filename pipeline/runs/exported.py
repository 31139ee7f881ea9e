"""Reads a folder of transformers' layout: the model's shape, tokenizer and weights.

That is a folder of `longhaul export`, or one with an architecture that longhaul has a table of.
"""

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from pydantic import ConfigDict
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longhaul.datamodules.files.untrusted import (
    Count,
    PlainName,
    Positive,
    one_line,
    parse_json,
    read_regular,
    shown,
)
from longhaul.datamodules.tokenizer import LongCrawl64Tokenizer, Tokenizer, build_tokenizer
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.modules.meta_device import build_on_meta
from longhaul.pipeline.architectures.architecture import Architecture
from longhaul.pipeline.architectures.registry import ARCHITECTURES
from longhaul.pipeline.checkpoints.integrity import CheckpointError
from longhaul.pipeline.checkpoints.tensor_header import FLOATING_POINT, TensorEntry, read_header

WEIGHTS = "model.safetensors"
"""The file of all weights. If there are several files, their names are derived from this one."""

WEIGHTS_INDEX = f"{WEIGHTS}.index.json"
"""If there are several files, the index that says which one holds a tensor."""

_MOST_BYTES = 16 << 20
_NUM_EXPERTS = re.compile("(moe_)?(num|n)(_local|_routed)?_experts")


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
class _Described:
    model_type: str


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
    tokenizer_class: str | None = None


@dataclass(frozen=True)
class _SpecialIds:
    """The part of config.json that names the tokens around a text."""

    bos_token_id: Count | None = None
    eos_token_id: Count | list[Count] | None = None


@dataclass(frozen=True)
class _Context:
    max_position_embeddings: Positive | None = None


@dataclass(frozen=True)
class _Index:
    weight_map: dict[str, PlainName]


def is_exported(path: str | Path) -> bool:
    """Whether a folder holds an exported model rather than a run."""
    return (Path(path) / "config.json").is_file()


def exported_model(folder: Path) -> LanguageModelConfig:
    """The model that an exported folder describes. Raises ValueError for any other folder."""
    what = folder / "config.json"
    content, architecture = _config_in(folder)
    values = parse_json(_ExportedConfig if architecture is None else _Described, content, what)
    try:
        if architecture is not None:
            return architecture.model_of(parse_json(dict[str, Any], content, what))
        assert isinstance(values, _ExportedConfig)
        if values.longhaul is None:
            raise ValueError(
                "longhaul: found nothing, as in earlier versions; export the run again"
            )
        changed = {"vocabulary": values.vocab_size, "tied_head": values.tie_word_embeddings}
        return LanguageModelConfig.from_dict({**dataclasses.asdict(values.longhaul), **changed})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{what}: {one_line(error)}") from error


def _config_in(folder: Path) -> tuple[bytes, Architecture | None]:
    """The content of a folder's config.json, and its architecture, None for longhaul's own code."""
    path = folder / "config.json"
    try:
        content = read_regular(path, _MOST_BYTES)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: {one_line(error)}") from error
    kind = parse_json(_Described, content, path).model_type
    if kind != "longhaul" and kind not in ARCHITECTURES:
        wanted = ", ".join(["longhaul", *ARCHITECTURES])
        problem = f"model_type: found {shown(kind)}, wanted one that longhaul can read: {wanted}"
        for name, found in parse_json(dict[str, Any], content, path).items():
            if _NUM_EXPERTS.fullmatch(name) and found not in (None, 0, 1):
                problem = f"{name}: found {shown(found)}, wanted dense MLPs; {problem}"
        raise ValueError(f"{path}: {problem}")
    return content, ARCHITECTURES.get(kind)


def exported_type(folder: Path) -> str:
    """The `model_type` of an exported folder."""
    _, architecture = _config_in(folder)
    return "longhaul" if architecture is None else architecture.model_type


def exported_context(folder: Path) -> int:
    """The longest context of the model of an exported folder, in tokens."""
    content, architecture = _config_in(folder)
    found = parse_json(_Context, content, folder / "config.json").max_position_embeddings
    if found is None and architecture is None:
        raise ValueError(f"{folder / 'config.json'}: found no max_position_embeddings, wanted one")
    learned = None if architecture is None else exported_model(folder).learned_positions
    return learned or found or cast(Architecture, architecture).context


def exported_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in an exported folder. Raises ValueError if it is missing or damaged."""
    try:
        path = folder / "tokenizer_config.json"
        settings = _TokenizerSettings()
        if path.exists():  # not every published folder has it
            settings = parse_json(_TokenizerSettings, read_regular(path, _MOST_BYTES), path)
        if settings.tokenizer_class == "LonghaulTokenizer":
            return LongCrawl64Tokenizer()
        config = folder / "config.json"
        ids = parse_json(_SpecialIds, read_regular(config, _MOST_BYTES), config)
        if not (folder / "tokenizer.json").is_file():
            raise ValueError("found no tokenizer.json, wanted one")
        eos = ids.eos_token_id
        if isinstance(eos, list):  # of which the first ends a text, and the others a turn of a chat
            eos = eos[0] if eos else None
        # Without an id, the tokenizer's own settings have it.
        return build_tokenizer(str(folder / "tokenizer.json"), bos=ids.bos_token_id, eos=eos)
    except (ValueError, OSError) as error:
        raise ValueError(f"{folder}: the tokenizer cannot be read, {one_line(error)}") from error


def exported_weights(folder: Path) -> dict[str, Tensor]:
    """All weights of an exported folder, by our names; errors as of `read_weights`."""
    return dict(read_weights(folder, exported_model(folder)))


def read_weights(folder: Path, config: LanguageModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The weights of an exported folder, by our names, each read when it is its turn.

    Args:
        folder: of the model.
        config: of the model, from `exported_model`.

    Raises:
        ValueError: a file is missing or damaged, or a tensor is missing, unknown or of another
            shape or type.
    """
    _, architecture = _config_in(folder)
    model = build_on_meta(config)
    try:
        found = find_tensors(folder)
        shapes = {name: tuple(one.entry.shape) for name, one in found.items()}

        def read(name: str) -> Tensor:
            if (dtype := found[name].entry.dtype) not in FLOATING_POINT:
                wanted = ", ".join(FLOATING_POINT)
                raise ValueError(f"{name}: found numbers of type {dtype}, wanted one of {wanted}")
            return found[name].read()

        if architecture is not None:
            yield from architecture.weights_of(model, shapes, read)
            return
        ours = {name: tuple(one.shape) for name, one in model.state_dict().items()}
        for name in sorted(ours.keys() | shapes.keys()):
            if ours.get(name) != shapes.get(name):
                raise ValueError(
                    f"{name}: found shape {shapes.get(name)}, wanted {ours.get(name)} as in "
                    "config.json"
                )
        for name in ours:
            yield name, read(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: the weights cannot be read, {one_line(error)}") from error


class FoundTensor(NamedTuple):
    """A tensor of a folder: its file, and what the header of that says of it."""

    path: Path
    name: str
    entry: TensorEntry

    def read(self) -> Tensor:
        """The tensor. Raises CheckpointError if it cannot be read."""
        try:
            with safe_open(self.path, "pt") as file:
                tensor: Tensor = file.get_tensor(self.name)
                return tensor
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path} cannot be read: {one_line(error)}") from error


def find_tensors(folder: Path) -> dict[str, FoundTensor]:
    """The tensors of an exported folder, by their names there.

    Raises:
        ValueError: a file is damaged, or two of them have a tensor of one name.
        OSError: a file cannot be read.
    """
    names, index = {WEIGHTS}, folder / WEIGHTS_INDEX
    if index.is_file():
        names = set(parse_json(_Index, read_regular(index, _MOST_BYTES), index).weight_map.values())
    elif not (folder / WEIGHTS).is_file():
        pickles = sorted(folder.glob("*.bin"))
        found_instead = f"found {pickles[0].name}, a pickle" if pickles else f"found no {WEIGHTS}"
        raise ValueError(f"{found_instead}, wanted {WEIGHTS}, or {WEIGHTS_INDEX} and its files")
    for name in sorted(names):
        if not (folder / name).is_file():
            raise ValueError(f"found no {name}, wanted it as in {WEIGHTS_INDEX}")
    found: dict[str, FoundTensor] = {}
    for path in sorted(folder / name for name in names):
        for name, entry in read_header(path).tensors.items():
            if name in found:
                raise ValueError(f"{path}: found {shown(name)}, which {found[name].path} has too")
            found[name] = FoundTensor(path, name, entry)
    return found
