"""Which format a file or folder of tokens has, by its first bytes and what is beside it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from longhaul.datamodules.files.untrusted import check_regular, parse_json, read_regular
from longhaul.datamodules.manifest import MANIFEST_NAME
from longhaul.datamodules.preparation.compression import compression_of
from longhaul.datamodules.preparation.text_files.saved_datasets import (
    SPLITS,
    is_saved,
    names_to_read,
)
from longhaul.datamodules.preparation.token_files import headed, megatron, tables
from longhaul.datamodules.preparation.token_files.datatrove import open_datatrove
from longhaul.datamodules.preparation.token_files.dolma import NPY_MAGIC, open_npy
from longhaul.datamodules.preparation.token_files.ids import Vocabulary, raw_tokens
from longhaul.datamodules.preparation.token_files.litdata import open_litdata
from longhaul.datamodules.preparation.token_files.mds import open_mds
from longhaul.datamodules.preparation.token_files.own import open_own
from longhaul.datamodules.preparation.token_files.sources import Items, Stream
from longhaul.datamodules.preparation.token_files.tars import open_tar
from longhaul.datamodules.urls import MissingInputError

READABLE = (
    "Megatron (.bin with .idx), llm.c, lit-gpt, .npy, MDS, LitData, datatrove (.ds), Parquet, "
    "Arrow, webdataset or longhaul; --raw for a file of nothing but tokens"
)
_HEAD_BYTES = 512
_MOST_INDEX_BYTES = 256 << 20
# What stands beside a file of tokens and belongs to it, or tells nothing.
_BESIDE = (".idx", ".csv.gz", ".index", ".metadata", ".loss", ".json", ".jsonl", ".yaml", ".md")
_PICKLES = (".pkl", ".pickle", ".pt", ".pth")


@dataclass(frozen=True)
class Options:
    """What a user may say of files that do not say it themselves."""

    vocabulary: Vocabulary
    raw: str | None = None
    column: str | None = None


@dataclass(frozen=True)
class _Index:
    """What an index.json of MDS or LitData has."""

    shards: object = None
    chunks: object = None


def recognise(paths: Sequence[Path], options: Options) -> tuple[str, tuple[Items | Stream, ...]]:
    """The format of these files and folders, and what they hold.

    Raises:
        ValueError: one cannot be read, or is damaged, or they have several formats.
    """
    found: list[tuple[str, Items | Stream]] = []
    for path in _without_companions(paths):
        if path.is_dir():
            found += _in_folder(path, options)
        else:
            found += _in_file(path.name, _existing(path), options)
    formats = list(dict.fromkeys(name for name, _ in found))
    if len(formats) > 1:
        raise ValueError(f"found {' and '.join(formats)}, wanted sources of one format at a time")
    if not found:
        raise ValueError(
            f"{', '.join(map(str, paths))}: found no file of tokens, wanted {READABLE}"
        )
    return formats[0], tuple(source for _, source in found)


def _without_companions(paths: Sequence[Path]) -> list[Path]:
    """The paths, each once, without what belongs to another of them, as a shell's * finds it."""
    companions = {
        path.with_name(name)
        for path in paths
        for name in (
            *(f"{path.name}{ending}" for ending in (".index", ".metadata", ".loss")),
            f"{path.name.removesuffix('.bin')}.idx",
            f"{path.name.removesuffix('.npy')}.csv.gz",
        )
        if path.name != name
    }
    return [path for path in dict.fromkeys(paths) if path not in companions]


def _existing(path: Path) -> Path:
    """The file that a path is, or of which it is the prefix."""
    prefixed = path.with_name(f"{path.name}.bin")
    if not path.exists() and prefixed.exists():
        return prefixed
    if not path.exists():
        raise MissingInputError(f"{path}: no such file or folder")
    return path


