"""The shards of a run, read by one process that trains nothing."""

from longhaul.configs import ConfigError, RunConfig
from longhaul.datamodules.tokens import TokenDataModule


def training_data(config: RunConfig) -> TokenDataModule:
    """A run's data, with or without validation samples."""
    return TokenDataModule(
        config.data,
        seed=config.trainer.seed,
        samples_per_update=config.trainer.micro_batch,
        micro_batch=config.trainer.micro_batch,
        rank=0,
        world_size=1,
    )


def held_out(config: RunConfig) -> TokenDataModule:
    """A run's data, whose validation samples are there; ConfigError where there are none."""
    data = training_data(config)
    if data.validation_manifest is None:
        raise ConfigError("data.validation_manifest: found null, wanted shards to evaluate on")
    return data
