"""Files of tokens: those in the folder token_files are by the formats' own libraries."""

import gzip
import json
import shutil
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from webdataset.writer import TarWriter

from longhaul.datamodules.manifest import Manifest
from longhaul.datamodules.preparation.packing import Packing
from longhaul.datamodules.preparation.source_files import open_sources
from longhaul.datamodules.preparation.text import prepare_text
from longhaul.datamodules.preparation.tokens import open_token_files, prepare_tokens
from longhaul.datamodules.shards import Shard
from longhaul.datamodules.tokenizer import build_tokenizer

FOREIGN = Path(__file__).parent / "token_files"
END = 256
TEXTS = ["Hi", "!", "", "déf", "\x07\0A"]
DOCUMENTS = [list(text.encode()) for text in TEXTS]
AFTER = [[*document, END] for document in DOCUMENTS]
TOKENIZER = build_tokenizer("bytes")
FLAT = [token for document in AFTER for token in document]
SHIFTED = [END, *FLAT[:-1]]


def foreign(name: str) -> Callable[[Path], Path]:
    """A copy of what a library wrote; the path in it that is named."""

    def copy(folder: Path) -> Path:
        first, _, rest = name.partition("/")
        shutil.copytree(FOREIGN / first, folder / first)
        return folder / first / rest

    return copy


def numbers(name: str, dtype: str, header: bytes = b"", tokens: list[int] = FLAT):
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(header + np.array(tokens, dtype).tobytes())
        return folder / name

    return write


def llmc(magic: int, version: int, tokens: int) -> bytes:
    return np.array([magic, version, tokens, *[0] * 253], "<i4").tobytes()


def litgpt(folder: Path) -> Path:
    header = b"LITPKDS" + struct.pack("<QBQ", 1, 8, len(SHIFTED) + 3)
    return numbers("train_0.bin", "<u2", header, [*SHIFTED, END, END, END])(folder)


def fairseq(folder: Path) -> Path:
    lengths = [len(document) for document in AFTER]
    offsets = np.cumsum([0, *lengths[:-1]]) * 2
    head = b"MMIDIDX\0\0" + struct.pack("<QBQ", 1, 8, len(lengths))
    (folder / "f.idx").write_bytes(
        head + np.array(lengths, "<i4").tobytes() + offsets.astype("<i8").tobytes()
    )
    return numbers("f.bin", "<u2")(folder)


def old_index(folder: Path, documents: tuple[int, ...] = ()) -> Path:
    """The index that fairseq, and with the first sequences of documents Megatron, had before."""
    ends = np.cumsum([0] + [len(document) for document in AFTER])
    head = b"TNTIDX\0\0" + struct.pack("<5Q", 1, 4, 4, len(AFTER), len(AFTER))
    head += struct.pack("<Q", len(documents)) if documents else b""
    arrays = [np.arange(len(AFTER) + 1), ends, np.diff(ends), documents]
    (folder / "o.idx").write_bytes(
        head + b"".join(np.array(one, "<i8").tobytes() for one in arrays)
    )
    return numbers("o.bin", "<i4")(folder)


def real_npy(folder: Path) -> Path:
    np.save(folder / "a.npy", np.array(FLAT, np.int32))
    return folder / "a.npy"


def webdataset(folder: Path) -> Path:
    with TarWriter(str(folder / "a.tar")) as writer:
        for number, document in enumerate(AFTER):
            sample = {"tokens.npy": np.array(document, np.uint16), "json": {"number": number}}
            writer.write({"__key__": f"{number:03}", **sample})
    return folder / "a.tar"


def endless_header() -> bytes:
    """The header of a name of 4 GiB, which a few compressed bytes may hold."""
    header = tarfile.TarInfo("name")
    header.type, header.size = tarfile.XHDTYPE, 1 << 32
    return header.tobuf(tarfile.GNU_FORMAT)


def packed_tar(folder: Path) -> Path:
    path = webdataset(folder)
    (folder / "b.tar.gz").write_bytes(gzip.compress(path.read_bytes()))
    return folder / "b.tar.gz"


