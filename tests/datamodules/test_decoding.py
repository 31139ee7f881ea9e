"""Text that is shown id by id against the text of all ids, for every decoder of `tokenizers`."""

import random

import pytest
import tokenizers
from tokenizers import decoders, models

from longhaul.datamodules.decoding import FileDecoder

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
WORDS = ["<unk>", "</s>", *"▁ é.a\ufffd", "▁▁", "▁the", "▁p", "lace", "日本", "n't"]
PIECES = {
    "llama": (decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)]), [*WORDS, *BYTES]),
    "gemma": (decoders.Sequence(LLAMA), [*BYTES, *WORDS]),
    "byte level": (decoders.ByteLevel(), tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    "word piece": (decoders.WordPiece(), [*WORDS, "##ing", "##", "##.", "do", "not"]),
    "metaspace": (decoders.Metaspace(), WORDS),
    "suffixes": (decoders.BPEDecoder(), ["a", "b</w>", "</w>", "</w>c</w>", "<0xC3></w>"]),
    "ctc": (decoders.CTC(), [*WORDS, "<pad>", "|"]),
    "strip": (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]), WORDS),
    "joined first": (decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "x")]), [*"abc"]),
    "words": (None, WORDS),
}


def tokenizer_with(name: str) -> tokenizers.Tokenizer:
    decoder, pieces = PIECES[name]
    vocabulary = {piece: number for number, piece in enumerate(sorted(pieces))}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=min(pieces)))
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


@pytest.mark.parametrize("name", PIECES)
def test_what_is_shown_is_the_text_of_all_ids(name: str) -> None:
    tokenizer = tokenizer_with(name)
    draw = random.Random(name)
    size = tokenizer.get_vocab_size()
    for length in [*range(1, 40)] * 5 + [150] * 5:
        some = [draw.randrange(size) for _ in range(draw.randint(1, size))]
        ids = [draw.choice(some) for _ in range(length)]
        decoder = FileDecoder(tokenizer)
        shown = "".join([*map(decoder.push, ids), decoder.flush()])
        assert shown == tokenizer.decode(ids, skip_special_tokens=False), ids


def test_ids_that_the_library_s_own_stream_refuses_are_shown() -> None:
    tokenizer = tokenizer_with("llama")
    decoder = FileDecoder(tokenizer)
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in (0xE2, 0x82, 0xAC, 0x41, 0xFF)]
    # The first four are a character and a letter, until the fifth spoils them all.
    assert [decoder.push(token) for token in ids] == [""] * 5
    assert decoder.push(tokenizer.token_to_id("a")) == "\ufffd" * 5 + "a"


@pytest.mark.parametrize("name", ["llama", "gemma", "byte level", "word piece", "metaspace"])
def test_text_is_shown_while_it_grows_and_the_past_is_not_decoded_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_with(name)
    draw = random.Random(0)
    words = [i for i in map(tokenizer.token_to_id, ("▁the", "lace", "a", "Ġ")) if i is not None]
    decoder, most, shown = FileDecoder(tokenizer), 0, ""
    ids = [draw.choice(words) for _ in range(200)]
    for count, token in enumerate(ids, 1):
        shown += decoder.push(token)
        assert shown == tokenizer.decode(ids[:count])
        most = max(most, len(decoder._ids))
    assert most < 40


def test_a_continuation_keeps_the_space_between_it_and_the_prompt() -> None:
    for name in ("llama", "metaspace", "word piece"):
        tokenizer = tokenizer_with(name)
        prompt, ids = ([tokenizer.token_to_id(word) for word in said] for said in (["a"], ["▁p"]))
        text = "▁p" if name == "word piece" else "p"
        assert FileDecoder(tokenizer).push(ids[0]) == text
        assert FileDecoder(tokenizer, prompt).push(ids[0]) == f" {text}"
        assert FileDecoder(tokenizer, prompt * 50).push(ids[0]) == f" {text}"
