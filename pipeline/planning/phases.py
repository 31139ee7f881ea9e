"""The phases of a run whose context or updates grow while it trains."""

import dataclasses

from longhaul.configs import RunConfig


def phases(config: RunConfig) -> list[RunConfig]:
    """A config for each context and size of updates that a run has, in which they never change.

    The pieces that samples are cut into are samples there, which changes nothing for the model.
    """
    data, optim = config.data, config.optim
    begins = (0, *(one.until_tokens for one in data.short_first),
              *(one.at_tokens for one in optim.larger_updates))  # fmt: skip
    sizes = dict.fromkeys(
        (data.context_at(tokens), optim.update_factor(tokens))
        for tokens in sorted(begins)
        if tokens < config.trainer.max_tokens
    )
    return [_phase(config, context, factor) for context, factor in sizes]


def _phase(config: RunConfig, context: int, factor: int) -> RunConfig:
    data, trainer, optim = config.data, config.trainer, config.optim
    micro_batch = trainer.micro_batch * (data.context // context)
    tokens = factor * optim.tokens_per_update
    return dataclasses.replace(
        config,
        data=dataclasses.replace(data, context=context, short_first=[]),
        trainer=dataclasses.replace(trainer, micro_batch=micro_batch),
        optim=dataclasses.replace(optim, tokens_per_update=tokens, larger_updates=[]),
    )
