"""Passkey prompts, and their scoring against answers made by hand."""

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from longhaul.datamodules.tokenizer import build_tokenizer
from longhaul.pipeline.evaluation.figures import wilson_interval
from longhaul.pipeline.evaluation.tasks import passkey
from longhaul.pipeline.evaluation.tasks.passkey import (
    PASSKEY_DEPTHS,
    Prompt,
    ask,
    by_length,
    draw_curve,
    draw_depths,
    is_right,
    make_prompt,
    make_prompts,
    score,
    write_table,
)
from longhaul.pipeline.generation.decoding import Session
from longhaul.pipeline.runs.trained_model import load_trained_model
from longhaul.pipeline.terminal.progress import TokenProgress

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@pytest.mark.parametrize("name", ["bytes", "gpt2", "longcrawl64"])
@pytest.mark.parametrize("length", [256, 1024, 4096])
def test_a_prompt_is_the_shortest_longer_than_asked_for(name: str, length: int) -> None:
    tokenizer = build_tokenizer(name)
    for depth in PASSKEY_DEPTHS:
        prompt = make_prompt(tokenizer, length, "54321", depth=depth)
        assert len(prompt.ids) == len(tokenizer.encode(prompt.text)) > length
        shorter = prompt.text.replace(FILLER + "\n", "", 1)
        assert len(tokenizer.encode(shorter)) <= length


def test_a_prompt_has_the_lines_of_the_paper_and_its_key_where_asked() -> None:
    tokenizer = build_tokenizer("bytes")
    for depth in PASSKEY_DEPTHS:
        first, *lines, last = make_prompt(tokenizer, 2048, "54321", depth=depth).text.split("\n")
        assert first == (
            "There is an important info hidden inside a lot of irrelevant text. Find it and "
            "memorize them. I will quiz you about the important information there."
        )
        assert last == "What is the pass key?"
        place = lines.index("The pass key is 54321. Remember it. 54321 is the pass key.")
        fillers = lines[:place] + lines[place + 1 :]
        assert set(fillers) == {FILLER}
        assert abs(place - depth * len(fillers)) <= 0.5


def test_prompts_are_the_same_every_time_and_take_depths_in_turn() -> None:
    tokenizer = build_tokenizer("bytes")
    one, two = (make_prompts(tokenizer, 512, 12, "grid") for _ in range(2))
    assert [prompt.text for prompt in one] == [prompt.text for prompt in two]
    assert [prompt.depth for prompt in one] == [
        *PASSKEY_DEPTHS,
        *PASSKEY_DEPTHS,
        *PASSKEY_DEPTHS[:2],
    ]
    assert len({prompt.key for prompt in one}) > 9
    assert all(10_000 <= int(prompt.key) <= 99_999 for prompt in one)
    other = make_prompts(tokenizer, 1024, 12, "grid")
    assert [prompt.key for prompt in one] != [prompt.key for prompt in other]


def test_random_places_are_equally_likely_and_the_same_every_time() -> None:
    tokenizer = build_tokenizer("bytes")
    prompts = make_prompts(tokenizer, 600, 600, "random")
    again = make_prompts(tokenizer, 600, 600, "random")
    assert [prompt.text for prompt in prompts] == [prompt.text for prompt in again]
    places = Counter[int]()
    for prompt in prompts:
        _, *lines, _ = prompt.text.split("\n")
        place = lines.index(
            f"The pass key is {prompt.key}. Remember it. {prompt.key} is the pass key."
        )
        assert prompt.depth == place / 5
        places[place] += 1
    # Six places; with both ends as half a place, these would be drawn 60 times each.
    assert sorted(places) == [0, 1, 2, 3, 4, 5]
    assert min(places.values()) > 75
    # The keys are those of the grid: what differs is where they stand.
    grid = make_prompts(tokenizer, 600, 600, "grid")
    assert [prompt.key for prompt in prompts] == [prompt.key for prompt in grid]


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("54321", True),
        (" The pass key is 54321. Remember", True),
        ("\n54321\\n I have to say", True),
        ("12345. No, 54321", True),
        ("543210", False),
        ("154321", False),
        ("5432", False),
        ("54 321", False),
        ("the pass key", False),
        ("", False),
    ],
)
def test_an_answer_is_right_if_the_key_is_a_number_in_it(answer: str, right: bool) -> None:
    assert is_right("54321", answer) is right


