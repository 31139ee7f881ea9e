"""Runs lm_eval on an exported folder, in a process that `longhaul evaluate` starts.

lm_eval gets its own process because it sets seeds and imports much, and because there the export's
code is the only remote code that is trusted. The script has one argument, JSON, and is started in
the folder of the bundled task, whose YAML names its data file relative to that folder.
"""

import json
import sys
from pathlib import Path
from typing import Any


def main(work: dict[str, Any]) -> None:
    """Write lm_eval's results, or {"unknown": [names of tasks that lm_eval does not know]}.

    Args:
        work: names of `tasks`; `model_args` and `batch_size` of lm_eval's Hugging Face model; and
            `found`, the path to write to.
    """
    # Imported here: an optional dependency.
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(Path(__file__).parent))
    found: dict[str, Any] = {
        "unknown": [name for name in work["tasks"] if name not in manager.all_tasks]
    }
    if not found["unknown"]:
        found = simple_evaluate(
            model="hf",
            model_args=work["model_args"],
            tasks=work["tasks"],
            batch_size=work["batch_size"],
            task_manager=manager,
            log_samples=False,
        )
    Path(work["found"]).write_text(json.dumps(found, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
