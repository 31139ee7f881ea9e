"""Windows of tokens to measure on, and a model's losses on them in bounded memory."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longhaul.configs import ConfigError, RunConfig
from longhaul.datamodules.corpus import Corpus, corpus_of
from longhaul.datamodules.files.untrusted import read_regular
from longhaul.datamodules.loaders import HeldOut
from longhaul.datamodules.stream import Batch, BatchLoader
from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.evaluation.options import TextOptions
from longhaul.pipeline.runs.data import moved_data_are_explained
from longhaul.pipeline.runs.trained_model import TrainedModel

_MOST_TEXT_BYTES = 1 << 30
_ENOUGH_TOKENS = 1 << 20  # to know the bytes of a token, which takes seconds


def with_context(config: RunConfig, context: int) -> RunConfig:
    """The config with windows of another length, and about as many tokens per micro-batch."""
    share = config.data.context / context
    data = dataclasses.replace(config.data, context=context)
    micro_batch = max(1, round(config.trainer.micro_batch * share))
    # RunConfig checks that an update is a whole number of micro-batches.
    trainer = dataclasses.replace(config.trainer, micro_batch=micro_batch)
    optim = dataclasses.replace(
        config.optim, tokens_per_update=context * micro_batch * trainer.world_size
    )
    return dataclasses.replace(config, data=data, trainer=trainer, optim=optim)


def shifted(target: Int[Tensor, "B T"], bos_id: int) -> Int[Tensor, "B T"]:
    """The input from which a model predicts these tokens: the bos id, then all but the last."""
    return torch.cat([torch.full_like(target[:, :1], bos_id), target[:, :-1]], dim=1)


class CutWindows:
    """Batches of consecutive windows of given sequences, in the form of a run's validation batches.

    The tokens of a sequence after its last whole window are not read.
    """

    def __init__(
        self, sequences: Sequence[Int[Tensor, "T"]], context: int, bos_id: int, micro_batch: int
    ) -> None:
        windows = [one[: len(one) // context * context].view(-1, context) for one in sequences]
        self._windows = torch.cat(windows)  # (B, context)
        self._bos_id = bos_id
        self._micro_batch = micro_batch

    def __len__(self) -> int:
        return -(-len(self._windows) // self._micro_batch)

    def __iter__(self) -> Iterator[Batch]:
        index = torch.arange(len(self._windows))
        pairs = zip(
            self._windows.split(self._micro_batch), index.split(self._micro_batch), strict=True
        )
        for target, samples in pairs:
            tokens = shifted(target, self._bos_id)
            yield {"input": tokens, "target": target, "index": samples}


def validation_batches(
    config: RunConfig, train: Corpus, context_key: str = "data.context", *, every: int = 1
) -> BatchLoader:
    """All validation samples of a run, in batches.

    Args:
        config: of the run.
        train: the training corpus.
        context_key: that data.context was given with.
        every: read only the first of each so many samples.

    Raises:
        ValueError: there are none, or they are not where the config says.
    """
    data = config.data
    if data.validation_manifest is None:
        raise ConfigError("data.validation_manifest: found null, wanted shards to evaluate on")
    with moved_data_are_explained("validation_manifest"):
        read = HeldOut(data, train)
    read.corpus.windows_per_block(data.context, context_key)
    # The first of so many ranks has these samples.
    return read.loader(config.trainer.micro_batch, rank=0, world_size=every)


def read_windows(
    trained: TrainedModel, options: TextOptions, context: int
) -> CutWindows | BatchLoader:
    """All windows of the texts that the options name, or of the run's validation samples.

    About as many validation tokens are read as in training, whatever the context.
    """
    config = with_context(trained.config, context)
    if not options.text:
        key = "data.context"
        if context != trained.positions.context:
            names = ("document_tokens", "context")
            own = [name for name in names if context == getattr(options, name, None)]
            key = "--" + (own[0].replace("_", "-") if own else "contexts")
        return validation_batches(config, trained.corpus, key)
    texts = _read_texts(trained, options, context)
    return CutWindows(texts, context, trained.corpus.bos_id, config.trainer.micro_batch)


def read_documents(
    trained: TrainedModel, options: TextOptions, length: int
) -> list[Int[Tensor, "length"]]:
    """All windows of a length in memory, so that they can be read in more than one way."""
    return _targets(read_windows(trained, options, length))


def _targets(batches: Iterable[Batch]) -> list[Int[Tensor, "T"]]:
    """The windows of batches, without those that only fill a batch up."""
    return [
        target
        for batch in batches
        for target, index in zip(batch["target"], batch["index"], strict=True)
        if index >= 0
    ]


def bytes_per_token(targets: Iterable[Int[Tensor, "T"]], corpus: Corpus) -> float:
    """Bytes of text in UTF-8 for each token of these windows; NaN if there are none.

    The ids that begin and end texts are tokens that a model predicts, but no text. Of the
    characters that a window's ends cut, nothing is counted.
    """
    tokenizer = corpus.load_tokenizer()
    num_tokens = num_bytes = 0
    for target in targets:
        ids = [one for one in target.tolist() if one not in (corpus.bos_id, corpus.eot_id)]
        num_bytes += len(tokenizer.decode(ids).strip("\ufffd").encode(errors="replace"))
        num_tokens += len(target)
        if num_tokens >= _ENOUGH_TOKENS:
            break
    return num_bytes / num_tokens if num_tokens else math.nan


def read_beginnings(
    trained: TrainedModel, options: TextOptions, length: int
) -> list[Int[Tensor, "length"]]:
    """The first tokens of each text that the options name, or of each validation block.

    So many blocks are read that their first tokens are about as many as validation reads in
    training.
    """
    if options.text:
        return [tokens[:length] for tokens in _read_texts(trained, options, length)]
    config = with_context(trained.config, length)
    data = config.data
    each = corpus_of(data, "validation_manifest").block_tokens // length
    data = dataclasses.replace(data, validation_tokens=each * data.validation_tokens)
    config = dataclasses.replace(config, data=data)
    return _targets(validation_batches(config, trained.corpus, every=each))


def _read_texts(trained: TrainedModel, options: TextOptions, least: int) -> list[Int[Tensor, "T"]]:
    """The tokens of each text; ValueError if there are less than `least` in one of them."""
    tokenizer = trained.corpus.load_tokenizer()
    texts = []
    for path in options.text:
        tokens = torch.from_numpy(tokenizer.encode(_read(path)))
        if len(tokens) < least:
            raise ValueError(
                f"--text: found {len(tokens)} tokens in {path}, wanted {least} or more"
            )
        texts.append(tokens)
    return texts


def _read(path: Path) -> str:
    try:
        # As texts are prepared: without a byte order mark, and with their own line ends.
        return read_regular(path, _MOST_TEXT_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text: found {path}, wanted text in UTF-8: {error.reason}") from None


@torch.no_grad()
def read_losses(
    model: LanguageModel,
    tokens: Int[Tensor, "B T"],
    target: Int[Tensor, "B T"],
    precision: str,
    at_once: int | None = None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Float[Tensor, "B T"]:
    """Cross-entropy of every token, in nats.

    Args:
        model, tokens, target, precision: what is measured, and how.
        at_once: tokens to read at a time, carrying the state; None means the whole window.
        progress: called with the number of tokens after each read.
    """
    device = tokens.device.type
    with torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
        if at_once is None:
            losses, _ = model.token_losses(tokens, target)
            progress(tokens.numel())
            return losses
        parts, state = [], None
        for part, wanted in zip(tokens.split(at_once, 1), target.split(at_once, 1), strict=True):
            losses, state = model.token_losses(part, wanted, state, keep_state=True)
            parts.append(losses)
            progress(part.numel())
    return torch.cat(parts, dim=1)
