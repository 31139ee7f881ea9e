"""Share of keys, hidden in texts of --lengths tokens, that the model retrieves.

A key is a number in a long, repetitive text, which is asked for at its end. Prompts have the format
of CoCA (arXiv:2309.08646, listing 1), after Mohtashami and Jaggi (2023). CoCA does not say what
stands between lines, nor how answers are drawn: here line breaks, and greedily.
"""

import csv
import itertools
import math
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch

from longhaul.datamodules.tokenizer import Ids, Tokenizer
from longhaul.pipeline.evaluation import figures, tables
from longhaul.pipeline.evaluation.labels import label, metric_prefix
from longhaul.pipeline.evaluation.options import BosOptions
from longhaul.pipeline.evaluation.task import TaskResult
from longhaul.pipeline.generation.decoding import Sampling, Session, decode
from longhaul.pipeline.runs.trained_model import TrainedModel


@dataclass(frozen=True, kw_only=True)
class Options(BosOptions):
    lengths: tuple[int, ...] | None = None
    """Lengths of prompts in tokens; default powers of two from 256 to 4 training contexts."""

    depths: Literal["grid", "random"] = "grid"
    """Where the key stands, at each of 5 depths in turn, or anywhere."""

    prompts: int = 20
    """Prompts per length."""


@dataclass(frozen=True)
class _Row:
    length: tables.Positive
    prompts: tables.Positive
    right: tables.Count
    depths: Literal["grid", "random"]
    bos: tables.Bos


_OPTION_COLUMNS = {"depths": "depths of keys", **tables.BOS_COLUMN}


def answers_by_length(rows: tables.Rows) -> dict[int, tuple[int, int]]:
    """The numbers of right answers and of prompts at each length of a table, over all depths."""
    counts: dict[int, tuple[int, int]] = {}
    for row in rows:
        right, count = counts.get(row["length"], (0, 0))
        counts[row["length"]] = right + row["right"], count + row["prompts"]
    return dict(sorted(counts.items()))


def _curve(rows: tables.Rows) -> tables.Curve:
    counts = answers_by_length(rows)
    right, prompts = zip(*counts.values(), strict=True)
    low, high = zip(*itertools.starmap(figures.wilson_interval, counts.values()), strict=True)
    found: dict[str, Sequence[Any]] = {"length": list(counts), "right": right, "prompts": prompts}
    # All rows of a table are of the same options.
    found |= {name: [rows[0][name]] * len(counts) for name in _OPTION_COLUMNS}
    found["share"] = [r / p for r, p in counts.values()]
    return tables.Curve(found, (low, high))


def _caption(of_runs: Sequence[tables.Rows]) -> str:
    counts = {count for rows in of_runs for _, count in answers_by_length(rows).values()}
    return (
        f"Prompts per length: {', '.join(map(str, sorted(counts)))}; "
        f"{tables.options_in_words(of_runs, _OPTION_COLUMNS)}; bands: Wilson 95 %."
    )


TABLES = (
    tables.TaskTable(
        name="passkey",
        row=_Row,
        title="Passkeys retrieved",
        measured_by="--tasks passkey",
        most=("right", "prompts"),
        options=_OPTION_COLUMNS,
        charts=[
            # Figure 5 of CoCA.
            tables.Chart(
                name="passkey",
                curve=_curve,
                caption=_caption,
                x_label="length of the prompt (tokens)",
                y_label="passkeys retrieved (share)",
                y_axis="share",
            )
        ],
    ),
)

SHORTEST_PASSKEY = 256
"""Length of the shortest prompts, in tokens."""

PASSKEY_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The grid of the key's depths: the share of the filler text that comes before it."""

ANSWER_TOKENS = 64
# Tokens of the prompts that are answered side by side. Prompts are read one after the other, but
# each has a state while its answer is decoded.
_TOKENS_AT_ONCE = 4096

_TASK_LINE = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
_FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
_KEY_LINE = "The pass key is {key}. Remember it. {key} is the pass key."
_QUESTION = "What is the pass key?"


@dataclass(frozen=True)
class Prompt:
    """A text that contains a key."""

    length: int
    """The requested length in tokens; `ids` has a few more."""

    depth: float
    """The share of the fillers before the key: the requested one, or that of its random place."""

    key: str
    text: str
    ids: Ids


Answer = Callable[[Sequence[Prompt]], list[str]]
"""A model's answers to prompts that have the same number of tokens."""


def passkey_text(key: str, fillers: int, before: int) -> str:
    """The prompt with `fillers` copies of the filler text, `before` of them before the key."""
    lines = [_FILLER] * fillers
    lines.insert(before, _KEY_LINE.format(key=key))
    return "\n".join([_TASK_LINE, *lines, _QUESTION])


