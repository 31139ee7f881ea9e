"""Writes the report of an MLflow experiment: a folder of figures, tables and one page."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

from longhaul.datamodules.urls import at_home
from longhaul.pipeline.evaluation.tables import TaskTable
from longhaul.pipeline.reporting import comparison, evaluations, summaries, training, verdicts
from longhaul.pipeline.reporting.drawing import Figure, Table, draw, write_csv
from longhaul.pipeline.reporting.page import write_page
from longhaul.pipeline.reporting.runs import Run, read_runs
from longhaul.pipeline.reporting.tables import TABLES
from longhaul.pipeline.reporting.variants import LEADING_COLUMNS, NamedRuns
from longhaul.pipeline.system.atomic_folder import atomic_folder, new_or_empty_folder, write_listing

logger = logging.getLogger(__name__)

_NO_PAIR = (
    "no finished run of another kind has a run of the reference kind (--against) of its seed, "
    "context and data that has read as much"
)
_LISTING = "report.sha256"

_RUN_CELLS: dict[str, Callable[[Run], str | int | float]] = {
    "learning_rate": lambda run: run.config.optim.learning_rate,
    "seed": lambda run: run.seed,
    "tokens": lambda run: run.tokens,
    "validation_loss_nats": lambda run: run.final_loss,
    "bits_per_byte": lambda run: run.bits_per_byte,
    "tokens_per_second": lambda run: run.speed,
    "parameters": lambda run: run.num_parameters,
    "state_bytes": lambda run: run.state_bytes,
    "commit": lambda run: run.commit,
    "hardware": lambda run: run.hardware,
    "data": lambda run: run.data.name,
    "data_sha256": lambda run: run.data.sha256,
    "tokenizer": lambda run: run.tokenizer,
}
"""The columns of runs.csv after LEADING_COLUMNS."""

T = TypeVar("T")

_Maker: TypeAlias = tuple[Callable[[NamedRuns], Iterable[T]], str]
"""Makes figures or tables; and the text that is shown if it makes none: the reason, or the command
that would measure it.
"""


def _measured_by(table: TaskTable) -> str:
    return f"longhaul evaluate RUN {table.measured_by}"


def _charts(are_losses: bool) -> dict[str, _Maker[Figure]]:
    """For each table of a task with charts: of losses, or of all else."""
    return {
        table.title: (partial(evaluations.charts, table), _measured_by(table))
        for table in TABLES.values()
        if table.charts and (table.charts[0].y_axis == "loss") is are_losses
    }


_FIGURES: dict[str, _Maker[Figure]] = {
    "Loss against tokens": (training.loss_against_tokens, "no run logged an update"),
    "Loss of each source": (training.loss_of_sources, "no run has data.sources"),
    **_charts(are_losses=True),
    "Training loss at equal sequences": (
        comparison.loss_at_sequences,
        "no finished run logged an update, or the losses there are not finite",
    ),
    "Gap at equal sequences": (comparison.gap_at_sequences, _NO_PAIR),
    "Loss against training context": (comparison.loss_against_context, "no run was validated"),
    "Gap at equal tokens": (comparison.gap_against_context, _NO_PAIR),
    "Loss against state": (training.loss_against_state, "no run was validated"),
    "Speed against training context": (training.speed_against_context, "no run logged an update"),
    **_charts(are_losses=False),
}
"""By title, in the order of the page."""

_TABLES: dict[str, _Maker[Table]] = {
    "What the seeds show": (
        verdicts.verdict_tables,
        "no two variants have finished runs of one seed, context and data, and as many tokens",
    ),
    "Means over seeds": (comparison.seeds_table, "no finished run has a loss"),
    **{
        table.summary.title: (partial(summaries.summaries, table), _measured_by(table))
        for table in TABLES.values()
        if table.summary is not None
    },
    "Loss of a bigram model": (summaries.bigram_tables, "longhaul evaluate RUN --tasks bigram"),
    "lm-eval": (summaries.lm_eval_tables, "longhaul evaluate RUN --tasks lm-eval"),
    "Tables of position scaling": (
        summaries.ntk_tables,
        "longhaul evaluate RUN --tasks perplexity,passkey --positions dynamic_ntk --factor 4",
    ),
}


def report(
    experiment: str,
    destination: str | Path,
    uri: str,
    *,
    names: Sequence[str] = (),
    search: str = "",
    against: str | None = None,
    sequences: int | None = None,
) -> list[Path]:
    """Write figures, tables and index.html into a folder, which is complete or absent.

    Args:
        experiment: its name in MLflow.
        destination: a folder that does not exist yet, is empty, or is a report that nobody changed.
        uri: `sqlite:///FILE`, or the address of a server.
        names, search: which runs, as in `read_runs`.
        against, sequences: what is compared, as `reference` and `sequences` of NamedRuns.

    Returns:
        The files written.

    Raises:
        ValueError: there is no such store, experiment or run, no run has finished, none has read so
            many sequences or is of that kind, or the destination holds something else.
        RuntimeError: MLflow cannot be reached.
        OSError: the folder could not be written.
    """
    if sequences is not None and sequences < 1:
        raise ValueError(f"--sequences: found {sequences}, wanted 1 or more")
    uri = at_home(uri)
    target = new_or_empty_folder(destination, _LISTING)
    runs, unread = read_runs(uri, experiment, names, search)
    for line in unread:
        logger.warning("left out: run %s", line)
    named = NamedRuns(runs, sequences, against)
    left_out = [f"Run {line}" for line in unread]
    figures = _made(named, _FIGURES, left_out)
    # What has one point a run says no more than a table, and is not what a reader came for.
    figures.sort(key=lambda figure: all(len(set(one.x)) < 2 for one in figure.series))
    tables = _made(named, _TABLES, left_out)
    with atomic_folder(target, _LISTING) as folder:
        for figure in figures:
            draw(figure, folder)
        for table in tables:
            write_csv(folder / f"{table.name}.csv", table.columns, table.rows)
        rows = [
            [*named.leading_cells(run), *(cell(run) for cell in _RUN_CELLS.values())]
            for run in named.runs
        ]
        write_csv(folder / "runs.csv", [*LEADING_COLUMNS, *_RUN_CELLS], rows)
        write_page(folder, experiment, uri, named, figures, tables, left_out)
        write_listing(folder, _LISTING)
    return sorted(Path(destination).iterdir())


def _made(named: NamedRuns, makers: Mapping[str, _Maker[T]], left_out: list[str]) -> list[T]:
    """All figures, or all tables; for each title that has none a line is added to `left_out`."""
    every = list[T]()
    for title, (make, reason) in makers.items():
        made = [one for part in named.comparable() for one in make(part)]
        every += made
        if not made:
            left_out.append(f"{title}: {reason}")
    return every
