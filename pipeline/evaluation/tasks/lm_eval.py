"""Tasks of EleutherAI's lm_eval, run on an export of the checkpoint."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from longhaul.pipeline.evaluation.labels import metric_prefix
from longhaul.pipeline.evaluation.task import Options, TaskResult
from longhaul.pipeline.evaluation.tasks import lm_eval_task
from longhaul.pipeline.exporting.folder import export
from longhaul.pipeline.generation.decoding import tokens_per_pass
from longhaul.pipeline.runs.trained_model import TrainedModel
from longhaul.pipeline.system.files import write_atomically

BUNDLED = "longhaul_pairs"
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


def measure(trained: TrainedModel, options: Options, folder: Path) -> TaskResult:
    with tempfile.TemporaryDirectory() as temporary:
        exported, report = Path(temporary, "model"), Path(temporary, "found.json")
        export(trained.checkpoint, exported)
        context = trained.config.data.context
        work = {
            "tasks": options.lm_eval_tasks,
            "model_args": {
                "pretrained": str(exported),
                "trust_remote_code": True,
                "add_bos_token": True,
                "dtype": "float32",
                "max_length": context,
                "device": str(trained.device),
            },
            "batch_size": max(1, tokens_per_pass(trained.device) // context),
            "found": str(report),
        }
        _run_harness(work, Path(temporary, "modules"))
        text = report.read_text()
    answer = json.loads(text)
    if unknown := answer.get("unknown"):
        raise ValueError(
            f"--lm-eval-tasks: found {', '.join(unknown)}, wanted {BUNDLED} or tasks that lm_eval "
            "knows (lm_eval ls tasks)"
        )
    file = folder / "lm-eval-results.json"
    write_atomically(file, text)
    return TaskResult(
        {
            f"{metric_prefix(trained, options)}/lm-eval/{name}": value
            for name, value in _numbers(answer["results"]).items()
        },
        (file,),
    )


def _run_harness(work: dict[str, Any], modules: Path) -> None:
    """Run lm_eval in its own process; transformers keeps the export's code in `modules`.

    In its usual folder, transformers would keep that code for later exports.
    """
    environment = {
        key: value for key, value in os.environ.items() if not _RANK_VARIABLES.fullmatch(key)
    }
    module = f"{lm_eval_task.__name__}.run"
    status = subprocess.run(
        [sys.executable, "-P", "-m", module, json.dumps(work)],
        cwd=Path(lm_eval_task.__file__).parent,
        env=environment | {"HF_MODULES_CACHE": str(modules)},
    ).returncode
    if status:
        raise RuntimeError(f"lm-eval: ended with status {status}, for the reason above")


def _numbers(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """All metrics as TASK/METRIC, or TASK/METRIC/FILTER if answers were filtered first."""
    numbers = {}
    for task, values in results.items():
        for key, value in values.items():
            metric, _, answer_filter = key.partition(",")
            if answer_filter and isinstance(value, (int, float)):
                name = (
                    f"{task}/{metric}"
                    if answer_filter == "none"
                    else f"{task}/{metric}/{answer_filter}"
                )
                numbers[name] = float(value)
    return numbers