def make_prompt(
    tokenizer: Tokenizer, length: int, key: str, *, depth: float | None = None, place: float = 0.0
) -> Prompt:
    """The prompt with the fewest fillers that make it longer than `length` tokens.

    Args:
        tokenizer: of the model.
        length: tokens of the whole prompt.
        key: five digits.
        depth: the share of the fillers before the key, 0 to 1; None means that `place` decides.
        place: 0 to 1, exclusive. Numbers drawn evenly from there make every place before, between
            and after the fillers equally likely.
    """

    def before(fillers: int) -> int:
        return int(place * (fillers + 1)) if depth is None else round(depth * fillers)

    def build(fillers: int) -> tuple[str, Ids]:
        text = passkey_text(key, fillers, before(fillers))
        return text, tokenizer.encode(text)

    none, some = (len(build(fillers)[1]) for fillers in (0, 8))
    # A filler's number of tokens may depend on its neighbours, so the search starts a little below
    # the estimate and goes up.
    fillers = max(0, int((length - none) / ((some - none) / 8)) - 2)
    text, ids = build(fillers)
    while len(ids) <= length:
        fillers += 1
        text, ids = build(fillers)
    found = round(before(fillers) / max(1, fillers), 4) if depth is None else depth
    return Prompt(length, found, key, text, ids)


def make_prompts(tokenizer: Tokenizer, length: int, count: int, depths: str) -> list[Prompt]:
    """The same prompts on every call: keys from 10,000 to 99,999, depths of a grid or random.

    The source says "a random position between the fillers"; here the key may also stand before the
    first filler and after the last, as in Mohtashami and Jaggi's prompts.
    """
    draw = random.Random(f"passkey {length}")
    keys = [str(draw.randint(10_000, 99_999)) for _ in range(count)]
    if depths == "random":
        return [make_prompt(tokenizer, length, key, place=draw.random()) for key in keys]
    turns = itertools.cycle(PASSKEY_DEPTHS)
    return [make_prompt(tokenizer, length, key, depth=next(turns)) for key in keys]


def is_right(key: str, answer: str) -> bool:
    """Whether the answer contains the key as a whole number."""
    return re.search(rf"(?<!\d){key}(?!\d)", answer) is not None


def score(prompts: Sequence[Prompt], answers: Sequence[str]) -> dict[tuple[int, float], list[bool]]:
    """Whether each answer is right, by length and depth."""
    scores: dict[tuple[int, float], list[bool]] = defaultdict(list)
    for prompt, answer in zip(prompts, answers, strict=True):
        scores[prompt.length, prompt.depth].append(is_right(prompt.key, answer))
    return dict(scores)


def ask(prompts: Sequence[Prompt], answer: Answer) -> list[str]:
    """Answers in the order of the prompts. Prompts with the same number of tokens form batches."""
    answers: dict[int, str] = {}
    for group in _batches(prompts):
        for index, text in zip(group, answer([prompts[i] for i in group]), strict=True):
            answers[index] = text
    return [answers[index] for index in range(len(prompts))]


