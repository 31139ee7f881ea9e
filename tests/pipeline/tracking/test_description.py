"""What MLflow is told of a run beside its config."""

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from longhaul.configs import load_run_config
from longhaul.datamodules.corpus import Corpus
from longhaul.datamodules.manifest import Manifest, ShardEntry
from longhaul.datamodules.mixture import Stage
from longhaul.pipeline.tracking import description
from longhaul.pipeline.tracking.description import describe


def corpus(location: str) -> Corpus:
    shards = [ShardEntry(name=f"{n}.tar", bytes=1, documents=3, sha256=f"{n}" * 64) for n in (1, 2)]
    sizes = {"vocab_size": 257, "bos_id": 256, "eot_id": 256, "document_tokens": 100}
    manifest = Manifest(
        tokenizer="bytes",
        tokenizer_sha256="0",
        dtype="uint16",
        shards=tuple(shards),
        location=location,
        **sizes,
    )
    return Corpus(manifest)


@pytest.mark.parametrize(
    ("location", "name"),
    [
        ("/data/gpt2/train/manifest.json", "gpt2/train"),
        ("file:///data/gpt2/train/manifest.json", "gpt2/train"),
        ("https://me:secret@host/gpt2/train/manifest.json", "gpt2/train"),
        ("https://me:secret@host/manifest.json", "host"),
        ("s3://bucket/gpt2/train/manifest.json", "gpt2/train"),
        ("s3://bucket/manifest.json", "bucket"),
    ],
)
def test_data_are_named_by_their_last_two_folders(location: str, name: str) -> None:
    assert corpus(location).name == name


def test_a_relative_path_is_named_by_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path / "gpt2")
    assert corpus("train/manifest.json").name == "gpt2/train"


def test_each_source_is_a_dataset_with_its_weights() -> None:
    places = {name: corpus(f"/data/{name}/train/manifest.json").sources[0] for name in ("web", "c")}
    stages = [Stage(0, {"web": 7, "c": 3}), Stage(5000, {"web": 1})]
    config = load_run_config("run/demo.yaml")
    found = describe(config, 1, Corpus(places, stages), None)
    assert found.params["data"] == "web+c"
    # Names, weights and shards, all of which identify the data.
    for other in (
        Corpus(places, stages[:1]),
        Corpus(places, [Stage(0, {"web": 7, "c": 4}), stages[1]]),
        Corpus({"web": places["web"], "d": places["c"]}, [Stage(0, {"web": 7, "d": 3}), stages[1]]),
    ):
        assert describe(config, 1, other, None).params["data_sha256"] != found.params["data_sha256"]
    first, second = found.datasets
    assert (first.name, second.name) == ("web", "c")
    assert json.loads(first.source) == {"uri": "/data/web/train/manifest.json"}
    assert json.loads(second.profile)["weight_from_tokens"] == {"0": 3, "5000": 0}


def test_a_run_is_described_in_mlflows_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "source_commit", lambda: "abc123-dirty")
    monkeypatch.setattr(description, "main_device", lambda: "NVIDIA H100")
    monkeypatch.setattr(description, "source_hashes", lambda kinds: dict.fromkeys(kinds, "9" * 64))
    config = load_run_config("run/demo.yaml", ["trainer.max_tokens=409_600"])
    trainer = dataclasses.replace(config.trainer, strategy="ddp", devices=2)
    config = dataclasses.replace(config, trainer=trainer)
    train = corpus("/data/gpt2/train/manifest.json")
    validation = corpus("https://me:secret@host/gpt2/validation/manifest.json")
    found = describe(config, 1_200_000, train, validation)
    sha256 = hashlib.sha256(("1" * 64 + "2" * 64).encode()).hexdigest()
    assert found.params == {
        "parameters": "1200000",
        "tokens": "409600",
        "data": "gpt2/train",
        "data_sha256": sha256,
        "hardware": "2 x NVIDIA H100",
        "commit": "abc123-dirty",
        "attention_sha256": f"conformal_sympow {'9' * 12}",
    }
    assert found.tags == {
        "longhaul.attention": "conformal_sympow",
        "mlflow.source.name": "longhaul train",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": "abc123",
        "mlflow.source.git.dirty": "true",
        "mlflow.note.content": "conformal_sympow with 1.2M parameters on 410K tokens of "
        "gpt2/train, context 512",
    }
    first, second = found.datasets
    assert (first.name, first.context, first.source_type) == ("gpt2/train", "training", "local")
    assert first.digest == sha256[:12]
    assert json.loads(first.source) == {"uri": "/data/gpt2/train/manifest.json"}
    assert json.loads(first.profile)["num_tokens"] == 600
    assert (second.name, second.context) == ("gpt2/validation", "validation")
    address = "https://***@host/gpt2/validation/manifest.json"
    assert (second.source_type, json.loads(second.source)) == ("http", {"url": address})
    # A budget that ends within an update is trained to the end of that update.
    config = load_run_config("run/demo.yaml", ["trainer.max_tokens=100"])
    found = describe(config, 1, train, None)
    assert found.params["tokens"] == str(config.optim.tokens_per_update)
    assert "on 8.2K tokens of" in found.tags["mlflow.note.content"]
    monkeypatch.setattr(description, "source_commit", lambda: None)
    found = describe(config, 1, train, None)
    assert len(found.datasets) == 1
    assert not [name for name in found.tags if "git" in name]
