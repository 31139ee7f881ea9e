"""Which tokenizer a name, a path or a URL means. What a file holds is told from its content."""

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from longhaul.datamodules.files.untrusted import parse_json, read_regular
from longhaul.datamodules.remote.reading import read_remote
from longhaul.datamodules.tokenizer.base import FileTokenizer, Tokenizer
from longhaul.datamodules.tokenizer.built_in import (
    BytesTokenizer,
    Gpt2Tokenizer,
    LongCrawl64Tokenizer,
)
from longhaul.datamodules.tokenizer.json_file import JsonTokenizer
from longhaul.datamodules.tokenizer.ranks import RanksTokenizer, is_ranks, pattern_in
from longhaul.datamodules.tokenizer.sentence_pieces import SentencePieceTokenizer
from longhaul.datamodules.urls import is_remote, local_path

BUILT_IN = ("bytes", "gpt2", "longcrawl64")
_MOST_BYTES = 256 << 20  # of a tokenizer's file
_MOST_SETTINGS_BYTES = 16 << 20
# Files of a folder that may be its tokenizer, the best one first.
_FILES = ("tokenizer.json", "tokenizer.model", "*.tiktoken")
# Files beside a tokenizer that name its bos and eos, the one that counts first.
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_LAYOUTS = "tokenizer.json, SentencePiece model or file of tiktoken ranks"


def build_tokenizer(
    name_or_path: str,
    *,
    bos: str | int | None = None,
    eos: str | int | None = None,
    pattern: str | None = None,
) -> Tokenizer:
    """The tokenizer `bytes`, `gpt2` or `longcrawl64`, or that of a file, or in a folder.

    Args:
        name_or_path: one of those. A file is a Hugging Face tokenizer.json, a SentencePiece model
            or a file of tiktoken ranks, such as Llama 3's tokenizer.model.
        bos: token of a file, or its id, that stands in front of a sequence. None: `bos_token` of
            the tokenizer_config.json or special_tokens_map.json beside it, or one with a usual
            name, or `eos`.
        eos: token, or its id, that ends a text. None: `eos_token` there, or one with a usual name.
        pattern: of tiktoken ranks, which hold none: one of PATTERNS.

    Raises:
        ValueError: there is no such tokenizer, or it has no such tokens.
    """
    if name_or_path in BUILT_IN:
        if (bos, eos, pattern) != (None, None, None):
            raise ValueError(
                f"tokenizer {name_or_path}: found --bos, --eos or --pattern, wanted them only with "
                f"the path of a {_LAYOUTS}"
            )
        if name_or_path == "bytes":
            return BytesTokenizer()
        return Gpt2Tokenizer() if name_or_path == "gpt2" else LongCrawl64Tokenizer()
    path = Path(name_or_path)
    if path.is_dir():
        files = [file for name in _FILES for file in sorted(path.glob(name))]
        path = files[0] if files else path
    if not path.is_file():
        raise ValueError(f"tokenizer: {_found_none(name_or_path)}")
    for settings in map(path.with_name, _SETTINGS):
        if settings.is_file():
            found = parse_json(_Settings, read_regular(settings, _MOST_SETTINGS_BYTES), settings)
            bos = _content_of(found.bos_token) if bos is None else bos
            eos = _content_of(found.eos_token) if eos is None else eos
    content = read_regular(path, _MOST_BYTES)
    known = pattern_in(path.name) if pattern is None else pattern
    return _tokenizer_of(content, str(path), bos=bos, eos=eos, pattern=known)


def _found_none(name_or_path: str) -> str:
    """Why no tokenizer is at a path, or what a name may be meant to be."""
    path = Path(name_or_path)
    if path.is_dir():
        wanted = f"wanted {', '.join(_FILES[:-1])} or {_FILES[-1]} in it"
        return f"found {name_or_path!r}, a folder without a tokenizer, {wanted}"
    wanted = f"wanted {', '.join(BUILT_IN)}, or the path of a {_LAYOUTS}"
    if near := difflib.get_close_matches(name_or_path.lower(), BUILT_IN, n=1):
        return f"found {name_or_path!r}, {wanted}; the nearest is {near[0]}"
    if os.sep in name_or_path or path.suffix:
        return f"found {name_or_path!r}, no such file, {wanted}"
    return f"found {name_or_path!r}, {wanted}"


def read_tokenizer(url: str, name: str, *, bos: int, eos: int) -> FileTokenizer:
    """The tokenizer of a file at a path or URL, with these ids, as it was copied under a name."""
    if is_remote(url):
        content = read_remote(url, _MOST_BYTES)
    else:
        content = read_regular(local_path(url), _MOST_BYTES)
    return _tokenizer_of(content, url, bos=bos, eos=eos, pattern=pattern_in(name))


def _tokenizer_of(
    content: bytes,
    where: str,
    *,
    bos: str | int | None,
    eos: str | int | None,
    pattern: str | None,
) -> FileTokenizer:
    if is_ranks(content):
        return RanksTokenizer(content, where, bos=bos, eos=eos, pattern=pattern)
    if pattern is not None:
        raise ValueError(f"{where}: found --pattern {pattern}, wanted it only with tiktoken ranks")
    if content.lstrip().startswith(b"{"):
        return JsonTokenizer(content, where, bos=bos, eos=eos)
    # The first field of a message of protobuf.
    if content.startswith(b"\n"):
        return SentencePieceTokenizer(content, where, bos=bos, eos=eos)
    if content.startswith(b"\x80"):
        raise ValueError(f"{where}: found a pickle, which may run code, wanted a {_LAYOUTS}")
    raise ValueError(f"{where}: found {content[:20]!r} at its beginning, wanted a {_LAYOUTS}")


@dataclass(frozen=True)
class _Token:
    content: str


@dataclass(frozen=True)
class _Settings:
    """What is read of a tokenizer_config.json."""

    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None


def _content_of(token: str | _Token | None) -> str | None:
    return token.content if isinstance(token, _Token) else token
