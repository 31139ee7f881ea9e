"""The LightningDataModule: token windows for one rank, at any position, on any number of ranks."""

from typing import Any

from lightning import LightningDataModule

from longhaul.datamodules.config import DataConfig
from longhaul.datamodules.corpus import Corpus, corpus_of
from longhaul.datamodules.loaders import HeldOut, make_loader, open_stores
from longhaul.datamodules.mixture import MixtureOrder
from longhaul.datamodules.stream import Batch, BatchLoader, RankBatches
from longhaul.datamodules.workers import start_fork_server


class TokenDataModule(LightningDataModule):
    """The training batches of one rank from `first_sample` on, and its share of the validation.

    The loaders have no state to save. The number of samples consumed so far, which Pretraining
    counts, is enough to resume on any number of ranks and workers. A plain `lightning.Trainer`
    keeps that number in its checkpoints.

    Args:
        config: which shards are read, and how.
        seed: seed of the order of samples.
        samples_per_update: samples that all ranks together consume per optimizer update.
        micro_batch: samples per batch.
        rank, world_size: index of this rank, and number of ranks; None: those of the trainer.
        ranks_per_sample: number of consecutive ranks that train on the same samples.
        first_sample: global index of the first sample, a multiple of `samples_per_update`.
        num_samples: samples that all ranks together consume from there on; None: endless.
        pin_memory: whether batches are in page-locked memory.
        earlier: the corpus with the stages that the run has had so far; None: it has not begun.

    Raises:
        ValueError: if sizes do not fit, a corpus cannot be read, or tokenizers differ.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        seed: int,
        samples_per_update: int,
        micro_batch: int,
        rank: int | None = None,
        world_size: int | None = None,
        ranks_per_sample: int = 1,
        first_sample: int = 0,
        num_samples: int | None = None,
        pin_memory: bool = False,
        earlier: Corpus | None = None,
    ) -> None:
        super().__init__()
        if world_size is None and (first_sample or num_samples is not None):
            raise ValueError(
                f"first_sample, num_samples: found {first_sample} and {num_samples} without "
                "world_size, wanted 0 and None in a plain trainer, whose checkpoints say where to "
                "go on"
            )
        self.config = config
        self._micro_batch = micro_batch
        self._rank = rank
        self._world_size = world_size
        self._ranks_per_sample = ranks_per_sample
        self._pin_memory = pin_memory
        self._samples_per_update = samples_per_update
        self.start_at(first_sample, num_samples)
        self.corpus = corpus_of(config)
        if earlier is not None:
            self.corpus = self.corpus.continuing(earlier)
        self.order = self.corpus.training_order(
            config.context, seed, config.shuffle_shards, samples_per_update
        )
        self._stores = open_stores(config, self.corpus)
        self._held_out: HeldOut | None = None
        if config.manifests("validation_manifest"):
            self._held_out = HeldOut(config, self.corpus)
        if config.workers:
            # It has time to import torch until workers are started.
            start_fork_server()

    def start_at(self, first_sample: int, num_samples: int | None) -> None:
        """Set the first sample of the next training loader, and its number of samples."""
        self._first_sample, self._num_samples = first_sample, num_samples
        if self._world_size is not None:
            self._batches()  # which checks the sizes

    def state_dict(self) -> dict[str, Any]:
        """How many samples the module of this trainer has trained on."""
        return {"samples": self._own_trainer.lightning_module.progress.samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.start_at(state_dict["samples"], None)

    @property
    def _own_trainer(self) -> Any:
        if self.trainer is None:
            raise ValueError("rank and world_size: found None without a trainer, wanted numbers")
        return self.trainer

    @property
    def _place(self) -> tuple[int, int]:
        """The index of this rank, and the number of ranks."""
        if self._rank is None or self._world_size is None:
            return self._own_trainer.global_rank, self._own_trainer.world_size
        return self._rank, self._world_size

    def _batches(self) -> RankBatches:
        rank, world_size = self._place
        return RankBatches(
            first_sample=self._first_sample,
            num_samples=self._num_samples,
            samples_per_update=self._samples_per_update,
            micro_batch=self._micro_batch,
            rank=rank // self._ranks_per_sample,
            world_size=world_size // self._ranks_per_sample,
        )

    @property
    def validation_corpus(self) -> Corpus | None:
        """The tokens that validation reads, None without validation."""
        return None if self._held_out is None else self._held_out.corpus

    def read_by(self, samples: int) -> dict[str, tuple[int, float]]:
        """Tokens and epochs of each source in the first samples of the run, by its name.

        At the end of an update. It is empty where the one source has no name.
        """
        if not isinstance(self.order, MixtureOrder):
            return {}
        counts = self.order.counts(samples)
        epochs = counts / self.order.samples_per_source
        read = zip((counts * self.config.context).tolist(), epochs.tolist(), strict=True)
        return dict(zip(self.corpus.names, read, strict=True))

    def check_present(self) -> None:
        """Raise ShardError if a local shard is missing that must not be replaced."""
        for store in self._stores:
            store.check_present()
        if self._held_out is not None:
            self._held_out.check_present()

    @property
    def bad_shards(self) -> tuple[str, ...]:
        """Names of the training shards that this rank has replaced so far."""
        return tuple(name for store in self._stores for name in store.bad_shards)

    def train_dataloader(self) -> BatchLoader:
        """The micro-batches of this rank, from `first_sample` on."""
        return make_loader(
            self.config,
            self.corpus,
            self._stores,
            self.order,
            self._batches(),
            pin_memory=self._pin_memory,
            pieces=self._pieces if self.config.short_first else None,
        )

    def _pieces(self, sample: int) -> int:
        """Into how many pieces the sample of this index is cut, as are all of its update."""
        first = sample - sample % self._samples_per_update
        return self.config.context // self.config.context_at(first * self.config.context)

    def val_dataloader(self) -> BatchLoader | list[Batch]:
        """This rank's share of the validation samples; an empty list without validation."""
        if self._held_out is None:
            return []
        return self._held_out.loader(self._micro_batch, *self._place, pin_memory=self._pin_memory)
