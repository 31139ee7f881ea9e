"""Wrote the folders beside it, with the formats' own libraries; no test runs it. See README.md.

The texts are those of test_tokens.py, as bytes, each with 256 at its end.
"""

import importlib.machinery
import importlib.metadata
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
END = 256
TEXTS = ["Hi", "!", "", "déf", "\x07\0A"]
DOCUMENTS = [[*text.encode(), END] for text in TEXTS]


def megatron() -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder = HERE / "megatron"
    folder.mkdir()

    def write(name: str, dtype: type, sentences: int = 1, modes: bool = False) -> None:
        path = folder / name
        builder = IndexedDatasetBuilder(f"{path}.bin", dtype=dtype, multimodal=modes)
        for document in DOCUMENTS:
            if document == [END]:
                builder.end_document()  # as preprocess_data.py does for an empty text
                continue
            lengths = [1] * (sentences - 1) + [len(document) - sentences + 1]
            mode = [0] * sentences if modes else None
            builder.add_document(torch.tensor(document), lengths, mode)
        builder.finalize(f"{path}.idx")

    write("short_text_document", np.uint16)
    write("int_text_document", np.int32)
    write("some_text_sentence", np.uint16, sentences=2)
    write("modes_text_document", np.uint16, modes=True)


def litdata() -> None:
    from litdata.streaming.item_loader import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    def write(name: str, items: list[Any], **options: Any) -> None:
        writer = BinaryWriter(str(HERE / name), **options)
        for number, item in enumerate(items):
            writer.add_item(number, item)
        writer.done()
        writer.merge()

    tensors = [torch.tensor(document, dtype=torch.int32) for document in DOCUMENTS]
    write("litdata", tensors, chunk_bytes="1MB", item_loader=TokensLoader(block_size=4))
    write(
        "litdata_zstd",
        tensors,
        chunk_bytes="1MB",
        compression="zstd",
        compression_level="chunk",
        item_loader=TokensLoader(block_size=4),
    )
    arrays = [
        {"n": number, "tokens": np.array(document, np.uint16)}
        for number, document in enumerate(DOCUMENTS)
    ]
    write("litdata_leaves", arrays, chunk_size=3)


def mds() -> None:
    class Stub(types.ModuleType):
        def __getattr__(self, name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    for end in ("", ".transforms", ".transforms.functional", ".datasets", ".datasets.folder"):
        stub = Stub(f"torchvision{end}")
        stub.__path__ = []
        stub.__spec__ = importlib.machinery.ModuleSpec(stub.__name__, None)
        sys.modules[stub.__name__] = stub
    from streaming import MDSWriter

    def write(name: str, encoding: str, dtype: type, compression: str | None = None) -> None:
        columns = {"tokens": encoding, "id": "int", "name": "str"}
        options = {"compression": compression, "hashes": ["sha1"]}
        with MDSWriter(out=str(HERE / name), columns=columns, **options) as writer:
            for number, document in enumerate(DOCUMENTS):
                array = np.array(document, dtype)
                value = array.tobytes() if encoding == "bytes" else array
                writer.write({"tokens": value, "id": number, "name": "x" * number})

    write("mds", "ndarray:int32", np.int32)
    write("mds_types", "ndarray", np.uint16)
    write("mds_bytes", "bytes", np.int64)
    for compression in ("br", "bz2", "gz", "snappy", "zstd:7"):
        write(f"mds_{compression[:4].strip(':')}", "ndarray:int32", np.int32, compression)


def datatrove() -> None:
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    for size, tokenizer in ((2, None), (4, "me/bytes")):
        file = TokenizedFile(
            str(HERE / "datatrove"),
            f"{8 * size}.ds",
            save_index=True,
            tokenizer_name_or_path=tokenizer,
            save_final_metadata=True,
            token_size=size,
        )
        for document in DOCUMENTS:
            file.write(document, None)
        file.close()


def dolma() -> None:
    # Their own __init__ import all taggers.
    for name in ("dolma", "dolma.core", "dolma.tokenizer"):
        package = types.ModuleType(name)
        folder = importlib.metadata.distribution("dolma").locate_file(name.replace(".", "/"))
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    from dolma.tokenizer.data_types import TokenizerOutput
    from dolma.tokenizer.memmap_writer import MemmapWriter

    path = HERE / "dolma" / "part-0-00000.npy"
    with MemmapWriter(str(path), np.dtype("uint32"), max_tokens=100) as writer:
        for number, document in enumerate(DOCUMENTS):
            writer.write(TokenizerOutput.from_tokens(f"id-{number}", "a.jsonl.gz", 1, document))


def saved() -> None:
    from datasets import Dataset

    rows = [None if document == [END] else document for document in DOCUMENTS]
    Dataset.from_dict({"input_ids": rows}).save_to_disk(str(HERE / "saved"), num_shards=2)


for write_format in (megatron, litdata, mds, datatrove, dolma, saved):
    if sys.argv[1:] and write_format.__name__ not in sys.argv[1:]:
        continue
    for old in HERE.glob(f"{write_format.__name__}*"):
        shutil.rmtree(old)
    write_format()
