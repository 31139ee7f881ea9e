"""The fields of config.json in which layers may differ: positions, windows and scores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, cast, get_type_hints

from pydantic import Field

from longhaul.datamodules.files.untrusted import Positive, checked_value, shown
from longhaul.modules.attention import AttentionConfig
from longhaul.modules.attention.softmax import SoftmaxConfig
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.modules.rotary import ROTARY_SCALINGS, RotaryScaling

Options = dict[str, Any]
"""Those of the attention of a layer."""

FULL, WINDOWED = "full_attention", "sliding_attention"

Taps = Annotated[int, Field(ge=2)]
"""The width of a short convolution, in tokens."""

_Number = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_SCALINGS = {
    "default" if kind == "none" else kind: names for kind, names in ROTARY_SCALINGS.items()
}
"""The parameters of each `rope_type`, which RotaryScaling has by the same names."""


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Which of these fields an architecture has, and what absent ones mean."""

    kinds: ClassVar[tuple[str, ...]] = ("softmax",)

    is_rotated: bool = True
    """Whether there are rotary positions, with the fields of them."""
    theta: float = 10_000.0
    local_theta: float | None = None
    """That of windowed layers, where these have a rotation of their own; None: one for all."""
    share: float | None = None
    """The share of a head that rotates; None: there is no such parameter."""
    old: Mapping[str, str] = field(default_factory=lambda: {"rope_theta": "rope_theta"})
    """Fields that had parameters of rotation before version 5, and their names now."""
    has_window: bool = False
    window: int | None = None
    has_switch: bool = False
    """Whether windows need `use_sliding_window`."""
    types: Callable[[Mapping[str, Any], Sequence[int]], list[str]] | None = None
    """The types without `layer_types`, from the fields and a 0 for each layer without positions;
    None: a window is that of all layers."""
    has_null_theta: bool = False
    """Whether null in place of the base means that no layer has positions."""
    has_unrotated: bool = False
    """Whether `no_rope_layers` has a 0 for each layer without positions; absent, every fourth."""
    score_width: int | None = None
    """`query_pre_attn_scalar`, whose root divides scores in place of that of a head's width."""
    has_softcap: bool = False
    softcap: float | None = None

    def read(
        self, content: dict[str, Any], sizes: LanguageModelConfig, context: int
    ) -> list[Options]:
        """The options of every layer; these fields are taken from `content`.

        Args:
            content: fields of config.json.
            sizes: a model of the same sizes.
            context: the longest, in tokens.

        Raises:
            ValueError: naming the field whose value longhaul cannot express.
        """
        rotated = self._rotated(content, sizes.layers)
        windows = self._windows(content, rotated)
        rotations = self._rotations(content, windows, context)
        rotations = [
            rotation if is_rotated else {"rotary": "none"}
            for rotation, is_rotated in zip(rotations, rotated, strict=True)
        ]
        shared: Options = {}
        if self.score_width is not None:
            given = content.pop("query_pre_attn_scalar", self.score_width)
            width = checked_value(_Number, given, "query_pre_attn_scalar")
            usual = sizes.shape_of(0).head_dim
            shared["scale"] = None if width == usual else float(width) ** -0.5
        if self.has_softcap:
            cap = content.pop("attn_logit_softcapping", self.softcap)
            shared["softcap"] = checked_value(_Number | None, cap, "attn_logit_softcapping")
        found = []
        for window, rotation in zip(windows, rotations, strict=True):
            options = {"kind": "softmax", **rotation, **shared}
            found.append(options | ({} if window is None else {"window": window}))
        return found

    def write(
        self, attentions: Sequence[AttentionConfig], sizes: LanguageModelConfig
    ) -> dict[str, Any]:
        """The fields of a model of these sizes with these layers, as far as they can say it."""
        found: dict[str, Any] = {}
        layers = [cast(SoftmaxConfig, one) for one in attentions]
        types = [FULL if one.window is None else WINDOWED for one in layers]
        windows = [one.window for one in layers if one.window is not None]
        if self.has_window:
            found["sliding_window"] = windows[0] if windows else None
        if self.has_switch:
            found["use_sliding_window"] = bool(windows)
        if self.types is not None:
            found["layer_types"] = types
        if self.has_unrotated:
            found["no_rope_layers"] = [int(one.rotary != "none") for one in layers]
        rotated = [one for one in layers if one.rotary != "none"] or list(layers)
        rope: dict[str, Any] = self._rope_of(rotated[0])
        if self.local_theta is not None:
            by_type = dict(zip(reversed(types), reversed(layers), strict=True))
            rope = {name: self._rope_of(by_type.get(name, layers[0])) for name in (FULL, WINDOWED)}
        if self.is_rotated:
            found |= {"rope_parameters": rope, **self._old_rope(rope)}
        first = layers[0]
        if self.score_width is not None:
            width = sizes.shape_of(0).head_dim if first.scale is None else first.scale**-2
            found["query_pre_attn_scalar"] = (
                round(width) if abs(width - round(width)) < 1e-6 else width
            )
        if self.has_softcap:
            found["attn_logit_softcapping"] = first.softcap
        return found

    def _rotated(self, content: dict[str, Any], count: int) -> list[int]:
        """For each layer 1 with rotary positions, else 0."""
        if not self.has_unrotated:
            return [int(self.is_rotated)] * count
        interval = content.pop("no_rope_layer_interval", 4)
        every = checked_value(Positive, interval, "no_rope_layer_interval")
        given = content.pop("no_rope_layers", None)
        usual = [int((layer + 1) % every != 0) for layer in range(count)]
        rotated: list[int] = checked_value(list[int] | None, given, "no_rope_layers") or usual
        if len(rotated) != count:
            raise ValueError(f"no_rope_layers: found {len(rotated)} layers, wanted {count}")
        return rotated

    def _windows(self, content: dict[str, Any], rotated: Sequence[int]) -> list[int | None]:
        count = len(rotated)
        if not self.has_window:
            return [None] * count
        given = content.pop("sliding_window", self.window)
        window = checked_value(Positive | None, given, "sliding_window")
        if self.has_switch and not _bool(content, "use_sliding_window", False):
            window = None
        if self.types is None:
            return [window] * count
        types = self.types(content, rotated)
        given = content.pop("layer_types", None)
        types = checked_value(list[str] | None, given, "layer_types") or types
        for name in ("max_window_layers", "sliding_window_pattern", "_sliding_window_pattern"):
            content.pop(name, None)
        for one in types:
            if one not in (FULL, WINDOWED):
                raise ValueError(f"layer_types: found {shown(one)}, wanted {FULL} or {WINDOWED}")
        if len(types) != count:
            raise ValueError(f"layer_types: found {len(types)} layers, wanted {count}")
        return [window if one == WINDOWED else None for one in types]

    def _rotations(
        self, content: dict[str, Any], windows: Sequence[int | None], context: int
    ) -> list[Options]:
        if not self.is_rotated:
            return [{}] * len(windows)
        outer = {new: content.pop(old) for old, new in self.old.items() if old in content}
        given = {
            name: checked_value(dict[str, Any] | None, content.pop(name, None), name) or {}
            for name in ("rope_parameters", "rope_scaling")
        }
        local = content.pop("rope_local_base_freq", None) if self.local_theta else None
        if self.local_theta is None:
            found = given["rope_scaling"] or given["rope_parameters"]
            if self.has_null_theta and (outer | found).get("rope_theta", self.theta) is None:
                return [{"rotary": "none"}] * len(windows)
            found = _agreeing(outer, found, "rope_parameters")
            rotation = self._rotation(found, "rope_parameters", self.theta, context)
            rotations = [rotation] * len(windows)
        else:
            hint = dict[Literal["full_attention", "sliding_attention"], dict[str, Any] | None]
            nested = checked_value(hint, given["rope_parameters"], "rope_parameters")
            # Before version 5 a scaling was that of layers without a window.
            inner = (nested.get(FULL) or {}) | given["rope_scaling"]
            full = _agreeing(outer, inner, f"rope_parameters.{FULL}")
            small = ({} if local is None else {"rope_theta": local}) | (nested.get(WINDOWED) or {})
            if False in (full.get("truncate"), small.get("truncate")):
                # transformers looks for it beside the types, where it is not.
                raise ValueError(
                    "rope_parameters.truncate: found False in that of a type of layers, which "
                    "transformers does not read there; wanted true"
                )
            of_full = self._rotation(full, f"rope_parameters.{FULL}", self.theta, context)
            of_small = self._rotation(
                small, f"rope_parameters.{WINDOWED}", self.local_theta, context
            )
            rotations = [of_full if one is None else of_small for one in windows]
        return rotations

    def _rotation(
        self, given: Mapping[str, Any], where: str, theta: float, context: int
    ) -> Options:
        """The options of a layer with these parameters."""
        found = {"rope_theta": theta, **{k: v for k, v in given.items() if v is not None}}
        kind = found.pop("rope_type", found.get("type", "default"))
        found.pop("type", None)
        if not isinstance(kind, str) or kind not in _SCALINGS:
            raise ValueError(
                f"{where}.rope_type: found {shown(kind)}, wanted one of {', '.join(_SCALINGS)}"
            )
        base = checked_value(_Number, found.pop("rope_theta"), f"{where}.rope_theta")
        options: Options = {"rotary_base": base}
        if self.share is not None:
            share, name = found.pop("partial_rotary_factor", self.share), "partial_rotary_factor"
            options["rotary_share"] = checked_value(_Number, share, f"{where}.{name}")
        hints = get_type_hints(RotaryScaling)
        scaling = {
            name: checked_value(hints[name], found.pop(name), f"{where}.{name}")
            for name in _SCALINGS[kind]
            if name in found
        }
        if kind in ("default", "linear"):  # where it means nothing
            found.pop("original_max_position_embeddings", None)
        elif "original_max_position_embeddings" not in scaling:
            scaling["original_max_position_embeddings"] = context
        for name in sorted(found):
            raise ValueError(
                f"{where}.{name}: found {shown(found[name])}, which no rotation of longhaul has; "
                "wanted no such parameter"
            )
        if kind != "default":
            if "factor" not in scaling:
                if kind not in ("yarn", "longrope"):
                    raise ValueError(f"{where}.factor: found none, wanted a number")
                scaling["factor"] = context / scaling["original_max_position_embeddings"]
            options["rotary_scaling"] = {"rope_type": kind, **scaling}
        return options

    def _rope_of(self, layer: SoftmaxConfig) -> dict[str, Any]:
        scaling = layer.rotary_scaling
        kind = "default" if scaling.rope_type == "none" else scaling.rope_type
        if self.has_null_theta and layer.rotary == "none":
            return {"rope_type": "default", "rope_theta": None}
        found: dict[str, Any] = {"rope_type": kind, "rope_theta": layer.rotary_base}
        if self.share is not None:
            found["partial_rotary_factor"] = layer.rotary_share
        values = {name: getattr(scaling, name) for name in _SCALINGS[kind]}
        return found | {name: value for name, value in values.items() if value is not None}

    def _old_rope(self, rope: Mapping[str, Any]) -> dict[str, Any]:
        """The same as before version 5, which is all that many tools read."""
        of_full = rope if self.local_theta is None else rope[FULL]
        found = {old: of_full[new] for old, new in self.old.items()}
        if of_full["rope_type"] != "default":
            scaling = {k: v for k, v in of_full.items() if k not in self.old.values()}
            found["rope_scaling"] = scaling
        if self.local_theta is not None:
            found["rope_local_base_freq"] = rope[WINDOWED]["rope_theta"]
        return found