def table(kind: pyarrow.DataType) -> pyarrow.Table:
    rows = [None if document == [END] else document for document in AFTER]
    column = pyarrow.array(rows, kind)
    return pyarrow.table({"id": list(range(len(rows))), "input_ids": column})


def parquet(folder: Path) -> Path:
    content = table(pyarrow.large_list(pyarrow.int64()))
    pyarrow.parquet.write_table(content, folder / "a.parquet", row_group_size=2)
    return folder / "a.parquet"


def arrow(folder: Path, opened=pyarrow.ipc.new_stream, name: str = "a.arrow") -> Path:
    content = table(pyarrow.list_(pyarrow.uint16()))
    with opened(str(folder / name), content.schema) as writer:
        writer.write_table(content, 2)
    return folder / name


def own(folder: Path) -> Path:
    """longhaul's own shards, in blocks of another length; each is a file of its own."""
    path = numbers("train.bin", "<u2")(folder)
    files = open_token_files([path], TOKENIZER, raw="uint16")
    prepare_tokens(files, folder / "own", TOKENIZER, packing=Packing(2), docs_per_shard=3)
    return folder / "own"


FORMATS = {
    **{
        name: (foreign(name), {})
        for name in (
            "megatron/short_text_document",
            "megatron/int_text_document.bin",
            "megatron/some_text_sentence.idx",
            "megatron/modes_text_document",
            "litdata",
            "litdata_zstd",
            "litdata_leaves",
            "mds",
            "mds_types",
            "mds_br",
            "mds_bz2",
            "mds_gz",
            "mds_zstd",
            "datatrove/16.ds",
            "datatrove/32.ds",
        )
    },
    "mds_bytes": (foreign("mds_bytes"), {"raw": "int64"}),
    "fairseq": (fairseq, {}),
    "fairseq, old": (old_index, {}),
    "megatron, old": (lambda folder: old_index(folder, (0, 1, 2, 3, 4, 5)), {}),
    "nanogpt": (numbers("train.bin", "<u2"), {"raw": "uint16"}),
    "nanogpt, big endian": (numbers("train.bin", ">u2"), {"raw": "uint16be"}),
    "llm.c": (numbers("a_0.bin", "<u2", llmc(20240520, 1, 15), SHIFTED), {}),
    "llm.c, llama 3": (numbers("a_0.bin", "<u4", llmc(20240801, 7, 15), SHIFTED), {}),
    "lit-gpt": (litgpt, {}),
    "numpy": (real_npy, {}),
    "dolma": (foreign("dolma/part-0-00000.npy"), {"raw": "uint32"}),
    "dolma, no table": (numbers("a.npy", "<u2"), {"raw": "uint16"}),
    "webdataset": (webdataset, {}),
    "webdataset, compressed": (packed_tar, {"column": "tokens.npy"}),
    "parquet": (parquet, {}),
    "arrow stream": (arrow, {"column": "input_ids"}),
    "arrow file": (lambda folder: arrow(folder, pyarrow.ipc.new_file), {}),
    "saved data set": (foreign("saved"), {}),
    "longhaul": (own, {}),
}


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[int], list[int]]]:
    folder = tmp_path_factory.mktemp("texts")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (folder / "a.jsonl").write_text(lines)
    opened = open_sources([str(folder / "a.jsonl")])
    (manifest,) = prepare_text(opened, folder / "out", TOKENIZER, packing=Packing(3))
    assert manifest.num_tokens == 12
    return blocks_of(manifest)


def blocks_of(manifest: Manifest) -> list[tuple[list[int], list[int]]]:
    """The tokens of each block, and the ends of the documents in it."""
    found = []
    for entry in manifest.shards:
        path = Path(manifest.url_of(entry.name))
        shard = Shard(path, entry, 3, np.dtype(manifest.dtype), has_ends=True)
        for start, ends in zip(shard.starts, shard.ends, strict=True):
            found.append((shard.tokens[start : start + 3].tolist(), ends.tolist()))
    return found


