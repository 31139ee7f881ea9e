"""The configuration of a run's data."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read, and how."""

    manifest: str
    """Training manifest.json, or the folder that holds it: a path, or a URL webdataset can open."""
    context: int
    """Tokens per sample; divides the documents' length."""
    validation_manifest: str | None = None
    """The same for validation; None means no validation."""
    validation_tokens: int = 524_288
    """Tokens of a validation pass, the first ones: the same text whatever the context."""
    workers: int = 1
    """Processes per rank that read ahead; 0 reads in the training process."""
    shuffle_shards: int = 8
    """Shards whose samples are mixed with each other; all of them stay mapped at a time."""
    on_bad_shard: str = "stop"
    """`stop`, or `replace`: a damaged, short or missing shard is replaced by the next one."""
    max_bad_fraction: float = 0.01
    """Share of the shards that may be replaced before the run stops after all, 0 to 1."""
    cache_dir: str | None = None
    """Folder for copies of remote shards, kept for ever; a remote manifest needs one."""

    def __post_init__(self) -> None:
        for name in ("context", "validation_tokens", "shuffle_shards"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name}: found {getattr(self, name)}, wanted 1 or more")
        if self.workers < 0:
            raise ValueError(f"data.workers: found {self.workers}, wanted 0 or more")
        if self.on_bad_shard not in ("stop", "replace"):
            raise ValueError(
                f"data.on_bad_shard: found {self.on_bad_shard!r}, wanted stop or replace"
            )
        if not 0 <= self.max_bad_fraction <= 1:
            raise ValueError(f"data.max_bad_fraction: found {self.max_bad_fraction}, wanted 0 to 1")
