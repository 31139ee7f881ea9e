import json
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import webdataset
import zarr

from longhaul.datamodules.manifest import Manifest
from longhaul.datamodules.preparation.longcrawl64 import open_store, parse_rows, prepare_longcrawl64
from longhaul.datamodules.preparation.resumable import PROGRESS_NAME

ROWS, COLUMNS = 200, 96
CHUNKS = (32, 40)

MakeStore = Callable[..., tuple[Path, np.ndarray]]


@pytest.fixture
def make_store(tmp_path: Path) -> MakeStore:
    """A small store in the layout of LongCrawl64, written by zarr, and its tokens."""

    def make(dtype: str = "<u2", largest: int = 50_256, **options) -> tuple[Path, np.ndarray]:
        path = tmp_path / "train.zarr"
        tokens = np.random.default_rng(0).integers(0, largest, (ROWS, COLUMNS), endpoint=True)
        array = zarr.create_array(
            store=str(path),
            shape=tokens.shape,
            chunks=CHUNKS,
            dtype=dtype,
            zarr_format=2,
            fill_value=0,
            compressors=numcodecs.Blosc(cname="lz4", clevel=5, shuffle=numcodecs.Blosc.SHUFFLE),
            **options,
        )
        array[:] = tokens
        return path, tokens

    return make


def prepare(path: Path, destination: Path, rows: str | None = None, **options) -> Manifest:
    store = open_store(path)
    options = {"docs_per_shard": 24, **options}
    return prepare_longcrawl64(store, destination, parse_rows(store, rows), **options)


def stock_tokens(manifest: Manifest) -> list[list[int]]:
    urls = [manifest.url_of(shard.name) for shard in manifest.shards]
    dataset = webdataset.WebDataset(urls, shardshuffle=False).decode()
    return [sample["tokens.npy"].tolist() for sample in dataset]


def test_stock_webdataset_reads_the_rows_of_the_store(make_store, tmp_path: Path) -> None:
    path, tokens = make_store()
    reported: list[int] = []
    manifest = prepare(path, tmp_path / "out", progress=reported.append)
    assert stock_tokens(manifest) == tokens.tolist()
    assert [shard.documents for shard in manifest.shards] == [24] * 8 + [8]
    assert (manifest.document_tokens, manifest.dtype, manifest.bos_id) == (
        COLUMNS,
        "uint16",
        50_256,
    )
    assert reported == [COLUMNS * rows for rows in range(ROWS + 1)]
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "manifest.json",
        *(f"train-00000{n}.tar" for n in range(9)),
    }


def test_a_store_whose_name_is_no_text_has_a_manifest(make_store, tmp_path: Path) -> None:
    path, _ = make_store()
    odd = path.rename(tmp_path / "a\udcff.zarr")
    manifest = prepare(odd, tmp_path / "out")
    assert manifest.source["store"] == "a\N{REPLACEMENT CHARACTER}.zarr"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("0:1", [range(1)]),
        ("31:33", [range(31, 33)]),
        ("50:", [range(50, ROWS)]),
        (":64", [range(64)]),
        ("96:130,3:40", [range(96, 130), range(3, 40)]),
        ("whole", [range(ROWS)]),
    ],
)
def test_rows_choose_documents(make_store, tmp_path: Path, rows: str, expected) -> None:
    path, tokens = make_store()
    wanted = [tokens[row].tolist() for part in expected for row in part]
    assert stock_tokens(prepare(path, tmp_path / "out", rows)) == wanted


@pytest.mark.parametrize("rows", ["5:5", "7:3", "0:201", "-1:4", "a:b", "3", "0:9,8:12"])
def test_invalid_rows_are_refused(make_store, rows: str) -> None:
    with pytest.raises(ValueError, match=r"^rows: found '"):
        parse_rows(open_store(make_store()[0]), rows)


