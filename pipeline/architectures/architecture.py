"""What a table of an architecture says, and how it is read."""

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import itemgetter
from typing import Any, NamedTuple, cast, get_type_hints

import torch
from torch import Tensor

from longhaul.datamodules.files.untrusted import Positive, checked_value, shown
from longhaul.modules.attention import Attention, AttentionConfig, LayerShape
from longhaul.modules.attention.recurrent.gated_deltanet import GatedDeltaNetConfig
from longhaul.modules.block import Block
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import BIAS_PLACES, LanguageModelConfig
from longhaul.pipeline.architectures.layers import Layers, in_config


@dataclass(frozen=True)
class Field:
    """A field of config.json, and the option of LanguageModelConfig that has its value."""

    name: str
    absent: Any
    """Its value in a file that has none: the default of transformers' class."""
    option: str
    words: Mapping[str, Any] | None = None
    """Where the option has other values than the field: these values of the field, and its."""

    def read(self, value: Any) -> Any:
        """The value of the option."""
        if self.words is None:
            return checked_value(_hints()[self.option], value, self.name)
        if not isinstance(value, str) or value not in self.words:
            wanted = ", ".join(self.words)
            raise ValueError(f"{self.name}: found {shown(value)}, wanted one of {wanted}")
        return self.words[value]

    def write(self, model: LanguageModelConfig) -> Any:
        """The value of the field, None if it has none for this model."""
        value = getattr(model, self.option)
        if self.words is None:
            return value
        return next((word for word, one in self.words.items() if one == value), None)


@dataclass(frozen=True)
class Fixed:
    """A field of config.json of which every model of longhaul has one value."""

    name: str
    absent: Any
    value: Any
    same: tuple[Any, ...] = ()
    """Other values that mean the same."""


@dataclass(frozen=True)
class Dropout:
    """A field with a rate of dropout: any is read, as it changes no logit, and 0 is written."""

    name: str
    absent: float = 0.0


@dataclass(frozen=True)
class Biases:
    """A field of config.json that says whether there are biases in places of `model.biases`."""

    name: str
    absent: bool
    places: tuple[str, ...]


Rows = tuple[tuple[int, int | None], ...]
"""The first row and the end of parts, one after the other; None: up to the last row."""


class Place(NamedTuple):
    """Rows of a tensor of ours."""

    name: str
    rows: Rows = ((0, None),)
    is_transposed: bool = False

    def lengths(self, count: int) -> list[int]:
        """The number of rows in each part, of a tensor of so many."""
        return [len(range(count)[begin:end]) for begin, end in self.rows]

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """That of these rows, of a tensor of ours of this shape."""
        shape = (sum(self.lengths(whole[0])), *whole[1:]) if whole else ()
        return shape[::-1] if self.is_transposed else shape


