"""Contexts on the same tokens, and perplexity through a sliding window, against plain loops."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from longhaul.datamodules.data_module import TokenDataModule
from longhaul.modules.attention import attention_config
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.modules.rotary import PositionScaling
from longhaul.pipeline.evaluation.tasks.perplexity import sliding_loss, sliding_windows
from longhaul.pipeline.evaluation.windows import Passage
from longhaul.pipeline.runs.trained_model import load_trained_model

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other
BOS = 63


def token_loss(model: LanguageModel, before: list[int], token: int) -> float:
    hidden, _ = model.activations(torch.tensor([before]))
    logits = hidden[0, -1].double() @ model.embedding.weight.double().T
    return -logits.log_softmax(0)[token].item()


@pytest.mark.parametrize(
    ("positions", "kind"),
    [
        *((positions, "softmax") for positions in ("none", "linear", "dynamic_ntk")),
        ("none", "conformal_sympow"),
        *(
            pytest.param(positions, "conformal_sympow", marks=pytest.mark.wide)
            for positions in ("linear", "dynamic_ntk")
        ),
    ],
)
@pytest.mark.parametrize("bos_id", [BOS, None])
@torch.no_grad()
def test_sliding_loss_is_that_of_a_brute_force_window(
    kind: str, positions: str, bos_id: int | None
) -> None:
    torch.manual_seed(0)
    config = LanguageModelConfig(
        attention=attention_config(kind)(), layers=2, width=32, heads=2, vocabulary=64
    )
    model = LanguageModel(config).double().eval()
    if positions != "none":
        model.set_positions(PositionScaling(name=positions, factor=4.0, context=4))
    document = torch.randint(60, (1, 23))
    # What is read before what is predicted; without a bos id, the first token is not predicted.
    read = [BOS, *document[0].tolist()] if bos_id else document[0].tolist()
    tokens = read[1:]
    for window, stride in ((8, 3), (8, 8), (len(tokens), 5)):
        wanted, start = 0.0, 0
        for position, token in enumerate(tokens):
            # The window moves by its stride when it does not reach this token.
            while position >= start + window:
                start = min(start + stride, len(tokens) - window)
            if positions == "dynamic_ntk":
                # Rates follow the length of the whole window, not of what precedes the token.
                whole = [bos_id or read[start], *tokens[start : start + window - 1]]
                hidden, _ = model.activations(torch.tensor([whole]))
                logits = hidden[0, position - start] @ model.embedding.weight.T
                wanted -= logits.log_softmax(0)[token].item()
            else:
                before = [bos_id or read[start], *tokens[start:position]]
                wanted += token_loss(model, before, token)
        # A window may be as long as the document, of which one token is not predicted.
        given = 23 if window == len(tokens) else window
        found = sliding_loss(
            model,
            Passage(document[0]),
            window=given,
            stride=stride,
            bos_id=bos_id,
            precision="32-true",
        )
        assert found == pytest.approx(wanted, abs=1e-4), (window, stride)


def test_every_token_is_scored_once_with_enough_before_it() -> None:
    for length, window, stride in ((100, 20, 7), (100, 20, 20), (20, 20, 3), (99, 33, 1)):
        scored: list[int] = []
        for end, count in sliding_windows(length, window, stride):
            scored += range(end - count, end)
            assert end >= window
            assert count == window or window - count >= window - stride
        assert scored == list(range(length))


def values_of(run: Run, *arguments: str) -> tuple[dict[str, float], Path]:
    run.longhaul("evaluate", "small", *arguments)
    folder = run.path / "small" / "evaluation" / "step-000000030"
    return json.loads((folder / "results.json").read_text()), folder


def test_contexts_and_perplexity_are_measured_on_a_run(uninterrupted: Run) -> None:
    arguments = ("--tasks", "context,perplexity", "--contexts", "32,64,128", "--stride", "16")
    values, folder = values_of(uninterrupted, *arguments)
    rows = list(csv.DictReader((folder / "context.csv").open()))
    assert [int(row["context"]) for row in rows] == [32, 64, 128]
    assert {int(row["tokens"]) for row in rows} == {384}
    # Windows as long as the documents are the documents, whichever task reads them.
    windows = list(csv.DictReader((folder / "perplexity.csv").open()))
    assert float(rows[-1]["standard_error"]) == float(windows[-1]["standard_error"]) > 0
    assert [int(row["window"]) for row in windows] == [32, 64, 128]
    assert {row["document_tokens"] for row in windows} == {"all"}
    for row in windows:
        value = values[f"evaluation/perplexity_{int(row['window']):06d}"]
        assert value == pytest.approx(math.exp(float(row["loss_nats"])), rel=1e-5)
    # A window as long as the document does not slide: it is the context of that length.
    assert math.log(values["evaluation/perplexity_000128"]) == pytest.approx(
        values["evaluation/loss_in_context_000128"], abs=1e-5
    )
    for name in ("context.png", "perplexity.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    # The validation samples are these same tokens, in windows of 64.
    trained = load_trained_model(uninterrupted.path / "small")
    data = TokenDataModule(
        trained.config.data, seed=0, samples_per_update=1, micro_batch=1, rank=0, world_size=1
    )
    wanted = [trained.model.loss(b["input"], b["target"]).item() for b in data.val_dataloader()]
    loss = float(rows[1]["loss_nats"])
    assert loss == pytest.approx(sum(wanted) / len(wanted), abs=1e-5)


def test_contexts_of_a_text_read_the_same_tokens(uninterrupted: Run, tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("abc def\n" * 40)  # 320 bytes: two windows of 128, and a rest of two of 32
    arguments = ("--tasks", "context", "--contexts", "32,128", "--text", str(text))
    uninterrupted.longhaul("evaluate", "small", *arguments)
    (folder,) = (uninterrupted.path / "small" / "evaluation").glob("*-text-t-*")
    rows = list(csv.DictReader((folder / "context.csv").open()))
    assert [int(row["tokens"]) for row in rows] == [256, 256]


@pytest.mark.wide
def test_the_first_tokens_of_each_text_are_read(uninterrupted: Run, tmp_path: Path) -> None:
    texts = [tmp_path / name for name in ("a.txt", "b.txt")]
    for text, word in zip(texts, ("abc def\n", "while True:\n"), strict=True):
        text.write_text(word * 40)
    arguments = ("--tasks", "perplexity", "--contexts", "32,64", "--stride", "16")
    arguments = (*arguments, "--document-tokens", "96", "--text", *map(str, texts))
    trained = load_trained_model(uninterrupted.path / "small")
    for bos, options in ((256, ()), (None, ("--no-bos",))):
        uninterrupted.longhaul("evaluate", "small", *arguments, *options)
        (folder,) = (uninterrupted.path / "small" / "evaluation").glob("*-text-a_and_1-*")
        scored = 96 if bos else 95
        for row in csv.DictReader((folder / "perplexity.csv").open()):
            assert (row["documents"], row["tokens"]) == ("2", str(2 * scored))
            assert (row["document_tokens"], row["bos"]) == ("96", "yes" if bos else "no")
            losses = [
                sliding_loss(
                    trained.model,
                    Passage(torch.tensor(list(text.read_bytes()[:96]))),
                    window=int(row["window"]),
                    stride=16,
                    bos_id=bos,
                    precision="32-true",
                )
                for text in texts
            ]
            assert float(row["loss_nats"]) == pytest.approx(sum(losses) / (2 * scored), abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "context", "--contexts", "48,64"], "--contexts: found 48 with 64, wanted div"),
        (["--tasks", "context", "--contexts", "a"], "--contexts: found 'a', wanted tokens"),
        (["--tasks", "context", "--contexts", "0,4"], "--contexts: found '0,4', wanted tokens"),
        (["--tasks", "positions,recall", "--context", "9"], "--context: found with recall, which"),
        (["--tasks", "passkey", "--text", "t"], "--text: found with passkey, which does not read"),
        (["--stride", "9"], "--stride: found with positions, which does not read it; wanted other"),
        (["--tasks", "perplexity", "--stride", "0"], "--stride: found 0, wanted 1 to 64"),
        (["--tasks", "perplexity", "--stride", "256"], "--stride: found 256, wanted 1 to 64"),
        (
            ["--tasks", "perplexity", "--document-tokens", "128"],
            "--document-tokens: found 128, wanted 256 or more, the longest of --contexts",
        ),
        (
            ["--tasks", "perplexity", "--document-tokens", "300", "--contexts", "64"],
            "--document-tokens: 300 does not divide the blocks' 1024 tokens",
        ),
        (["--no-bos"], "--no-bos: found with positions, which does not read it; wanted other"),
    ],
)
def test_bad_arguments_are_one_line(uninterrupted: Run, arguments: list[str], message: str) -> None:
    result = uninterrupted.longhaul("evaluate", "small", *arguments, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith(f"longhaul: {message}")
    assert len(result.stderr.splitlines()) == 1
