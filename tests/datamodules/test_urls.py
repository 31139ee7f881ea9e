import functools
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from longhaul.datamodules import urls
from longhaul.datamodules.manifest import load_manifest
from longhaul.datamodules.shards import ShardError
from longhaul.datamodules.store import ShardStore


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """A web server for `tmp_path`: its URL, and the list of requested paths."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            asked.append(self.path)

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(tmp_path))
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


def store_of(location: str, cache_dir: Path) -> ShardStore:
    return ShardStore(
        load_manifest(location),
        cache_dir=str(cache_dir),
        replaces_bad=False,
        max_bad_fraction=0.0,
        keep_open=2,
    )


def last_token(store: ShardStore) -> int:
    position = len(store.manifest.shards) - 1
    shard = store[position]
    return int(shard.tokens[shard.starts[-1] + 63])


def test_shards_of_the_same_name_from_two_sources_do_not_collide(
    make_shards, served, tmp_path
) -> None:
    make_shards(documents=3, name="a/shards")
    make_shards(documents=2, name="b/shards")
    url, asked = served
    for _ in range(2):
        assert (
            last_token(store_of(f"{url}/a/shards/manifest.json", tmp_path / "cache")) == 3 * 64 - 1
        )
        assert last_token(store_of(f"{url}/b/shards", tmp_path / "cache")) == 2 * 64 - 1
    shards = [path for path in asked if path.endswith(".tar")]
    assert shards == ["/a/shards/train-000000.tar", "/b/shards/train-000000.tar"]


def test_a_damaged_copy_is_fetched_again(make_shards, served, tmp_path) -> None:
    make_shards(documents=2)
    store_of(f"{served[0]}/shards", tmp_path / "cache")[0]
    (copy,) = (tmp_path / "cache").glob("*.tar")
    copy.write_bytes(copy.read_bytes()[:-5])
    assert last_token(store_of(f"{served[0]}/shards", tmp_path / "cache")) == 127


@pytest.mark.parametrize("form", ["FIFO", "link"])
def test_a_lock_in_the_cache_is_neither_waited_for_nor_followed(
    make_shards, served, tmp_path, form
) -> None:
    make_shards(documents=2)
    store_of(f"{served[0]}/shards", tmp_path / "cache")[0]
    (lock,) = (tmp_path / "cache").glob("*.lock")
    precious = tmp_path / "precious"
    precious.write_text("precious")
    lock.unlink()
    os.mkfifo(lock) if form == "FIFO" else lock.symlink_to(precious)
    with pytest.raises(ShardError, match=r"\.lock"):
        store_of(f"{served[0]}/shards", tmp_path / "cache")[0]
    assert precious.read_text() == "precious"


def test_a_file_damaged_at_its_source_is_not_cached(
    make_shards, served, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(urls.time, "sleep", lambda seconds: None)
    shard = Path(make_shards(documents=2).url_of("train-000000.tar"))
    content = shard.read_bytes()
    store = store_of(f"{served[0]}/shards", tmp_path / "cache")
    shard.write_bytes(content[:-5])
    with pytest.raises(ShardError, match=r"^shard http.*000000.tar: cannot be fetched .*, 3 att"):
        store[0]
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]
    shard.write_bytes(content)
    assert last_token(store) == 127


def test_a_pipe_command_is_a_source_of_shards(make_shards, tmp_path) -> None:
    location = make_shards(documents=2).location
    assert last_token(store_of(f"pipe:cat {location}", tmp_path / "cache")) == 127


def test_a_file_url_needs_no_cache(make_shards) -> None:
    manifest = load_manifest("file://" + make_shards(documents=2).location)
    store = ShardStore(
        manifest, cache_dir=None, replaces_bad=False, max_bad_fraction=0.0, keep_open=2
    )
    assert last_token(store) == 127


def test_a_remote_manifest_without_a_cache_is_refused(make_shards) -> None:
    manifest = load_manifest(f"pipe:cat {make_shards(documents=2).location}")
    with pytest.raises(ValueError, match=r"data.cache_dir: found null, wanted a folder"):
        ShardStore(manifest, cache_dir=None, replaces_bad=False, max_bad_fraction=0.0, keep_open=2)
