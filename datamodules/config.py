"""The configuration of a run's data."""

from dataclasses import dataclass

from longhaul.datamodules.files.untrusted import shown


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which shards are read, and how."""

    manifest: str
    """manifest.json of the training shards, or its folder: a path, or a URL webdataset can open."""

    context: int
    """Tokens per sample; a divisor of the length of the blocks."""

    validation_manifest: str | None = None
    """manifest.json of the validation shards, or its folder; null: no validation."""

    validation_tokens: int = 524_288
    """Tokens per validation pass, 1 or more: the first ones, the same text for every context."""

    workers: int = 1
    """Processes per rank that read ahead, 0 to 4096; 0: the training process reads."""

    shuffle_shards: int = 8
    """Number of shards whose samples are shuffled together, 1 or more; twice as many stay open."""

    on_bad_shard: str = "stop"
    """stop | replace: read the next good shard instead of a damaged, short or missing one."""

    max_bad_fraction: float = 0.01
    """Fraction of the shards, 0 to 1, that may be replaced; the run stops when it is exceeded."""

    cache_dir: str | None = None
    """Folder for copies of remote shards, never emptied; required for a remote manifest."""

    def __post_init__(self) -> None:
        # No block of a manifest is longer. `longhaul evaluate --context` may ask for any number.
        if self.context > 1 << 40:
            raise ValueError(f"data.context: found {shown(self.context)}, wanted 2^40 at most")
        for name in ("context", "validation_tokens", "shuffle_shards"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name}: found {getattr(self, name)}, wanted 1 or more")
        # Each one is a process.
        if not 0 <= self.workers <= 4096:
            raise ValueError(f"data.workers: found {self.workers}, wanted 0 to 4096")
        if self.on_bad_shard not in ("stop", "replace"):
            raise ValueError(
                f"data.on_bad_shard: found {self.on_bad_shard!r}, wanted stop or replace"
            )
        if not 0 <= self.max_bad_fraction <= 1:
            raise ValueError(f"data.max_bad_fraction: found {self.max_bad_fraction}, wanted 0 to 1")