def test_accuracy_is_the_share_that_a_stub_answers_right(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("bytes")
    prompts = [*make_prompts(tokenizer, 256, 10, "grid"), *make_prompts(tokenizer, 512, 10, "grid")]
    asked: list[int] = []

    def answer(group: Sequence[Prompt]) -> list[str]:
        """Right at 256 tokens; at 512 where the key stands in the second half."""
        assert len({len(prompt.ids) for prompt in group}) == 1
        asked.append(len(group))
        return [
            f"It is {p.key}." if p.length == 256 or p.depth > 0.5 else "99999999" for p in group
        ]

    answers = ask(prompts, answer)
    assert sum(asked) == 20
    assert max(asked) > 1
    found = score(prompts, answers)
    assert by_length(found) == {256: (10, 10), 512: (4, 10)}
    assert found[512, 0.75] == [True, True]
    assert found[512, 0.5] == [False, False]
    write_table(tmp_path / "p.csv", found, passkey.Options())
    rows = list(csv.DictReader((tmp_path / "p.csv").open()))
    assert [(r["length"], r["depth"], r["prompts"], r["right"]) for r in rows[-2:]] == [
        ("512", "0.75", "2", "2"),
        ("512", "1.0", "2", "2"),
    ]
    draw_curve(tmp_path / "curve.png", found, "a stub", 256)
    draw_depths(tmp_path / "depths.png", found, "a stub")
    draw_depths(tmp_path / "depths.png", {(256, 0.1): [True], (512, 0.95): [False]}, "no grid")
    for name in ("curve.png", "depths.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_interval_holds_the_share_and_stays_a_share() -> None:
    for right, count in ((0, 20), (20, 20), (7, 20)):
        low, high = wilson_interval(right, count)
        assert 0 <= low <= right / count + 1e-12
        assert right / count - 1e-12 <= high <= 1
    assert wilson_interval(50, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)


def test_passkeys_are_measured_on_a_run(uninterrupted: Run) -> None:
    arguments = ("--tasks", "passkey", "--lengths", "300,256", "--prompts", "5")
    uninterrupted.longhaul("evaluate", "small", *arguments)
    folder = uninterrupted.path / "small" / "evaluation" / "step-000000030"
    rows = list(csv.DictReader((folder / "passkey.csv").open()))
    assert [(int(row["length"]), float(row["depth"])) for row in rows] == [
        (length, depth) for length in (256, 300) for depth in PASSKEY_DEPTHS
    ]
    assert {(row["depths"], row["bos"]) for row in rows} == {("grid", "yes")}
    values = json.loads((folder / "results.json").read_text())
    assert {name for name in values if "passkey" in name} == {
        "evaluation/passkey_000256",
        "evaluation/passkey_000300",
    }
    assert (folder / "passkey_depth.png").exists()
    # At random places, with one prompt, and without a bos id in front of it.
    random = ("--lengths", "256", "--prompts", "1", "--depths", "random", "--no-bos")
    uninterrupted.longhaul("evaluate", "small", "--tasks", "passkey", *random)
    (row,) = csv.DictReader((folder / "passkey.csv").open())
    tokenizer = build_tokenizer("bytes")
    (prompt,) = make_prompts(tokenizer, 256, 1, "random")
    assert (row["length"], row["prompts"]) == ("256", "1")
    assert float(row["depth"]) == prompt.depth
    assert (row["depths"], row["bos"]) == ("random", "no")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "512,255"], "--lengths: found 255, wanted 256 or more"),
        (["--lengths", "1x"], "--lengths: found '1x', wanted tokens, such as 1024,64k"),
        (["--depths", "random", "--prompts", "0"], "--prompts: found 0, wanted 1 or more"),
        (["--prompts", "4"], "--prompts: found 4, wanted 5 or more with passkey, one per depth"),
    ],
)
def test_bad_arguments_are_one_line_before_any_task(
    uninterrupted: Run, arguments: list[str], message: str
) -> None:
    given = ("evaluate", "small", "--tasks", "bigram,passkey", *arguments, "--again")
    result = uninterrupted.longhaul(*given, check=False)
    assert result.returncode == 2
    assert (result.stdout, result.stderr) == ("", f"longhaul: {message}\n")


def test_what_follows_the_end_of_text_is_no_answer(
    uninterrupted: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = 256

    def decode(model: Any, sessions: Sequence[Session], **options: Any) -> Iterator[Any]:
        """Every other answer has the end of text before the key, the others after it."""
        for index, session in enumerate(sessions):
            key = re.search(rb"key is (\d+)", bytes(session.unread[1:]))
            assert key is not None
            before, after = ([end], []) if len(asked) % 2 else ([], [end])
            asked.append(session)
            for token in [*before, *key[1], *after]:
                if not session.is_done:
                    yield index, token

    asked: list[Session] = []
    for name in ("draw_curve", "draw_depths"):
        monkeypatch.setattr(passkey, name, lambda *arguments: None)
    monkeypatch.setattr(passkey, "decode", decode)
    trained = load_trained_model(uninterrupted.path / "small")
    result = passkey.measure(trained, passkey.Options(lengths=(256,), prompts=10), tmp_path)
    assert result.values == {"evaluation/passkey_000256": 0.5}
    assert len(asked) == 10
    assert all(session.is_done for session in asked)


def test_64_tokens_are_asked_for_and_progress_ends_at_its_total(
    uninterrupted: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[int, int]] = []
    asked: list[int] = []

    def decode(*arguments: Any, num_tokens: int, **options: Any) -> Iterator[Any]:
        asked.append(num_tokens)
        return iter(())

    def show(self: TokenProgress, done: int) -> None:
        self._done = done
        shown.append((done, self._total or 0))

    monkeypatch.setattr(TokenProgress, "show", show)
    for name in ("draw_curve", "draw_depths"):
        monkeypatch.setattr(passkey, name, lambda *arguments: None)
    monkeypatch.setattr(passkey, "decode", decode)
    trained = load_trained_model(uninterrupted.path / "small")
    passkey.measure(trained, passkey.Options(lengths=(256, 512), prompts=5), tmp_path)
    assert set(asked) == {64}
    totals = {total for _, total in shown}
    assert next(done for done, _ in shown) == 0
    assert {shown[-1][0]} == totals
    # A process that has the larger share counts it for all.
    progress = TokenProgress(10, times=2)
    progress.show(0)
    progress.add(6)
    assert shown[-1] == (10, 10)
