"""`longhaul generate`: continue a prompt, one token at a time at constant cost for linear kinds."""

import argparse
import itertools
import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from longhaul.datamodules.manifest import load_manifest
from longhaul.datamodules.tokenizer import tokenizer_of
from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.load import add_model_arguments, load_named_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--tokens", type=int, default=256, help="tokens to add (%(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest token (%(default)s)"
    )
    parser.add_argument("--top-k", type=int, help="choose among the k likeliest tokens only")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (%(default)s)")


def main(args: argparse.Namespace) -> int:
    if args.tokens < 1:
        raise ValueError(f"--tokens: found {args.tokens}, wanted 1 or more")
    if not 0 <= args.temperature < math.inf:
        raise ValueError(f"--temperature: found {args.temperature}, wanted 0 or more")
    if args.top_k is not None and args.top_k < 1:
        raise ValueError(f"--top-k: found {args.top_k}, wanted 1 or more")
    trained = load_named_model(args)
    manifest = load_manifest(trained.config.data.manifest)
    tokenizer = tokenizer_of(manifest)
    prompt = torch.tensor([[manifest.bos_id, *tokenizer.encode(args.prompt)]])
    generator = torch.Generator(trained.device).manual_seed(args.seed)
    decoder = tokenizer.stream_decoder()
    tokens = sample_tokens(
        trained.model,
        prompt.to(trained.device),
        num_tokens=args.tokens,
        vocabulary=manifest.vocab_size,
        temperature=args.temperature,
        top_k=args.top_k,
        generator=generator,
    )
    # Only now is it known that the model can continue the prompt.
    first = next(tokens)
    print(args.prompt, end="", flush=True)
    for token in itertools.chain([first], tokens):
        if token == tokenizer.eot_id:
            break
        print(decoder.push(token), end="", flush=True)
    print(decoder.flush())
    return 0


def sample_tokens(
    model: LanguageModel,
    prompt: Tensor,
    *,
    num_tokens: int,
    vocabulary: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator,
) -> Iterator[int]:
    """Yield tokens after a (1, T) prompt: one parallel pass over it, then recurrent steps."""
    logits, state = model.prefill(prompt)
    for index in range(num_tokens):
        # Rows beyond the tokenizer's ids only pad the embedding.
        token = choose(logits[:, :vocabulary], temperature, top_k, generator)
        yield int(token)
        if index + 1 < num_tokens:
            logits, state = model.step(token, state)


def choose(
    logits: Float[Tensor, "1 V"],
    temperature: float,
    top_k: int | None,
    generator: torch.Generator,
) -> Tensor:
    """One token, sampled at a temperature among the k likeliest; 0 takes the likeliest."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    if top_k is not None and top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    probabilities = (logits / temperature).softmax(dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]