def in_config(layers: Sequence[Options]) -> tuple[Options, dict[str, Options]]:
    """`attention` and `layer_attention` of a model with these layers."""
    usual = max(layers, key=layers.count)
    others: dict[str, Options] = {}
    for options in layers:
        places = [n for n, one in enumerate(layers) if one == options]
        if options == usual or options in others.values():
            continue
        step = places[1] - places[0] if len(places) > 1 else 1
        if len(places) > 1 and places == list(range(places[0], len(layers), step)):
            others[f"{places[0]}::{step}"] = options
        else:
            others |= {str(place): options for place in places}
    return usual, others


def _bool(content: dict[str, Any], name: str, absent: bool) -> bool:
    value: bool = checked_value(bool, content.pop(name, absent), name)
    return value


def size_in(content: dict[str, Any], name: str, absent: int, hint: Any = Positive) -> int:
    """A size, that of a file which has none or null if it is absent."""
    value = content.pop(name, None)
    found: int = checked_value(hint, absent if value is None else value, name)
    return found


def _agreeing(outer: Options, inner: Options, where: str) -> Options:
    """Both, of which programs read one or the other: ValueError where they say different things."""
    for name, found in outer.items():
        if inner.get(name) not in (None, found):
            raise ValueError(
                f"{name}: found {shown(found)} beside {shown(inner[name])} in {where}, wanted one "
                "value"
            )
    return outer | inner
