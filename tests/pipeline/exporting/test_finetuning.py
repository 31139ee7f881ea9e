"""Exported models in the hands of transformers: trained, rounded, resized, saved again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from longhaul.configs.loader import to_dict
from longhaul.datamodules.tokenizer import build_tokenizer
from longhaul.modules.attention import attention_config
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.pipeline.exporting.configuration_longhaul import LonghaulConfig
from longhaul.pipeline.exporting.modeling_longhaul import LonghaulForCausalLM
from longhaul.pipeline.exporting.tokenizer_files import write_tokenizer


def both(
    kind: str, width: int = 32, tied_head: bool = True, **options: Any
) -> tuple[LanguageModel, LonghaulForCausalLM]:
    """A model as longhaul has it, and as it is exported."""
    torch.manual_seed(0)
    attention = attention_config(kind)(**options)
    config = LanguageModelConfig(
        attention=attention, layers=2, width=width, heads=4, vocabulary=320, tied_head=tied_head
    )
    model = LanguageModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # large enough for every part to matter
            parameter.add_(0.3 * torch.randn_like(parameter))
    exported = LonghaulForCausalLM(LonghaulConfig(to_dict(config)))
    left = exported.load_state_dict(model.state_dict(), strict=False)
    assert left == (["lm_head.weight"] if tied_head else [], [])
    return model, exported.eval()


def tokens(T: int, B: int = 1) -> Tensor:
    return torch.randint(256, (B, T), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def error(exact: Tensor, found: Tensor) -> float:
    return float((found.float() - exact).square().mean().sqrt())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("zeros", {}),
        ("zeros", {"initial_state": "learned", "rank": 3}),
        ("conformal_sympow", {}),
        # Of which keys and values are kept. Its states are large, and take long.
        pytest.param("sympow", {"degree": 8}, marks=pytest.mark.wide),
    ],
)
def test_autocast_rounds_no_sum_over_tokens(kind: str, options: dict[str, Any]) -> None:
    model, exported = both(kind, 64, **options)
    x = tokens(1000)
    with torch.no_grad():
        exact = model.activations(x)[0] @ model.embedding.weight.T
        with torch.autocast("cpu", torch.bfloat16):
            own = model.activations(x)[0] @ model.embedding.weight.T
            found = exported(x).logits
    assert 0 < error(exact, found) < 1.1 * error(exact, own)


def test_saved_again_it_computes_the_same(tmp_path: Path) -> None:
    _, exported = both("conformal_sympow")
    exported.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    back = LonghaulForCausalLM.from_pretrained(tmp_path).eval()
    assert back.lm_head.weight is back.embedding.weight
    assert torch.equal(back(tokens(20)).logits, exported(tokens(20)).logits)


def test_rows_can_be_added_to_the_embedding() -> None:
    _, exported = both("softmax")
    before = exported(tokens(20)).logits
    exported.resize_token_embeddings(330)
    assert exported.lm_head.weight is exported.embedding.weight
    after = exported(tokens(20)).logits
    assert after.shape == (1, 20, 330)
    torch.testing.assert_close(after[..., :320], before)


def test_a_head_of_its_own_stays_its_own(tmp_path: Path) -> None:
    model, exported = both("softmax", tied_head=False)
    before = exported(tokens(20)).logits
    torch.testing.assert_close(before, model(tokens(20)))
    exported.save_pretrained(tmp_path)
    back = LonghaulForCausalLM.from_pretrained(tmp_path).eval()
    assert back.lm_head.weight is not back.embedding.weight
    assert torch.equal(back(tokens(20)).logits, before)
    exported.resize_token_embeddings(330)
    torch.testing.assert_close(exported(tokens(20)).logits[..., :320], before)


def test_what_generation_has_cached_does_not_stop_training() -> None:
    _, exported = both("conformal_sympow")
    with torch.inference_mode():
        exported.generate(tokens(20), max_new_tokens=2)
    exported.train()(tokens(20), labels=tokens(20)).loss.backward()
    assert all(parameter.grad is not None for parameter in exported.parameters())


def test_padding_behind_the_tokens_is_trained_as_one_batch() -> None:
    """Without a cache, nothing that matters follows the tokens of a row."""
    _, exported = both("conformal_sympow")
    x, calls = tokens(20, 2), []
    mask, labels = torch.ones_like(x), x.clone()
    mask[1, 15:], labels[1, 15:] = 0, -100
    exported.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    loss = exported.train()(x, mask, labels=labels).loss
    assert len(calls) == 1
    losses = [exported(row[None, :T], labels=row[None, :T]).loss * (T - 1)
              for row, T in zip(x, (20, 15), strict=True)]  # fmt: skip
    torch.testing.assert_close(loss, sum(losses) / (19 + 14))


def test_at_padding_stand_the_logits_of_the_token_before() -> None:
    _, exported = both("softmax")
    x, mask = tokens(20, 2), torch.ones(2, 20)
    mask[0, :4] = mask[1, 15:] = 0
    with torch.no_grad():
        found = exported(x, mask).logits
        torch.testing.assert_close(found[1, 15:], exported(x[1:, :15]).logits[0, -1:].expand(5, -1))
        grown = exported.generate(x, attention_mask=mask, max_new_tokens=5, do_sample=False)
        alone = exported.generate(x[1:, :15], max_new_tokens=5, do_sample=False)
    assert torch.equal(grown[1, 20:], alone[0, 15:])


def test_an_escape_that_the_text_ends_in_is_decoded_as_in_generation(tmp_path: Path) -> None:
    tokenizer, plain = build_tokenizer("longcrawl64"), build_tokenizer("gpt2")
    write_tokenizer(tmp_path, tokenizer, tokenizer.vocab_size)
    exported = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True)
    for text in (r"a\u\\", r"\u", r"\u00\n", r"\u00\n4", r"\ud83d\ude", "\\", r"\n\q\u0041"):
        ids = plain.encode(text).tolist()
        assert exported.decode(ids) == tokenizer.decode(ids), text


def test_a_batch_is_padded_before_its_texts_so_that_it_can_be_continued(tmp_path: Path) -> None:
    assert write_tokenizer(tmp_path, build_tokenizer("bytes"), 320) == (True, 257)
    exported = AutoTokenizer.from_pretrained(tmp_path)
    batch = exported(["a", "abc"], padding=True)
    assert batch.attention_mask == [[0, 0, 1, 1], [1, 1, 1, 1]]
    # A token of its own, so that padding can be told from the end of a text.
    assert batch.input_ids[0] == [257, 257, 256, ord("a")]
    assert (exported.pad_token_id, exported.eos_token_id) == (257, 256)


def test_without_a_free_row_padding_is_the_end_of_a_text(tmp_path: Path) -> None:
    assert write_tokenizer(tmp_path, build_tokenizer("bytes"), 257) == (True, 256)
    exported = AutoTokenizer.from_pretrained(tmp_path)
    assert exported.pad_token_id == exported.eos_token_id == 256
    assert len(exported) == 257