def prepare(path: Path, destination: Path, **options: str) -> Manifest:
    files = open_token_files([path], TOKENIZER, **options)
    return prepare_tokens(files, destination, TOKENIZER, packing=Packing(3))[0]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_shards_of_the_texts_themselves(
    name: str, tmp_path: Path, wanted: list[tuple[list[int], list[int]]]
) -> None:
    write, options = FORMATS[name]
    manifest = prepare(write(tmp_path), tmp_path / "out", **options)
    assert blocks_of(manifest) == wanted
    separator = "before" if name.startswith(("llm.c", "lit-gpt")) else "after"
    assert manifest.source["separator"] == separator


def cut(name: str, size: int = -1):
    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:size])

    return damage


def put(name: str, place: int, content: bytes):
    """Other bytes at a place of a file; at its end if it is negative."""

    def damage(folder: Path) -> None:
        whole = bytearray((folder / name).read_bytes() if (folder / name).exists() else b"")
        place_in_file = place if place >= 0 else len(whole)
        whole[place_in_file : place_in_file + len(content)] = content
        (folder / name).write_bytes(whole)

    return damage


def edit(name: str, old: str, new: str):
    def damage(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return damage


def replace(name: str, old: np.ndarray, new: np.ndarray):
    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        assert content.count(old.tobytes()) == 1
        (folder / name).write_bytes(content.replace(old.tobytes(), new.tobytes()))

    return damage


def remove(name: str):
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_a_megatron_document_has_the_name_of_its_bin_however_it_is_given(
    tmp_path: Path, ending: str
) -> None:
    source = foreign(f"megatron/short_text_document{ending}")(tmp_path)
    names = [document.name for document in open_token_files([source], TOKENIZER).documents()]
    assert names[0] == "short_text_document.bin#1"
    folder = [document.name for document in open_token_files([tmp_path], TOKENIZER).documents()]
    assert any(name.endswith("megatron/short_text_document.bin#1") for name in folder)


SHORT, INDEX = "short_text_document.bin", "short_text_document.idx"
MEGATRON = foreign("megatron/short_text_document.bin")
DAMAGED = {
    "a cut .bin": (
        *(MEGATRON, cut("megatron/" + SHORT, 20)),
        "found 20 bytes, wanted 28 .the .idx counts 14 tokens of uint16.: a cut copy",
    ),
    "a cut .idx": (
        *(MEGATRON, cut("megatron/" + INDEX, 100)),
        "found 100 bytes, wanted 130 for 4 sequences: a cut copy",
    ),
    "no .idx": (MEGATRON, remove("megatron/" + INDEX), "found no --raw"),
    "no .bin": (
        *(foreign("megatron/" + INDEX), remove("megatron/" + SHORT)),
        f"found no {SHORT} beside it",
    ),
    "another .idx": (
        *(MEGATRON, put("megatron/" + INDEX, 0, b"PK")),
        "found another file, wanted an .idx",
    ),
    "a newer .idx": (MEGATRON, put("megatron/" + INDEX, 9, b"\2"), "found version 2, wanted 1"),
    "floats": (
        *(MEGATRON, put("megatron/" + INDEX, 17, b"\x06")),
        "dtype code 6, wanted 1 to 5 or 8, .* .projects disagree about 6 and 7.; --raw says which",
    ),
    "a negative length": (
        *(MEGATRON, put("megatron/" + INDEX, 34, struct.pack("<2i", -1, 6))),
        "found a negative length",
    ),
    "a document index that falls": (
        *(MEGATRON, put("megatron/" + INDEX, 82, struct.pack("<3q", 0, 2, 1))),
        "found a document index that falls",
    ),
    "another number of documents": (
        *(MEGATRON, put("megatron/" + INDEX, 82 + 40, struct.pack("<q", 3))),
        "found a document index that (falls|ends at 3, wanted 4)",
    ),
    "images": (
        foreign("megatron/modes_text_document"),
        put("megatron/modes_text_document.idx", 132, b"\1"),
        "found sequences of other modes",
    ),
    "another vocabulary": (
        *(MEGATRON, put("megatron/" + SHORT, 6, struct.pack("<H", 300))),
        "found id 300 at document 2, wanted ids below 257 of bytes$",
    ),
    "a cut chunk": (foreign("litdata"), cut("litdata/chunk-0-0.bin"), "samples in bytes .*at byte"),
    "a cut head": (foreign("litdata"), cut("litdata/chunk-0-0.bin", 9), "a cut copy"),
    "a cut index": (foreign("litdata"), cut("litdata/index.json", 50), "found no JSON"),
    "a missing chunk": (foreign("litdata"), remove("litdata/chunk-0-0.bin"), "does not exist"),
    "a cut compressed chunk": (
        *(foreign("litdata_zstd"), cut("litdata_zstd/chunk-0-0.zstd.bin", 50)),
        "chunk-0-0.zstd.bin: ",
    ),
    "encrypted": (
        *(foreign("litdata"), edit("litdata/index.json", '"encryption": null', '"encryption": {}')),
        "found encrypted chunks",
    ),
    "compressed samples": (
        foreign("litdata"),
        edit("litdata/index.json", '"compression_level": null', '"compression_level": "sample"'),
        "found compression within chunks",
    ),
    "pickled leaves": (
        *(foreign("litdata"), edit("litdata/index.json", "no_header_tensor:16", "pickle")),
        "wanted one array of tokens",
    ),
    "floats in a chunk": (
        *(foreign("litdata"), edit("litdata/index.json", "tensor:16", "tensor:1")),
        "wanted whole numbers",
    ),
    "a path out of the folder": (
        *(foreign("litdata"), edit("litdata/index.json", "chunk-0-0.bin", "../x")),
        "wanted a path below the folder",
    ),
    "another number of items": (
        *(foreign("litdata"), edit("litdata/index.json", '"chunk_size": 5', '"chunk_size": 6')),
        "found 5 items, wanted 6",
    ),
    "a cut shard": (
        *(foreign("mds"), cut("mds/shard.00000.mds", 400)),
        "found 400 bytes, wanted 412 .index.json.: a cut copy",
    ),
    "a shard beyond 4 GiB": (
        *(foreign("mds"), put("mds/shard.00000.mds", 16, struct.pack("<I", 5))),
        "found offsets that fall at sample 3, wanted them to grow: the shard passed 4 GiB",
    ),
    "a cut compressed shard": (
        *(foreign("mds_gz"), cut("mds_gz/shard.00000.mds.gz", 100)),
        "found 100 bytes, wanted 265 .index.json.: a cut copy",
    ),
    "a damaged compressed shard": (
        *(foreign("mds_gz"), put("mds_gz/shard.00000.mds.gz", 100, b"\0" * 60)),
        "shard.00000.mds.gz: damaged",
    ),
    "a shard that expands": (
        *(foreign("mds_gz"), edit("mds_gz/index.json", '"bytes": 412', '"bytes": 99')),
        "found 100 bytes or more after decompression, wanted 99",
    ),
    "snappy": (
        *(foreign("mds_snap"), lambda folder: None),
        "compression 'snappy', wanted none or br, bz2, gz, zstd",
    ),
    "a pickled column": (
        *(foreign("mds"), edit("mds/index.json", "ndarray:int32", "pkl")),
        "column 'tokens': found pickles",
    ),
    "bytes of no type": (foreign("mds_bytes"), lambda folder: None, "found bytes, wanted --raw"),
    "a cut .ds": (
        *(foreign("datatrove/16.ds"), cut("datatrove/16.ds", 28)),
        "found 28 bytes, wanted 30 .its index counts 15 tokens of 2 bytes.: a cut copy",
    ),
    "a cut .ds.index": (
        *(foreign("datatrove/16.ds"), cut("datatrove/16.ds.index", 30)),
        "found 30 bytes, wanted a multiple of 8",
    ),
    "no .ds.index": (
        *(foreign("datatrove/16.ds"), remove("datatrove/16.ds.index")),
        "found no 16.ds.index beside it",
    ),
    "ends that fall": (
        *(foreign("datatrove/16.ds"), put("datatrove/16.ds.index", 16, struct.pack("<Q", 1))),
        "found ends that fall at document 3",
    ),
    "metadata of another size": (
        *(foreign("datatrove/16.ds"), edit("datatrove/16.ds.metadata", "|2", "|4")),
        "wanted 60",
    ),
    "a cut file of llm.c's": (
        *(FORMATS["llm.c"][0], cut("a_0.bin")),
        "found 1,053 bytes, wanted 1,054 .its header counts 15 tokens of uint16.: a cut copy",
    ),
    "an evaluation": (
        numbers("a.bin", "<u2", llmc(20240522, 1, 15)),
        *(lambda folder: None, "found an evaluation file of llm.c"),
    ),
    "a newer version": (
        numbers("a.bin", "<u2", llmc(20240520, 2, 15)),
        *(lambda folder: None, "found version 2 of magic 20240520, wanted version 1"),
    ),
    "llm.c in big endian": (
        numbers("a.bin", ">u2", np.array([20240520, 1, 15], ">i4").tobytes()),
        *(lambda folder: None, "header in big endian"),
    ),
    "a cut lit-gpt": (litgpt, cut("train_0.bin"), "a cut copy"),
    "floats of lit-gpt's": (litgpt, put("train_0.bin", 15, b"\6"), "dtype code 6"),
    "a cut npy": (real_npy, cut("a.npy"), "a cut copy"),
    "floats of numpy's": (
        lambda folder: np.save(folder / "a.npy", np.ones(3)) or folder / "a.npy",
        *(lambda folder: None, "found an array of float64"),
    ),
    "no type": (
        *(numbers("a.npy", "<u2"), lambda folder: None),
        r"found no numpy header and no --raw, wanted --raw uint16 or uint32; "
        r"uint16 \(largest id 256\) fits bytes",
    ),
    "a cut tar": (
        lambda folder: (folder / "b.tar", webdataset(folder).rename(folder / "b.tar"))[0],
        *(cut("b.tar", 2048), "found no end of the tar"),
    ),
    "a cut tar.gz": (packed_tar, cut("b.tar.gz"), "damaged"),
    "a tar with an endless header": (
        *(webdataset, put("a.tar", 0, endless_header())),
        "found an extended header of 4,294,967,296 bytes",
    ),
    "two tars, one behind the other": (
        lambda folder: (twice := webdataset(folder), twice.write_bytes(twice.read_bytes() * 2))[0],
        *(lambda folder: None, "found more after its end, wanted one archive"),
    ),
    "a cut parquet": (parquet, cut("a.parquet"), "not readable as parquet"),
    "an Arrow stream cut behind a batch": (arrow, cut("a.arrow", -8), "found no end of the Arrow"),
    "offsets of Arrow beyond its values": (
        *(arrow, replace("a.arrow", np.array([0, 3, 5], "<i4"), np.array([0, 3, 1 << 28], "<i4"))),
        "a.arrow: damaged",
    ),
    "an Arrow file that is cut": (FORMATS["arrow file"][0], cut("a.arrow", 600), "not readable as"),
    "a missing part": (
        foreign("saved"),
        remove("saved/data-00001-of-00002.arrow"),
        "state.json: lists 'data-00001-of-00002.arrow', which is not there",
    ),
    "a selection": (
        *(foreign("saved"), put("saved/indices.arrow", 0, b"")),
        "found indices.arrow, a selection of rows by an old version of datasets",
    ),
    "a cut shard of ours": (own, cut("own/train-000001.tar"), "bytes, wanted"),
    "a shard of another tokenizer": (
        *(own, edit("own/manifest.json", TOKENIZER.sha256, "0" * 64)),
        "found tokens of bytes with SHA-256 000000000000, wanted those of bytes",
    ),
    "a pickle": (
        numbers("meta.pkl", "<u2", b"\x80\4"),
        *(lambda folder: None, "found a pickle, which runs code"),
    ),
    "text": (numbers("a.txt", "<u2"), lambda folder: None, "found no format of tokens"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_damaged_is_refused_in_one_line_before_anything_is_written(
    name: str, tmp_path: Path
) -> None:
    write, damage, message = DAMAGED[name]
    path = write(tmp_path)
    damage(tmp_path)
    with pytest.raises((ValueError, OSError), match=message) as error:
        prepare(path, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert not (tmp_path / "out").exists()