def _in_folder(folder: Path, options: Options) -> Iterator[tuple[str, Items | Stream]]:
    """What is in a folder and all below it, in the order of names."""
    for name, place in _folders(folder):
        names = sorted(one.name for one in place.iterdir())
        if SPLITS in names:
            splits = [one for one in names if (place / one / "state.json").exists()]
            raise ValueError(
                f"{place}: found the splits {', '.join(splits)} of a saved data set, wanted one of "
                "these folders"
            )
        if MANIFEST_NAME in names:
            for source in open_own(name, place, options.vocabulary):
                yield "longhaul", source
        elif "index.json" in names:
            yield from _indexed(name, place, options)
        else:
            for file in names_to_read(place, names):
                path, inner = place / file, f"{name}/{file}" if name else file
                if is_saved(names):
                    table = tables.open_table(inner, path, "stream", options.column)
                    yield "a saved data set", table
                elif path.is_file() and file[0] != "." and not file.endswith(_BESIDE):
                    yield from _in_file(inner, path, options)


def _folders(folder: Path) -> Iterator[tuple[str, Path]]:
    """A folder and those below it, by name; none below one whose index.json tells of these."""
    waiting = [("", folder)]
    while waiting:
        name, place = waiting.pop()
        yield name, place
        if (place / "index.json").exists():
            continue
        inner = sorted(
            (one for one in place.iterdir() if one.is_dir() and one.name[0] != "."), reverse=True
        )
        # Links are left out: they may lead above.
        waiting += [
            (f"{name}/{one.name}" if name else one.name, one)
            for one in inner
            if not one.is_symlink()
        ]


def _indexed(name: str, folder: Path, options: Options) -> Iterator[tuple[str, Items | Stream]]:
    where = folder / "index.json"
    index = parse_json(_Index, read_regular(where, _MOST_INDEX_BYTES), where)
    if index.shards is not None:
        for source in open_mds(name, folder, options.column, options.raw):
            yield "MDS", source
    elif index.chunks is not None:
        for source in open_litdata(name, folder):
            yield "LitData", source
    else:
        raise ValueError(
            f"{where}: found neither shards nor chunks, wanted those of MDS or LitData"
        )


def _in_file(name: str, path: Path, options: Options) -> Iterator[tuple[str, Items | Stream]]:
    check_regular(path)
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    tokens, index = stem.with_name(f"{stem.name}.bin"), stem.with_name(f"{stem.name}.idx")
    if head.startswith((megatron.MAGIC, megatron.OLD_MAGIC)) or (path == tokens and index.exists()):
        if not tokens.exists():
            raise ValueError(f"{path}: found no {tokens.name} beside it, wanted its tokens")
        # It may be that of the prefix, or of the .idx.
        folder, slash, _ = name.rpartition("/")
        name = f"{folder}{slash}{tokens.name}"
        yield "Megatron", megatron.open_megatron(name, tokens, index, options.raw)
    elif headed.is_llmc(head):
        yield "llm.c", headed.open_llmc(name, path)
    elif head.startswith(headed.LITGPT_MAGIC):
        yield "lit-gpt", headed.open_litgpt(name, path)
    elif path.suffix == ".npy" or head.startswith(NPY_MAGIC):
        yield ".npy", open_npy(name, path, options.raw, options.vocabulary)
    elif path.suffix == ".ds" or path.with_name(f"{path.name}.index").exists():
        yield "datatrove", open_datatrove(name, path)
    elif kind := next((tables.MAGICS[one] for one in tables.MAGICS if head.startswith(one)), None):
        yield "a table", tables.open_table(name, path, kind, options.column)
    elif head[257:262] == b"ustar" or _is_packed_tar(path, head):
        yield "webdataset", open_tar(name, path, options.column)
    elif path.suffix in _PICKLES:
        raise ValueError(
            f"{path}: found a pickle, which runs code when it is read, wanted {READABLE}"
        )
    elif options.raw is not None or path.suffix == ".bin":
        yield "raw", Stream(name, (raw_tokens(path, options.raw, options.vocabulary),))
    else:
        raise ValueError(f"{path}: found no format of tokens, wanted {READABLE}")


def _is_packed_tar(path: Path, head: bytes) -> bool:
    return compression_of(path.name, head) is not None and ".t" in path.name
