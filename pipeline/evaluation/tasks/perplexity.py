"""Perplexity through a window of each of --contexts that slides by --stride."""

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch

from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.evaluation import figures, tables
from longhaul.pipeline.evaluation.labels import label, metric_prefix
from longhaul.pipeline.evaluation.options import BosOptions, TextOptions
from longhaul.pipeline.evaluation.task import TaskResult
from longhaul.pipeline.evaluation.windows import (
    Passage,
    read_beginnings,
    read_documents,
    read_losses,
    read_windows,
    shifted,
)
from longhaul.pipeline.generation.decoding import tokens_at_once, tokens_per_pass
from longhaul.pipeline.runs.trained_model import TrainedModel


@dataclass(frozen=True, kw_only=True)
class Options(TextOptions, BosOptions):
    contexts: tuple[int, ...] | None = None
    """Lengths of windows in tokens; default 1, 2 and 4 training contexts."""

    stride: int | None = None
    """Tokens by which the window slides; default 256, or the shortest window."""

    document_tokens: int | None = None
    """Read only the first N tokens of each document, at least as many as the longest window;
    default the whole text, cut into documents as long as that window."""


@dataclass(frozen=True)
class _Row:
    window: tables.Positive
    stride: tables.Positive
    tokens: tables.Count
    perplexity: Annotated[float, tables.number(1, 1e100)]
    standard_error: tables.LossError
    document_tokens: tables.Positive | Literal["all"]
    bos: tables.Bos


_OPTION_COLUMNS = {
    "stride": "stride in tokens",
    "document_tokens": "first tokens read of each document",
    **tables.BOS_COLUMN,
}


def _curve(rows: tables.Rows) -> tables.Curve:
    found = tables.columns(rows, "window", *_OPTION_COLUMNS, "perplexity")
    errors = [row["perplexity"] * row["standard_error"] for row in rows]
    return tables.Curve(found, tables.band(found["perplexity"], errors))


def _caption(of_runs: Sequence[tables.Rows]) -> str:
    return (
        f"Tokens scored per run: {tables.column_values(of_runs, 'tokens')}; "
        f"{tables.options_in_words(of_runs, _OPTION_COLUMNS)}; bands: standard error over these "
        "parts of documents or, where all is read, over windows as long as the longest."
    )


TABLES = (
    tables.TaskTable(
        name="perplexity",
        row=_Row,
        title="Perplexity of a sliding window",
        measured_by="--tasks perplexity",
        options=_OPTION_COLUMNS,
        charts=[
            # Figure 4 of CoCA.
            tables.Chart(
                name="perplexity",
                curve=_curve,
                caption=_caption,
                x_label="sliding window (tokens)",
                y_label="perplexity (per token)",
                y_axis="perplexity",
            )
        ],
    ),
)


def sliding_windows(length: int, window: int, stride: int) -> Iterator[tuple[int, int]]:
    """The end of each window over a document, and how many of its last tokens are scored.

    The first window scores all its tokens. Every later window ends a stride further, or at the end
    of the document, and scores the tokens that no earlier window has scored. So each token is
    scored once, and after the first window with at least window - stride tokens before it.
    """
    scored = 0
    for end in range(window, length + stride, stride):
        end = min(end, length)
        yield end, end - scored
        scored = end
        if end == length:
            return


