"""Tasks of EleutherAI's harness (--lm-eval-tasks) on the exported checkpoint; needs lm_eval."""

import importlib.util
import json
import logging
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longhaul.datamodules.files.atomic import write_atomically
from longhaul.pipeline.evaluation.labels import metric_prefix
from longhaul.pipeline.evaluation.options import ContextOptions
from longhaul.pipeline.evaluation.task import TaskResult
from longhaul.pipeline.evaluation.tasks import lm_eval_task
from longhaul.pipeline.exporting.folder import export
from longhaul.pipeline.generation.decoding import tokens_per_pass
from longhaul.pipeline.runs.trained_model import TrainedModel
from longhaul.pipeline.terminal.output import run_shown

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Options(ContextOptions):
    is_shared = False

    lm_eval_tasks: tuple[str, ...] = ("longhaul_pairs",)
    """Tasks of the harness, or the one that longhaul brings."""

    lm_eval_limit: int | None = None
    """Read N documents of each task."""

    lm_eval_shots: int | None = None
    """Put N solved examples in front of each document; default the task's own."""

    lm_eval_metadata: dict[str, Any] | None = None
    """For tasks that make their documents, such as '{"max_seq_lengths": [4096]}' for ruler."""

    lm_eval_generation: dict[str, Any] | None = None
    """Arguments of generation instead of the task's, such as '{"max_gen_toks": 32}'."""

    lm_eval_samples: bool = False
    """Write each document with the model's answer."""


# Numbers of float32 in the logits of a batch, of which lm_eval makes one copy: 1 GiB each.
_MOST_LOGITS = 1 << 28
# With these variables the harness would take itself for one of the training's ranks.
_RANK_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|SLURM_(PROCID|LOCALID|NTASKS)"
)


def check(trained: TrainedModel, options: Options) -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(
            "--tasks: found lm-eval without the package lm_eval, wanted it installed: "
            "pip install -c constraints.txt -e '.[lm-eval]'"
        )
    if trained.positions.name != "none":
        raise ValueError(
            f"--positions: found {trained.positions.name} with lm-eval, wanted none: exported "
            "models read positions as in training"
        )
    for option, value, least in (
        ("--lm-eval-limit", options.lm_eval_limit, 1),
        ("--lm-eval-shots", options.lm_eval_shots, 0),
    ):
        if value is not None and value < least:
            raise ValueError(f"{option}: found {value}, wanted {least} or more")


def measure(trained: TrainedModel, options: Options, folder: Path) -> TaskResult:
    with tempfile.TemporaryDirectory() as temporary:
        exported, report = Path(temporary, "model"), Path(temporary, "found.json")
        export(trained.checkpoint, exported, form="longhaul")
        _keep_no_states(exported / "config.json")
        _run_harness(
            _work(trained, options) | {"found": str(report)}, exported, Path(temporary, "modules")
        )
        answer = json.loads(report.read_text())
    if refused := answer.get("refused"):
        raise ValueError(refused)
    _warn_of_shortened(trained.config.data.context, answer["longhaul"])
    samples = answer.pop("samples", {})
    files = [folder / "lm-eval-results.json"]
    write_atomically(files[0], json.dumps(answer, indent=2) + "\n")
    if options.lm_eval_samples:
        files.append(folder / "lm-eval-samples.jsonl")
        lines = [
            json.dumps({"task": task} | sample) for task, some in samples.items() for sample in some
        ]
        write_atomically(files[1], "".join(f"{line}\n" for line in lines))
    return TaskResult(
        {
            f"{metric_prefix(trained, options)}/lm-eval/{name}": value
            for name, value in _numbers(answer).items()
        },
        tuple(files),
    )


def _work(trained: TrainedModel, options: Options) -> dict[str, Any]:
    """What lm_eval is asked for, without paths."""
    context = trained.config.data.context
    # Logits of a whole batch are there at once, in float32.
    tokens = min(tokens_per_pass(trained.device), _MOST_LOGITS // trained.config.model.vocabulary)
    return {
        "tasks": options.lm_eval_tasks,
        "model_args": {
            "trust_remote_code": True,
            "add_bos_token": True,
            "dtype": "float32",
            "max_length": context,
            "device": str(trained.device),
        },
        "batch_size": max(1, tokens // context),
        "metadata": options.lm_eval_metadata or {},
        "options": {
            "limit": options.lm_eval_limit,
            "num_fewshot": options.lm_eval_shots,
            "gen_kwargs": options.lm_eval_generation,
            "log_samples": options.lm_eval_samples,
        },
    }


def _keep_no_states(config: Path) -> None:
    """Let the export keep no states unless asked to: lm_eval asks where it generates.

    Likelihoods would hold the states of all rows and layers for nothing.
    """
    write_atomically(config, json.dumps(json.loads(config.read_text()) | {"use_cache": False}))


def _warn_of_shortened(context: int, counts: dict[str, int]) -> None:
    if counts["shortened"]:
        logger.warning(
            "lm-eval: %d of %d requests were longer than the context, %d tokens, and have lost "
            "text after their first token; with --context %d all of them fit",
            counts["shortened"],
            counts["requests"],
            context,
            counts["longest"],
        )


def _run_harness(work: dict[str, Any], exported: Path, modules: Path) -> None:
    """Run lm_eval in its own process; transformers keeps the export's code in `modules`.

    In its usual folder, transformers would keep that code for later exports.
    """
    environment = {
        key: value for key, value in os.environ.items() if not _RANK_VARIABLES.fullmatch(key)
    }
    work["model_args"]["pretrained"] = str(exported)
    module = f"{lm_eval_task.__name__}.run"
    status = run_shown(
        [sys.executable, "-P", "-m", module, json.dumps(work)],
        Path(lm_eval_task.__file__).parent,
        environment | {"HF_MODULES_CACHE": str(modules)},
    )
    if status:
        raise RuntimeError(f"lm-eval: ended with status {status}, for the reason above")


def _numbers(answer: dict[str, Any]) -> dict[str, float]:
    """All metrics as TASK/METRIC, or TASK/METRIC/FILTER if answers were filtered first."""
    results: dict[str, dict[str, Any]] = answer["results"]
    members: dict[str, list[str]] = answer.get("group_subtasks", {})
    numbers = {}
    for task, values in results.items():
        for key, value in values.items():
            metric, _, answer_filter = key.partition(",")
            if not answer_filter or not isinstance(value, (int, float)):
                continue
            measured = (results.get(name, {}) for name in (task, *members.get(task, [])))
            if any(_is_placeholder(metric, one.get(key)) for one in measured):
                continue
            suffix = "" if answer_filter == "none" else f"/{answer_filter}"
            numbers[f"{task}/{metric}{suffix}"] = float(value)
    return numbers


def _is_placeholder(metric: str, value: Any) -> bool:
    """Whether it is the -1 that RULER's tasks, whose metrics are lengths, give without samples."""
    return metric.isdecimal() and value == -1
