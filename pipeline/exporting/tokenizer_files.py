"""Writes a tokenizer so that transformers' AutoTokenizer gives the same ids as longhaul's."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longhaul.datamodules.native import foreign_content
from longhaul.datamodules.tokenizer import (
    END_OF_TEXT,
    PATTERNS,
    JsonTokenizer,
    RanksTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    gpt2_files,
)

_PADDING = "<|padding|>"


def check_exportable(tokenizer: Tokenizer) -> None:
    """Raise ValueError if no tokenizer.json would give the same ids."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        raise ValueError(
            f"tokenizer: found {tokenizer.name}, a SentencePiece model, for which transformers "
            "computes ids in another way, wanted the tokenizer.json of the same model"
        )


def write_tokenizer(folder: Path, tokenizer: Tokenizer, rows: int) -> tuple[bool, int]:
    """Write tokenizer.json and its config, and the code that escapes text if that is needed.

    Args:
        folder: to write to.
        tokenizer: of the run, which `check_exportable` accepts.
        rows: of the embedding. If one belongs to no token, padding gets a token of its own.

    Returns:
        Whether it puts bos before a text: where bos is a special token of the tokenizer's. And the
        id of the padding, which is that of the end of a text where no row is free.

    Raises:
        ValueError: the library fails with the tokenizer.
    """
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        # Texts of a batch are continued at their ends, which padding must not follow.
        "padding_side": "left",
        # Special tokens in a text are read as plain text, as in training.
        "split_special_tokens": True,
    }
    if isinstance(tokenizer, JsonTokenizer):
        content = tokenizer.without_end()
        # Training neither adds tokens around texts, nor truncates or pads them.
        content |= {"post_processor": None, "truncation": None, "padding": None}
        # Only added tokens may be special: transformers would look for any other one in every text.
        added = {token["id"]: token["content"] for token in content.get("added_tokens", [])}
        for token in content.get("added_tokens", []):
            token["special"] |= token["id"] in (tokenizer.bos_id, tokenizer.eot_id)
    elif isinstance(tokenizer, RanksTokenizer):
        # The library gives added tokens consecutive ids, so that there may be no gap.
        behind = range(len(tokenizer.ranks), tokenizer.vocab_size)
        added = {token: f"<|special_{token}|>" for token in behind}
        added |= {token: name for name, token in tokenizer.special.items()}
        content = _ranks_tokenizer(tokenizer, [*added.values()])
    else:
        content = _byte_tokenizer() if tokenizer.name == "bytes" else _gpt2_tokenizer()
        added = {tokenizer.eot_id: END_OF_TEXT}
    for role, token in (("bos", tokenizer.bos_id), ("eos", tokenizer.eot_id)):
        if token in added:
            config[f"{role}_token"] = added[token]
    if "bos_token" in config:
        # Every sequence of training began with it.
        content["post_processor"] = _begin_with(config["bos_token"], tokenizer.bos_id)
    pad_id = tokenizer.eot_id
    if tokenizer.vocab_size < rows and (padding := _add_padding(content, tokenizer.vocab_size)):
        config["pad_token"], pad_id = padding, tokenizer.vocab_size
    elif "eos_token" in config:
        config["pad_token"] = config["eos_token"]
    if tokenizer.name == "longcrawl64":
        config["tokenizer_class"] = "LonghaulTokenizer"
        # A name of its own, as the model's code has in source.py.
        code = Path(__file__).with_name("tokenization_longhaul.py").read_text(encoding="utf-8")
        name = f"tokenization_longhaul_{hashlib.sha256(code.encode()).hexdigest()[:12]}"
        config["auto_map"] = {"AutoTokenizer": [None, f"{name}.LonghaulTokenizer"]}
        (folder / f"{name}.py").write_text(code, encoding="utf-8")
    for name, value in (("tokenizer.json", content), ("tokenizer_config.json", config)):
        (folder / name).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
    return "bos_token" in config, pad_id


def _add_padding(content: dict[str, Any], free_id: int) -> str | None:
    """Add a token of this id to a tokenizer.json. Returns its name, None if it cannot be added."""
    # Imported here: slow, and only exports need it.
    from tokenizers import Tokenizer

    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    token = {"id": free_id, "content": _PADDING, **flags, "special": True}
    added = [*content.get("added_tokens", []), token]
    with foreign_content("tokenizer", "cannot be read with a token for padding"):
        before, after = (
            Tokenizer.from_str(json.dumps(one)).get_vocab()
            for one in (content, content | {"added_tokens": added})
        )
    # A vocabulary with gaps gives the token another id, and one that has the name its own.
    if after != {**before, _PADDING: free_id}:
        return None
    content["added_tokens"] = added
    return _PADDING


def _begin_with(token: str, token_id: int) -> dict[str, Any]:
    """What puts a token before a text, or before the first of a pair, in a tokenizer.json."""
    begin = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [begin, first],
        "pair": [begin, first, second],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def _byte_tokenizer() -> dict[str, Any]:
    """One token per byte, with ids 0 to 255."""
    return _byte_level({char: byte for byte, char in enumerate(_byte_characters())}, [], False)


def _gpt2_tokenizer() -> dict[str, Any]:
    files = gpt2_files()
    lines = files["vocab.bpe"].read_text(encoding="utf-8").splitlines()[1:]
    vocabulary = json.loads(files["encoder.json"].read_text(encoding="utf-8"))
    merges = [(first, second) for first, second in (line.split() for line in lines if line)]
    return _byte_level(vocabulary, merges, True)


def _ranks_tokenizer(tokenizer: RanksTokenizer, special: list[str]) -> dict[str, Any]:
    """Its words that are tokens, and all merges of two tokens into one, as tiktoken has them."""
    ranks, letters = tokenizer.ranks, _byte_characters()
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in ranks:
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(a, b) for a, b in halves if a in ranks and b in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(names[first], names[second]) for first, second in pairs]
    vocabulary = {names[token]: rank for token, rank in ranks.items()}
    content = _byte_level(vocabulary, merges, False, special)
    content["model"]["ignore_merges"] = True
    pattern = {"Regex": PATTERNS[tokenizer.pattern]}
    words = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    steps = [words, content["pre_tokenizer"]]
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    return content


def _byte_level(
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    splits_words: bool,
    special: Sequence[str] = (END_OF_TEXT,),
) -> dict[str, Any]:
    # Imported here: slow, and only exports need it.
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=splits_words
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(name, special=True, normalized=False) for name in special]
    tokenizer.add_special_tokens(added)
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    return content


def _byte_characters() -> list[str]:
    """The printable characters that stand for the bytes 0 to 255 in byte-level vocabularies."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
