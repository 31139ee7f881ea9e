import dataclasses
import errno
import os
import pickle
import tarfile
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import webdataset

from longhaul.datamodules.files.untrusted import sha256_of
from longhaul.datamodules.manifest import Manifest, load_manifest
from longhaul.datamodules.shards import Block, Shard, ShardError, new_shard
from longhaul.datamodules.store import ShardStore


def store_of(manifest: Manifest, **options) -> ShardStore:
    options = {"replaces_bad": False, "max_bad_fraction": 1.0, **options}
    return ShardStore(manifest, cache_dir=None, keep_open=2, **options)


def first_tokens(store: ShardStore, position: int) -> list[int]:
    shard = store[position]
    return [int(shard.tokens[start]) for start in shard.starts]


def path_of(manifest: Manifest, position: int) -> Path:
    return Path(manifest.url_of(manifest.shards[position].name))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "cut": (cut, "10239 bytes, wanted 10240"),
    "flip": (flip, "sha256 is [0-9a-f]{64}, wanted [0-9a-f]{64}"),
    "missing": (Path.unlink, "No such file or directory"),
}


def test_stock_webdataset_reads_the_same_tokens(make_shards) -> None:
    manifest = make_shards(blocks=10, docs_per_shard=4)
    urls = [manifest.url_of(shard.name) for shard in manifest.shards]
    samples = list(webdataset.WebDataset(urls, shardshuffle=False).decode())
    assert [sample["__key__"] for sample in samples] == [f"{n:09d}" for n in range(10)]
    stock = np.concatenate([sample["tokens.npy"] for sample in samples])
    assert stock.dtype == np.uint32
    assert stock.tolist() == list(range(640))
    store = store_of(manifest)
    ours = [
        token
        for position in range(len(manifest.shards))
        for start in store[position].starts
        for token in store[position].tokens[start : start + 64].tolist()
    ]
    assert ours == stock.tolist()


def test_the_manifest_describes_the_files(make_shards) -> None:
    manifest = load_manifest(make_shards(blocks=10, docs_per_shard=4).location)
    assert [shard.name for shard in manifest.shards] == [f"train-00000{n}.tar" for n in range(3)]
    assert [shard.documents for shard in manifest.shards] == [4, 4, 2]
    assert (manifest.num_blocks, manifest.num_tokens) == (10, 640)
    for position, shard in enumerate(manifest.shards):
        path = path_of(manifest, position)
        assert (path.stat().st_size, sha256_of(path)) == (shard.bytes, shard.sha256)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_shard_is_named(make_shards, damage: str) -> None:
    manifest = make_shards()
    harm, message = DAMAGES[damage]
    harm(path_of(manifest, 1))
    store = store_of(manifest)
    assert first_tokens(store, 0) == [0, 64, 128]
    with pytest.raises(ShardError, match=rf"^shard .*/train-000001.tar: .*{message}$"):
        store[1]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_shard_is_replaced_by_the_next_good_one(make_shards, damage: str) -> None:
    manifest = make_shards(blocks=10, docs_per_shard=2)
    for position in (1, 2, 4):
        DAMAGES[damage][0](path_of(manifest, position))
    expected = {0: 0, 1: 3, 2: 3, 3: 3, 4: 0}
    # The replacement does not depend on the order in which a process opens shards.
    for positions in (range(5), reversed(range(5))):
        store = store_of(manifest, replaces_bad=True)
        for position in positions:
            good = expected[position] * 128
            assert first_tokens(store, position) == [good, good + 64]
        assert store.bad_shards == tuple(f"train-00000{n}.tar" for n in (1, 2, 4))


