"""Train, validate and resume in a plain Trainer: stock_trainer.py SHARDS UPDATES [KEY=VALUE...]."""

import sys

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import MLFlowLogger

from longhaul.configs import load_run_config
from longhaul.datamodules.data_module import TokenDataModule
from longhaul.modules.pretraining import Pretraining

if __name__ == "__main__":
    shards, updates = sys.argv[1], int(sys.argv[2])
    places = [f"data.manifest={shards}/train", f"data.validation_manifest={shards}/validation"]
    config = load_run_config("run/demo.yaml", [*places, *sys.argv[3:]])
    lightning.seed_everything(config.trainer.seed)
    samples, micro_batch = config.samples_per_update, config.trainer.micro_batch
    data = TokenDataModule(
        config.data, seed=config.trainer.seed, samples_per_update=samples, micro_batch=micro_batch
    )
    trainer = lightning.Trainer(
        max_steps=updates,
        logger=MLFlowLogger("stock", tracking_uri="sqlite:///mlflow.db"),
        callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=5, save_last=True)],
        val_check_interval=10 * samples // micro_batch,  # in micro-batches
        log_every_n_steps=1,
    )
    module = Pretraining(
        config.model,
        config.optim,
        accumulation=samples // micro_batch // trainer.world_size,
        samples_per_update=samples,
        max_tokens=config.trainer.max_tokens,
    )
    trainer.fit(module, data, ckpt_path="last")
