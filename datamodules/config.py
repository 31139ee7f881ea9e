"""The configuration of a run's data."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from longhaul.datamodules.files.untrusted import AtLeastOne, check_fields


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which shards are read, and how."""

    manifest: str
    """manifest.json of the training shards, or its folder: a path, or a URL."""

    # No block of a manifest is longer. `longhaul evaluate --context` may ask for any number.
    context: Annotated[int, Field(ge=1, le=1 << 40)]
    """Tokens per sample; a divisor of the length of the blocks."""

    document_mask: bool = True
    """No token sees another document, where the shards hold the ends of documents."""

    validation_manifest: str | None = None
    """manifest.json of the validation shards, or its folder; null: no validation."""

    validation_tokens: AtLeastOne = 524_288
    """Tokens per validation pass, 1 or more: the first ones, the same text for every context."""

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
