"""Where things lie: the addresses of what is beside a manifest."""

import pytest

from longhaul.datamodules import urls

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
        ("s3://bucket/a/manifest.json", "s3://bucket/a/x.tar"),
        ("hf://datasets/me/b@main/a/manifest.json", "hf://datasets/me/b@main/a/x.tar"),
        ("/manifest.json/a/manifest.json", "/manifest.json/a/x.tar"),
    ],
)
def test_a_shard_stands_where_the_manifest_does_and_nothing_else_changes(
    location: str, wanted: str
) -> None:
    assert urls.sibling(location, NAME, "x.tar") == wanted
    if urls.is_remote(location):
        assert urls.inside(location, NAME) == location


def test_the_folder_of_a_manifest_may_have_a_query_at_a_web_server_alone() -> None:
    for location, wanted in (
        ("https://h/a/?token=1", "https://h/a/manifest.json?token=1"),
        ("s3://bucket/a#b", "s3://bucket/a#b/manifest.json"),
        ("s3://bucket/a?/", "s3://bucket/a?/manifest.json"),
    ):
        assert urls.inside(location, NAME) == wanted
