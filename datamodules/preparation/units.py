"""Prepare the documents of units: tokenize each unit into a file, and pack these into shards."""

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from longhaul.datamodules.files.locks import lock
from longhaul.datamodules.files.untrusted import check_no_links
from longhaul.datamodules.manifest import MANIFEST_NAME, Manifest
from longhaul.datamodules.preparation.documents import Unit
from longhaul.datamodules.preparation.packing import PackedUnits, Packing
from longhaul.datamodules.preparation.resumable import (
    PROGRESS_NAME,
    UNITS_NAME,
    Progress,
    check_destination,
    check_same_preparation,
    counting_on,
    finished_manifest,
    prepare_shards,
)
from longhaul.datamodules.preparation.tokenizing import tokenize_units, unit_path
from longhaul.datamodules.preparation.unit_files import UnitForm
from longhaul.datamodules.tokenizer import FileTokenizer, Tokenizer

_LOCK_NAME = "lock"


@dataclass(frozen=True)
class Part:
    """Every `of`-th unit from number `index` on, which one task of several tokenizes."""

    index: int
    of: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            raise ValueError(f"part: found {self.index}/{self.of}, wanted 0/N to N-1/N")


def _nothing(tokens: int) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is prepared, but for its units."""

    destination: Path
    """Folder of the shards, or of the folders `train` and `validation`."""
    tokenizer: Tokenizer
    source: Mapping[str, Any]
    """What identifies the units: a preparation only resumes with an equal one."""
    packing: Packing
    docs_per_shard: int = 256
    """Blocks per shard."""
    validation_fraction: float = 0.0
    """Share of the documents that is for validation; 0: there is no such folder."""
    workers: int = 1
    """Processes that tokenize. They change no byte of the result."""
    part: Part | None = None
    """Units to tokenize, and nothing else; another job packs them. None is everything."""
    tokenized: Progress = _nothing
    """Called with the number of tokens in unit files so far."""
    packed: Progress = _nothing
    """Called with the number of tokens in shards so far."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(
                f"--validation-fraction: found {self.validation_fraction}, wanted 0 to below 1"
            )
        if self.docs_per_shard < 1:
            raise ValueError(f"--docs-per-shard: found {self.docs_per_shard}, wanted 1 or more")

    @property
    def units_folder(self) -> Path:
        """Folder of the unit files, which is there until all shards are."""
        return self.destination / UNITS_NAME

    @property
    def splits(self) -> dict[str, Path]:
        """The folder of the shards of each split."""
        if self.validation_fraction == 0:
            return {"train": self.destination}
        return {name: self.destination / name for name in ("train", "validation")}

    @property
    def extra_files(self) -> dict[str, bytes]:
        """Files beside the shards: with the tokenizer they can be decoded without the original."""
        if isinstance(self.tokenizer, FileTokenizer):
            return {self.tokenizer.name: self.tokenizer.content}
        return {}

    @property
    def form(self) -> UnitForm:
        """How unit files are written."""
        return UnitForm(self._dtype, self.tokenizer.eot_id, self.validation_fraction)

    @property
    def _dtype(self) -> Literal["uint16", "uint32"]:
        return "uint16" if self.tokenizer.vocab_size <= 1 << 16 else "uint32"

    def template(self, split: str) -> Manifest:
        """The manifest of a split, without its shards."""
        packing = asdict(self.packing)
        return Manifest(
            **self.tokenizer.identity,
            document_tokens=self.packing.block_tokens,
            dtype=self._dtype,
            boundaries="ends",
            source={
                **self.source,
                "packing": packing.pop("kind"),
                "document_tokens": packing.pop("block_tokens"),
                **packing,
                "tokenizer_sha256": self.tokenizer.sha256,
                "validation_fraction": self.validation_fraction,
                "docs_per_shard": self.docs_per_shard,
                "split": split,
            },
            shards=(),
        )


def prepare_units(job: Job, units: Callable[[], Mapping[str, Unit]]) -> list[Manifest]:
    """Write the shards of units, or finish an interrupted preparation.

    Args:
        job: what is prepared.
        units: finds them, by a key, in their order. Unit files of equal keys have equal content.

    Returns:
        The manifest, or those of `train` and `validation`; none of a part.

    Raises:
        ValueError: a unit is damaged, a split does not fill a block, or the destination holds
            something else.
    """
    if (manifests := _open_units_folder(job)) is not None:
        return manifests
    found = units()
    if job.part is None:
        return _write_shards(job, found)
    _tokenize(job, dict(list(found.items())[job.part.index :: job.part.of]))
    return []


def _tokenize(job: Job, units: Mapping[str, Unit]) -> None:
    tokenize_units(units, job.units_folder, job.form, workers=job.workers, progress=job.tokenized)


