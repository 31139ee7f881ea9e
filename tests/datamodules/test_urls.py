import contextlib
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
    position = len(store) - 1
    shard = store[position]
    return int(shard.tokens[shard.starts[-1] + 63])


def test_shards_of_the_same_name_from_two_sources_do_not_collide(
    make_shards, served, tmp_path
) -> None:
    make_shards(blocks=3, name="a/shards")
    make_shards(blocks=2, name="b/shards")
    url, asked = served
    for _ in range(2):
        assert (
            last_token(store_of(f"{url}/a/shards/manifest.json", tmp_path / "cache")) == 3 * 64 - 1
        )
        assert last_token(store_of(f"{url}/b/shards", tmp_path / "cache")) == 2 * 64 - 1
    shards = [path for path in asked if path.endswith(".tar")]
    assert shards == ["/a/shards/train-000000.tar", "/b/shards/train-000000.tar"]


def test_a_damaged_copy_is_fetched_again(make_shards, served, tmp_path) -> None:
    make_shards(blocks=2)
    store_of(f"{served[0]}/shards", tmp_path / "cache")[0]
    (copy,) = (tmp_path / "cache").glob("*.tar")
    copy.write_bytes(copy.read_bytes()[:-5])
    assert last_token(store_of(f"{served[0]}/shards", tmp_path / "cache")) == 127


@pytest.mark.parametrize("form", ["FIFO", "link"])
def test_a_lock_in_the_cache_is_neither_waited_for_nor_followed(
    make_shards, served, tmp_path, form
) -> None:
    make_shards(blocks=2)
    store_of(f"{served[0]}/shards", tmp_path / "cache")[0]
    (copy,) = (tmp_path / "cache").glob("*.tar")
    copy.unlink()  # no lock is needed to read it
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
    shard = Path(make_shards(blocks=2).url_of("train-000000.tar"))
    content = shard.read_bytes()
    store = store_of(f"{served[0]}/shards", tmp_path / "cache")
    shard.write_bytes(content[:-5])
    with pytest.raises(ShardError, match=r"^shard http.*000000.tar: cannot be fetched .*, 3 att"):
        store[0]
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]
    shard.write_bytes(content)
    assert last_token(store) == 127


def test_a_pipe_command_is_a_source_of_shards(make_shards, tmp_path) -> None:
    location = make_shards(blocks=2).location
    assert last_token(store_of(f"pipe:cat {location}", tmp_path / "cache")) == 127


def test_a_file_url_needs_no_cache(make_shards) -> None:
    manifest = load_manifest("file://" + make_shards(blocks=2).location)
    store = ShardStore(
        manifest, cache_dir=None, replaces_bad=False, max_bad_fraction=0.0, keep_open=2
    )
    assert last_token(store) == 127


def test_a_remote_manifest_without_a_cache_is_refused(make_shards) -> None:
    manifest = load_manifest(f"pipe:cat {make_shards(blocks=2).location}")
    with pytest.raises(ValueError, match=r"data.cache_dir: found null, wanted a folder"):
        ShardStore(manifest, cache_dir=None, replaces_bad=False, max_bad_fraction=0.0, keep_open=2)


def test_a_copy_that_is_there_is_checked_outside_the_lock(
    make_shards, served, tmp_path, monkeypatch
) -> None:
    make_shards(blocks=2)
    store_of(f"{served[0]}/shards", tmp_path / "cache")[0]

    def locked(path: Path) -> None:
        raise AssertionError("other processes would wait for this one")

    monkeypatch.setattr(urls, "_locked", locked)
    assert last_token(store_of(f"{served[0]}/shards", tmp_path / "cache")) == 127


def test_a_copy_fetched_while_waiting_is_checked_outside_the_lock(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"content")
    held, events = threading.Event(), list[str]()
    url = f"pipe:cat {tmp_path}/source"

    path = urls.fetch(url, tmp_path / "cache", is_intact=lambda path: True)
    content = path.read_bytes()
    path.unlink()
    locked = urls._locked

    @contextlib.contextmanager
    def after_another(lock: Path) -> Iterator[None]:
        with locked(lock):
            if not path.exists():  # another process was first
                path.write_bytes(content)
            held.set()
            yield
        held.clear()

    def is_good(path: Path) -> bool:
        events.append("inside" if held.is_set() else "outside")
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(urls, "_locked", after_another)
        urls.fetch(url, tmp_path / "cache", is_intact=is_good)
    assert events == ["outside"]


NAME = "manifest.json"


@pytest.mark.parametrize(
    ("location", "wanted"),
    [
        ("https://h/a/manifest.json", "https://h/a/x.tar"),
        ("https://manifest.json/a/manifest.json", "https://manifest.json/a/x.tar"),
        ("https://h/manifest.json.d/a/manifest.json", "https://h/manifest.json.d/a/x.tar"),
        ("https://h/manifest.json/manifest.json", "https://h/manifest.json/x.tar"),
        ("https://h/a/manifest.json?key=manifest.json#b", "https://h/a/x.tar?key=manifest.json#b"),
        ("https://h/get?file=a/manifest.json&v=1", "https://h/get?file=a/x.tar&v=1"),
        ("https://h/get?file=a%2Fmanifest.json", "https://h/get?file=a%2Fx.tar"),
        ("pipe:aws s3 cp s3://b/a/manifest.json -", "pipe:aws s3 cp s3://b/a/x.tar -"),
        ("pipe:cat 'my-manifest.json/manifest.json'", "pipe:cat 'my-manifest.json/x.tar'"),
        ("/manifest.json/a/manifest.json", "/manifest.json/a/x.tar"),
    ],
)
def test_a_shard_stands_where_the_manifest_does_and_nothing_else_changes(
    location: str, wanted: str
) -> None:
    assert urls.sibling(location, NAME, "x.tar") == wanted
    if urls.is_remote(location):
        assert urls.inside(location, NAME) == location


def test_the_folder_of_a_manifest_may_have_a_query() -> None:
    for location, wanted in (
        ("https://h/a/?token=1", "https://h/a/manifest.json?token=1"),
        ("s3://bucket/a#b", "s3://bucket/a/manifest.json#b"),
    ):
        assert urls.inside(location, NAME) == wanted
    with pytest.raises(ValueError, match=r"^pipe:cat a: found no manifest.json in the command"):
        load_manifest("pipe:cat a")
