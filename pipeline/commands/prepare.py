"""`longhaul prepare`: a corpus as webdataset shards with a manifest."""

import argparse
from pathlib import Path
from typing import Any, get_args

from longhaul.datamodules.preparation.packing import Packing
from longhaul.datamodules.preparation.source_files import STANDARD_LIBRARY
from longhaul.datamodules.preparation.text import FEW_FILES
from longhaul.datamodules.preparation.text_files.keys import TEXT_KEY
from longhaul.datamodules.preparation.token_files.sources import Separator
from longhaul.datamodules.preparation.token_files.stored import RAW_TYPES
from longhaul.datamodules.preparation.units import Part
from longhaul.datamodules.tokenizer import BUILT_IN, PATTERNS

_TOKENIZERS = (
    f"{', '.join(BUILT_IN)}, or the path of a tokenizer.json, SentencePiece model or file of "
    "tiktoken ranks"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    corpora = parser.add_subparsers(dest="corpus", required=True)
    zarr = corpora.add_parser("longcrawl64", help="LongCrawl64's Zarr v2 layout")
    zarr.add_argument("source", metavar="SRC.zarr", type=Path)
    zarr.add_argument("destination", metavar="DST", type=Path)
    zarr.add_argument(
        "--rows",
        metavar="A:B",
        help="rows A to B-1; several ranges with commas between them; or `whole`",
    )
    text = corpora.add_parser(
        "text",
        help="files or folders of text, JSON lines, .parquet, .arrow or webdataset tars; `stdlib` "
        "is Python's own sources",
    )
    # One more positional for DST would not tell what is missing where one path is given.
    text.add_argument(
        "paths",
        metavar="SRC ... DST",
        nargs="+",
        help="files or folders of text, or `stdlib` for Python's standard library; then the folder "
        "to write",
    )
    text.add_argument(
        "--tokenizer",
        default="bytes",
        help=f"{_TOKENIZERS} (bytes)",
    )
    text.add_argument(
        "--text-key",
        default=TEXT_KEY,
        metavar="KEY",
        help="what the texts are called in JSON lines and tables: a name, or a path with dots "
        "such as doc.text (%(default)s)",
    )
    tokens = corpora.add_parser(
        "tokens",
        help="tokens of Megatron, nanoGPT, llm.c, OLMo, MDS, LitData, datatrove and others",
    )
    tokens.add_argument(
        "paths",
        metavar="SRC ... DST",
        nargs="+",
        help="files or folders of tokens of one format, then the folder to write",
    )
    tokens.add_argument(
        "--tokenizer",
        required=True,
        help=f"that of the tokens: {_TOKENIZERS}",
    )
    tokens.add_argument(
        "--raw",
        choices=tuple(RAW_TYPES),
        metavar="TYPE",
        help=f"the type of tokens in files that do not say it: {', '.join(RAW_TYPES)} (be: big "
        "endian)",
    )
    tokens.add_argument(
        "--separator",
        choices=get_args(Separator),
        help="where the id stands that begins or ends a text; by default the files tell",
    )
    tokens.add_argument(
        "--column",
        metavar="NAME",
        help="the column of tokens in tables and MDS, or the ending of members of a webdataset tar",
    )
    for command in (text, tokens):
        command.add_argument(
            "--pattern",
            metavar="|".join(PATTERNS),
            help="whose words and special tokens a file of tiktoken ranks has",
        )
        for role, what in (("bos", "stands in front of a sequence"), ("eos", "ends a text")):
            command.add_argument(
                f"--{role}",
                metavar="TOKEN",
                help=f"the token of a file, or its id, that {what}; by default {role}_token of the "
                "tokenizer_config.json or special_tokens_map.json beside it, or a usual name",
            )
        command.add_argument(
            "--doc-tokens", type=int, default=65_536, metavar="N", help="tokens per block (65536)"
        )
        command.add_argument(
            "--validation-fraction",
            type=float,
            default=0.05,
            metavar="F",
            help="share of the text that goes to DST/validation, not DST/train (%(default)s): the "
            f"end of each file, or of {FEW_FILES} and more files, and of records, some by hashes "
            "of their names; 0: none",
        )
        command.add_argument(
            "--packing",
            choices=("concat", "best-fit"),
            default="concat",
            help="concat: texts are joined and cut into blocks; best-fit: texts go whole into "
            "blocks that have room, and few are cut (%(default)s)",
        )
        command.add_argument(
            "--long",
            choices=("split", "crop", "drop"),
            default="split",
            help="what happens to texts that are longer than a block (%(default)s)",
        )
        command.add_argument(
            "--min-tokens", type=int, default=0, metavar="N", help="drop texts of fewer tokens"
        )
        command.add_argument(
            "--max-tokens", type=int, metavar="N", help="drop texts of more tokens"
        )
        command.add_argument(
            "--workers",
            type=int,
            metavar="N",
            help="processes that tokenize; by default one for each processor",
        )
        command.add_argument(
            "--part",
            type=_part,
            metavar="I/N",
            help="tokenize every N-th unit of the source, from the I-th on, counted from 0, and "
            "write no shards: a prepare without --part does that, and finds what is tokenized",
        )
    for command in (zarr, text, tokens):
        command.add_argument(
            "--docs-per-shard", type=int, default=256, metavar="N", help="blocks per shard (256)"
        )


def _part(text: str) -> Part:
    index, _, of = text.partition("/")
    try:
        return Part(int(index), int(of))
    except ValueError:
        message = f"found {text!r}, wanted I/N with I from 0 to N-1"
        raise argparse.ArgumentTypeError(message) from None


def main(args: argparse.Namespace) -> int:
    from longhaul.pipeline.preparation.run import (
        prepare_from_longcrawl64,
        prepare_from_text,
        prepare_from_tokens,
    )

    if args.corpus == "longcrawl64":
        prepare_from_longcrawl64(
            args.source, args.destination, rows=args.rows, docs_per_shard=args.docs_per_shard
        )
        return 0
    sources, destination, options = sources_and_options(args)
    if args.corpus == "tokens":
        prepare_from_tokens(
            [Path(source) for source in sources],
            Path(destination),
            raw=args.raw,
            column=args.column,
            separator=args.separator,
            **options,
        )
    else:
        prepare_from_text(sources, Path(destination), text_key=args.text_key, **options)
    return 0


def sources_and_options(args: argparse.Namespace) -> tuple[list[str], str, dict[str, Any]]:
    """Return the sources, the folder to write, and the options that text and tokens share.

    Raises:
        ValueError: there is one path, or the options do not fit together.
    """
    *sources, destination = args.paths
    if not sources:
        example = f"`longhaul prepare {args.corpus} {destination} data/NAME`"
        # What is not there may be meant as the folder to write.
        if args.corpus == "text" and not Path(destination).exists():
            example = f"`longhaul prepare text {STANDARD_LIBRARY} {destination}` for Python's own"
            example = f"{example} sources"
        raise ValueError(
            f"found one path, {destination!r}, wanted sources and then the folder to write, such "
            f"as {example}"
        )
    options = {
        "tokenizer": args.tokenizer,
        "packing": Packing(
            args.doc_tokens, args.packing, args.long, args.min_tokens, args.max_tokens
        ),
        "docs_per_shard": args.docs_per_shard,
        "validation_fraction": args.validation_fraction,
        "bos": args.bos,
        "eos": args.eos,
        "pattern": args.pattern,
        "workers": args.workers,
        "part": args.part,
    }
    return sources, destination, options
