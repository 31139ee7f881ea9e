"""Exports of a tokenizer.json give the ids of training for texts with special tokens."""

import base64
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from longhaul.datamodules.tokenizer import (
    JsonTokenizer,
    RanksTokenizer,
    SentencePieceTokenizer,
    build_tokenizer,
)
from longhaul.pipeline.exporting import check
from longhaul.pipeline.exporting.tokenizer_files import check_exportable, write_tokenizer

TEXTS = ("hello <|im_start|> x </s>", "a</s>b", "</s>", "<s></s></s>", "plain")


def tokenizer_of(kind: str, is_special: bool) -> JsonTokenizer:
    names = ["<unk>", "<s>", "</s>", "\u2581", *map(chr, range(33, 127))]
    if kind == "pieces":
        pieces = [(name, 0.0 if len(name) > 1 else -5.0) for name in names]
        tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    else:
        vocabulary = {name: number for number, name in enumerate([*names, "</", "s>"])}
        merges = [("<", "/"), ("s", ">"), ("</", "s>")]
        tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    added = [AddedToken(name, special=is_special) for name in ("<s>", "</s>")]
    tokenizer.add_tokens([*added, AddedToken("<|im_start|>", special=True)])
    return JsonTokenizer(tokenizer.to_str().encode(), "tokenizer.json")


@pytest.mark.parametrize("kind", ["pieces", "merges"])
@pytest.mark.parametrize("is_special", [True, False])
def test_special_tokens_in_texts_are_text(tmp_path: Path, kind: str, is_special: bool) -> None:
    tokenizer = tokenizer_of(kind, is_special)
    write_tokenizer(tmp_path, tokenizer, tokenizer.vocab_size + 1)
    exported = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode(text).tolist()
        assert tokenizer.eot_id not in ids
        assert tokenizer.decode(ids) == text
        assert exported(text).input_ids == [tokenizer.bos_id, *ids]
    check._check_tokenizer(tmp_path, tokenizer)
    config = json.loads((tmp_path / "tokenizer_config.json").read_bytes())
    config["split_special_tokens"] = False
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match=r"^tokenizer: found ids "):
        check._check_tokenizer(tmp_path, tokenizer)


def test_a_tokenizer_at_which_the_library_panics_ends_an_export_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tokenizer_of("merges", True)
    values = json.loads(whole.content)
    # The decoder cuts three characters off the end of every token, and most have one.
    values["decoder"] = {"type": "Strip", "content": "x", "start": 0, "stop": 3}
    tokenizer = JsonTokenizer(json.dumps(values).encode(), "tokenizer.json")
    write_tokenizer(tmp_path, tokenizer, tokenizer.vocab_size)
    with pytest.raises(ValueError, match=r"^tokenizer: the exported one cannot encode and decode"):
        check._check_tokenizer(tmp_path, tokenizer)

    class Panic(BaseException):
        pass

    def from_str(content: str) -> None:
        raise Panic("index out of range")

    monkeypatch.setattr("tokenizers.Tokenizer", SimpleNamespace(from_str=from_str))
    with pytest.raises(ValueError, match=r"^tokenizer: cannot be read with a token for padding, "):
        write_tokenizer(tmp_path, tokenizer, tokenizer.vocab_size + 1)


def test_ranks_are_exported_with_their_words_and_special_tokens(tmp_path: Path) -> None:
    gpt2 = build_tokenizer("gpt2")._encoding._mergeable_ranks  # type: ignore[attr-defined]
    first = sorted(gpt2.items(), key=lambda one: one[1])[:2000]
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in first)
    # With `cl100k` an id is free between the ranks and the special tokens.
    tokenizer = RanksTokenizer("".join(lines).encode(), "a", pattern="cl100k", bos=2030)
    write_tokenizer(tmp_path, tokenizer, tokenizer.vocab_size + 1)
    exported = AutoTokenizer.from_pretrained(tmp_path)
    for text in (*TEXTS, "It's  12345 tokens,\n\n   isn't <|endoftext|>?  ", "é日本"):
        ids = tokenizer.encode(text).tolist()
        assert exported(text).input_ids == [2030, *ids]
        assert exported.decode([*ids, tokenizer.eot_id]) == f"{text}<|endoftext|>"
    again = build_tokenizer(str(tmp_path / "tokenizer.json"), bos=2030, eos=tokenizer.eot_id)
    assert again.vocab_size == tokenizer.vocab_size + 1  # padding has an id of its own
    check._check_tokenizer(tmp_path, tokenizer)


def test_a_sentencepiece_model_is_not_exported() -> None:
    tokenizer = object.__new__(SentencePieceTokenizer)
    with pytest.raises(
        ValueError, match=r"found tokenizer.model, a SentencePiece model, for which"
    ):
        check_exportable(tokenizer)
