"""Shards in a bucket, at moto's server: `pip install s3fs "moto[server]"`, which dev leaves out."""

import os
from pathlib import Path

import pytest

from longhaul.datamodules.manifest import load_manifest
from longhaul.datamodules.remote import cache, reading
from longhaul.datamodules.shards import ShardError, UnreadShardError
from longhaul.datamodules.store import ShardStore
from longhaul.datamodules.urls import MissingInputError

pytestmark = pytest.mark.soak  # its packages are heavier than longhaul


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch):
    s3fs = pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    import boto3

    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    # As a user sets them: longhaul knows none of these.
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr(reading, "_FIRST_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(cache, "_ATTEMPTS", 2)
    monkeypatch.setattr(reading, "_BLOCK_BYTES", 1000)  # several requests a shard
    s3fs.S3FileSystem.clear_instance_cache()
    made = boto3.client("s3")
    made.create_bucket(Bucket="bucket")
    yield made
    server.stop()


def upload(client, folder: Path) -> None:
    for path in folder.iterdir():
        client.put_object(Bucket="bucket", Key=f"a/b/{path.name}", Body=path.read_bytes())


def test_shards_are_read_from_a_bucket(client, make_shards, tmp_path) -> None:
    folder = Path(make_shards(blocks=4, docs_per_shard=2).location).parent
    upload(client, folder)
    for location in ("s3://bucket/a/b", "s3://bucket/a/b/manifest.json"):
        manifest = load_manifest(location)
        options = {"replaces_bad": False, "max_bad_fraction": 0.0, "keep_open": 2}
        store = ShardStore(manifest, cache_dir=str(tmp_path / "cache"), **options)
        for position in range(2):
            shard = store[position]
            tokens = shard.tokens[shard.starts[0] : shard.starts[0] + 3].tolist()
            assert tokens == [position * 128, position * 128 + 1, position * 128 + 2]
    copies = sorted((tmp_path / "cache").glob("*.tar"))
    assert {copy.read_bytes() for copy in copies} == {
        path.read_bytes() for path in folder.glob("*.tar")
    }


def test_what_a_bucket_lacks_or_has_otherwise_is_one_line(client, make_shards, tmp_path) -> None:
    folder = Path(make_shards(blocks=4, docs_per_shard=2).location).parent
    for location in ("s3://bucket/nothing", "s3://nowhere/a"):
        with pytest.raises(MissingInputError, match=f"^{location}/manifest.json: no such file$"):
            load_manifest(location)
    upload(client, folder)
    store = ShardStore(
        load_manifest("s3://bucket/a/b"),
        **{"cache_dir": str(tmp_path / "cache"), "replaces_bad": False},
        **{"max_bad_fraction": 0.0, "keep_open": 2},
    )
    client.delete_object(Bucket="bucket", Key="a/b/train-000000.tar")
    with pytest.raises(ShardError, match=r"train-000000.tar: no such file$"):
        store[0]
    client.put_object(Bucket="bucket", Key="a/b/train-000001.tar", Body=b"other")
    with pytest.raises(ShardError, match=r"train-000001.tar: .*5 bytes received, wanted [\d,]+\)"):
        store[1]
    os.environ["AWS_ENDPOINT_URL"] = "http://127.0.0.1:9"
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(UnreadShardError, match=r"^shard s3://.*Could not connect") as caught:
        store[1]
    assert "\n" not in str(caught.value)
