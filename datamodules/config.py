"""The configuration of a run's data."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from longhaul.datamodules.files.untrusted import AtLeastOne, check_fields, shown

ManifestKey = Literal["manifest", "validation_manifest"]
MANIFEST_KEYS: tuple[ManifestKey, ...] = ("manifest", "validation_manifest")
# Words that no reader of YAML takes for something else, and of which names of metrics are made.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}", re.ASCII)
_NO_NAMES = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}
_MOST_SOURCES = 1024

Share = Annotated[float, Field(ge=0, le=1e18)]


def key_of(name: str, key: ManifestKey) -> str:
    """The key of a source's manifest; the name "" is that of `data.manifest`."""
    return f"data.sources.{name}.{key}" if name else f"data.{key}"


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One of several sources, `data.sources.NAME`: its shards, and how much of them is read."""

    manifest: str
    """manifest.json of its training shards, or its folder: a path, or a URL."""

    weight: Share | None = None
    """Its share of the tokens, relative to the others' weights; null in all: their sizes."""

    max_epochs: Annotated[float, Field(gt=0)] | None = None
    """How often its tokens may be read in the run, or null; checked at the start."""

    validation_manifest: str | None = None
    """manifest.json of its validation shards, or its folder, or null."""


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """An entry of `data.schedule`: weights that hold from a number of trained tokens on."""

    at_tokens: AtLeastOne
    """Tokens trained before, rounded up to a whole number of updates."""

    weights: dict[str, Share]
    """The weight of each source from there on, by name; those left out are not read."""