def sliding_loss(
    model: LanguageModel,
    passage: Passage,
    *,
    window: int,
    stride: int,
    bos_id: int | None,
    precision: str,
    progress: Callable[[int], None] = lambda tokens: None,
) -> float:
    """Sum of the losses of a passage's tokens in nats. Every window reads as many tokens.

    The first that a window reads is bos_id or, with None, the token before those that it predicts.
    The first token of a passage is not scored then, since nothing precedes it. The source (CoCA,
    section 4.2) names window and stride alone.
    """
    document = passage.tokens[None]
    is_first = None
    wanted = document if bos_id is not None else document[:, 1:]
    T = wanted.shape[1]
    window = min(window, T)
    total = 0.0
    pieces = list(sliding_windows(T, window, stride))
    # All windows have the same length, so as many as fit are read in one batch.
    side_by_side = max(1, tokens_per_pass(document.device) // window)
    for start in range(0, len(pieces), side_by_side):
        group = pieces[start : start + side_by_side]
        target = torch.cat([wanted[:, end - window : end] for end, _ in group])
        if bos_id is not None:
            if passage.is_first is not None:
                is_first = torch.stack([passage.is_first[end - window : end] for end, _ in group])
                is_first[:, 0] = True
            tokens = shifted(target, bos_id, is_first)
        else:
            tokens = torch.cat([document[:, end - window : end] for end, _ in group])
        at_once = tokens_at_once(model, window)
        losses = read_losses(model, tokens, target, precision, at_once, progress, is_first).double()
        for row, (_, scored) in zip(losses, group, strict=True):
            total += row[window - scored :].sum().item()
    return total


def chosen_windows(trained: TrainedModel, options: Options) -> tuple[tuple[int, ...], int]:
    """The lengths of the windows and the stride; by default 1, 2 and 4 training contexts.

    Raises:
        ValueError: the stride is longer than the shortest window, so that tokens would be left out,
            or a window is longer than what is read of each document.
    """
    trained_at = trained.positions.context
    windows = options.contexts or tuple(trained_at * 2**power for power in range(3))
    stride = min(256, *windows) if options.stride is None else options.stride
    if not 1 <= stride <= min(windows):
        raise ValueError(
            f"--stride: found {stride}, wanted 1 to {min(windows)}, the shortest window"
        )
    longest = options.document_tokens
    if longest is not None and longest < max(windows):
        raise ValueError(
            f"--document-tokens: found {longest}, wanted {max(windows)} or more, the longest of "
            "--contexts"
        )
    return windows, stride


def check(trained: TrainedModel, options: Options) -> None:
    windows, _ = chosen_windows(trained, options)
    data = trained.config.data
    if options.no_bos and not options.text and data.document_mask and trained.corpus.has_ends:
        raise ValueError(
            "--no-bos: found with documents that do not see each other, whose first tokens nothing "
            "would predict; wanted the id in front of each, or --text"
        )
    read_windows(trained, options, options.document_tokens or max(windows))


def measure(trained: TrainedModel, options: Options, folder: Path) -> TaskResult:
    trained_at = trained.positions.context
    windows, stride = chosen_windows(trained, options)
    if options.document_tokens is None:
        length = max(windows)
        documents = read_documents(trained, options, length)
    else:
        length = options.document_tokens
        documents = read_beginnings(trained, options, length)
    bos_id = None if options.no_bos else trained.corpus.bos_id
    # Without a bos id, nothing comes before the first token of a document.
    scored = length - options.no_bos
    work = sum(
        min(window, scored) * len(list(sliding_windows(scored, min(window, scored), stride)))
        for window in windows
    )
    losses: dict[int, float] = {}
    errors: dict[int, float] = {}
    with trained.ranks.progress(work * len(documents), "perplexity") as progress:
        for window in windows:
            document_losses = [
                sliding_loss(
                    trained.model,
                    document.to(trained.device),
                    window=window,
                    stride=stride,
                    bos_id=bos_id,
                    precision=trained.config.trainer.precision,
                    progress=progress.add,
                )
                for document in trained.ranks.share(documents)
            ]
            gathered = trained.ranks.gather(document_losses)
            losses[window] = sum(gathered) / (scored * len(documents))
            errors[window] = figures.standard_error([loss / scored for loss in gathered])
    table, picture = folder / "perplexity.csv", folder / "perplexity.png"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        names = ["window", "stride", "documents", "tokens", "loss_nats", "perplexity"]
        writer.writerow([*names, "standard_error", "document_tokens", "bos"])
        for window, loss in losses.items():
            tokens = scored * len(documents)
            row = [window, stride, len(documents), tokens, f"{loss:.6f}", f"{math.exp(loss):.6f}"]
            read = options.document_tokens or "all"
            writer.writerow([*row, f"{errors[window]:.6f}", read, options.bos])
    with figures.figure(picture, f"{trained.config.name}, {label(trained, options)}") as axes:
        values = [math.exp(loss) for loss in losses.values()]
        bars = [value * errors[window] for window, value in zip(losses, values, strict=True)]
        axes.errorbar(
            list(losses), values, bars, fmt="o-", color=figures.BLUE, label=figures.ERROR_BARS
        )
        axes.axvline(trained_at, color="black", linestyle=":", label="training context")
        figures.tokens_axis(axes, f"sliding window (tokens), stride {stride}", list(losses))
        axes.set_ylabel("perplexity (per token)")
        figures.widen(axes, is_relative=True)
        figures.legend_below(axes)
    prefix = metric_prefix(trained, options)
    named = {f"{prefix}/perplexity_{w:06d}": math.exp(loss) for w, loss in losses.items()}
    return TaskResult(named, (table, picture))