Modules = Mapping[str, str | tuple[str, Callable[[Attention], Rows]]]
"""Modules of a block, by their names: ours, and our rows in their order if not all of them."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The table of one architecture."""

    name: str
    """The class in transformers."""

    model_type: str

    fields: tuple[Field | Fixed | Dropout | Biases, ...]

    constants: Mapping[str, Any] = field(default_factory=dict)
    """Options of LanguageModelConfig that have these values in every model of it."""

    biases: tuple[str, ...] = ()
    """The places that always have biases."""

    has_scaled_embedding: bool = False
    """Whether the embedding is multiplied by the root of the width."""

    ignored_fields: tuple[str, ...] = ()
    """Fields that change no logit."""

    context: int
    """The longest context, `max_position_embeddings`, of a file that has none."""

    layers: Layers
    """The fields in which layers may differ."""

    modules: Mapping[str, str]
    """Modules outside of the blocks, by their names: ours."""

    layer: str
    """The prefix of a block's modules, with {} for its number."""

    layer_modules: Modules
    """Those of every block."""

    kind_modules: Mapping[str, Modules] = field(default_factory=dict)
    """Those of the blocks of a kind of attention, by its name."""

    joined: tuple[str, ...] = ()
    """Modules of a block whose rows follow one another, which files may cut at other rows."""

    cut: Mapping[str, Callable[[Attention], Mapping[str, Rows]]] = field(default_factory=dict)
    """Modules of a block that hold several of `layer_modules`, by what follows the name of the
    whole: its rows of each. Such an architecture is read and not written."""

    transposed: tuple[str, ...] = ()
    """Modules of a block, by their names, whose weights are (inputs, outputs)."""

    old_prefix: str = ""
    """What some files leave out in front of the names of tensors."""

    old_tensors: Mapping[str, str] = field(default_factory=dict)
    """Patterns of parts of other names of tensors: what the present ones have there."""

    ignored_tensors: str = r"(?!)"
    """A pattern of names of tensors that hold no weights."""

    def config_of(self, model: LanguageModelConfig) -> dict[str, Any]:
        """What config.json says of a model.

        Raises:
            ValueError: naming the option whose value this architecture cannot express.
        """
        for one in (model.attention_of(layer) for layer in range(model.layers)):
            if one.kind not in self.layers.kinds:
                wanted = " or ".join(self.layers.kinds)
                raise ValueError(
                    f"attention.kind: found {one.kind}, wanted {wanted} in {self.name}"
                )
        model = canonical(model)
        found: dict[str, Any] = {"model_type": self.model_type, "architectures": [self.name]}
        for field_ in self.fields:
            if isinstance(field_, Field):
                found[field_.name] = field_.write(model)
            elif isinstance(field_, Fixed):
                found |= {} if field_.value is None else {field_.name: field_.value}
            elif isinstance(field_, Dropout):
                found[field_.name] = 0.0
            else:
                found[field_.name] = set(field_.places) <= set(cast(list[str], model.biases))
        layers = [model.attention_of(layer) for layer in range(model.layers)]
        found |= self.layers.write(layers, model)
        again = canonical(self.model_of(found))
        for layer, attention in enumerate(layers):
            self._compare("attention.", attention, again.attention_of(layer))
        self._compare("", model, again)
        return found

    def _compare(self, prefix: str, model: Any, again: Any) -> None:
        for option in fields(model):
            found, wanted = (getattr(one, option.name) for one in (model, again))
            if found != wanted and option.name not in ("attention", "layer_attention"):
                raise ValueError(
                    f"model.{prefix}{option.name}: found {shown(found)}, wanted {shown(wanted)} in "
                    f"{self.name}"
                )

    def model_of(self, content: Mapping[str, Any]) -> LanguageModelConfig:
        """The model that config.json describes.

        Raises:
            ValueError: naming a field that longhaul cannot express, or that is of no known name.
        """
        left = {
            name: value
            for name, value in content.items()
            if name not in self.ignored_fields and name not in _IGNORED
        }
        # None of them normalises the embedding.
        values, places = {"embedding_norm": False, **self.constants}, [*self.biases]
        for one in self.fields:
            value = left.pop(one.name, one.absent)
            if isinstance(one, Field):
                values[one.option] = one.read(value)
            elif isinstance(one, Biases):
                places += one.places if checked_value(bool, value, one.name) else ()
            elif isinstance(one, Fixed) and value not in (one.value, *one.same):
                raise ValueError(f"{one.name}: found {shown(value)}, wanted {one.value!r}")
        values["biases"] = True if len(places) == len(BIAS_PLACES) else places or False
        # This checks the sizes, before there is something for each layer.
        sizes = LanguageModelConfig.from_dict({**values, "attention": {"kind": "softmax"}})
        if self.has_scaled_embedding:
            values["embedding_scale"] = sizes.width**0.5
        name = "max_position_embeddings"
        context = checked_value(Positive, content.get(name, self.context), name)
        layers = self.layers.read(left, sizes, context)
        values["attention"], values["layer_attention"] = in_config(layers)
        for name in sorted(left):
            raise ValueError(
                f"{name}: found {shown(left[name])}, which no model of longhaul has; wanted no "
                "such field"
            )
        return LanguageModelConfig.from_dict(values)

    def tensors(self, model: LanguageModel) -> dict[str, Place]:
        """Their tensors, by their names in files, and where each is among ours.

        Raises:
            ValueError: naming a tensor of ours that they do not have.
        """
        modules = {theirs: Place(own) for theirs, own in self.modules.items()}
        for layer in range(model.config.layers):
            attention = cast(Block, model.blocks[layer]).attention
            of_kind = self.kind_modules.get(attention.config.kind, {})
            for theirs, own in {**self.layer_modules, **of_kind}.items():
                place = Place(own) if isinstance(own, str) else Place(own[0], own[1](attention))
                name = f"blocks.{layer}.{place.name}"
                is_transposed = theirs in self.transposed
                place = place._replace(name=name, is_transposed=is_transposed)
                modules[f"{self.layer.format(layer)}.{theirs}"] = place
        ours = model.state_dict()
        found = {
            f"{theirs}{kind}": Place(name, place.rows, place.is_transposed and kind == ".weight")
            for theirs, place in modules.items()
            for kind in (".weight", ".bias", "")  # a parameter of the attention itself
            if (name := f"{place.name}{kind}") in ours
        }
        for name in sorted(ours.keys() - {place.name for place in found.values()}):
            raise ValueError(f"{name}: found a tensor that {self.name} does not have")
        return found

    def weights_of(
        self,
        model: LanguageModel,
        found: Mapping[str, tuple[int, ...]],
        read: Callable[[str], Tensor],
    ) -> Iterator[tuple[str, Tensor]]:
        """The weights of a model, by our names, each read when it is its turn.

        Args:
            model: on any device; its shapes are read.
            found: shapes of the tensors of a folder, by their names.
            read: gives one of them.

        Raises:
            ValueError: naming a tensor that is missing, unknown or of another shape.
        """
        found, read = self._taken_apart(model, found, read)
        places, named = self.tensors(model), dict[str, str]()
        for name in found:
            if not re.search(self.ignored_tensors, name):
                now = name
                for old, new in self.old_tensors.items():
                    now = re.sub(old, new, now)
                whole = f"{self.old_prefix}{now}"
                now = whole if whole in places else now
                if now in named:
                    raise ValueError(f"{name}: found {named[now]} too, wanted one of them")
                named[now] = name
        theirs = {own: f"{name}.weight" for name, own in self.modules.items()}
        embedding = theirs["embedding"]
        tied = named.pop(theirs["lm_head"], None) if model.config.tied_head else None
        for name in sorted(places.keys() | named.keys()):
            if name not in named:
                raise ValueError(f"{name}: found no such tensor, wanted that of {self.name}")
            if name not in places:
                raise ValueError(
                    f"{named[name]}: found an unknown tensor of {self.name}, wanted none"
                )
        ours, parts = model.state_dict(), defaultdict[str, list[tuple[str, Place]]](list)
        places = self._as_cut(places, {name: found[one] for name, one in named.items()}, ours)
        for name, place in places.items():
            shape, wanted = found[named[name]], place.shape(ours[place.name].shape)
            if shape != wanted:
                raise ValueError(
                    f"{named[name]}: found shape {shape}, wanted {wanted} as in config.json"
                )
            parts[place.name].append((named[name], place))
        if tied is not None and not torch.equal(read(tied), read(named[embedding])):
            raise ValueError(
                f"{tied}: found another matrix than {named[embedding]}, wanted the same, since "
                "tie_word_embeddings is true"
            )
        for own, sources in parts.items():
            rows: list[tuple[int, Tensor]] = []
            for name, place in sources:
                tensor = read(name).T if place.is_transposed else read(name)
                begins = (begin for begin, _ in place.rows)
                rows += zip(begins, tensor.split(place.lengths(len(ours[own]))), strict=True)
            yield own, torch.cat([part for _, part in sorted(rows, key=itemgetter(0))])

    def _taken_apart(
        self,
        model: LanguageModel,
        found: Mapping[str, tuple[int, ...]],
        read: Callable[[str], Tensor],
    ) -> tuple[Mapping[str, tuple[int, ...]], Callable[[str], Tensor]]:
        """The tensors of a folder, each part of those in `cut` as one of its own."""
        shapes, sources = dict(found), dict[str, tuple[str, Rows]]()
        for layer, theirs, kind in itertools.product(
            range(model.config.layers), self.cut, ("weight", "bias")
        ):
            module = f"{self.layer.format(layer)}.{theirs}"
            if (shape := shapes.pop(whole := f"{module}.{kind}", None)) is None:
                continue
            parts = self.cut[theirs](cast(Block, model.blocks[layer]).attention)
            lengths = {
                name: sum(Place(name, rows).lengths(*shape[:1])) for name, rows in parts.items()
            }
            if shape[0] != sum(lengths.values()):
                raise ValueError(
                    f"{whole}: found shape {shape}, wanted {sum(lengths.values())} rows as in "
                    "config.json"
                )
            for name, rows in parts.items():
                sources[part := f"{module}.{name}.{kind}"] = whole, rows
                shapes[part] = (lengths[name], *shape[1:])

        def read_part(name: str) -> Tensor:
            if name not in sources:
                return read(name)
            whole, rows = sources[name]
            tensor = read(whole)
            return torch.cat([tensor[begin:end] for begin, end in rows])

        return shapes, read_part

    def _as_cut(
        self,
        places: Mapping[str, Place],
        shapes: Mapping[str, tuple[int, ...]],
        ours: Mapping[str, Tensor],
    ) -> dict[str, Place]:
        """The places of tensors, those of `joined` as long as they are in the files."""
        found, ends = dict(places), dict[str, int]()
        for name, place in places.items():
            if name.endswith(tuple(f".{one}.weight" for one in self.joined)) and shapes[name]:
                begin = ends.get(place.name, 0)
                ends[place.name] = end = begin + shapes[name][0]
                found[name] = place._replace(rows=((begin, end),))
        is_whole = all(end == len(ours[name]) for name, end in ends.items())
        return found if is_whole else dict(places)


