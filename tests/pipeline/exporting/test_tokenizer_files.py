"""Exports of a tokenizer.json give the ids of training for texts with special tokens."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from longhaul.datamodules.tokenizer import FileTokenizer
from longhaul.pipeline.exporting import check
from longhaul.pipeline.exporting.tokenizer_files import write_tokenizer

TEXTS = ("hello <|im_start|> x </s>", "a</s>b", "</s>", "<s></s></s>", "plain")


def tokenizer_of(kind: str, is_special: bool) -> FileTokenizer:
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
    return FileTokenizer(tokenizer.to_str().encode(), "tokenizer.json")


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
    tokenizer = FileTokenizer(json.dumps(values).encode(), "tokenizer.json")
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