def _batches(prompts: Sequence[Prompt]) -> Iterator[list[int]]:
    alike: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        alike[len(prompt.ids)].append(index)
    for tokens, indices in alike.items():
        at_once = max(1, _TOKENS_AT_ONCE // tokens)
        yield from (indices[i : i + at_once] for i in range(0, len(indices), at_once))


def chosen_lengths(trained: TrainedModel, options: Options) -> list[int]:
    """The lengths of the prompts in tokens; by default up to four training contexts.

    Raises:
        ValueError: one is too short for a prompt.
    """
    if options.lengths is None:
        longest = max(SHORTEST_PASSKEY, 4 * trained.positions.context)
        return [2**k for k in range(SHORTEST_PASSKEY.bit_length() - 1, longest.bit_length())]
    if min(options.lengths) < SHORTEST_PASSKEY:
        raise ValueError(
            f"--lengths: found {min(options.lengths)}, wanted {SHORTEST_PASSKEY} or more"
        )
    return list(options.lengths)


def check(trained: TrainedModel, options: Options) -> None:
    chosen_lengths(trained, options)
    if options.depths == "grid" and options.prompts < len(PASSKEY_DEPTHS):
        raise ValueError(
            f"--prompts: found {options.prompts}, wanted {len(PASSKEY_DEPTHS)} or more with "
            "passkey, one per depth"
        )
    if options.prompts < 1:
        raise ValueError(f"--prompts: found {options.prompts}, wanted 1 or more")
    # Kinds of linear cost refuse to keep a state under dynamic_ntk.
    trained.model.prefill(torch.tensor([[trained.corpus.bos_id]], device=trained.device))


def measure(trained: TrainedModel, options: Options, folder: Path) -> TaskResult:
    lengths = chosen_lengths(trained, options)
    corpus = trained.corpus
    tokenizer = corpus.load_tokenizer()
    sampling = Sampling(vocabulary=corpus.vocab_size)
    first = [] if options.no_bos else [corpus.bos_id]

    def work(prompt: Prompt) -> int:
        return len(first) + len(prompt.ids) + ANSWER_TOKENS

    def answer(group: Sequence[Prompt]) -> list[str]:
        sessions = [Session([*first, *prompt.ids.tolist()]) for prompt in group]
        answers: list[list[int]] = [[] for _ in group]
        device = trained.device.type
        is_rounded = trained.config.trainer.precision == "bf16-mixed"
        with torch.autocast(device, dtype=torch.bfloat16, enabled=is_rounded):
            for index, token in decode(
                trained.model, sessions, num_tokens=ANSWER_TOKENS, sampling=sampling
            ):
                # What follows the end of the text would be an answer to something else.
                if token == corpus.eot_id:
                    sessions[index].is_done = True
                else:
                    answers[index].append(token)
        progress.add(sum(map(work, group)))
        return [tokenizer.decode(ids) for ids in answers]

    scores: dict[tuple[int, float], list[bool]] = {}
    prompts_of = {
        length: make_prompts(tokenizer, length, options.prompts, options.depths)
        for length in lengths
    }
    total = sum(work(prompt) for some in prompts_of.values() for prompt in some)
    with trained.ranks.progress(total, "passkey") as progress:
        for prompts in prompts_of.values():
            answers = ask(list(trained.ranks.share(prompts)), answer)
            scores |= score(prompts, trained.ranks.gather(answers))
    table = folder / "passkey.csv"
    write_table(table, scores, options)
    curve, depths = folder / "passkey.png", folder / "passkey_depth.png"
    title = f"{trained.config.name}, {label(trained, options)}"
    draw_curve(curve, scores, title, trained.positions.context)
    draw_depths(depths, scores, title)
    prefix = metric_prefix(trained, options)
    values = {
        f"{prefix}/passkey_{length:06d}": right / count
        for length, (right, count) in by_length(scores).items()
    }
    return TaskResult(values, (table, curve, depths))


def by_length(scores: dict[tuple[int, float], list[bool]]) -> dict[int, tuple[int, int]]:
    """The numbers of right answers and of prompts at each length, over all depths."""
    lengths = sorted({length for length, _ in scores})
    sums = {}
    for length in lengths:
        answers = [right for key, some in scores.items() if key[0] == length for right in some]
        sums[length] = sum(answers), len(answers)
    return sums


def write_table(path: Path, scores: dict[tuple[int, float], list[bool]], options: Options) -> None:
    """CSV with a row for each length and depth, which names the options of the prompts."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["length", "depth", "prompts", "right", "accuracy", "depths", "bos"])
        for (length, depth), answers in sorted(scores.items()):
            right = sum(answers)
            row = [length, depth, len(answers), right, f"{right / len(answers):.4f}"]
            writer.writerow([*row, options.depths, options.bos])


def draw_curve(
    path: Path, scores: dict[tuple[int, float], list[bool]], title: str, trained_at: int
) -> None:
    """PNG of accuracy against length, with Wilson's interval of 95 %."""
    sums = by_length(scores)
    lengths = list(sums)
    shares = [right / count for right, count in sums.values()]
    low, high = zip(*(figures.wilson_interval(*sums[length]) for length in lengths), strict=True)
    with figures.figure(path, title) as axes:
        axes.fill_between(lengths, low, high, color=figures.BLUE, alpha=0.15, linewidth=0)
        axes.plot(lengths, shares, "o-", color=figures.BLUE)
        axes.axvline(trained_at, color="black", linestyle=":", label="training context")
        axes.set_ylim(-0.02, 1.02)
        figures.tokens_axis(axes, "length of the prompt (tokens)", lengths)
        axes.set_ylabel("passkeys retrieved (share)")
        figures.legend_below(axes)


def draw_depths(path: Path, scores: dict[tuple[int, float], list[bool]], title: str) -> None:
    """PNG of accuracy by length and depth; random depths are put together in fifths."""
    lengths = sorted({length for length, _ in scores})
    is_grid = {depth for _, depth in scores} <= set(PASSKEY_DEPTHS)
    rows = [
        f"{100 * depth:.0f}" if is_grid else f"{20 * i} to {20 * i + 20}"
        for i, depth in enumerate(PASSKEY_DEPTHS)
    ]
    answers: dict[tuple[int, int], list[bool]] = defaultdict(list)
    for (length, depth), some in scores.items():
        # A fifth holds one depth of the grid.
        answers[length, min(int(depth * len(rows)), len(rows) - 1)] += some
    shares = [
        [fmean(answers[length, row]) if answers[length, row] else math.nan for length in lengths]
        for row in range(len(rows))
    ]
    with figures.figure(path, title) as axes:
        # The colours of cividis look alike with and without colour blindness.
        image = axes.imshow(shares, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.tick_params(axis="x", rotation=45 if len(lengths) > 5 else 0)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_xlabel("length of the prompt (tokens)")
        axes.set_ylabel("depth of the key (%)")
        axes.figure.colorbar(image, ax=axes, label="passkeys retrieved (share)")
