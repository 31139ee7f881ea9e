"""What exported models do with the options of transformers' `forward` and `generate`."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, DynamicCache, StaticCache

from longhaul.configs.loader import to_dict
from longhaul.modules.attention import attention_config
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.pipeline.exporting import source
from longhaul.pipeline.exporting.cache_longhaul import LonghaulCache
from longhaul.pipeline.exporting.configuration_longhaul import LonghaulConfig
from longhaul.pipeline.exporting.modeling_longhaul import LonghaulForCausalLM
from longhaul.pipeline.exporting.source import file_of, model_code


def config_of(kind: str, **options: Any) -> LanguageModelConfig:
    sizes = {"layers": 2, "width": 32, "heads": 4, "vocabulary": 320}
    return LanguageModelConfig(attention=attention_config(kind)(), **sizes, **options)


def model_of(kind: str, **options: Any) -> LonghaulForCausalLM:
    return built(config_of(kind), **options)


def built(config: LanguageModelConfig, **options: Any) -> LonghaulForCausalLM:
    torch.manual_seed(0)
    model = LonghaulForCausalLM(LonghaulConfig(to_dict(config), **options))
    with torch.no_grad():
        for parameter in model.parameters():  # large enough for every part to matter
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="module", params=["conformal_sympow", "softmax", "tokens"])
def model(request: pytest.FixtureRequest) -> LonghaulForCausalLM:
    """A model with states of constant size, one whose states grow, one that caches its inputs."""
    if request.param == "tokens":
        return model_of("conformal_sympow", caches_tokens=True)
    return model_of(request.param)


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.no_grad():
        yield


def tokens(T: int = 12, B: int = 3) -> Tensor:
    return torch.randint(256, (B, T), generator=torch.Generator().manual_seed(1))


def padded() -> Tensor:
    """A mask of rows with padding before, around and amid their tokens."""
    mask = torch.ones_like(tokens())
    mask[0, :5] = mask[1, :2] = mask[1, -3:] = mask[2, 4:6] = 0
    return mask


def test_the_loss_of_a_padded_batch_is_that_of_its_rows(model: LonghaulForCausalLM) -> None:
    x, mask = tokens(), padded()
    rows = [row[kept.bool()][None] for row, kept in zip(x, mask, strict=True)]
    count = sum(row.shape[1] - 1 for row in rows)
    wanted = sum(model(row, labels=row).loss * (row.shape[1] - 1) for row in rows) / count
    for use_cache in (False, True):
        found = model(x, mask, labels=x, use_cache=use_cache).loss
        torch.testing.assert_close(found, wanted)


def test_logits_before_the_first_token_have_not_read_it(model: LonghaulForCausalLM) -> None:
    """Else a loss that is computed outside would judge a token by logits that know it."""
    x = tokens()
    for first in (17, 99):
        x[0, 5] = first
        assert not model(x, padded()).logits[0, :5].any()


def test_at_padding_stand_the_logits_of_the_token_before_it(model: LonghaulForCausalLM) -> None:
    x, mask = tokens(), torch.ones_like(tokens())
    mask[0, 7:] = mask[1, 10:] = 0
    for use_cache in (False, True):
        logits = model(x, mask, use_cache=use_cache).logits
        for row, T in enumerate((7, 10, 12)):
            alone = model(x[row : row + 1, :T]).logits[0]
            wanted = torch.cat([alone, alone[-1:].expand(12 - T, -1)])
            torch.testing.assert_close(logits[row], wanted)


def test_blocks_may_be_on_two_devices() -> None:
    """The second is `meta`, which computes shapes alone."""
    model = model_of("softmax")
    for part in (*model.blocks[1:], model.final_norm, model.lm_head):
        part.to("meta").register_forward_pre_hook(
            lambda _, values, options: (
                tuple(x.to("meta") for x in values if x is not None),
                options,
            ),
            with_kwargs=True,
        )
    mask = padded()
    mask[2] = 0  # a row without a token
    output = model(tokens(), mask, use_cache=False, output_hidden_states=True)
    assert [one.device.type for one in output.hidden_states] == ["cpu", "cpu", "meta"]
    assert output.logits.device.type == "meta"


def test_hidden_states_are_inputs_of_blocks_and_the_last_output(model: LonghaulForCausalLM) -> None:
    found: list[Tensor] = []
    hooks = [b.register_forward_pre_hook(lambda _, x: found.append(x[0])) for b in model.blocks]
    output = model(tokens(), output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    assert len(output.hidden_states) == 3
    for one, wanted in zip(output.hidden_states, found, strict=False):
        assert torch.equal(one, wanted)
    logits = model.lm_head(output.hidden_states[-1])
    torch.testing.assert_close(logits, output.logits)
    assert model(tokens()).hidden_states is None
    in_rows = model(tokens(), padded(), output_hidden_states=True).hidden_states
    alone = model(tokens()[:1, 5:], output_hidden_states=True).hidden_states
    for one, wanted in zip(in_rows, alone, strict=True):
        torch.testing.assert_close(one[:1, 5:], wanted)
    generated = model.generate(
        tokens(), max_new_tokens=2, return_dict_in_generate=True, output_hidden_states=True
    )
    assert [len(step) for step in generated.hidden_states] == [3, 3]


def test_logits_to_keep_is_a_number_or_positions(model: LonghaulForCausalLM) -> None:
    whole = model(tokens()).logits
    for kept in (1, 4):
        torch.testing.assert_close(model(tokens(), logits_to_keep=kept).logits, whole[:, -kept:])
    places = torch.tensor([3, 0, 11])
    torch.testing.assert_close(model(tokens(), logits_to_keep=places).logits, whole[:, places])
    of_each = torch.tensor([[0, 1], [11, 3], [5, 5]])
    found = model(tokens(), logits_to_keep=of_each).logits
    torch.testing.assert_close(found, torch.stack([whole[n, of_each[n]] for n in range(3)]))
    found = model(tokens(), logits_to_keep=padded().bool()).logits
    torch.testing.assert_close(found, whole[padded().bool()])
    both = model(tokens(), logits_to_keep=2, labels=tokens())
    torch.testing.assert_close(both.logits, whole[:, -2:])
    assert both.loss == model(tokens(), labels=tokens()).loss


def test_outputs_are_tuples_if_asked_for(model: LonghaulForCausalLM) -> None:
    logits, cache = model(tokens(), return_dict=False)
    assert torch.equal(logits, model(tokens()).logits)
    assert isinstance(cache, LonghaulCache)


def test_embeddings_stand_for_their_tokens(model: LonghaulForCausalLM) -> None:
    x, length = tokens(), {"max_new_tokens": 4, "do_sample": False}
    given = model.get_input_embeddings()(x)
    wanted = model(x, padded()).logits
    assert torch.equal(model(inputs_embeds=given, attention_mask=padded()).logits, wanted)
    found = model.generate(inputs_embeds=given, **length)
    assert torch.equal(found, model.generate(x, **length)[:, 12:])
    for arguments, message in (
        ({}, "found neither"),
        ({"input_ids": x, "inputs_embeds": given}, "found both"),
    ):
        with pytest.raises(ValueError, match=f"input_ids, inputs_embeds: {message}, wanted one"):
            model(**arguments)


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head_can_be_replaced(tied: bool) -> None:
    model = model_of("softmax", tie_word_embeddings=tied)
    before = model(tokens()).logits
    other = torch.nn.Embedding(320, 32)
    model.set_input_embeddings(other)
    assert model.get_input_embeddings() is other
    assert not torch.equal(model(tokens()).logits, before)
    head = torch.nn.Linear(32, 7, bias=False)
    model.set_output_embeddings(head)
    assert model.get_output_embeddings() is head
    assert model(tokens()).logits.shape == (3, 12, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_ids": torch.arange(12)[None]}, "position_ids: found some, wanted none: att"),
        ({"output_attentions": True}, "output_attentions: found some, wanted none: kinds of l"),
        ({"token_type_ids": torch.zeros(3, 12)}, "token_type_ids: found some, wanted none: the m"),
        ({"atention_mask": torch.ones(3, 12)}, "atention_mask: found some, wanted none: the mod"),
        ({"attention_mask": torch.ones(3, 1, 12, 12)}, r"attention_mask: found shape \(3, 1, 12,"),
        ({"attention_mask": torch.ones(3, 11)}, r"found shape \(3, 11\), wanted \(3, 12\), or mo"),
        ({"past_key_values": DynamicCache()}, "past_key_values: found a DynamicCache, wanted a L"),
        ({"past_key_values": LonghaulCache(2)}, "past_key_values: found 2 rows, wanted 3"),
    ],
)
def test_what_the_model_does_not_have_is_refused_by_name(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        model_of("softmax")(tokens(), **options)
    assert "\n" not in str(error.value)


def test_generate_refuses_other_caches_by_name(model: LonghaulForCausalLM) -> None:
    for cache in (DynamicCache(), StaticCache(model.config, 40)):
        message = f"past_key_values: found a {type(cache).__name__}, wanted a LonghaulCache"
        with pytest.raises(ValueError, match=message):
            model.generate(tokens(), past_key_values=cache, max_new_tokens=2)


def test_assisted_generation_needs_states_that_can_be_cut_back(model: LonghaulForCausalLM) -> None:
    prompt = tokens(6, 1).repeat(1, 3)  # in which the next tokens are looked up
    options = {"max_new_tokens": 12, "do_sample": False}
    if model._is_stateful:
        with pytest.raises(ValueError, match="stateful"):
            model.generate(prompt, prompt_lookup_num_tokens=3, **options)
        return
    cut: list[int] = []
    crop = LonghaulCache.crop
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LonghaulCache, "crop", lambda cache, n: (cut.append(n), crop(cache, n))[1])
        found = model.generate(prompt, prompt_lookup_num_tokens=3, **options)
    assert torch.equal(found, model.generate(prompt, **options))
    assert min(cut) < 0


def test_a_cache_is_cut_back_to_fewer_tokens(model: LonghaulForCausalLM) -> None:
    x, mask = tokens(), torch.ones_like(tokens())
    mask[0, :5] = 0
    cache = model(x, mask).past_key_values
    cache.crop(0)
    with pytest.raises(ValueError, match="tokens_to_remove: found 3, wanted 0 or a negative num"):
        cache.crop(3)
    if model._is_stateful:
        with pytest.raises(
            ValueError, match="crop: found a call for LonghaulCache, which has a st"
        ):
            cache.crop(-1)
        return
    cache.crop(-4)
    assert (cache.get_seq_length(), cache.layers[0].get_seq_length()) == (8, 8)
    found = model(x[:, 8:], mask, past_key_values=cache).logits
    torch.testing.assert_close(found, model(x, mask).logits[:, 8:])
    # The fifth token is padding in one row alone, so that rows would be cut to different tokens.
    message = "crop: found a call for LonghaulCache, which can be cut back to 5 tokens, not to 4;"
    with pytest.raises(ValueError, match=message):
        cache.crop(-8)


WINDOWED = {"1": attention_config("softmax")(window=5)}  # type: ignore[call-arg]


@pytest.mark.parametrize("options", [{"layer_attention": WINDOWED}, {"learned_positions": 40}])
def test_a_cache_without_all_it_has_read_is_not_cut_back(options: dict[str, Any]) -> None:
    """A window's cache holds no more than the next token sees, so that one less lacks a token."""
    model = built(config_of("softmax", **options))
    for T in (2, 12):  # shorter than the window, too
        cache = model(tokens(T)).past_key_values
        with pytest.raises(
            ValueError, match="crop: found a call for LonghaulCache, which has a state that cannot"
        ):
            cache.crop(-1)
        assert not cache.is_croppable
    with pytest.raises(ValueError, match="stateful"):
        model.generate(tokens(), prompt_lookup_num_tokens=3, max_new_tokens=2)


