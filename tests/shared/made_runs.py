"""Runs made by hand, for reports."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from logged_runs import small_config

from longhaul.pipeline.evaluation.labels import Label
from longhaul.pipeline.reporting.runs import Data, Point, Run
from longhaul.pipeline.reporting.tables import TABLES, Evaluated

UPDATE = 512


def run(
    kind: str,
    losses: Sequence[float],
    *overrides: str,
    context: int = 64,
    seed: int = 0,
    status: str = "FINISHED",
) -> Run:
    """A run of updates of 512 tokens, whose last validation loss is its last training loss."""
    given = (f"model.attention.kind={kind}", f"data.context={context}", f"trainer.seed={seed}")
    config = small_config(*given, *overrides)
    points = [Point(step, step * UPDATE, loss) for step, loss in enumerate(losses, start=1)]
    name = " ".join([kind, str(context), str(seed), *overrides])
    return Run(
        run_id=name,
        name=name,
        status=status,
        commit="abc",
        hardware="a processor",
        data=Data("gpt2/train", "9" * 64),
        tokenizer="bytes",
        validation_data="8",
        bytes_per_token=1.0,
        config=config,
        config_text="",
        losses=points,
        validation=points[-1:],
        speed=1.0,
        num_parameters=1,
        state_bytes=1,
        evaluations={},
        left_out=[],
    )


def seeds_of(kind: str, losses: Sequence[float], *overrides: str, context: int = 64) -> list[Run]:
    """A run of each seed, with such last losses."""
    return [
        run(kind, [9.0, loss], *overrides, context=context, seed=seed)
        for seed, loss in enumerate(losses)
    ]


def with_rows(run: Run, **tables: list[dict[str, Any]]) -> Run:
    """The run with results of tasks at its last checkpoint."""
    label = Label(2, None, "", "")
    every = {task: list[Evaluated]() for task in (*TABLES, "bigram", "lm-eval")}
    every |= {
        task.replace("_", "-") if task == "lm_eval" else task: [Evaluated(label, rows)]
        for task, rows in tables.items()
    }
    return dataclasses.replace(run, evaluations=every)


def windows(*losses: float) -> list[dict[str, Any]]:
    return [
        {"context": 64 * 2**at, "tokens": 512, "loss_nats": loss, "standard_error": 0.25}
        for at, loss in enumerate(losses)
    ]
