"""Bytes of text for each token, from which reports compute bits per byte."""

import math

import pytest
import torch

from longhaul.datamodules.corpus import Corpus
from longhaul.datamodules.manifest import Manifest, ShardEntry
from longhaul.datamodules.tokenizer import build_tokenizer
from longhaul.pipeline.evaluation.windows import Passage, bytes_per_token


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_bytes_are_those_of_the_text(name: str) -> None:
    tokenizer = build_tokenizer(name)
    manifest = Manifest(
        tokenizer=name,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        eot_id=tokenizer.eot_id,
        document_tokens=8,
        dtype="uint16",
        shards=(ShardEntry(name="a", bytes=1, documents=1, sha256="0" * 64),),
    )
    text = "Grüße, größer als das."
    ids = [*map(int, tokenizer.encode(text)), tokenizer.eot_id]
    found = bytes_per_token([Passage(torch.tensor(ids))] * 2, Corpus(manifest))
    # The end of a text is a token that is predicted, and no text.
    assert found == pytest.approx(len(text.encode()) / len(ids))
    assert math.isnan(bytes_per_token([], Corpus(manifest)))