def test_a_cache_does_what_caches_of_transformers_do(model: LonghaulForCausalLM) -> None:
    x, more = tokens(), tokens(4).flip(0)
    whole = model(torch.cat([x, more], dim=1)).logits[:, -4:]
    mask = padded()

    def read(rows: Tensor, cache: LonghaulCache) -> Tensor:
        return model(rows, past_key_values=cache).logits  # type: ignore[no-any-return]

    cache = model(x).past_key_values
    assert isinstance(cache, Cache)
    assert (cache.get_seq_length(), cache.batch_size, cache.get_mask_sizes(1, 0)) == (
        12,
        3,
        (13, 0),
    )
    torch.testing.assert_close(read(more, copy.deepcopy(cache)), whole)
    chosen = copy.deepcopy(cache)
    chosen.batch_select_indices(torch.tensor([2, 0]))
    torch.testing.assert_close(read(more[[2, 0]], chosen), whole[[2, 0]])
    chosen = copy.deepcopy(cache)
    chosen.batch_select_indices(torch.tensor([False, True, False]))
    torch.testing.assert_close(read(more[1:2], chosen), whole[1:2])
    twice = copy.deepcopy(cache)
    twice.batch_repeat_interleave(2)
    torch.testing.assert_close(
        read(more.repeat_interleave(2, 0), twice), whole.repeat_interleave(2, 0)
    )
    # In groups, too.
    groups = model(x, mask).past_key_values
    wanted = read(more, copy.deepcopy(groups))
    groups.reorder_cache(torch.tensor([1, 2, 0]))
    torch.testing.assert_close(read(more[[1, 2, 0]], groups), wanted[[1, 2, 0]])
    assert len(cache) == (1 if model.config.caches_tokens else 2)
    assert cache.is_initialized
    assert cache.is_croppable != model._is_stateful
    assert not cache.is_compileable
    assert not any(cache.is_sliding)
    cache.reset()
    assert cache.get_seq_length() == cache.layers[0].get_seq_length() == 0
    torch.testing.assert_close(read(x, cache), model(x).logits)
    for call in (cache.update, cache.layers[0].update):
        with pytest.raises(
            ValueError, match=r"^update: found a call for LonghaulCache, which holds"
        ):
            call()


