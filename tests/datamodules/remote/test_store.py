"""Shards of a remote manifest."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from longhaul.datamodules.config import DataConfig
from longhaul.datamodules.corpus import load_corpus
from longhaul.datamodules.loaders import make_loader, open_stores
from longhaul.datamodules.manifest import load_manifest
from longhaul.datamodules.shards import ShardError, UnreadShardError
from longhaul.datamodules.store import ShardStore
from longhaul.datamodules.stream import RankBatches


def store_of(location: str, cache_dir: Path, **options) -> ShardStore:
    options = {"replaces_bad": False, "max_bad_fraction": 1.0, "keep_open": 2} | options
    return ShardStore(load_manifest(location), cache_dir=str(cache_dir), **options)


def last_token(store: ShardStore) -> int:
    position = len(store) - 1
    shard = store[position]
    return int(shard.tokens[shard.starts[-1] + 63])


def shards_asked(server) -> list[str]:
    return [path for path in server.asked if path.endswith(".tar")]


def test_shards_of_the_same_name_from_two_sources_do_not_collide(
    make_shards, server, tmp_path
) -> None:
    make_shards(blocks=3, name="a/shards")
    make_shards(blocks=2, name="b/shards")
    for _ in range(2):
        for folder, blocks in (("a/shards/manifest.json", 3), ("b/shards", 2)):
            store = store_of(f"{server.url}/{folder}", tmp_path / "cache")
            assert last_token(store) == blocks * 64 - 1
    assert shards_asked(server) == ["/a/shards/train-000000.tar", "/b/shards/train-000000.tar"]


def test_a_damaged_copy_is_fetched_again(make_shards, server, tmp_path) -> None:
    make_shards(blocks=2)
    store_of(f"{server.url}/shards", tmp_path / "cache")[0]
    (copy,) = (tmp_path / "cache").glob("*.tar")
    copy.write_bytes(copy.read_bytes()[:-5])
    assert last_token(store_of(f"{server.url}/shards", tmp_path / "cache")) == 127


@pytest.mark.parametrize("form", ["FIFO", "link"])
@pytest.mark.parametrize("which", [".tar.lock", "cache.lock"])
def test_a_lock_in_the_cache_is_neither_waited_for_nor_followed(
    make_shards, server, tmp_path, form, which
) -> None:
    make_shards(blocks=2)
    store_of(f"{server.url}/shards", tmp_path / "cache")[0]
    (copy,) = (tmp_path / "cache").glob("*.tar")
    copy.unlink()  # no lock is needed to read it
    (lock,) = (tmp_path / "cache").glob(f"*{which}")
    precious = tmp_path / "precious"
    precious.write_text("precious")
    lock.unlink()
    os.mkfifo(lock) if form == "FIFO" else lock.symlink_to(precious)
    with pytest.raises(UnreadShardError, match=r"\.lock"):
        store_of(f"{server.url}/shards", tmp_path / "cache")[0]
    assert precious.read_text() == "precious"


def test_a_file_url_needs_no_cache(make_shards) -> None:
    manifest = load_manifest("file://" + make_shards(blocks=2).location)
    store = ShardStore(
        manifest, cache_dir=None, replaces_bad=False, max_bad_fraction=0.0, keep_open=2
    )
    assert last_token(store) == 127


def test_a_remote_manifest_without_a_cache_is_refused(make_shards, server) -> None:
    make_shards(blocks=2)
    manifest = load_manifest(f"{server.url}/shards")
    with pytest.raises(ValueError, match=r"data.cache_dir: found null, wanted a folder"):
        ShardStore(manifest, cache_dir=None, replaces_bad=False, max_bad_fraction=0.0, keep_open=2)


@pytest.mark.parametrize(
    ("lie", "kind"),
    [
        *((lie, ShardError) for lie in ("404", "other", "short", "long")),
        *((lie, UnreadShardError) for lie in ("403", "500", "cut", "stall", "redirect")),
    ],
)
def test_only_a_missing_or_another_shard_is_replaced(
    make_shards, server, hurried, tmp_path, lie, kind
) -> None:
    """Other ranks may be able to read one that a network has failed to bring."""
    make_shards(blocks=4, docs_per_shard=2)
    url = f"{server.url}/shards/train-000000.tar"
    server.elsewhere = "http://localhost:9"
    for replaces in (False, True):
        store = store_of(f"{server.url}/shards", tmp_path / "cache", replaces_bad=replaces)
        server.lies = [lie] * (1 if lie in ("404", "403", "redirect") else 2)
        if replaces and kind is ShardError:
            assert store[0].tokens[store[0].starts[0]] == 2 * 64
            continue
        with pytest.raises(kind, match=f"^shard {url}: ") as caught:
            store[0]
        assert "\n" not in str(caught.value)


def test_a_mapped_copy_stays_until_it_is_closed(make_shards, server, hurried, tmp_path) -> None:
    shards = make_shards(blocks=3, docs_per_shard=1).shards
    options = {"cache_bytes": shards[0].bytes, "keep_open": 1}
    store = store_of(f"{server.url}/shards", tmp_path / "cache", **options)
    first = store[0]
    with pytest.raises(UnreadShardError, match=r"data.cache_bytes: found .*, wanted "):
        store[1]
    assert first.tokens[first.starts[0]] == 0
    del first
    store.fetch_ahead((1,))  # closes it
    assert store[1].tokens[store[1].starts[0]] == 64


def config_of(server, tmp_path, **options) -> DataConfig:
    options = {"context": 64, "workers": 0, "shuffle_shards": 2} | options
    return DataConfig(manifest=f"{server.url}/shards", cache_dir=str(tmp_path / "cache"), **options)


@pytest.mark.parametrize("wanted", [{"shuffle_shards": 1, "workers": 1}, {"shuffle_shards": 9}])
def test_a_cache_holds_at_least_what_one_rank_reads(make_shards, server, tmp_path, wanted) -> None:
    shards = make_shards(blocks=10, docs_per_shard=2).shards
    size = sum(shard.bytes for shard in shards[: 4 if "workers" in wanted else 5])
    config = config_of(server, tmp_path, cache_bytes=size - 1, **wanted)
    line = f"^data.cache_bytes: found {size - 1:,}, wanted {size:,} or more for each rank"
    with pytest.raises(ValueError, match=line):
        open_stores(config, load_corpus(config.manifest))
    config = config_of(server, tmp_path, cache_bytes=size, **wanted)
    open_stores(config, load_corpus(config.manifest))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.wide)])
def test_the_next_group_is_fetched_while_one_is_read(
    make_shards, server, tmp_path, workers
) -> None:
    shards = make_shards(blocks=16, docs_per_shard=2).shards
    size = (4 + 2 * workers) * max(shard.bytes for shard in shards)
    config = config_of(server, tmp_path, cache_bytes=size, workers=workers)
    corpus = load_corpus(config.manifest)
    order = corpus.training_order(64, 0, config.shuffle_shards)
    batches = RankBatches(
        first_sample=0, num_samples=48, samples_per_update=2, micro_batch=2, rank=0, world_size=1
    )
    loader = iter(make_loader(config, corpus, open_stores(config, corpus), order, batches))
    samples = [next(loader)]
    ahead = {f"/shards/{shards[one].name}" for _, some in order.upcoming(0) for one in some}
    assert len(ahead) == 4
    end = time.monotonic() + 20
    while not ahead <= set(server.asked) and time.monotonic() < end:
        time.sleep(0.001)
    assert ahead <= set(server.asked)
    samples += loader
    local = load_corpus(str(tmp_path / "shards"))
    plain = DataConfig(manifest=local.location, context=64, workers=0, shuffle_shards=2)
    wanted = make_loader(plain, local, open_stores(plain, local), order, batches)
    for found, same in zip(samples, wanted, strict=True):
        assert found["target"].equal(same["target"])
    assert sum(one.stat().st_size for one in (tmp_path / "cache").glob("*.tar")) <= size


def test_upcoming_shards_are_those_of_this_group_and_the_next(make_shards) -> None:
    corpus = load_corpus(make_shards(blocks=10, docs_per_shard=2).location)
    order = corpus.training_order(64, 3, 2)
    for sample in range(25):
        needed = order.locate_many(np.arange(sample, sample + 3)).shard.tolist()
        (found,) = order.upcoming(sample)
        assert found[0] == 0
        assert set(needed) <= set(found[1])
        assert len(found[1]) <= 4
