"""Where a run leaves another one: runs of several budgets share what none of them has decayed."""

import math
from pathlib import Path

from longhaul.configs import ConfigError, RunConfig
from longhaul.pipeline.checkpoints.folders import newest_checkpoint, step_of
from longhaul.pipeline.runs.folder import fixed_difference, locate, stored_config

# Keys of which the rate of the trunk does not depend, while it is constant.
_FREE = (
    "trainer.branch_from",
    "trainer.start_from",
    *(f"optim.schedule.{key}" for key in ("name", "decay_tokens", "final_factor")),
)


def branch_point(config: RunConfig) -> Path:
    """The checkpoint of trainer.branch_from from which a wsd run goes on: the newest that fits.

    Neither run may have begun to decay there, so that the new one trains as if it had trained
    alone, from its first update.

    Raises:
        ConfigError: there is no such run or checkpoint, or the run trains otherwise.
    """
    assert config.trainer.branch_from is not None
    try:
        return _branch_point(config, config.trainer.branch_from)
    except ValueError as error:
        raise ConfigError(f"trainer.branch_from: {error}") from error


def _branch_point(config: RunConfig, branch_from: str) -> Path:
    folder, checkpoint = locate(branch_from)
    trunk = stored_config(folder)
    if difference := fixed_difference(config, trunk, _FREE):
        raise ValueError(f"{difference} as in {folder.config_file}")
    if trunk.optim.schedule.name not in ("constant", "wsd"):
        raise ValueError(
            f"found optim.schedule.name {trunk.optim.schedule.name} in {folder.config_file}, "
            "wanted wsd or constant"
        )
    ends = [_decay_begins(one) for one in (config, trunk)]
    per_update = config.optim.tokens_per_update
    where = f"wanted one of {min(ends):,} tokens at most, where the decay begins"
    if ends[1] < ends[0]:
        where += f" in {folder.path}"
    if checkpoint is None:
        checkpoint = newest_checkpoint(folder.checkpoints, min(ends) // per_update)
        if checkpoint is None:
            raise ValueError(
                f"found no intact checkpoint in {folder.checkpoints} that fits, {where} "
                "(checkpoint.keep_every keeps more of them)"
            )
    elif step_of(checkpoint) * per_update > min(ends):
        raise ValueError(f"found {step_of(checkpoint) * per_update:,} tokens, {where}")
    return checkpoint


def _decay_begins(config: RunConfig) -> float:
    """Tokens of a run up to which its rate has not decayed."""
    schedule = config.optim.schedule
    if schedule.name == "constant":
        return math.inf
    return config.trainer.max_tokens - schedule.decay_tokens
