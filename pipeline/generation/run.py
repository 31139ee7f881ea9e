"""Continues prompts and prints the texts as they grow."""

from collections.abc import Sequence
from typing import cast

import torch

from longhaul.datamodules.decoding import StoppingDecoder
from longhaul.modules.attention.base import float32_weights
from longhaul.modules.block import Block
from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.generation.decoding import Sampling, Session, decode
from longhaul.pipeline.generation.options import GenerationOptions
from longhaul.pipeline.generation.session_files import load_session, origin, save_session
from longhaul.pipeline.runs.trained_model import TrainedModel
from longhaul.pipeline.terminal.output import exact_stdout


def check_state_dtype(model: LanguageModel) -> None:
    """Raise ValueError unless every layer has a state that may be kept in bfloat16."""
    for block in model.blocks:
        attention = cast(Block, block).attention
        if not attention.can_round_state:
            raise ValueError(
                f"--state-dtype: found bfloat16 with kind {attention.config.kind}, wanted float32, "
                "or a kind with a state of fixed size that can be rounded"
            )


def round_weights(model: LanguageModel) -> None:
    """Make all weights bfloat16, in place, but those that a module uses in float32 only."""
    kept = float32_weights(model)
    for weight in model.parameters():
        if weight not in kept:
            weight.data = weight.data.bfloat16()


def generate(trained: TrainedModel, options: GenerationOptions) -> None:
    """Print each prompt and its continuation.

    Raises:
        ValueError: the saved state is damaged or of another model, there is no corpus, or a
            layer has no state that can be in bfloat16.
        OSError: the state could not be written.
    """
    if options.has_bfloat16_state:
        check_state_dtype(trained.model)
    if options.has_bfloat16_weights:
        round_weights(trained.model)
    model_origin = origin(trained)
    prompts = options.prompts or [""]
    corpus = trained.corpus
    tokenizer = corpus.load_tokenizer()
    encoded = [tokenizer.encode(prompt).tolist() for prompt in prompts]
    start, earlier = Session([corpus.bos_id]), list[int]()
    if options.state is not None:
        start = load_session(options.state, trained.model, model_origin)
        earlier = start.unread
    sessions = [
        Session(
            [*start.unread, *ids],
            start.state,
            # Seeds of their own, so that equal prompts have different continuations.
            torch.Generator(trained.device).manual_seed(options.seed + index),
        )
        for index, ids in enumerate(encoded)
    ]
    sampling = Sampling(
        vocabulary=corpus.vocab_size,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
    )
    printer = _Printer(prompts)
    texts = [
        StoppingDecoder(tokenizer.stream_decoder([*earlier, *ids]), options.stop) for ids in encoded
    ]
    decoded = decode(
        trained.model,
        sessions,
        num_tokens=options.num_tokens,
        sampling=sampling,
        has_bfloat16_states=options.has_bfloat16_state,
    )
    for index, token in decoded:
        session, text = sessions[index], texts[index]
        session.is_done = token == tokenizer.eot_id
        if not session.is_done:
            printer.add(index, text.push(token))
            session.is_done = text.has_stopped
    for index, text in enumerate(texts):
        printer.add(index, text.flush())
        printer.end()
    if options.save_state is not None:
        save_session(options.save_state, sessions[0], model_origin)


class _Printer:
    """Prints texts that grow at the same time, one after the other.

    The text whose turn it is gets printed as it grows; later texts are kept until their turn.
    Nothing is printed before the first addition, which shows that the model can continue at all.
    """

    def __init__(self, prompts: Sequence[str]) -> None:
        count = len(prompts)
        self._waiting = [
            prompt if count == 1 else f"--- prompt {number} of {count} ---\n{prompt}"
            for number, prompt in enumerate(prompts, 1)
        ]
        self._turn = 0

    def add(self, index: int, text: str) -> None:
        self._waiting[index] += text
        if index == self._turn:
            print(self._waiting[index], end="", flush=True, file=exact_stdout())
            self._waiting[index] = ""

    def end(self) -> None:
        """End the line of the text whose turn it is, and begin the next text's turn."""
        print(flush=True)
        self._turn += 1
