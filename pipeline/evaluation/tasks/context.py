"""Loss at each of --contexts, on the same tokens, cut into windows of each length."""

import csv
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longhaul.pipeline.evaluation import figures, tables
from longhaul.pipeline.evaluation.labels import BYTES_PER_TOKEN, label, metric_prefix
from longhaul.pipeline.evaluation.options import TextOptions
from longhaul.pipeline.evaluation.task import TaskResult
from longhaul.pipeline.evaluation.windows import (
    CutWindows,
    bytes_per_token,
    read_documents,
    read_losses,
    read_windows,
)
from longhaul.pipeline.generation.decoding import tokens_at_once, tokens_per_pass
from longhaul.pipeline.runs.trained_model import TrainedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Options(TextOptions):
    contexts: tuple[int, ...] | None = None
    """Lengths of windows in tokens; default 1/4 to 4 training contexts."""


@dataclass(frozen=True)
class _Row:
    context: tables.Positive
    loss_nats: tables.Loss
    tokens: tables.Count
    standard_error: tables.LossError


def _curve(rows: tables.Rows) -> tables.Curve:
    found = tables.columns(rows, "context", "loss_nats")
    errors = tables.columns(rows, "standard_error")["standard_error"]
    return tables.Curve(found, tables.band(found["loss_nats"], errors))


def _caption(of_runs: Sequence[tables.Rows]) -> str:
    return (
        f"Tokens per run: {tables.column_values(of_runs, 'tokens')}, the same for all lengths; "
        "bands: standard error over windows as long as the longest."
    )


TABLES = (
    tables.TaskTable(
        name="context",
        row=_Row,
        title="Loss in windows of each length",
        measured_by="--tasks context",
        charts=[
            tables.Chart(
                name="loss_in_windows",
                curve=_curve,
                caption=_caption,
                x_label="window (tokens)",
                y_label="loss (nats per token)",
            )
        ],
    ),
)


def chosen_contexts(trained: TrainedModel, options: Options) -> tuple[int, ...]:
    """The chosen contexts; by default a quarter of the training context to four times it.

    Raises:
        ValueError: one does not divide the longest, so that they could not read the same tokens.
    """
    trained_at = trained.positions.context
    contexts = options.contexts or tuple(max(1, trained_at // 4) * 2**power for power in range(5))
    for context in contexts:
        if max(contexts) % context:
            raise ValueError(
                f"--contexts: found {context} with {max(contexts)}, wanted divisors of the "
                "longest, so that all of them read the same tokens"
            )
    return contexts


def check(trained: TrainedModel, options: Options) -> None:
    read_windows(trained, options, max(chosen_contexts(trained, options)))


def measure(trained: TrainedModel, options: Options, folder: Path) -> TaskResult:
    contexts = chosen_contexts(trained, options)
    documents = read_documents(trained, options, max(contexts))
    num_tokens = max(contexts) * len(documents)
    bos_id = trained.corpus.bos_id
    losses: dict[int, float] = {}
    errors: dict[int, float] = {}
    with trained.ranks.progress(num_tokens * len(contexts), "context") as progress:
        for context in contexts:
            side_by_side = max(1, tokens_per_pass(trained.device) // context)
            windows = CutWindows(documents, context, bos_id, side_by_side)
            sums = []
            for batch in trained.ranks.share(windows):
                read = read_losses(
                    trained.model,
                    batch["input"].to(trained.device),
                    batch["target"].to(trained.device),
                    trained.config.trainer.precision,
                    tokens_at_once(trained.model, context),
                    progress.add,
                    batch["is_first"].to(trained.device) if "is_first" in batch else None,
                )
                sums += [read.double().sum(dim=1).tolist()]
            of_windows = [loss for batch in trained.ranks.gather(sums) for loss in batch]
            each = max(contexts) // context
            of_longest = [
                sum(of_windows[first : first + each]) / max(contexts)
                for first in range(0, len(of_windows), each)
            ]
            losses[context] = sum(of_longest) / len(of_longest)
            errors[context] = figures.standard_error(of_longest)
    table, picture = folder / "context.csv", folder / "context.png"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["context", "loss_nats", "tokens", "standard_error"])
        for context, loss in losses.items():
            writer.writerow([context, f"{loss:.6f}", num_tokens, f"{errors[context]:.6f}"])
    with figures.figure(picture, f"{trained.config.name}, {label(trained, options)}") as axes:
        axes.errorbar(
            list(losses),
            list(losses.values()),
            list(errors.values()),
            fmt="o-",
            color=figures.BLUE,
            label=figures.ERROR_BARS,
        )
        trained_at = trained.positions.context
        axes.axvline(trained_at, color="black", linestyle=":", label="training context")
        figures.tokens_axis(axes, "context (tokens)", list(losses))
        axes.set_ylabel("loss (nats per token)")
        figures.widen(axes)
        figures.legend_below(axes)
    prefix = metric_prefix(trained, options)
    values = {f"{prefix}/loss_in_context_{c:06d}": loss for c, loss in losses.items()}
    if trained.ranks.is_first and not options.text:
        try:
            values[BYTES_PER_TOKEN] = bytes_per_token(documents, trained.corpus)
        except (OSError, ValueError) as error:  # Losses need no tokenizer.
            logger.warning("context: bytes per token are not counted: %s", error)
    return TaskResult(values, (table, picture))
