"""Windows of tokens to measure on, and a model's losses on them in bounded memory."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longhaul.configs import ConfigError, RunConfig
from longhaul.datamodules.corpus import Corpus, corpus_of
from longhaul.datamodules.files.untrusted import read_regular
from longhaul.datamodules.loaders import HeldOut
from longhaul.datamodules.stream import Batch, BatchLoader
from longhaul.modules.block import Block
from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.evaluation.options import TextOptions
from longhaul.pipeline.runs.data import moved_data_are_explained
from longhaul.pipeline.runs.trained_model import TrainedModel

_MOST_TEXT_BYTES = 1 << 30
_ENOUGH_TOKENS = 1 << 20  # to know the bytes of a token, which takes seconds


def with_context(config: RunConfig, context: int) -> RunConfig:
    """The config with windows of another length, and about as many tokens per micro-batch."""
    share = config.data.context / context
    data = dataclasses.replace(config.data, context=context, short_first=[])
    micro_batch = max(1, round(config.trainer.micro_batch * share))
    # RunConfig checks that an update is a whole number of micro-batches.
    trainer = dataclasses.replace(config.trainer, micro_batch=micro_batch)
    optim = dataclasses.replace(
        config.optim, tokens_per_update=context * micro_batch * trainer.world_size
    )
    return dataclasses.replace(config, data=data, trainer=trainer, optim=optim)


class Passage(NamedTuple):
    """Tokens to measure on."""

    tokens: Int[Tensor, "T"]
    is_first: Bool[Tensor, "T"] | None = None
    """Whether a token is the first of its document. None: all are one document."""

    def to(self, device: torch.device) -> "Passage":
        is_first = None if self.is_first is None else self.is_first.to(device)
        return Passage(self.tokens.to(device), is_first)


def shifted(
    target: Int[Tensor, "B T"], bos_id: int, is_first: Bool[Tensor, "B T"] | None = None
) -> Int[Tensor, "B T"]:
    """The input from which a model predicts these tokens: the bos id, then all but the last.

    The bos id is in front of every document.
    """
    tokens = torch.cat([torch.full_like(target[:, :1], bos_id), target[:, :-1]], dim=1)
    return tokens if is_first is None else tokens.masked_fill(is_first, bos_id)


class CutWindows:
    """Batches of consecutive windows of given passages, in the form of a run's validation batches.

    The tokens of a passage after its last whole window are not read.
    """

    def __init__(
        self, passages: Iterable[Passage], context: int, bos_id: int, micro_batch: int
    ) -> None:
        tokens, is_first = zip(*passages, strict=True)

        def cut(one: Tensor) -> Tensor:
            return one[: len(one) // context * context].view(-1, context)

        self._windows = torch.cat([cut(one) for one in tokens])  # (B, context)
        self._is_first: Tensor | None = None
        if is_first[0] is not None:
            self._is_first = torch.cat([cut(one) for one in is_first])  # (B, context)
            self._is_first[:, 0] = True
        self._bos_id = bos_id
        self._micro_batch = micro_batch

    def __len__(self) -> int:
        return -(-len(self._windows) // self._micro_batch)

    def __iter__(self) -> Iterator[Batch]:
        for index in torch.arange(len(self._windows)).split(self._micro_batch):
            target = self._windows[index]
            is_first = None if self._is_first is None else self._is_first[index]
            tokens = shifted(target, self._bos_id, is_first)
            batch = {"input": tokens, "target": target, "index": index}
            yield batch if is_first is None else {**batch, "is_first": is_first}


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
    if not data.manifests("validation_manifest"):
        raise ConfigError(
            "data.validation_manifest: found null, wanted shards to evaluate on, or --text"
        )
    with moved_data_are_explained("validation_manifest"):
        read = HeldOut(data, train)
    read.corpus.check_context(data.context, context_key)
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


def read_documents(trained: TrainedModel, options: TextOptions, length: int) -> list[Passage]:
    """All windows of a length in memory, so that they can be read in more than one way."""
    return _passages(read_windows(trained, options, length))


def _passages(batches: Iterable[Batch]) -> list[Passage]:
    """The windows of batches, without those that only fill a batch up."""
    found = []
    for batch in batches:
        real = batch["index"] >= 0
        tokens = batch["target"][real]
        is_first = batch["is_first"][real] if "is_first" in batch else [None] * len(tokens)
        found += [Passage(*one) for one in zip(tokens, is_first, strict=True)]
    return found


def longest_document(batch: Batch, row: int) -> slice:
    """Where the longest document is in a row of a batch, the first of several."""
    T = batch["target"].shape[1]
    if "is_first" not in batch:
        return slice(0, T)
    starts = batch["is_first"][row].nonzero().flatten().tolist()
    pairs = zip(starts, [*starts[1:], T], strict=True)
    return max((slice(*pair) for pair in pairs), key=lambda one: one.stop - one.start)


def bytes_per_token(passages: Iterable[Passage], corpus: Corpus) -> float:
    """Bytes of text in UTF-8 for each token of these windows; NaN if there are none.

    The ids that begin and end texts are tokens that a model predicts, but no text. Of the
    characters that a window's ends cut, nothing is counted.
    """
    tokenizer = corpus.load_tokenizer()
    num_tokens = num_bytes = 0
    for target, _ in passages:
        ids = [one for one in target.tolist() if one not in (corpus.bos_id, corpus.eot_id)]
        num_bytes += len(tokenizer.decode(ids).strip("\ufffd").encode(errors="replace"))
        num_tokens += len(target)
        if num_tokens >= _ENOUGH_TOKENS:
            break
    return num_bytes / num_tokens if num_tokens else math.nan


def read_beginnings(trained: TrainedModel, options: TextOptions, length: int) -> list[Passage]:
    """The first tokens of each text that the options name, or of each validation block.

    So many blocks are read that their first tokens are about as many as validation reads in
    training.
    """
    if options.text:
        return [Passage(one.tokens[:length]) for one in _read_texts(trained, options, length)]
    config = with_context(trained.config, length)
    data = config.data
    each = corpus_of(data, "validation_manifest").block_tokens // length
    data = dataclasses.replace(data, validation_tokens=each * data.validation_tokens)
    config = dataclasses.replace(config, data=data)
    return _passages(validation_batches(config, trained.corpus, every=each))


def _read_texts(trained: TrainedModel, options: TextOptions, least: int) -> list[Passage]:
    """The tokens of each text; ValueError if there are less than `least` in one of them."""
    tokenizer = trained.corpus.load_tokenizer()
    texts = []
    for path in options.text:
        tokens = torch.from_numpy(tokenizer.encode(_read(path)))
        if len(tokens) < least:
            raise ValueError(
                f"--text: found {len(tokens)} tokens in {path}, wanted {least} or more"
            )
        texts.append(Passage(tokens))
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
    is_first: Bool[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """Cross-entropy of every token, in nats.

    Args:
        model, tokens, target, precision: what is measured, and how.
        at_once: tokens to read at a time, carrying the state; None means the whole window.
        progress: called with the number of tokens after each read.
        is_first: whether a token is the first of its document; None: a window is one document.
    """
    device = tokens.device.type
    if is_first is not None and (at_once is not None or _depends_on_length(model)):
        # A state is that of one document, and so are positions that depend on its length.
        losses = torch.empty_like(target, dtype=torch.float32)
        for row, column, end in _documents(is_first):
            own = slice(row, row + 1), slice(column, end)
            losses[own] = read_losses(model, tokens[own], target[own], precision, at_once, progress)
        return losses
    with torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
        if at_once is None:
            losses, _ = model.token_losses(tokens, target, is_first=is_first)
            progress(tokens.numel())
            return losses
        parts, state = [], None
        for part, wanted in zip(tokens.split(at_once, 1), target.split(at_once, 1), strict=True):
            losses, state = model.token_losses(part, wanted, state, keep_state=True)
            parts.append(losses)
            progress(part.numel())
    return torch.cat(parts, dim=1)


def _documents(is_first: Bool[Tensor, "B T"]) -> Iterator[tuple[int, int, int]]:
    """Row, first column and end of each document."""
    T = is_first.shape[1]
    starts = is_first.nonzero().tolist()
    for (row, column), (next_row, next_column) in zip(starts, [*starts[1:], [-1, 0]], strict=True):
        yield row, column, next_column if next_row == row else T


def _depends_on_length(model: LanguageModel) -> bool:
    rotaries = (cast(Block, block).attention.rotary for block in model.blocks)
    return any(one is not None and one.depends_on_length for one in rotaries)
