"""Files of tokenizers of every kind, and texts that are hard for them."""

import base64
import functools
import io
import json
from pathlib import Path

import pytest
import tokenizers

TEXTS = (
    "",
    "def f(x):\n    return x  # plain\n",
    "naïve café, 日本語, Ελληνικά, עברית",
    "😀 family 👩‍👩‍👧 and flag 🇨🇦",
    'quotes " and \\ backslashes \\n, \\u0041, tabs\t, nul \x00, bell \x07, / and \x7f',
    "<|endoftext|> is text here",
    "a</s>b<s>c<|begin_of_text|>",
    "line\r\nline\rline\u2028end",
)


def byte_pairs(path: Path) -> Path:
    """A tokenizer.json of byte pairs with special tokens, which cuts and pads texts."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["some text to learn from, some more of it"], trainer)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(path))
    return path


def ranks_file(path: Path, *tokens: bytes) -> Path:
    """A file of tiktoken's ranks: of each byte, and of these tokens."""
    every = [*(bytes([byte]) for byte in range(256)), *tokens]
    lines = (f"{base64.b64encode(one).decode()} {rank}\n" for rank, one in enumerate(every))
    path.write_text("".join(lines))
    return path


@functools.cache
def sentence_pieces() -> bytes:
    """A SentencePiece model of Llama 2's shape."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some text to learn from, some more of it"] * 9),
        model_writer=model,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return model.getvalue()


def llama_json() -> tokenizers.Tokenizer:
    """A tokenizer.json of Llama 2's shape, which divides no text into words."""
    steps = tokenizers.normalizers
    before = steps.Sequence([steps.Prepend("\u2581"), steps.Replace(" ", "\u2581")])
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    names += [
        *"abcdefghijklmnopqrstuvwxyz",
        "\u2581w",
        "or",
        "d\u2581d",
        "ds",
        "\u2581\u2581",
        "xx",
    ]
    pairs = [("\u2581", "w"), ("o", "r"), ("d", "s"), ("\u2581", "\u2581"), ("x", "x")]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {name: number for number, name in enumerate(names)},
            pairs,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = before
    last = tokenizers.decoders
    tokenizer.decoder = last.Sequence(
        [last.Replace("\u2581", " "), last.ByteFallback(), last.Fuse(), last.Strip(" ", 1, 0)]
    )
    return tokenizer


def saved(path: Path, tokenizer: tokenizers.Tokenizer, **changed: object) -> Path:
    """A tokenizer.json, of which these values are others than the library would write."""
    path.write_text(json.dumps({**json.loads(tokenizer.to_str()), **changed}))
    return path


def characters(*more: str) -> tokenizers.Tokenizer:
    """A tokenizer with an id for each printable character, and for these tokens."""
    names = [*map(chr, range(32, 127)), *more]
    vocabulary = {name: number for number, name in enumerate(names)}
    return tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
