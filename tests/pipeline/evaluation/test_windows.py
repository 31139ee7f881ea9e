"""Windows of texts and shards, and losses read in pieces through the state."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from longhaul.datamodules.stream import PADDING_INDEX, TokenWindows, Windows
from longhaul.modules.attention import attention_config
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.modules.rotary import PositionScaling
from longhaul.pipeline.evaluation.options import TextOptions
from longhaul.pipeline.evaluation.windows import (
    CutWindows,
    Passage,
    _read,
    longest_document,
    read_beginnings,
    read_documents,
    read_losses,
    shifted,
)
from longhaul.pipeline.generation.decoding import tokens_at_once, tokens_per_pass
from longhaul.pipeline.runs.trained_model import load_trained_model

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other
MEMORY = Path(__file__).with_name("evaluated_memory.py")
LINEAR = ("conformal_sympow", "retention", "cartan", "zeros", "complex", "linear")


def model_of(kind: str, **options: Any) -> LanguageModel:
    torch.manual_seed(0)
    attention = attention_config(kind)(**options)
    config = LanguageModelConfig(attention=attention, layers=2, width=32, heads=2, vocabulary=64)
    return LanguageModel(config).eval()


@pytest.mark.parametrize("kind", LINEAR)
def test_losses_read_in_pieces_are_those_of_the_whole_window(kind: str) -> None:
    model = model_of(kind).double()
    target = torch.randint(64, (2, 100))
    tokens = target.roll(1, 1)
    seen: list[int] = []
    found = read_losses(model, tokens, target, "32-true", 32, seen.append)
    wanted = torch.nn.functional.cross_entropy(
        (model.activations(tokens)[0] @ model.embedding.weight.T).mT, target, reduction="none"
    )
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-6)
    assert seen == [64, 64, 64, 8]


IS_FIRST = torch.zeros(2, 100, dtype=torch.bool)
for _row, _starts in enumerate(([0, 1, 3, 40, 99], [0, 32, 64])):
    IS_FIRST[_row, _starts] = True


@pytest.mark.parametrize("kind", ["conformal_sympow", "zeros", "softmax"])
@pytest.mark.parametrize("at_once", [None, 32])
def test_no_document_of_a_window_changes_the_losses_of_another(
    kind: str, at_once: int | None
) -> None:
    model = model_of(kind).double()
    target = torch.randint(64, (2, 100))
    tokens = shifted(target, 63, IS_FIRST)
    found = read_losses(model, tokens, target, "32-true", at_once, is_first=IS_FIRST)
    for row, starts in enumerate(([0, 1, 3, 40, 99, 100], [0, 32, 64, 100])):
        for start, end in itertools.pairwise(starts):
            alone = target[row : row + 1, start:end]
            wanted = read_losses(model, shifted(alone, 63), alone, "32-true")
            torch.testing.assert_close(
                found[row : row + 1, start:end].double(), wanted.double(), rtol=0, atol=1e-6
            )


def test_positions_that_depend_on_the_length_are_those_of_each_document() -> None:
    model = model_of("softmax").double()
    model.set_positions(PositionScaling(name="dynamic_ntk", factor=2.0, context=16))
    target = torch.randint(64, (2, 100))
    found = read_losses(model, shifted(target, 63, IS_FIRST), target, "32-true", is_first=IS_FIRST)
    alone = target[:1, 3:40]
    wanted = read_losses(model, shifted(alone, 63), alone, "32-true")
    torch.testing.assert_close(found[:1, 3:40].double(), wanted.double(), rtol=0, atol=1e-6)


def test_cut_windows_begin_documents_where_passages_do() -> None:
    passage = Passage(torch.arange(10), torch.tensor([1, 0, 0, 1, 0, 0, 0, 1, 0, 0]).bool())
    (batch,) = CutWindows([passage], context=5, bos_id=99, micro_batch=2)
    assert batch["is_first"].int().tolist() == [[1, 0, 0, 1, 0], [1, 0, 1, 0, 0]]
    assert batch["input"].tolist() == [[99, 0, 1, 99, 3], [99, 5, 99, 7, 8]]
    assert longest_document(batch, 0) == slice(0, 3)
    assert longest_document(batch, 1) == slice(2, 5)


def test_only_states_that_pay_are_carried_through_long_windows() -> None:
    long = 1 << 18
    for kind in LINEAR:
        assert tokens_at_once(model_of(kind), long) == 4_096, kind
        assert tokens_at_once(model_of(kind), 4_096) is None
    assert tokens_at_once(model_of("softmax"), long) is None
    assert tokens_at_once(model_of("sympow", degree=8), long) is None
    stretched = model_of("conformal_sympow")
    stretched.set_positions(PositionScaling(name="dynamic_ntk", factor=2.0, context=64))
    assert tokens_at_once(stretched, long) is None


def test_windows_of_texts_follow_each_other_and_leave_rests_out() -> None:
    texts = [Passage(torch.arange(10)), Passage(torch.arange(20, 26))]
    batches = list(CutWindows(texts, context=4, bos_id=99, micro_batch=2))
    targets = torch.cat([batch["target"] for batch in batches])
    assert targets.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [20, 21, 22, 23]]
    inputs = torch.cat([batch["input"] for batch in batches])
    assert inputs.tolist() == [[99, 0, 1, 2], [99, 4, 5, 6], [99, 20, 21, 22]]
    assert torch.cat([batch["index"] for batch in batches]).tolist() == [0, 1, 2]


def test_beginnings_of_documents_are_their_first_tokens(
    uninterrupted: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = load_trained_model(uninterrupted.path / "small")
    here = dataclasses.replace(trained.config.data, workers=0)
    trained = dataclasses.replace(trained, config=dataclasses.replace(trained.config, data=here))
    read: list[int] = []
    read_samples = TokenWindows.__getitems__

    def count(self: TokenWindows, indices: Sequence[int]) -> Windows:
        read.extend(index for index in indices if index != PADDING_INDEX)
        return read_samples(self, indices)

    with monkeypatch.context() as patched:
        patched.setattr(TokenWindows, "__getitems__", count)
        found = read_beginnings(trained, TextOptions(), 256)
    # The first of the four windows of each document, and no other.
    assert read == [0, 4]
    whole = dataclasses.replace(trained.config.data, validation_tokens=2048)
    config = dataclasses.replace(trained.config, data=whole)
    windows = read_documents(dataclasses.replace(trained, config=config), TextOptions(), 1024)
    # About as many tokens as in training, which are 384.
    assert len(found) == 2
    for (beginning, begins), (document, begins_whole) in zip(found, windows, strict=True):
        assert torch.equal(beginning, document[:256])
        assert torch.equal(begins, begins_whole[:256])
    texts = tmp_path / "a.txt", tmp_path / "b.txt"
    for index, text in enumerate(texts):
        text.write_bytes(bytes(range(index + 20, index + 120)) * 3)
    found = read_beginnings(trained, TextOptions(text=texts), 100)
    assert [one.tokens.tolist() for one in found] == [list(range(20, 120)), list(range(21, 121))]


def test_a_text_longer_than_a_document_is_read_through_the_state(
    uninterrupted: Run, tmp_path: Path
) -> None:
    context = 2 * tokens_per_pass(torch.device("cpu"))
    text = tmp_path / "a book.txt"
    content = b"def f(x): return x\n" * 500
    text.write_bytes(content)
    arguments = ("evaluate", "small", "--text", str(text), "--context", str(context))
    uninterrupted.longhaul(*arguments)
    # Another text of that name has results of its own.
    name = f"text-a_book-{sha256(sha256(content).digest()).hexdigest()[:8]}"
    label = f"step-000000030-context-{context}-{name}"
    folder = uninterrupted.path / "small" / "evaluation" / label
    values = json.loads((folder / "results.json").read_text())
    prefix = f"evaluation/context-{context}/{name}"
    assert f"{prefix}/loss_up_to_008192" in values
    assert len((folder / "positions.csv").read_text().splitlines()) == context + 1
    trained = load_trained_model(uninterrupted.path / "small")
    target = torch.tensor([list(text.read_bytes()[:context])])
    tokens = torch.cat([torch.tensor([[256]]), target[:, :-1]], dim=1)
    whole = trained.model.loss(tokens, target).item()
    assert values[f"{prefix}/loss"] == pytest.approx(whole, abs=1e-4)
    short = uninterrupted.longhaul(*arguments[:-1], "16384", check=False)
    assert short.returncode == 2
    assert f"--text: found 9500 tokens in {text}, wanted 16384" in short.stderr


@pytest.mark.soak
def test_memory_is_flat_from_16_thousand_tokens_to_262_thousand(
    make_run: Callable[[int], Run],
) -> None:
    run = make_run(8)
    demo = ("model.layers=4", "model.width=192", "model.heads=6", "data.context=512")
    sizes = ("optim.tokens_per_update=4096", "trainer.micro_batch=8", "trainer.max_tokens=4096")
    sizes += ("checkpoint.every_tokens=4096", "trainer.validate_every_tokens=4096")
    run.longhaul("train", "small.yaml", *demo, *sizes)
    library = "".join(path.read_text() for path in sorted(Path(json.__file__).parent.glob("*.py")))
    text = run.path / "long.txt"
    text.write_text((library * 20)[: 1 << 18])
    grown = {}
    for context in (1 << 14, 1 << 18):
        result = subprocess.run(
            [sys.executable, "-P", str(MEMORY), "small", str(text), str(context)],
            cwd=run.path,
            env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert result.returncode == 0, result.stderr
        before, after = map(int, result.stdout.splitlines()[-1].split()[1:])
        grown[context] = after - before
        print(f"{context:,} tokens: peak {after / 2**20:.0f} MiB, {before / 2**20:.0f} before")
    # Sixteen times the tokens: the text itself and two float64 sums a position, no activations.
    # One layer's activations alone, held for all tokens, would be 200 MB.
    assert grown[1 << 18] - grown[1 << 14] < 64 * 2**20


def test_a_text_is_read_as_texts_are_prepared(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\ntwo\r".encode())
    assert _read(path) == "one\r\ntwo\r"
    path.write_bytes("\ufeffone".encode("utf-16"))
    with pytest.raises(ValueError, match=r"--text: found .*a.txt, wanted text in UTF-8"):
        _read(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"a.txt: found a FIFO, wanted a regular file"):
        _read(path)