@pytest.mark.parametrize("nested", [False, True])
def test_missing_chunks_are_named_and_can_be_left_out(make_store, tmp_path: Path, nested) -> None:
    options = {"chunk_key_encoding": {"name": "v2", "separator": "/"}} if nested else {}
    path, tokens = make_store(**options)
    dot = "/" if nested else "."
    assert (path / f"6{dot}2").exists()
    (path / f"1{dot}2").unlink()
    (path / f"4{dot}0").unlink()
    (path / f"4{dot}1").write_bytes(b"")
    with pytest.raises(
        ValueError,
        match=rf"3 of 21 chunk files are missing, the first is 1{dot}2; "
        rf"whole rows: 0:32,64:128,160:200 .*--rows",
    ):
        prepare(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=rf"1 of 6 chunk files are missing, the first is 1{dot}2"):
        prepare(path, tmp_path / "out", "40:80")
    for rows in ("0:32,64:128,160:200", "whole"):
        manifest = prepare(path, tmp_path / rows, rows)
        taken = [*range(32), *range(64, 128), *range(160, 200)]
        assert stock_tokens(manifest) == tokens[taken].tolist()


def test_a_store_without_a_complete_row_of_chunks_is_refused(make_store, tmp_path: Path) -> None:
    path, _ = make_store()
    for row in range(7):
        (path / f"{row}.0").unlink()
    with pytest.raises(ValueError, match=r"7 of 21 .* whole rows: none"):
        prepare(path, tmp_path / "out")
    with pytest.raises(ValueError, match="no row of chunks is whole"):
        prepare(path, tmp_path / "out", "whole")


@pytest.mark.parametrize("dtype", ["<i4", ">u2", "<u4", "<f4"])
def test_another_dtype_is_refused(make_store, dtype: str) -> None:
    with pytest.raises(ValueError, match=rf"dtype: found '{dtype}', wanted '<u2'"):
        open_store(make_store(dtype=dtype)[0])


def test_ids_above_gpt2s_are_refused(make_store, tmp_path: Path) -> None:
    path, tokens = make_store()
    zarr.open_array(str(path))[77, 5] = 50_257
    with pytest.raises(ValueError, match="id 50257 at row 77, column 5, wanted ids up to 50256"):
        prepare(path, tmp_path / "out")
    # Without that row there is no error.
    assert stock_tokens(prepare(path, tmp_path / "some", "78:90")) == tokens[78:90].tolist()


@pytest.mark.parametrize("kept", [5, 1000, -1])
def test_a_chunk_cut_short_is_named(make_store, tmp_path: Path, kept: int) -> None:
    path, _ = make_store()
    chunk = path / "2.1"
    chunk.write_bytes(chunk.read_bytes()[:kept])
    with pytest.raises(
        ValueError, match=r"train.zarr: chunk 2.1 is damaged, found \d+ bytes"
    ) as caught:
        prepare(path, tmp_path / "out")
    assert "\n" not in str(caught.value)
    prepare(path, tmp_path / "rest", "96:200")