@dataclass(frozen=True, kw_only=True)
class CutConfig:
    """An entry of `data.short_first`: the length of pieces until a number of trained tokens."""

    context: AtLeastOne
    """Tokens of a piece, a divisor of `data.context`, and more than in the entry before."""

    until_tokens: AtLeastOne
    """Trained tokens up to which samples are cut so, rounded up to `optim.tokens_per_update`."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which shards are read, and how."""

    manifest: str | None = None
    """manifest.json of the training shards, or its folder: a path or URL; null with sources."""

    sources: dict[str, SourceConfig] = field(default_factory=dict)
    """Several sources by name, in place of `data.manifest`, each with the keys below."""

    schedule: list[StageConfig] = field(default_factory=list)
    """Weights of the sources from later tokens on, in their order, each with the keys below."""

    from_tokens: AtLeastOne | None = None
    """Trained tokens from which the sources' weights hold in a run that began with others."""

    # No block of a manifest is longer. `longhaul evaluate --context` may ask for any number.
    context: Annotated[int, Field(ge=1, le=1 << 40)]
    """Tokens per sample; a divisor of the length of the blocks."""

    short_first: list[CutConfig] = field(default_factory=list)
    """Shorter contexts at the beginning: samples are cut into pieces, each with the keys below."""

    document_mask: bool = True
    """No token sees another document, where the shards hold the ends of documents."""

    validation_manifest: str | None = None
    """manifest.json of the validation shards, or its folder; null: none, or those of sources."""

    validation_tokens: AtLeastOne = 524_288
    """Tokens per validation pass, 1 or more: the first ones, equally many of each source."""

    # Each one is a process.
    workers: Annotated[int, Field(ge=0, le=4096)] = 1
    """Processes per rank that read ahead, 0 to 4096; 0: the training process reads."""

    shuffle_shards: AtLeastOne = 8
    """Number of shards whose samples are shuffled together, 1 or more; twice as many stay open."""

    on_bad_shard: Literal["stop", "replace"] = "stop"
    """stop | replace: read the next good shard instead of a damaged, short or missing one."""

    max_bad_fraction: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Fraction of the shards, 0 to 1, that may be replaced; the run stops when it is exceeded."""

    cache_dir: str | None = None
    """Folder on each node for copies of remote shards; required for a remote manifest."""

    cache_bytes: AtLeastOne | None = None
    """Bytes of the copies in it, such as 200GB: the least recently used ones go; null: all stay."""

    def __post_init__(self) -> None:
        check_fields(self, "data.")
        self._check_manifests()
        for name, source in self.sources.items():
            if not _NAME.fullmatch(name) or name.lower() in _NO_NAMES:
                raise ValueError(
                    f"data.sources: found the name {shown(name)}, wanted a letter, and then "
                    "letters, digits, _ and -, 64 at most, and no word such as yes or null"
                )
            if source.weight == 0 and not self._has_weight_later(name):
                raise ValueError(
                    f"data.sources.{name}.weight: found 0, wanted more than 0 (leave the source "
                    "out instead)"
                )
        self._check_weights()
        self._check_schedule()
        self._check_short_first()

    def context_at(self, tokens: int) -> int:
        """Length of the sequences in the update that begins after so many trained tokens."""
        cuts = (one.context for one in self.short_first if tokens < one.until_tokens)
        return next(cuts, self.context)

    def manifests(self, key: ManifestKey) -> dict[str, str]:
        """The path or URL of each source's manifest of this kind, by the source's name.

        The one that belongs to no source has the name "".
        """
        whole: str | None = getattr(self, key)
        found = {name: getattr(source, key) for name, source in self.sources.items()}
        given = {name: one for name, one in found.items() if one is not None}
        return given if whole is None else {"": whole}

    def with_manifests(self, key: ManifestKey, places: Mapping[str, str]) -> "DataConfig":
        """The config with other paths or URLs, by names as those of `manifests`."""
        sources = {
            name: dataclasses.replace(source, **{key: places.get(name, getattr(source, key))})
            for name, source in self.sources.items()
        }
        whole = {key: places[""]} if "" in places else {}
        return dataclasses.replace(self, sources=sources, **whole)  # type: ignore[arg-type]

    def without_validation(self) -> "DataConfig":
        """The config without validation shards."""
        sources = {
            name: dataclasses.replace(source, validation_manifest=None)
            for name, source in self.sources.items()
        }
        return dataclasses.replace(self, sources=sources, validation_manifest=None)

    def _check_manifests(self) -> None:
        if self.manifest is not None and self.sources:
            raise ValueError(
                f"data.manifest: found {shown(self.manifest)} with data.sources, wanted null, or "
                "no sources"
            )
        if self.manifest is None and not self.sources:
            raise ValueError("data.manifest: missing, and there are no data.sources")
        of_sources = [name for name in self.sources if self.sources[name].validation_manifest]
        if self.validation_manifest is not None and of_sources:
            raise ValueError(
                f"data.validation_manifest: found {shown(self.validation_manifest)} with "
                f"data.sources.{of_sources[0]}.validation_manifest, wanted one of them"
            )
        if len(self.sources) > _MOST_SOURCES:
            raise ValueError(
                f"data.sources: found {len(self.sources)}, wanted {_MOST_SOURCES} at most"
            )
        for key in ("schedule", "from_tokens"):
            if getattr(self, key) and not self.sources:
                raise ValueError(f"data.{key}: found without data.sources, wanted sources")

    def _check_weights(self) -> None:
        without = [name for name, source in self.sources.items() if source.weight is None]
        if without and len(without) < len(self.sources):
            raise ValueError(
                f"data.sources.{without[0]}.weight: missing, and others have one; wanted a weight "
                "for all sources, or for none"
            )
        if self.sources and not without and not any(s.weight for s in self.sources.values()):
            raise ValueError("data.sources: found the weight 0 in all, wanted one that is more")

    def _check_schedule(self) -> None:
        before = self.from_tokens or 0
        for number, stage in enumerate(self.schedule):
            key = f"data.schedule.{number}"
            if stage.at_tokens <= before:
                raise ValueError(
                    f"{key}.at_tokens: found {stage.at_tokens}, wanted more than the {before} "
                    "before it"
                )
            for name in stage.weights:
                if name not in self.sources:
                    raise ValueError(
                        f"{key}.weights: found {shown(name)}, wanted one of "
                        f"{', '.join(self.sources)}"
                    )
            if not any(stage.weights.values()):
                raise ValueError(f"{key}.weights: found no weight, wanted one that is more than 0")
            before = stage.at_tokens

    def _check_short_first(self) -> None:
        length = until = 0
        for number, cut in enumerate(self.short_first):
            key = f"data.short_first.{number}"
            for name, found, least in (
                ("context", cut.context, length),
                ("until_tokens", cut.until_tokens, until),
            ):
                if found <= least:
                    raise ValueError(
                        f"{key}.{name}: found {found}, wanted more than the {least} before it"
                    )
            if cut.context >= self.context or self.context % cut.context:
                raise ValueError(
                    f"{key}.context: found {cut.context}, wanted a divisor of data.context = "
                    f"{self.context}, and less"
                )
            length, until = cut.context, cut.until_tokens

    def _has_weight_later(self, name: str) -> bool:
        """Whether a source that is not read may be read at another time of the run."""
        return self.from_tokens is not None or any(one.weights.get(name) for one in self.schedule)