@functools.cache
def _hints() -> dict[str, Any]:
    return get_type_hints(LanguageModelConfig, include_extras=True)


def canonical(model: LanguageModelConfig) -> LanguageModelConfig:
    """The same model, with numbers where null stands for what follows from others.

    Layers whose attention is not that of the first one have an entry each.
    """
    shape = model.shape_of(0)
    layers = [_canonical_layer(model.attention_of(n), shape) for n in range(model.layers)]
    return replace(
        model,
        init="gpt2",
        kv_heads=shape.key_heads,
        head_dim=shape.head_dim,
        mlp_width=4 * model.width if model.mlp_width is None else model.mlp_width,
        biases=[place for place in BIAS_PLACES if model.has_biases(place)],
        attention=layers[0],
        layer_attention={str(n): one for n, one in enumerate(layers) if one != layers[0]},
    )


def _canonical_layer(attention: AttentionConfig, shape: LayerShape) -> AttentionConfig:
    if isinstance(attention, GatedDeltaNetConfig):
        K, V = attention.widths(shape.head_dim)
        groups = shape.heads if attention.groups is None else attention.groups
        return replace(attention, key_dim=K, value_dim=V, groups=groups)
    return attention


# Of all architectures: what files tell of their making, of texts, and of outputs beside logits.
_IGNORED = (
    *("_name_or_path", "architectures", "model_type", "transformers_version"),
    *("dtype", "torch_dtype", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"),
    *("chunk_size_feed_forward", "id2label", "label2id", "problem_type"),
    *("is_encoder_decoder", "output_attentions", "output_hidden_states", "return_dict"),
    *("use_cache", "transformers.js_config"),
)