def test_a_chunk_that_does_not_decode_is_named(make_store, tmp_path: Path) -> None:
    path, _ = make_store()
    chunk = path / "2.1"
    content = bytearray(chunk.read_bytes())
    content[0] = 99  # blosc's version
    chunk.write_bytes(content)
    with pytest.raises(ValueError, match=r"train.zarr: chunk 2.1 is damaged, ") as caught:
        prepare(path, tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_such_a_store_is_refused(make_store, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder"):
        open_store(tmp_path / "nowhere.zarr")
    (tmp_path / "empty.zarr").mkdir()
    with pytest.raises(ValueError, match=r"empty.zarr: found no .zarray, wanted a Zarr v2 store"):
        open_store(tmp_path / "empty.zarr")
    zarr.create_group(str(tmp_path / "group.zarr"), zarr_format=2)
    with pytest.raises(ValueError, match=r"group.zarr: found a Zarr group"):
        open_store(tmp_path / "group.zarr")
    path, _ = make_store()
    meta = json.loads((path / ".zarray").read_text())
    for change, message in (
        ({"shape": [200]}, r"shape: found \[200\], wanted at least 2 items"),
        ({"shape": ["200", 96]}, "shape.0: found '200', wanted a valid integer"),
        ({"shape": [200.5, 96]}, "shape.0: found 200.5, wanted a valid integer"),
        ({"shape": None}, "shape: found null, wanted a valid array"),
        ({"shape": [1 << 39, 96]}, r"chunks \(32, 40\) make .* chunks, wanted 1,048,576 at most"),
        ({"shape": [10**30, 96]}, r"shape.0: found 10+, wanted less than"),
        ({"chunks": [1 << 24, 40]}, "wanted rows of chunks of at most 512 MiB"),
        ({"chunks": [32, 1 << 24]}, "wanted rows of chunks of at most 512 MiB"),
        ({"chunks": [0, 40]}, "chunks.0: found 0, wanted greater than"),
        ({"chunks": [32]}, "chunks: found .32., wanted at least 2 items"),
        ({"chunks": "32"}, "chunks: found '32', wanted a valid array"),
        ({"fill_value": "x"}, "fill_value: found 'x', wanted a valid integer"),
        ({"fill_value": -1}, "fill_value: found -1, wanted greater than"),
        ({"fill_value": float("nan")}, "fill_value: found nan, wanted a valid integer"),
        ({"compressor": "blosc"}, "compressor: found 'blosc', wanted an object"),
        ({"compressor": {"id": "pickle"}}, "compressor.id: found 'pickle', wanted 'blosc', 'gzip'"),
        ({"filters": [{"id": "delta"}]}, "filters: found .* wanted at most 0 items"),
        ({"order": "F"}, "order: found 'F', wanted 'C'"),
        ({"zarr_format": 3}, "zarr_format: found 3, wanted 2"),
        ({"dimension_separator": "../"}, "dimension_separator: found '../', wanted '.' or '/'"),
    ):
        (path / ".zarray").write_text(json.dumps({**meta, **change}))
        with pytest.raises(ValueError, match=message) as caught:
            open_store(path)
        assert "\n" not in str(caught.value)
    for content in ("{", "[" * 10_000, "[]", ""):
        (path / ".zarray").write_text(content)
        with pytest.raises(ValueError, match=r"^\S*/train.zarr/.zarray: found [^\n]*$"):
            open_store(path)


@pytest.mark.parametrize("codec", ["gzip", "zlib", "zstd", "lz4", "blosc", None])
def test_every_compression_that_is_read_is_bounded(tmp_path: Path, codec: str | None) -> None:
    tokens = np.random.default_rng(0).integers(0, 99, (4, 8)).astype("<u2")

    def packed(content: bytes) -> bytes:
        return bytes(numcodecs.get_codec({"id": codec}).encode(content)) if codec else content

    path = tmp_path / "train.zarr"
    path.mkdir()
    meta = {
        "zarr_format": 2,
        "shape": [4, 8],
        "chunks": [4, 8],
        "dtype": "<u2",
        "compressor": codec and {"id": codec},
        "order": "C",
        "filters": None,
        "fill_value": 0,
    }
    (path / ".zarray").write_text(json.dumps(meta))
    (path / "0.0").write_bytes(packed(tokens.tobytes()))
    assert stock_tokens(prepare(path, tmp_path / "out")) == tokens.tolist()
    for number, content in enumerate(
        (packed(bytes(1 << 24)), packed(bytes(62)), packed(tokens.tobytes())[:-1], b"\0", b"x" * 99)
    ):
        (path / "0.0").write_bytes(content)
        with pytest.raises(ValueError, match=r"train.zarr: chunk 0.0 is damaged, [^\n]*$"):
            prepare(path, tmp_path / f"bad{number}")


def test_a_second_preparation_at_the_same_time_is_refused(make_store, tmp_path: Path) -> None:
    path, _ = make_store()

    def progress(tokens: int) -> None:
        if tokens == 30 * COLUMNS:
            with (
                ProcessPoolExecutor(1, get_context("fork")) as other,
                pytest.raises(ValueError, match="out: another preparation is writing into it"),
            ):
                other.submit(prepare, path, tmp_path / "out").result()

    prepare(path, tmp_path / "out", progress=progress)


@pytest.mark.parametrize("is_torn", [False, True])
def test_a_shard_not_fully_recorded_or_renamed_is_written_again(
    make_store, tmp_path: Path, is_torn: bool
) -> None:
    path, tokens = make_store()
    folder = tmp_path / "out"

    class StopError(Exception):
        pass

    def progress(tokens_done: int) -> None:
        if tokens_done == 80 * COLUMNS:
            raise StopError

    with pytest.raises(StopError):
        prepare(path, folder, progress=progress)
    # The state after a kill before the renaming: recorded, but still with the temporary name.
    os.rename(folder / "train-000002.tar", folder / ".train-000002.tar.tmp")
    if is_torn:
        # The state after a kill during the recording: the record is incomplete.
        content = (folder / PROGRESS_NAME).read_bytes()
        (folder / PROGRESS_NAME).write_bytes(content[:-20])
    assert stock_tokens(prepare(path, folder)) == tokens.tolist()
    assert not list(folder.glob(".*"))
