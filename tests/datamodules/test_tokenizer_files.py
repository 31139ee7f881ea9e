"""Tokenizers that other programs wrote: special tokens, ranks, SentencePiece, damaged files."""

import base64
import json
import os
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizer_files import (
    TEXTS,
    byte_pairs,
    characters,
    ranks_file,
    saved,
    sentence_pieces,
)

from longhaul.datamodules.native import foreign_content
from longhaul.datamodules.tokenizer import (
    FileTokenizer,
    build_tokenizer,
    ranks,
    read_tokenizer,
)


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
def test_a_copied_file_is_read_as_it_was(tmp_path: Path, kind: str) -> None:
    path, pattern = tmp_path / "own", None
    if kind == "ranks":
        ranks_file(path, b"ab")
        pattern = "o200k"
    else:
        path.write_bytes(byte_pairs(path).read_bytes() if kind[0] == "t" else sentence_pieces())
    built = build_tokenizer(str(path), pattern=pattern)
    assert isinstance(built, FileTokenizer)
    copy = tmp_path / built.name
    copy.write_bytes(built.content)
    again = read_tokenizer(str(copy), built.name, bos=built.bos_id, eos=built.eot_id)
    for key in ("name", "sha256", "vocab_size", "bos_id", "eot_id"):
        assert getattr(again, key) == getattr(built, key)
    assert build_tokenizer(str(copy)).sha256 == built.sha256
    pickled = pickle.loads(pickle.dumps(built))  # for the workers of a preparation
    text = "ab some </s>"  # a special token is text in the copy too
    assert pickled.encode(text).tolist() == built.encode(text).tolist()
    # A worker, which gets it with every unit, builds it once.
    assert pickle.loads(pickle.dumps(built)) is pickled


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
