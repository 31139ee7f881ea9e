"""Runs lm_eval on an exported folder, in a process that `longhaul evaluate` starts.

lm_eval gets its own process because it sets seeds and imports much, and because there the export's
code is the only remote code that is trusted. The script has one argument, JSON, and is started in
the folder of the bundled task, whose YAML names its data file relative to that folder.
"""

import json
import sys
from pathlib import Path
from typing import Any

from longhaul.datamodules.files.untrusted import one_line
from longhaul.datamodules.native import ENDINGS
from longhaul.pipeline.evaluation.tasks.lm_eval_task.shortening import TooShortError


def main(work: dict[str, Any]) -> None:
    """Write lm_eval's results with the counts of requests, or {"refused": why it cannot run}.

    Args:
        work: names of `tasks`; `model_args` and `batch_size` of lm_eval's Hugging Face model;
            `metadata` of tasks; further `options` of lm_eval's `simple_evaluate`; and `found`, the
            path to write to.
    """
    # Imported here: an optional dependency.
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from longhaul.pipeline.evaluation.tasks.lm_eval_task.model import LonghaulLM

    # Tasks that make their texts, such as RULER's, find the tokenizer in the model's arguments.
    metadata = work["model_args"] | work["metadata"]
    manager = TaskManager(include_path=str(Path(__file__).parent), metadata=metadata)
    unknown = [name for name in work["tasks"] if name not in manager.all_tasks]
    if unknown:
        found: dict[str, Any] = {
            "refused": f"--lm-eval-tasks: found {', '.join(unknown)}, wanted longhaul_pairs or "
            "tasks that lm_eval knows (lm_eval ls tasks)"
        }
    else:
        try:
            model = LonghaulLM(**work["model_args"], batch_size=work["batch_size"])
            found = simple_evaluate(
                model=model,
                model_args=work["model_args"],
                tasks=work["tasks"],
                batch_size=work["batch_size"],
                task_manager=manager,
                **work["options"],
            )
        except TooShortError as error:
            found = {"refused": str(error)}
        except (Exception, *ENDINGS):
            raise
        except BaseException as error:  # A panic of the library in Rust that reads the tokenizer.
            found = {"refused": f"tokenizer: fails at a text of lm_eval, {one_line(error)}"}
        else:
            counts = model.shortening
            found["longhaul"] = {
                "requests": counts.requests,
                "shortened": counts.shortened,
                "longest": counts.longest,
            }
    Path(work["found"]).write_text(json.dumps(found, indent=2, default=str) + "\n")


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except Exception as failure:  # of whatever package a task needs
        sys.exit(f"lm-eval: {type(failure).__name__}: {one_line(failure)}")
    except KeyboardInterrupt:
        sys.exit(130)
