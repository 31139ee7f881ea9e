"""Exported models under accelerate, peft and transformers' Trainer, with GPT-2 as the control."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from everyday import everyday
from peft import (
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    TaskType,
    get_peft_model,
)
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from longhaul.configs.loader import to_dict
from longhaul.modules.attention import attention_config, registered_variants
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.pipeline.exporting.configuration_longhaul import LonghaulConfig
from longhaul.pipeline.exporting.modeling_longhaul import LonghaulForCausalLM

GPT2 = "gpt2"
FLAGSHIP = "conformal_sympow"
# Options with weights outside of projections.
OPTIONS: dict[str, dict[str, Any]] = {
    "cartan": {"gate_init": "long_memory", "initial_state": "learned", "step_size": True},
    "complex": {"learned_rates": True, "learned_sizes": True},
    FLAGSHIP: {"gate_init": "long_memory", "initial_state": "learned", "qk_norm": True},
    "retention": {"swish_gate": True},
    "sympow_gated": {"gate": "learned"},
    "zeros": {"zeroth": "first_layer", "ordered": True, "initial_state": "learned"},
}
# `make test` has the control, the flagship, and zeros, whose first layer computes more than others.
EVERYDAY = (GPT2, FLAGSHIP, "zeros")
every_model = pytest.mark.parametrize("name", everyday((GPT2, *registered_variants()), EVERYDAY))
control_and_ours = pytest.mark.parametrize("name", [GPT2, FLAGSHIP])
EMBEDDING = {GPT2: "wte", FLAGSHIP: "embedding"}


def model_of(name: str, *, tied: bool = True, biases: bool = False) -> Any:
    torch.manual_seed(0)
    model: Any
    if name == GPT2:
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 320}
        ids = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 257}
        still = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        model = GPT2LMHeadModel(GPT2Config(**sizes, **ids, **still, tie_word_embeddings=tied))
    else:
        attention = attention_config(name)(**OPTIONS.get(name, {}))
        config = LanguageModelConfig(
            attention=attention, layers=2, width=32, heads=4, vocabulary=320,
            tied_head=tied, biases=biases,
        )  # fmt: skip
        model = LonghaulForCausalLM(LonghaulConfig(to_dict(config), pad_token_id=257))
    with torch.no_grad():
        for parameter in model.parameters():  # large enough for every part to matter
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def tokens(T: int = 20, B: int = 2) -> Tensor:
    return torch.randint(256, (B, T), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def computed(model: Any) -> list[Tensor]:
    """Logits of a batch, padded and not, and what it continues with."""
    x = tokens()
    mask = torch.ones_like(x)
    mask[0, :4] = 0
    length = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 257}
    return [
        model(x).logits,
        model(x, attention_mask=mask).logits[mask.bool()],
        model.generate(x, attention_mask=mask, **length),
    ]


def same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@every_model
def test_offloaded_weights_are_those_that_compute(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    wanted = computed(model)
    same(computed(cpu_offload(model, execution_device=torch.device("cpu"))), wanted)
    model = disk_offload(model_of(name), tmp_path, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    same(computed(model), wanted)


@control_and_ours
@pytest.mark.parametrize("tied", [True, False])
def test_a_device_map_may_put_parts_on_disk(name: str, tied: bool, tmp_path: Path) -> None:
    model = model_of(name, tied=tied)
    wanted = computed(model)
    model.save_pretrained(tmp_path / "saved")
    load = partial(type(model).from_pretrained, tmp_path / "saved", offload_folder=tmp_path / "d")
    size = sum(parameter.nbytes for parameter in model.parameters())
    for most in (size // 2, 4 * size):
        found = load(device_map="auto", max_memory={"cpu": most})
        assert ("disk" in getattr(found, "hf_device_map", {}).values()) == (most < size)
        same(computed(found.eval()), wanted)
    parts = [part for part, _ in model.named_children()]
    if name != GPT2:
        on_disk = dict.fromkeys(parts, "cpu") | {"blocks": "disk"}
        dispatched = dispatch_model(model, on_disk, main_device="cpu", offload_dir=tmp_path / "e")
        same(computed(dispatched), wanted)


def train(model: Any, steps: int = 3, rate: float = 0.02) -> list[float]:
    """Losses of steps on one batch, all of whose trainable weights must have a gradient."""
    model.train()
    trainable = {k: p for k, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trainable.values(), lr=rate)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        for key, parameter in trainable.items():
            assert parameter.grad is not None, key
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    model.eval()
    return losses


@control_and_ours
def test_lora_changes_what_is_computed_and_can_be_merged(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    before = computed(model)
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", r=4))
    same(computed(adapted), before)
    losses = train(adapted)
    assert losses[-1] < losses[0] - 0.01
    after = computed(adapted)
    with adapted.disable_adapter():
        same(computed(adapted), before)
    same(computed(adapted.merge_and_unload()), after)


@control_and_ours
@pytest.mark.parametrize("layer", ["embedding", "norm", "gate", "initial_state"])
def test_modules_to_save_are_trained(name: str, layer: str) -> None:
    saved = {"embedding": EMBEDDING[name], "norm": "ln_f" if name == GPT2 else "final_norm"}
    if layer not in saved and name == GPT2:
        saved[layer] = "mlp"
    model = model_of(name)
    linear = ["c_attn"] if name == GPT2 else ["qkv"]
    config = LoraConfig(target_modules=linear, modules_to_save=[saved.get(layer, layer)])
    adapted = get_peft_model(model, config)
    before = computed(adapted)
    chosen = [p for k, p in adapted.named_parameters() if "modules_to_save" in k]
    assert chosen
    start = [p.detach().clone() for p in chosen]
    train(adapted)
    for parameter, old in zip(chosen, start, strict=True):
        assert not torch.equal(parameter, old)
    changed = computed(adapted)[0]
    assert not torch.equal(changed, before[0])
    with torch.no_grad():  # back to what they were: they alone decide what they computed
        for parameter, old in zip(chosen, start, strict=True):
            parameter.copy_(old)
    assert not torch.equal(computed(adapted)[0], changed)


@control_and_ours
@pytest.mark.parametrize("target", ["embedding", "lm_head"])
def test_lora_of_the_embedding_and_the_head(name: str, target: str) -> None:
    targets = [EMBEDDING[name] if target == "embedding" else target]
    adapted = get_peft_model(model_of(name), LoraConfig(target_modules=targets, r=4))
    losses = train(adapted)
    assert losses[-1] < losses[0]


@control_and_ours
def test_prompt_tuning_learns_and_generates(name: str) -> None:
    for config in (
        PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3),
        PromptEncoderConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3),
    ):
        adapted = get_peft_model(model_of(name), config)
        losses = train(adapted, 5)
        assert losses[-1] < losses[0]
        x = tokens()
        length = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 257}
        cached = adapted.generate(input_ids=x, attention_mask=torch.ones_like(x), **length)
        again = adapted.generate(
            input_ids=x, attention_mask=torch.ones_like(x), use_cache=False, **length
        )
        assert torch.equal(cached, again)
        assert cached.shape == (2, 24)


def test_prefix_tuning_is_refused_by_name() -> None:
    config = PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3)
    with pytest.raises(ValueError, match="past_key_values: found a DynamicCache, wanted a Longh"):
        get_peft_model(model_of(FLAGSHIP), config)(tokens())


@every_model
def test_gradient_checkpointing_changes_no_gradient(name: str) -> None:
    gradients = []
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model = model_of(name).train()
        calls: list[int] = []
        if options is not None:
            model.activation_checkpointing_enable(options)
            assert model.is_activation_checkpointing
        blocks = model.transformer.h if name == GPT2 else model.blocks
        blocks[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        model(tokens(), labels=tokens()).loss.backward()
        gradients.append({k: p.grad for k, p in model.named_parameters()})
        # GPT-2's are counted outside of what is computed again.
        assert len(calls) == (1 if options is None or name == GPT2 else 2)
    for key, wanted in gradients[0].items():
        for found in gradients[1:]:
            torch.testing.assert_close(found[key], wanted, msg=key)


@control_and_ours
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"gradient_checkpointing": True}, marks=pytest.mark.wide)]
)
def test_trainer_makes_ten_steps(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(name)
    rows = [{"input_ids": row, "labels": row} for row in tokens(20, 8)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=10, seed=0, per_device_train_batch_size=2, report_to=[],
        gradient_accumulation_steps=2, learning_rate=0.01, logging_steps=1, use_cpu=True,
        save_steps=10, disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    predicted = trainer.predict(rows)  # type: ignore[arg-type]
    assert predicted.predictions.shape == (8, 20, 320)
    whole = float(model(tokens(20, 8).to(model.device), labels=tokens(20, 8)).loss)
    # Trainer divides GPT-2's by all tokens, the first of each row too, which is not judged.
    wanted = whole * 19 / 20 if name == GPT2 else whole
    assert predicted.metrics["test_loss"] == pytest.approx(wanted, abs=1e-4)
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.1
    back = type(model).from_pretrained(tmp_path / "checkpoint-10").eval()
    same(computed(back), computed(model.eval()))


def test_trainer_weighs_all_tokens_of_an_update_alike(tmp_path: Path) -> None:
    """Two micro-batches with other numbers of tokens: the gradient is that of one batch.

    GPT-2's is 8 % off: Trainer counts the first token of each row, which is not judged.
    """
    model = model_of(FLAGSHIP)
    labels = tokens(20, 2)
    labels[1, 5:] = -100
    rows = [{"input_ids": x, "labels": y} for x, y in zip(tokens(20, 2), labels, strict=True)]
    found = []

    class Noting(Trainer):
        def training_step(self, *arguments: Any, **options: Any) -> Tensor:
            loss = super().training_step(*arguments, **options)
            found.append({k: p.grad.clone() for k, p in model.named_parameters()})
            return loss

    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=1, report_to=[],
        gradient_accumulation_steps=2, use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    Noting(model=model, args=arguments, train_dataset=rows).train()
    model = model_of(FLAGSHIP)
    model(tokens(20, 2), labels=labels).loss.backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(found[-1][key], parameter.grad, rtol=1e-3, atol=1e-5)


@every_model
def test_projections_can_be_quantised(name: str) -> None:
    model = model_of(name)
    wanted = model(tokens()).logits
    found = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})(tokens()).logits
    assert 0 < (found - wanted).abs().max() < 0.2 * wanted.abs().max()


def hooked(model: Any) -> Callable[[], list[str]]:
    """Names of the modules with weights of their own that were not called."""
    owners = {
        k: m
        for k, m in model.named_modules()
        if next(m.parameters(recurse=False), None) is not None
    }
    called: set[str] = set()
    for key, module in owners.items():
        module.register_forward_pre_hook(lambda *_, key=key: called.add(key))
    return lambda: sorted(owners.keys() - called)


@every_model
@torch.no_grad()
def test_every_module_with_weights_is_called(name: str) -> None:
    model = model_of(name)
    left = hooked(model)
    past = model(tokens(), use_cache=True).past_key_values
    assert left() == []
    model = model_of(name)
    left = hooked(model)
    model(tokens(1), past_key_values=past)
    assert [key for key in left() if "initial_state" not in key] == []
