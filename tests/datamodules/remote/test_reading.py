"""What is read by URL: from servers that fail, and from those that nobody has named."""

import logging
import random
import sys

import pytest

from longhaul.datamodules.manifest import load_manifest
from longhaul.datamodules.remote import reading
from longhaul.datamodules.remote.reading import read_remote
from longhaul.datamodules.urls import MissingInputError


@pytest.mark.parametrize("lie", ["stall", "cut", "500", "503", "429"])
def test_what_may_pass_is_tried_again(server, hurried, tmp_path, lie, caplog) -> None:
    (tmp_path / "a").write_bytes(b"content" * 100)
    server.lies = [lie]
    before = random.getstate()
    with caplog.at_level(logging.WARNING):
        assert read_remote(f"{server.url}/a", 1000) == b"content" * 100
    assert len(server.asked) == 2
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{server.url}/a: ")
    assert random.getstate() == before


@pytest.mark.parametrize(
    ("lie", "found", "asked"),
    [
        ("stall", "stalled: nothing came.*3 attempts", 3),
        ("slow", r"stalled: \d+ bytes in 0 s.*3 attempts", 3),
        ("cut", "payload is not completed.*3 attempts", 3),
        ("500", r"HTTP 500 Internal Server Error\), 3 attempts", 3),
        ("403", r"HTTP 403 Forbidden\), not tried again", 1),
        ("401", r"HTTP 401 Unauthorized\), not tried again", 1),
        ("404", "no such file$", 1),
        ("redirect", r"redirected to http://localhost:9, which is not named\), not tried", 1),
    ],
)
def test_what_does_not_pass_is_one_line(server, hurried, tmp_path, lie, found, asked) -> None:
    (tmp_path / "a").write_bytes(b"content" * 100)
    server.always = lie
    server.elsewhere = "http://localhost:9"
    with pytest.raises(OSError, match=f"^{server.url}/a: .*{found}") as caught:
        read_remote(f"{server.url}/a", 1000)
    assert "\n" not in str(caught.value)
    assert len(server.asked) == asked
    assert isinstance(caught.value, MissingInputError) == (lie == "404")


def test_a_redirect_on_the_same_host_is_followed(server, tmp_path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    server.lies = ["move"]
    assert read_remote(f"{server.url}/a", 1000) == b"content"
    assert server.asked == ["/a", "/a?moved"]


def test_the_waits_grow(server, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[float]()
    monkeypatch.setattr(reading.time, "sleep", waits.append)
    server.always = "500"
    with pytest.raises(OSError, match="6 attempts"):
        reading.retrying(f"{server.url}/a", lambda: list(reading.blocks(server.url)), attempts=6)
    assert all(0.35 * 2**n < wait < 0.65 * 2**n for n, wait in enumerate(waits))
    assert len(waits) == 5


def test_no_more_is_read_than_a_file_may_have(server, tmp_path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    with pytest.raises(OSError, match=r"/a: found more than 6 bytes, wanted 6 at most$"):
        read_remote(f"{server.url}/a", 6)


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("pipe:cat a", "found pipe, wanted a path or a URL of one of s3, gs, az, "),
        ("sftp://h/a", "found sftp, wanted a path or a URL of one of s3, "),
        ("github://a:b@main/c", "found github, wanted a path or "),
        ("simplecache://h/a", "found simplecache, wanted a path or "),
        ("s3://bucket/a", r"needs the package s3fs .*; `pip install 'longhaul\[s3\]'` installs it"),
    ],
)
def test_a_scheme_that_cannot_be_read_is_named(url, found, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ValueError, match=f"^{url}/manifest.json: {found}"):
        load_manifest(url)


def test_a_chain_of_urls_is_one_url(server, tmp_path) -> None:
    (tmp_path / "precious").write_text("precious")
    with pytest.raises(MissingInputError):
        read_remote(f"{server.url}/a::file://{tmp_path}/precious", 1000)
    assert server.asked == [f"/a::file://{tmp_path}/precious"]


def test_the_memory_of_fsspec_is_a_store(make_shards) -> None:
    import fsspec

    folder = make_shards(blocks=2).location.removesuffix("/manifest.json")
    fsspec.filesystem("memory").put(folder, "/shards", recursive=True)
    assert load_manifest("memory://shards").location == "memory://shards/manifest.json"