def loop(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.unlink()
    path.symlink_to(path)


def fail_to_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longhaul.datamodules.shards.sha256_of", raise_io_error)


def fail_to_map(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longhaul.datamodules.shards.mmap.mmap", raise_io_error)


def raise_io_error(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("fail", [loop, fail_to_read, fail_to_map])
@pytest.mark.parametrize("replaces_bad", [False, True])
def test_a_failing_file_system_marks_no_shard_as_bad(
    make_shards, monkeypatch, fail, replaces_bad: bool
) -> None:
    manifest = make_shards()
    store = store_of(manifest, replaces_bad=replaces_bad)
    fail(path_of(manifest, 1), monkeypatch)
    with pytest.raises(OSError, match=r"^shard .*/train-000001.tar: (Input|Too many levels)"):
        store[1]
    assert store.bad_shards == ()


def test_too_many_bad_shards_stop_the_run(make_shards) -> None:
    manifest = make_shards(blocks=10, docs_per_shard=1)
    store = store_of(manifest, replaces_bad=True, max_bad_fraction=0.2)
    for position in (1, 4, 7):
        path_of(manifest, position).unlink()
    assert first_tokens(store, 1) == [2 * 64]
    assert first_tokens(store, 4) == [5 * 64]
    with pytest.raises(ShardError, match=r"3 of 10 shards are bad, .* allows 0.2 .*000007.tar"):
        store[7]


def test_no_good_shard_at_all_is_an_error(make_shards) -> None:
    manifest = make_shards(blocks=2, docs_per_shard=1)
    for position in (0, 1):
        path_of(manifest, position).unlink()
    with pytest.raises(ShardError, match="all 2 shards are bad"):
        store_of(manifest, replaces_bad=True)[0]


def test_a_shard_is_hashed_again_only_when_it_changed(make_shards, monkeypatch) -> None:
    manifest = make_shards(blocks=4, docs_per_shard=1)
    hashed = []
    real = sha256_of

    def spy(path: Path) -> str:
        hashed.append(path.name)
        return real(path)

    monkeypatch.setattr("longhaul.datamodules.shards.sha256_of", spy)
    store = store_of(manifest)
    for position in (0, 1, 2, 3, 0, 1):
        store[position]
    # A worker of the rank has the record of what others have hashed.
    worker = pickle.loads(ForkingPickler.dumps(store))
    worker[0]
    worker[1]
    assert hashed == [f"train-00000{n}.tar" for n in range(4)]
    flip(path_of(manifest, 2))
    for one in (store, worker):
        with pytest.raises(ShardError, match=r"train-000002.tar: sha256"):
            one[2]
    path_of(manifest, 3).touch()
    worker[3]
    store[3]
    assert hashed[4:] == [f"train-00000{n}.tar" for n in (2, 2, 3)]


def test_a_shard_truncated_while_open_is_detected(make_shards) -> None:
    manifest = make_shards()
    for replaces_bad in (False, True):
        store = store_of(manifest, replaces_bad=replaces_bad)
        assert first_tokens(store, 1)[0] == 3 * 64
        path = path_of(manifest, 1)
        content = path.read_bytes()
        os.truncate(path, 512)
        if replaces_bad:
            assert first_tokens(store, 1)[0] == 6 * 64
            assert store.bad_shards == (path.name,)
        else:
            with pytest.raises(ShardError, match=r"train-000001.tar: 512 bytes, wanted 10240"):
                store[1]
        path.write_bytes(content)


def test_a_bad_manifest_is_refused_in_one_line(make_shards, tmp_path: Path) -> None:
    good = Path(make_shards().location).read_text()
    bad = tmp_path / "manifest.json"
    for old, new, message in (
        ('"format_version": 2', '"format_version": 9', "format_version: found 9, wanted 1 or 2"),
        ('"vocab_size": 641', '"vocab_size": "x"', "vocab_size: found 'x', wanted a valid integer"),
        ('"bos_id": 640', '"bos_id": 641', "bos_id: found 641, wanted less than vocab_size = 641"),
        ('"dtype": "uint32"', '"dtype": "int8"', "dtype: found 'int8', wanted 'uint16' or 'uint32"),
        (
            '"name": "train-000001.tar"',
            '"name": "../x.tar"',
            r"shards.1.name: found '../x.tar', wanted pattern ",
        ),
        ('"name": "train-000001.tar"', f'"name": "{"x" * 300}"', "wanted at most 200 characters"),
        ('"documents": 3', f'"documents": 1{"0" * 30}', "shards.0.documents: found 10+, wanted "),
        ('"document_tokens": 64', f'"document_tokens": 1{"0" * 30}', "document_tokens: found 10+,"),
        ('"documents": 3', f'"documents": {1 << 60}', "shards: found [0-9]+ tokens in all, want"),
        (
            '"blocks": 10',
            f'"blocks": {"[" * 10_000}',
            "found no JSON, recursion limit .*; wanted JSON",
        ),
        ('"shards"', '"other"', "shards: found nothing, wanted a value"),
        ('"shards"', '"shards": [], "other"', r"shards: found \[\], wanted at least 1 item"),
        ("{", "", "found no JSON, .*; wanted JSON"),
        (good, good[:1], "found no JSON, it ends within an object at line 1 column 1; wanted JSON"),
        (good, "", "found no JSON, it is empty; wanted JSON"),
    ):
        assert old in good
        bad.write_text(good.replace(old, new, 1))
        with pytest.raises(ValueError, match=f"^{bad}.*{message}[^\n]*$"):
            load_manifest(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere: no such manifest"):
        load_manifest("nowhere")


def test_a_manifest_of_another_token_type_is_refused(make_shards) -> None:
    manifest = make_shards()
    path = Path(manifest.location)
    path.write_text(path.read_text().replace("uint32", "uint16"))
    with pytest.raises(ShardError, match=r"found .*<u4.*, wanted .*<u2.*\(64,\), }\"$"):
        store_of(load_manifest(path))[0]


def rewrite(manifest: Manifest, position: int, content: bytes) -> Manifest:
    """The manifest with another file in the place of a shard, whose size and hash it names."""
    path = path_of(manifest, position)
    path.write_bytes(content)
    shards = list(manifest.shards)
    shards[position] = dataclasses.replace(
        shards[position], bytes=len(content), sha256=sha256_of(path)
    )
    return dataclasses.replace(manifest, shards=tuple(shards))


def tar_with(content: bytes, **fields: object) -> bytes:
    """A tar file of one member."""
    member = tarfile.TarInfo("000000000.tokens.npy")
    member.size = len(content)
    for key, value in fields.items():
        setattr(member, key, value)
    return member.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)


def npy(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


SHARDS = {
    "nested": (tar_with(npy("(" * 3000)), "is no npy array of one dimension"),
    "pickled": (
        tar_with(npy("{'descr': '|O', 'fortran_order': False, 'shape': (64,), }\n")),
        r"found an array with .*|O.*\(64,\), }\", wanted .*<u4.*\(64,\), }\"",
    ),
    "long": (
        tar_with(npy(f"{{'descr': '<u4', 'fortran_order': False, 'shape': ({'9' * 18},), }}\n")),
        r"found an array with .*<u4.*, wanted .*<u4.*\(64,\), }\"",
    ),
    "short": (
        tar_with(npy("{'descr': '<u4', 'fortran_order': False, 'shape': (64,), }\n") + b"123"),
        r"has \d+ bytes",
    ),
    "without magic": (tar_with(b"tokens"), "is no npy array of one dimension"),
    "beyond the end": (tar_with(b"", size=1 << 50), "wanted a plain file that ends within the sh"),
    "negative": (tar_with(b"", size=-512), "wanted a plain file that ends within the shard"),
    "link": (tar_with(b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "wanted a plain file"),
    "extended": (tar_with(b"", type=tarfile.XHDTYPE, size=1 << 40), "wanted a plain file"),
    "noise": (b"x" * 5000, "not a readable tar file, invalid header"),
    "zeros": (bytes(5000), "0 blocks, wanted 3"),
}


@pytest.mark.parametrize("name", SHARDS)
def test_a_hostile_shard_with_a_matching_hash_is_one_line(make_shards, name: str) -> None:
    content, message = SHARDS[name]
    with pytest.raises(ShardError, match=rf"^shard .*/train-000001.tar: [^\n]*{message}[^\n]*$"):
        store_of(rewrite(make_shards(), 1, content))[1]


def test_a_shard_that_is_no_regular_file_is_not_waited_for(make_shards) -> None:
    manifest = make_shards()
    path = path_of(manifest, 1)
    size = path.stat().st_size
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ShardError, match="found a FIFO, wanted a regular file"):
        Shard(path, manifest.shards[1], 64, np.dtype("uint32"))
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ShardError, match=f"0 bytes, wanted {size}"):
        store_of(manifest)[1]


def test_ids_above_the_vocabulary_are_refused_when_written_and_when_read(
    make_shards, tmp_path: Path
) -> None:
    manifest = make_shards()
    # Ids 0 to 639; the second shard holds 192 to 383.
    small = dataclasses.replace(manifest, vocab_size=300, bos_id=0, eot_id=0)
    store = store_of(small)
    assert first_tokens(store, 0) == [0, 64, 128]
    message = "train-000001.tar: id 319 in block 1, wanted ids below the manifest's vocab_size"
    with pytest.raises(ShardError, match=message):
        store[1]
    replacing = store_of(small, replaces_bad=True)
    assert first_tokens(replacing, 1) == [0, 64, 128]
    block = np.array([1, 2, 300], np.uint16)
    message = r"id 300 in block 0, wanted ids below .* 300$"
    new = new_shard(tmp_path / "new.tar", 0, [Block(block)], 300)
    with pytest.raises(ShardError, match=message), new:
        pass
    assert not list(tmp_path.glob("*new*"))


def block_of(ends: list[int], length: int = 8) -> Block:
    return Block(np.arange(length, dtype=np.uint16), np.array(ends, np.uint32))


@pytest.mark.parametrize("ends", [[8, 8], [3, 2, 8], [0, 8], [3], [3, 9]])
def test_ends_that_do_not_ascend_to_the_length_are_refused(tmp_path: Path, ends: list[int]) -> None:
    new = new_shard(tmp_path / "new.tar", 0, [block_of(ends)], 300)
    with pytest.raises(ShardError, match="the ends of block 0 do not ascend to 8"), new:
        pass


def test_shards_lack_no_ends_of_a_block(tmp_path: Path) -> None:
    blocks = [block_of([2, 8]), Block(block_of([8]).tokens)]
    new = new_shard(tmp_path / "new.tar", 0, reversed(blocks), 300)
    with pytest.raises(ShardError, match=r"1 members \*.ends.npy, wanted one for each of 2"), new:
        pass
    # Readers that know no ends pass over them.
    with new_shard(tmp_path / "new.tar", 0, [blocks[0]], 300) as entry:
        pass
    shard = Shard(tmp_path / "new.tar", entry, 8, np.dtype("uint16"))
    assert shard.tokens[shard.starts[0] :][:8].tolist() == list(range(8))
    assert shard.ends == []
