"""Start-up messages: two lines of summary, and warnings about settings that look like mistakes."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from longhaul.configs import RunConfig
from longhaul.datamodules.config import key_of
from longhaul.datamodules.corpus import Corpus
from longhaul.datamodules.data_module import TokenDataModule
from longhaul.modules.optim import learning_rate_factor
from longhaul.pipeline.runs.folder import RunFolder
from longhaul.pipeline.tracking.mlflow_limits import without_secrets


def summary(
    config: RunConfig,
    folder: RunFolder,
    data: TokenDataModule,
    parameters: int,
    device: torch.device,
) -> tuple[str, str]:
    """Two lines: the model and its budget; the devices, and where results go.

    Args:
        config, folder: of the run.
        data: that is trained on.
        parameters: number of elements in all weights.
        device: of this rank.
    """
    trainer, tracking = config.trainer, config.tracking
    tokens = _budget(config)
    updates = f"{config.num_updates:,} update{'s' if config.num_updates > 1 else ''}"
    name = f"CPU, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    ranks = f"{trainer.world_size} rank{'s' if trainer.world_size > 1 else ''}"
    return (
        f"{parameters:,} parameters, {', '.join(config.model.kinds)}; {tokens:,} tokens in "
        f"{updates} are {_epochs(config, data)}",
        f"{name}, {trainer.strategy}, {ranks}, {trainer.precision}; run folder {folder.path}; "
        f"MLflow {without_secrets(tracking.uri)}, experiment {tracking.experiment}",
    )


def _epochs(config: RunConfig, data: TokenDataModule) -> str:
    """How often the run reads its data."""

    def there(corpus: Corpus) -> str:
        dropped = corpus.dropped_tokens
        unused = f", {dropped:,} more did not fill a block" if dropped else ""
        return f"({corpus.num_tokens:,} tokens{unused})"

    whole = data.corpus
    if not whole.has_names:
        epochs = _budget(config) / whole.num_tokens
        return f"{epochs:.3g} epochs of {config.data.manifest} {there(whole)}"
    read, each = data.read_by(config.num_updates * config.samples_per_update), whole.each
    return ", ".join(
        f"{tokens:,} of {name}, {epochs:.3g} epochs {there(each[name])}"
        for name, (tokens, epochs) in read.items()
    )


def config_warnings(
    config: RunConfig, data: TokenDataModule, before: RunConfig | None, trained: int
) -> Iterator[str]:
    """A line for each part of the config that does not do what it seems to ask for.

    Args:
        config: of the run.
        data: that is trained on.
        before: the config with which the run was started last, None for a new run.
        trained: tokens that the run has been trained on.
    """
    schedule, tokens = config.optim.schedule, _budget(config)
    if before is not None and trained == 0:
        yield "found no checkpoint of an earlier start of this run; training begins anew"
    if before is not None and before.trainer.max_tokens != config.trainer.max_tokens:
        rates = [
            config.optim.learning_rate
            * learning_rate_factor(schedule, trained, one.trainer.max_tokens)
            for one in (before, config)
        ]
        jumps = trained > 0 and rates[0] != rates[1]
        jump = f"; at this step the rate jumps from {rates[0]:.3g} to {rates[1]:.3g}"
        yield (
            f"trainer.max_tokens: found {config.trainer.max_tokens}, "
            f"{before.trainer.max_tokens} before; the learning rate schedule ends there"
            f"{jump if jumps else ''}"
        )
    if tokens != config.trainer.max_tokens:
        yield (
            f"trainer.max_tokens: {config.trainer.max_tokens:,} are no whole number of updates of "
            f"{config.optim.tokens_per_update:,} tokens, so {tokens:,} are trained"
        )
    decay = config.trainer.max_tokens - schedule.decay_tokens
    if config.trainer.max_tokens <= schedule.warmup_tokens:
        yield (
            f"optim.schedule.warmup_tokens: the budget of {config.trainer.max_tokens:,} tokens "
            f"ends within the warm-up of {schedule.warmup_tokens:,}; the learning rate only rises"
        )
    elif schedule.name == "wsd" and decay < schedule.warmup_tokens:
        yield (
            f"optim.schedule.decay_tokens: a decay of {schedule.decay_tokens:,} of "
            f"{config.trainer.max_tokens:,} tokens begins within the warm-up of "
            f"{schedule.warmup_tokens:,}; the learning rate never reaches its peak"
        )
    yield from _late_settings(config)
    yield from _stage_warnings(config, data)
    validation = data.validation_corpus
    if validation is None:
        return
    context, trained_on = config.data.context, data.corpus.each
    wanted = config.data.validation_tokens // len(validation.names)
    for name, corpus in validation.each.items():
        there = corpus.num_tokens // context * context
        if there < wanted // context * context:
            yield (
                f"data.validation_tokens: {corpus.location} has {there:,} of the {wanted:,} tokens "
                "asked for"
            )
        train = trained_on.get(name)
        if train is not None and _is_other_corpus(train, corpus):
            yield (
                f"{key_of(name, 'validation_manifest')}: {corpus.location} is of another corpus "
                f"than {key_of(name, 'manifest')}, {train.location}"
            )


def _late_settings(config: RunConfig) -> Iterator[str]:
    """A line for each change that no update of the budget is left for."""
    entries: dict[str, tuple[str, Sequence[Any]]] = {
        "optim.larger_updates": ("at_tokens", config.optim.larger_updates),
        "data.schedule": ("at_tokens", config.data.schedule),
        "data.short_first": ("until_tokens", config.data.short_first),
    }
    for key, (name, changes) in entries.items():
        for number, change in enumerate(changes):
            tokens = getattr(change, name)
            if config.optim.num_steps(tokens) >= config.num_updates:
                yield (
                    f"{key}.{number}.{name}: the budget of {config.trainer.max_tokens:,} tokens "
                    f"has no update after {tokens:,}; what was to change there does not"
                )


def _stage_warnings(config: RunConfig, data: TokenDataModule) -> Iterator[str]:
    """A line for each change of weights that waits for the end of an update."""
    update = config.optim.tokens_per_update
    for stage in data.corpus.stages:
        if stage.at_tokens % update:
            begins = -(-stage.at_tokens // update) * update
            key = "from_tokens" if stage.at_tokens == config.data.from_tokens else "schedule"
            yield (
                f"data.{key}: {stage.at_tokens:,} are no whole number of updates of {update:,} "
                f"tokens, so those weights hold from {begins:,} on"
            )


def _budget(config: RunConfig) -> int:
    """Tokens of all updates, which are all that is trained on."""
    return config.num_updates * config.optim.tokens_per_update


def _is_other_corpus(train: Corpus, validation: Corpus) -> bool:
    """Whether two corpora neither come from one origin nor lie in one folder."""
    origins = [
        {key: value for key, value in corpus.origin.items() if key != "split"}
        for corpus in (train, validation)
    ]
    # FOLDER/NAME/manifest.json, which may be a URL.
    folders = [corpus.location.rsplit("/", 2)[0] for corpus in (train, validation)]
    return origins[0] != origins[1] and folders[0] != folders[1]
