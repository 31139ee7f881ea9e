"""Runs in an MLflow database as training and evaluation log them, and readers of a report."""

import csv
import dataclasses
import json
import math
import shutil
from html.parser import HTMLParser
from pathlib import Path

from mlflow.entities import Metric
from mlflow.tracking import MlflowClient

from longhaul.configs import RunConfig, load_run_config, to_yaml

EVIL = "<script>alert(1)</script> \"q\" 'x' &lt; $y_{$"
LOSSES = [6.0, 5.0, math.nan, 4.25]
POSITIONS = (
    "position,loss_nats,standard_error,mean_up_to_here,standard_error_up_to_here,samples\n"
) + "".join(f"{t},{5 - t / 200},0.1,{5 - t / 400},0.05,8\n" for t in range(1, 257))
BINS = "first,last,loss_nats,standard_error,samples\n" + "".join(
    f"{t},{t + 1},{5 - t / 200},0.25,8\n" for t in range(1, 257, 2)
)


ATTENTION = (
    "layer,matrix,largest,first_token_share,kurtosis,half_life,rotation,rotation_spread,"
    "first_token_share_standard_error,kurtosis_standard_error,half_life_standard_error,windows\n"
    "0,0,0.5,0.25,3,8,1,0,0.125,0.25,2,8\n0,1,0.75,0.75,5,32,1,0,0.25,0.75,4,8\n"
    "1,0,0.25,0.5,4,inf,nan,0,0,0.5,nan,8\n"
)


def scores(largest: float) -> str:
    """Scores of two layers and four keys; in the last layer they are ten times as large."""
    rows = [
        f"{layer},{key},{key * 10 ** (layer - 1)},{-key},{20 * key},{largest / (3 - layer)},no\n"
        for layer in (1, 2)
        for key in range(1, 5)
    ]
    return "layer,key,score,least_of_heads,most_of_heads,largest,bos\n" + "".join(rows)


class Store:
    """An MLflow database, and runs put there under the names that training and evaluation use."""

    def __init__(self, uri: str, artifacts: str | None = None) -> None:
        self.uri = uri
        self.client = MlflowClient(uri)
        self.experiment = self.client.create_experiment("tests", artifacts)

    @classmethod
    def in_file(cls, folder: Path, empty: Path) -> "Store":
        shutil.copy(empty, folder / "mlflow.db")
        return cls(f"sqlite:///{folder}/mlflow.db", str(folder / "artifacts"))

    def add(
        self,
        name: str,
        *overrides: str,
        status: str = "FINISHED",
        loss: float = 4.5,
        commit: str = "abc",
    ) -> str:
        config = small_config(*overrides)
        tags = {"longhaul.attention": ",".join(config.model.kinds)}
        run_id: str = self.client.create_run(self.experiment, run_name=name, tags=tags).info.run_id
        metrics = [Metric("curves/validation_loss", loss, 1, 4)]
        for step, value in enumerate(LOSSES, start=1):
            metrics.append(Metric("curves/train_loss", value, 1, step))
            metrics.append(Metric("train/tokens", step * 512, 1, step))
            metrics.append(Metric("train/tokens_per_second", 100.0 * step, 1, step))
        self.client.log_batch(run_id, metrics)
        for key, value in (("commit", commit), ("data", "gpt2/train"), ("data_sha256", "9" * 64)):
            self.client.log_param(run_id, key, value)
        self.client.log_text(run_id, to_yaml(config), "config.yaml")
        environment = json.dumps({"accelerators": [], "processor": "a processor"})
        self.client.log_text(run_id, environment, "environment.json")
        if status != "RUNNING":
            self.client.set_terminated(run_id, status)
        return run_id

    def evaluate(self, run_id: str, label: str, task: str, text: str) -> None:
        self.client.log_text(run_id, text, f"evaluation/{label}/{task}.csv")


def small_config(*overrides: str) -> RunConfig:
    sizes = ("model.layers=2", "model.width=32", "model.heads=2", "data.context=64")
    budget = ("optim.tokens_per_update=512", "trainer.micro_batch=1", "trainer.max_tokens=2048")
    config = load_run_config("run/demo.yaml", [*sizes, *budget, *overrides])
    tracking = dataclasses.replace(config.tracking, uri="http://user:secret@mlflow:5000")
    return dataclasses.replace(config, tracking=tracking)


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


class Page(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "link", "img", "wbr"):
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), name
            if name in ("src", "href", "srcset", "data", "action", "style"):
                self.addresses.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
