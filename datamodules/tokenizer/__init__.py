"""Tokenizers: the built-in ones, and those of files that people have. None needs a network."""

from longhaul.datamodules.tokenizer.base import (
    END_OF_TEXT,
    FileTokenizer,
    Ids,
    Tokenizer,
    check_characters,
)
from longhaul.datamodules.tokenizer.built_in import (
    BytesTokenizer,
    Gpt2Tokenizer,
    LongCrawl64Tokenizer,
    gpt2_files,
)
from longhaul.datamodules.tokenizer.json_file import JsonTokenizer
from longhaul.datamodules.tokenizer.opening import BUILT_IN, build_tokenizer, read_tokenizer
from longhaul.datamodules.tokenizer.ranks import PATTERNS, RanksTokenizer
from longhaul.datamodules.tokenizer.sentence_pieces import SentencePieceTokenizer

__all__ = [
    "BUILT_IN",
    "END_OF_TEXT",
    "PATTERNS",
    "BytesTokenizer",
    "FileTokenizer",
    "Gpt2Tokenizer",
    "Ids",
    "JsonTokenizer",
    "LongCrawl64Tokenizer",
    "RanksTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "build_tokenizer",
    "check_characters",
    "gpt2_files",
    "read_tokenizer",
]
