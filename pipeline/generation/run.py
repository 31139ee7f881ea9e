"""Continues prompts and prints the texts as they grow."""

from collections.abc import Sequence
from pathlib import Path

import torch

from longhaul.datamodules.decoding import StoppingDecoder
from longhaul.datamodules.manifest import load_manifest
from longhaul.datamodules.tokenizer import tokenizer_of
from longhaul.pipeline.generation.decoding import Sampling, Session, decode
from longhaul.pipeline.generation.sessions import load_session, origin, save_session
from longhaul.pipeline.runs.trained_model import TrainedModel


def generate(
    trained: TrainedModel,
    prompts: Sequence[str],
    *,
    num_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    stop: Sequence[str],
    state: Path | None,
    save_state: Path | None,
) -> None:
    """Print each prompt and its continuation; `longhaul generate --help` explains the arguments.

    Raises:
        ValueError: the saved state is damaged or of another model, or there is no manifest.
        OSError: the state could not be written.
    """
    of = origin(trained)  # now, since a run that goes on deletes old checkpoints
    manifest = load_manifest(trained.config.data.manifest)
    tokenizer = tokenizer_of(manifest)
    start = Session([manifest.bos_id])
    if state is not None:
        start = load_session(state, trained.model, of)
    sessions = [
        Session(
            [*start.unread, *tokenizer.encode(prompt).tolist()],
            start.state,
            torch.Generator(trained.device).manual_seed(seed),
        )
        for prompt in prompts
    ]
    sampling = Sampling(
        vocabulary=manifest.vocab_size,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    printer = _Printer(prompts)
    texts = [StoppingDecoder(tokenizer.stream_decoder(), stop) for _ in prompts]
    for index, token in decode(trained.model, sessions, num_tokens=num_tokens, sampling=sampling):
        session, text = sessions[index], texts[index]
        session.is_done = token == tokenizer.eot_id
        if not session.is_done:
            printer.add(index, text.push(token))
            session.is_done = text.has_stopped
    for index, text in enumerate(texts):
        printer.add(index, text.flush())
        printer.end(index)
    if save_state is not None:
        save_session(save_state, sessions[0], of)


class _Printer:
    """Prints texts that grow together, one after the other: the first one whole as it comes.

    Nothing is printed before the first addition, when it is known that the model can continue.
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
            print(self._waiting[index], end="", flush=True)
            self._waiting[index] = ""

    def end(self, index: int) -> None:
        """End of the text whose turn it is."""
        print(flush=True)
        self._turn += 1