def test_a_cache_that_is_given_is_filled_also_without_use_cache(model: LonghaulForCausalLM) -> None:
    x = tokens()
    cache = LonghaulCache(3)
    assert model(x[:, :7], past_key_values=cache, use_cache=False).past_key_values is None
    assert cache.get_seq_length() == 7
    found = model(x[:, 7:], past_key_values=cache).logits
    torch.testing.assert_close(found, model(x).logits[:, 7:])


def test_beams_of_padded_rows_have_states_of_their_own(model: LonghaulForCausalLM) -> None:
    options = {"num_beams": 3, "max_new_tokens": 4, "attention_mask": padded(), "pad_token_id": 257}
    wanted = model.generate(tokens(), use_cache=False, **options)
    assert torch.equal(model.generate(tokens(), **options), wanted)


def test_generation_goes_on_from_a_cache(model: LonghaulForCausalLM) -> None:
    length = {"max_new_tokens": 4, "do_sample": False}
    first = model.generate(tokens(), return_dict_in_generate=True, **length)
    longer = torch.cat([first.sequences, tokens(5)], dim=1)
    found = model.generate(longer, past_key_values=first.past_key_values, **length)
    assert torch.equal(found, model.generate(longer, **length))


@pytest.mark.parametrize("kind", ["conformal_sympow", "softmax"])
def test_one_more_token_is_a_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks that are called, as hooks of accelerate need it."""
    model, calls = model_of(kind), []
    attention = model.blocks[0].attention
    monkeypatch.setattr(attention, "step", lambda *a, s=attention.step: (calls.append(1), s(*a))[1])
    cache = model(tokens()).past_key_values
    model(tokens(1), past_key_values=cache)
    assert len(calls) == (kind == "conformal_sympow")


def write(folder: Path, kind: str) -> LanguageModel:
    """An exported model; folder and code only."""
    torch.manual_seed(0)
    config = config_of(kind)
    model = LanguageModel(config).eval()
    folder.mkdir(parents=True)
    exported = LonghaulForCausalLM(LonghaulConfig(to_dict(config)))
    exported.load_state_dict(model.state_dict(), strict=False)
    code = model_code([config.attention])
    exported.config.auto_map = {
        "AutoConfig": f"{file_of(code, 'configuration_longhaul')[:-3]}.LonghaulConfig",
        "AutoModelForCausalLM": f"{file_of(code, 'modeling_longhaul')[:-3]}.LonghaulForCausalLM",
    }
    exported.save_pretrained(folder)
    for name, text in code.items():
        (folder / name).write_text(text)
    return model


def test_exports_of_one_name_run_their_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {
        kind: write(tmp_path / kind / "step-16", kind) for kind in ("softmax", "conformal_sympow")
    }
    # The code of another version of longhaul, for the same weights.
    read: Callable[[Any, str], str] = source._Code._source
    halved = ("y = x + ", "y = x / 2 + ")
    monkeypatch.setattr(source._Code, "_source", lambda *a: read(*a).replace(*halved))
    runs["halved"] = write(tmp_path / "halved" / "step-16", "softmax")
    found = {}
    for name in runs:
        load = AutoModelForCausalLM.from_pretrained
        model = load(tmp_path / name / "step-16", trust_remote_code=True).eval()
        found[name] = model(tokens()).logits
        model.save_pretrained(tmp_path / "again" / name / "step-16")
        again = load(tmp_path / "again" / name / "step-16", trust_remote_code=True).eval()
        assert torch.equal(again(tokens()).logits, found[name])
    for name in ("softmax", "conformal_sympow"):
        torch.testing.assert_close(found[name], runs[name](tokens()))
    assert (found["halved"] - found["softmax"]).abs().max() > 1e-4
