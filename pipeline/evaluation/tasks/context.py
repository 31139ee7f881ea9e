"""Held-out loss at several contexts, on the same tokens cut into windows of each length."""

import csv
from pathlib import Path

from longhaul.pipeline.evaluation.figures import BLUE, figure, tokens_axis
from longhaul.pipeline.evaluation.labels import label, metric_prefix
from longhaul.pipeline.evaluation.task import Options, TaskResult
from longhaul.pipeline.evaluation.tasks.positions import PositionLoss, measure_positions
from longhaul.pipeline.evaluation.windows import CutWindows, read_documents
from longhaul.pipeline.generation.decoding import TOKENS_AT_ONCE, tokens_at_once
from longhaul.pipeline.runs.trained_model import TrainedModel


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


def measure(trained: TrainedModel, options: Options, folder: Path) -> TaskResult:
    contexts = chosen_contexts(trained, options)
    documents = read_documents(trained, options, max(contexts))
    num_tokens = max(contexts) * len(documents)
    bos_id = trained.manifest.bos_id
    metrics: dict[int, PositionLoss] = {}
    with trained.ranks.progress(num_tokens * len(contexts), "context") as progress:
        for context in contexts:
            side_by_side = max(1, TOKENS_AT_ONCE // context)
            metrics[context] = measure_positions(
                trained.model,
                trained.ranks.share(CutWindows(documents, context, bos_id, side_by_side)),
                context,
                trained.device,
                trained.config.trainer.precision,
                tokens_at_once(trained.model, context),
                progress.add,
                is_shared=trained.ranks.count > 1,
            )
    losses = {context: metric.compute()[0].mean().item() for context, metric in metrics.items()}
    table, picture = folder / "context.csv", folder / "context.png"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["context", "loss_nats", "tokens"])
        writer.writerows([c, f"{loss:.6f}", num_tokens] for c, loss in losses.items())
    with figure(picture, f"{trained.config.name}, {label(trained, options)}") as axes:
        axes.plot(list(losses), list(losses.values()), "o-", color=BLUE)
        axes.axvline(trained.positions.context, color="black", linestyle=":", label="training")
        tokens_axis(axes, "context (tokens)", list(losses))
        axes.set_ylabel("loss (nats per token)")
        axes.legend(frameon=False)
    prefix = metric_prefix(trained, options)
    values = {f"{prefix}/loss_in_context_{c:06d}": loss for c, loss in losses.items()}
    return TaskResult(values, (table, picture))
