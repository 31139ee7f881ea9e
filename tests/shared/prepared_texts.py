"""Shards of texts, as tests prepare them."""

from pathlib import Path
from typing import Any

from longhaul.datamodules.manifest import Manifest
from longhaul.datamodules.preparation.packing import Packing
from longhaul.datamodules.preparation.source_files import open_sources
from longhaul.datamodules.preparation.text import prepare_text
from longhaul.datamodules.tokenizer import build_tokenizer


def prepare(
    sources: list[Path], destination: Path, name: str = "bytes", **options: Any
) -> Manifest:
    """Of blocks of 4 tokens, 3 in a shard, unless options say otherwise."""
    options = {"docs_per_shard": 3, **options}
    packing = Packing(options.pop("block_tokens", 4))
    opened = open_sources([str(source) for source in sources])
    return prepare_text(opened, destination, build_tokenizer(name), packing=packing, **options)[0]
