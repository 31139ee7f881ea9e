"""Writes the report of an MLflow experiment: a folder of figures, tables and one page."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from longhaul.datamodules.urls import at_home
from longhaul.pipeline.evaluation.tables import TaskTable
from longhaul.pipeline.reporting import comparison, evaluations, summaries, training, verdicts
from longhaul.pipeline.reporting.drawing import Figure, Table, draw, write_csv
from longhaul.pipeline.reporting.page import write_page
from longhaul.pipeline.reporting.runs import read_runs
from longhaul.pipeline.reporting.tables import TABLES
from longhaul.pipeline.reporting.variants import LEADING_COLUMNS, NamedRuns
from longhaul.pipeline.system.atomic_folder import atomic_folder, new_or_empty_folder, write_listing

logger = logging.getLogger(__name__)

_NO_PAIR = (
    "no finished run of another kind has a run of the reference kind (--against) of its seed, "
    "context and data that has read as much"
)
_LISTING = "report.sha256"


def _measured_by(table: TaskTable) -> str:
    return f"longhaul evaluate RUN {table.measured_by}"


def _charts(are_losses: bool) -> dict[str, tuple[Callable[[NamedRuns], Iterable[Figure]], str]]:
    """For each table of a task with charts, of losses or of all else: as in _FIGURES."""
    return {
        table.title: (partial(evaluations.charts, table), _measured_by(table))
        for table in TABLES.values()
        if table.charts and (table.charts[0].y_axis == "loss") is are_losses
    }


_FIGURES: dict[str, tuple[Callable[[NamedRuns], Iterable[Figure]], str]] = {
    "Loss against tokens": (training.loss_against_tokens, "no run logged an update"),
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
"""For each title: the function that makes its figures, and the text that is shown if it makes none:
the reason, or the command that would measure it. The page has them in this order.
"""

_TABLES: dict[str, tuple[Callable[[NamedRuns], Iterable[Table]], str]] = {
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
"""The same for tables."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The command line's options: which runs, and how they are compared."""

    runs: Sequence[str] = ()
    """Names of runs, in which * and ? stand for others; none means all."""

    filter: str = ""
    """What MLflow's search understands, such as `params.data = 'mine/train'`."""

    against: str | None = None
    """The kind that gaps are to; None means softmax, or else the first kind."""

    sequences: int | None = None
    """After how many training losses are compared; None means the most that all finished runs of
    one budget have read."""


def report(
    experiment: str, destination: str | Path, uri: str, choice: Choice = Choice()
) -> list[Path]:
    """Write figures, tables and index.html into a folder, which is complete or absent.

    Args:
        experiment: its name in MLflow.
        destination: a folder that does not exist yet, is empty, or is a report that nobody changed.
        uri: `sqlite:///FILE`, or the address of a server.
        choice: of runs, and of what they are compared with.

    Returns:
        The files written.

    Raises:
        ValueError: there is no such store, experiment or run, no run has finished, none has read so
            many sequences or is of that kind, or the destination holds something else.
        RuntimeError: MLflow cannot be reached.
        OSError: the folder could not be written.
    """
    if choice.sequences is not None and choice.sequences < 1:
        raise ValueError(f"--sequences: found {choice.sequences}, wanted 1 or more")
    uri = at_home(uri)
    target = new_or_empty_folder(destination, _LISTING)
    runs, unread = read_runs(uri, experiment, choice.runs, choice.filter)
    for line in unread:
        logger.warning("left out: run %s", line)
    named = NamedRuns(runs, choice.sequences, choice.against)
    parts = named.comparable()
    figures, left_out = list[Figure](), [f"Run {line}" for line in unread]
    for title, (make, reason) in _FIGURES.items():
        made = [figure for part in parts for figure in make(part)]
        figures += made
        if not made:
            left_out.append(f"{title}: {reason}")
    # What has one point a run says no more than a table, and is not what a reader came for.
    figures.sort(key=lambda figure: all(len(set(one.x)) < 2 for one in figure.series))
    tables = list[Table]()
    for title, (tabulate, reason) in _TABLES.items():
        tabulated = [table for part in parts for table in tabulate(part)]
        tables += tabulated
        if not tabulated:
            left_out.append(f"{title}: {reason}")
    with atomic_folder(target, _LISTING) as folder:
        for figure in figures:
            draw(figure, folder)
        for table in tables:
            write_csv(folder / f"{table.name}.csv", table.columns, table.rows)
        write_runs(folder / "runs.csv", named)
        write_page(folder, experiment, uri, named, figures, tables, left_out)
        write_listing(folder, _LISTING)
    return sorted(Path(destination).iterdir())


def write_runs(path: Path, named: NamedRuns) -> None:
    """CSV with one row per run."""
    settings = ("learning_rate", "seed")
    columns = (
        "tokens",
        "validation_loss_nats",
        "bits_per_byte",
        "tokens_per_second",
        "parameters",
        "state_bytes",
    )
    origin = ("commit", "hardware", "data", "data_sha256", "tokenizer")
    rows = [
        [
            *named.leading_cells(run),
            run.config.optim.learning_rate,
            run.config.trainer.seed,
            run.tokens,
            run.final_loss,
            run.bits_per_byte,
            run.speed,
            run.num_parameters,
            run.state_bytes,
            run.commit,
            run.hardware,
            run.data.name,
            run.data.sha256,
            run.tokenizer,
        ]
        for run in named.runs
    ]
    write_csv(path, [*LEADING_COLUMNS, *settings, *columns, *origin], rows)
