"""The files of a corpus in a fixed order, and which of their texts are for validation."""

import hashlib
import logging
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from longhaul.datamodules.files.untrusted import check_regular, shown
from longhaul.datamodules.preparation.compression import COMPRESSIONS
from longhaul.datamodules.preparation.formats import Text, UnreadableError, content_of, texts_of
from longhaul.datamodules.preparation.text_files.keys import TEXT_KEY
from longhaul.datamodules.preparation.text_files.saved_datasets import is_saved, names_to_read
from longhaul.datamodules.urls import MissingInputError

STANDARD_LIBRARY = "stdlib"
"""The source with this name is Python's standard library, and no path."""

_log = logging.getLogger(__name__)
_NAMED = 5
_TEXT_TABLES = (".csv", ".tsv")


@dataclass(frozen=True)
class SourceFiles:
    """A list of files in the order in which they are read, sorted by the hash of their names.

    Neighbouring files in a folder are similar. Sorted by hash, every stretch of the corpus is a
    mixture. The files of a dataset that `datasets` saved stay together, in its order.
    """

    description: str
    """Description of the files, for the manifest."""
    files: tuple[tuple[str, Path], ...]
    """Names, relative to the source, and paths."""
    text_key: str = TEXT_KEY
    """What the texts are called in files of records: a name, or a path with dots."""

    def fingerprint(self) -> str:
        """Hash of the names and sizes of all files."""
        lines = [f"{name}\0{path.stat().st_size}\n" for name, path in self.files]
        return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()

    @cached_property
    def plain_files(self) -> tuple[tuple[str, Path], ...]:
        """The files that are one text each."""
        return tuple((name, path) for name, path in self.files if content_of(path).kind == "text")

    def texts(self) -> Iterator[Text]:
        """All texts. A plain text file is one text; in other files every record is one text."""
        for name, path in self.files:
            yield from texts_of(name, path, text_key=self.text_key)


def open_sources(
    sources: Sequence[str], destination: Path | None = None, text_key: str = TEXT_KEY
) -> SourceFiles:
    """The files in these sources, which are files, folders, or STANDARD_LIBRARY.

    What is in the folder `destination`, in which their shards will be, is none of them.

    Args:
        text_key: the name of the texts in files of records, or a path with dots to them.

    Raises:
        ValueError: there is no text, or a file is damaged as far as its first bytes tell.
    """
    if not all(text_key.split(".")):
        raise ValueError(f"--text-key: found {shown(text_key)}, wanted a name, or names with dots")
    found: list[_Found] = []
    for source in sources:
        if source == STANDARD_LIBRARY:
            found += _standard_library()
        else:
            found += _files_in(Path(source), destination)
    is_library = list(sources) == [STANDARD_LIBRARY]
    description = "the Python standard library" if is_library else "files"
    if not found:
        raise ValueError(f"{', '.join(sources)}: no text in it")
    # The names of two sources may be equal.
    once = sorted(_each_once(found), key=_order)
    _warn_of_tables(once)
    return SourceFiles(description, tuple((one.name, one.path) for one in once), text_key)


def _order(file: "_Found") -> tuple[bytes, str, int]:
    if file.place is None:
        return _digest(file.name), str(file.path), 0
    folder = file.path.parent
    below = file.name.rpartition("/")[0] or folder.name
    return _digest(below), str(folder), file.place


def in_validation(name: str, fraction: float) -> bool:
    """Whether the text of this name belongs to the validation fraction, by the name's hash."""
    return _place(name) < fraction * 2**64


def files_in_validation(corpus: SourceFiles, fraction: float) -> frozenset[str]:
    """Names of the plain files whose sizes add up to the fraction as closely as they allow.

    They are taken in the order of their hashes, but for those that lead further away from it.
    """
    sizes = [(name, path.stat().st_size) for name, path in corpus.plain_files]
    wanted = fraction * sum(size for _, size in sizes)
    chosen = []
    total = 0
    for name, size in sorted(sizes, key=lambda item: _place(item[0])):
        if total + size / 2 <= wanted:
            chosen.append(name)
            total += size
    return frozenset(chosen)


def _place(name: str) -> int:
    # Other bytes of the hash than those that decide the order: else validation would come first.
    return int.from_bytes(_digest(name)[-8:], "big")


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


@dataclass(frozen=True)
class _Found:
    name: str
    path: Path
    is_linked: bool
    """Whether a link to a folder leads to it."""
    place: int | None = None
    """Among the files of a saved dataset, None if it is not one of them."""


