"""The tasks of `longhaul evaluate` by name, in the order in which they run."""

from collections.abc import Sequence

from longhaul.pipeline.evaluation.task import Task

TASKS: dict[str, Task] = {
    # Before positions, whose figure shows the bigram's loss.
    "bigram": Task(
        "bigram",
        "loss of a bigram model counted on the same training text",
        is_shared=False,
        decided_by=("text", "context"),
    ),
    "positions": Task(
        "positions",
        "loss at each position of the context, in bins of a hundredth of it, and its mean over all "
        "positions up to 1, 2, 4, ...",
        decided_by=("text", "context"),
    ),
    "context": Task(
        "context",
        "loss at each of --contexts, on the same tokens",
        decided_by=("text", "contexts"),
    ),
    "perplexity": Task(
        "perplexity",
        "perplexity through a window of each of --contexts that slides by --stride",
        decided_by=("text", "contexts", "stride", "document_tokens", "no_bos"),
    ),
    "passkey": Task(
        "passkey",
        "share of keys, hidden in texts of --lengths tokens, that the model retrieves",
        decided_by=("lengths", "depths", "prompts", "no_bos"),
    ),
    "recall": Task(
        "recall",
        "zero-shot recall: share of values recalled from 4 to 128 key-value pairs, --prompts "
        "sequences per number of pairs",
        decided_by=("text", "prompts"),
    ),
    "attention": Task(
        "attention",
        "mixing matrices, their outliers, half-lives of gates and rates of rotation, on the first "
        "8 windows (of at most 1024 tokens)",
        is_shared=False,
        decided_by=("text", "context"),
    ),
    "scores": Task(
        "scores",
        "attention scores of softmax kinds, before the softmax, of the first window's last token "
        "(at most 4096 tokens), and the largest of all",
        is_shared=False,
        decided_by=("text", "context", "no_bos"),
    ),
    "lm-eval": Task(
        "lm_eval",
        "tasks of EleutherAI's harness (--lm-eval-tasks) on the exported checkpoint; needs lm_eval",
        is_shared=False,
        decided_by=(
            "context",
            "lm_eval_tasks",
            "lm_eval_limit",
            "lm_eval_shots",
            "lm_eval_metadata",
            "lm_eval_generation",
            "lm_eval_samples",
        ),
    ),
}


def check_tasks(names: Sequence[str], where: str) -> None:
    """Raise ValueError for a name that is no task; `where` is the config key or option with it."""
    for name in names:
        if name not in TASKS:
            raise ValueError(f"{where}: found {name!r}, wanted some of {','.join(TASKS)}")