def _open_units_folder(job: Job) -> list[Manifest] | None:
    """Make the folder of the unit files; or the manifests, if all shards are there already."""
    finished = [finished_manifest(path, job.template(name)) for name, path in job.splits.items()]
    manifests = [manifest for manifest in finished if manifest is not None]
    if len(manifests) == len(finished):
        shutil.rmtree(job.units_folder, ignore_errors=True)
        job.packed(sum(manifest.num_tokens for manifest in manifests))
        return manifests
    names = {"train", "validation"} if job.validation_fraction else {PROGRESS_NAME}
    check_destination(job.destination, {*names, UNITS_NAME})
    for name, folder in job.splits.items():
        check_destination(folder, {PROGRESS_NAME, MANIFEST_NAME, UNITS_NAME})
        check_same_preparation(folder, job.template(name))
    check_no_links(job.destination, UNITS_NAME)
    job.units_folder.mkdir(parents=True, exist_ok=True)
    return None


def _write_shards(job: Job, units: Mapping[str, Unit]) -> list[Manifest]:
    with (job.units_folder / _LOCK_NAME).open("ab") as file:
        if not lock(file.fileno()):
            raise ValueError(f"{job.destination}: another preparation is writing into it")
        try:
            _tokenize(job, units)
        except ValueError:
            # What is finished need not be read again once the source is mended.
            if not any(unit_path(job.units_folder, key).exists() for key in units):
                _remove(job)
            raise
        paths = [unit_path(job.units_folder, key) for key in units]
        packed = {
            name: PackedUnits(paths, name == "validation", job.packing) for name in job.splits
        }
        _check_lengths(job, units, packed)
        manifests = []
        before = 0
        for name, folder in job.splits.items():
            manifests.append(
                prepare_shards(
                    folder,
                    replace(
                        job.template(name),
                        dropped_tokens=packed[name].dropped_tokens,
                        empty_texts=packed[name].empty_texts,
                        dropped=packed[name].dropped,
                    ),
                    packed[name],
                    docs_per_shard=job.docs_per_shard,
                    prefix=name,
                    extra_files=job.extra_files,
                    progress=counting_on(job.packed, before),
                )
            )
            before += manifests[-1].num_tokens
        shutil.rmtree(job.units_folder)
    return manifests


def _check_lengths(job: Job, units: Mapping[str, Unit], packed: Mapping[str, PackedUnits]) -> None:
    """Raise where a split does not fill a block. Validation is named first, which is smaller."""
    size = job.packing.block_tokens
    for name, folder in reversed(job.splits.items()):
        tokens = packed[name].tokens
        if tokens >= size:
            continue
        _remove(job)
        if not tokens:
            raise ValueError(_without_text(job, units, packed, name))
        # The largest power of two that fits: many contexts divide it.
        shorter = 1 << (tokens.bit_length() - 1)
        fraction = ", --validation-fraction" if job.validation_fraction else ""
        raise ValueError(
            f"{folder}: found {tokens} tokens for it, less than one block of {size}; wanted a "
            f"larger source or shorter blocks (--doc-tokens {shorter}{fraction})"
        )


def _without_text(
    job: Job, units: Mapping[str, Unit], packed: Mapping[str, PackedUnits], name: str
) -> str:
    """Why no token is left for a split, or for that of training if it has none either."""
    name = name if packed["train"].tokens else "train"
    if not any(one.tokens or one.dropped for one in packed.values()):
        files, first = int(job.source["files"]), [unit.name for unit in units.values()][:1]
        source = first[0] if first else str(job.destination)
        more = f" and {files - 1:,} more" if files > 1 else ""
        empty = any(one.empty_texts for one in packed.values())
        why = "all texts in it are empty" if empty else "there is no record in it"
        return f"{source}{more}: found no text, wanted some: {why}"
    one = packed[name]
    without = "; --validation-fraction 0 prepares without it" if name == "validation" else ""
    if one.dropped:
        packing = job.packing
        reasons = {
            "min_tokens": f"shorter than --min-tokens {packing.min_tokens}",
            "max_tokens": f"longer than --max-tokens {packing.max_tokens}",
            "drop": f"longer than a block of {packing.block_tokens} (--long drop)",
        }
        counts = {reasons[reason]: lost.documents for reason, lost in one.dropped.items()}
        if one.empty_texts:
            counts["empty"] = one.empty_texts
        why = ", ".join(
            f"{count:,} {'is' if count == 1 else 'are'} {reason}"
            for reason, count in counts.items()
        )
        texts = sum(counts.values())
        if len(counts) > 1:
            why = f"of its {texts:,} texts {why}"
        else:
            each = f"all its {texts:,} texts are" if texts > 1 else "its only text is"
            why = f"{each} {next(iter(counts))}"
    else:
        why = "of the texts none falls to it (--validation-fraction)"
    return f"{job.splits[name]}: found no text for it, wanted some: {why}{without}"


def _remove(job: Job) -> None:
    """Remove the unit files, and folders if nothing else is in them."""
    shutil.rmtree(job.units_folder, ignore_errors=True)
    for folder in (*job.splits.values(), job.destination):
        with suppress(OSError):
            folder.rmdir()