def _files_in(source: Path, destination: Path | None) -> list[_Found]:
    if not source.exists():
        raise MissingInputError(f"{source}: no such file or folder")
    if not source.is_dir():
        check_regular(source)
        content_of(source)
        return [_Found(source.name, source, False)]
    found, unreadable, special = [], [], []
    for each in _walk(source, destination):
        if not each.path.is_file():
            special.append(each)
            continue
        try:
            content_of(each.path)
        except UnreadableError:
            unreadable.append(each)
        else:
            found.append(each)
    _warn(unreadable, "files whose texts cannot be read")
    _warn(special, "links to nothing, FIFOs, sockets and devices")
    return found


def _standard_library() -> list[_Found]:
    if (here := Path(STANDARD_LIBRARY)).exists():
        _log.warning(
            "%s is read as Python's standard library, not as what has this name here; ./%s is that",
            *(here, here),
        )
    root = Path(sysconfig.get_path("stdlib"))
    foreign = {"site-packages", "dist-packages"}
    found = [
        each
        for each in _walk(root)
        if each.path.suffix == ".py"
        and not each.is_linked
        and not foreign & set(each.path.relative_to(root).parts)
    ]
    if not found:
        raise ValueError(f"{root}: Python's standard library has no sources here; name a source")
    return found


def _walk(source: Path, left_out: Path | None = None) -> Iterator[_Found]:
    """All that is below a folder and no folder itself, without what is in a folder to leave out.

    Links to folders are followed after all that is there without them, in the order of their names.
    So what a link and its own path lead to has the latter, and a link to a folder above ends.
    """
    seen = {_identity(source)}
    if left_out is not None and left_out.exists():
        seen.add(_identity(left_out))
    waiting, links, repeated = [source], list[Path](), list[Path]()
    is_linked = False
    while waiting or links:
        if waiting:
            folder = waiting.pop()
        else:
            is_linked = True
            links.sort()
            folder = links.pop(0)
            if _identity(folder) in seen:
                repeated.append(folder)
                continue
            seen.add(_identity(folder))
        # An OSError ends the preparation: a folder that cannot be read must not vanish.
        names = sorted(name for name in os.listdir(folder) if name[0] != ".")
        has_order = is_saved(names)
        for place, name in enumerate(names_to_read(folder, names)):
            path = folder / name
            if not path.is_dir():
                relative = path.relative_to(source).as_posix()
                yield _Found(relative, path, is_linked, place if has_order else None)
            elif name == "__pycache__":
                continue
            elif path.is_symlink():
                links.append(path)
            elif _identity(path) not in seen:
                seen.add(_identity(path))
                waiting.append(path)
    if repeated:
        _log.warning(
            "%d links to folders that are read anyway are left out: %s",
            *(len(repeated), _names([str(path) for path in repeated])),
        )


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _each_once(files: list[_Found]) -> list[_Found]:
    """The files without links, hard ones too, to files that are there anyway."""
    by_target: dict[object, _Found] = {}
    # A file goes before links to it, and these by name, whatever the order of the folder.
    for each in sorted(
        files, key=lambda one: (one.is_linked, one.path.is_symlink(), one.name, str(one.path))
    ):
        # Some file systems give the same number to several files, but no name to two.
        is_shared = each.path.stat().st_nlink > 1
        target = _identity(each.path) if is_shared else os.path.realpath(each.path)
        by_target.setdefault(target, each)
    if repeated := len(files) - len(by_target):
        _log.warning("%d files are named more than once, or by links, and read once", repeated)
    return list(by_target.values())


def _warn(left_out: list[_Found], what: str) -> None:
    if left_out:
        names = _names([str(each.path) for each in left_out])
        _log.warning("%d %s are left out: %s", len(left_out), what, names)


def _warn_of_tables(files: list[_Found]) -> None:
    """Tell of tables whose rows are read as if they were prose."""
    tables = [
        one for one in files if one.name.lower().removesuffix(_ending(one)).endswith(_TEXT_TABLES)
    ]
    if tables := [one for one in tables if content_of(one.path).kind == "text"]:
        _log.warning(
            "%d files of rows are read as plain text, each as one text with its commas or tabs: "
            "%s; Parquet or JSON lines have a text a row",
            *(len(tables), _names([str(one.path) for one in tables])),
        )


def _ending(file: _Found) -> str:
    return next((c.ending for c in COMPRESSIONS if file.name.lower().endswith(c.ending)), "")


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(shown, sorted(names)[:_NAMED])) + more
