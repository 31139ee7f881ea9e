"""One update: averaging, clipping, and skipping of spikes and gradients that are not finite."""

import copy
import dataclasses
import math
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from longhaul.modules import pretraining
from longhaul.modules.attention import Attention, attention_config, registered_variants
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.modules.optim import (
    LargerUpdateConfig,
    OptimConfig,
    build_optimizer,
    set_learning_rate,
)
from longhaul.modules.pretraining import Pretraining
from longhaul.modules.progress import Skip
from longhaul.pipeline.distributed.blocks import device_mesh, shard
from longhaul.pipeline.distributed.strategies import Single

CONTEXT, SAMPLES = 16, 8


def batches(num_updates: int, micro_batch: int) -> DataLoader[dict[str, Tensor]]:
    tokens = torch.randint(64, (num_updates * SAMPLES, CONTEXT), generator=torch.Generator())
    rows = [
        {"input": row.roll(1), "target": row, "source": torch.tensor(number % 3)}
        for number, row in enumerate(tokens)
    ]
    return DataLoader(rows, batch_size=micro_batch)  # type: ignore[arg-type]


def build(
    micro_batch: int, train_only: str | None = None, num_sources: int = 0, **optim: object
) -> Pretraining:
    torch.manual_seed(0)
    attention = attention_config("sympow_gated")(
        initial_state="zero" if train_only is None else "learned"  # type: ignore[call-arg]
    )
    model = LanguageModelConfig(layers=1, width=16, heads=2, vocabulary=64, attention=attention)
    return Pretraining(
        model,
        OptimConfig(tokens_per_update=SAMPLES * CONTEXT, **optim),  # type: ignore[arg-type]
        accumulation=SAMPLES // micro_batch,
        samples_per_update=SAMPLES,
        max_tokens=10_000,
        train_only=train_only,
        num_sources=num_sources,
    )


def fit(
    module: Pretraining,
    num_updates: int,
    micro_batch: int,
    spoil: Callable[[int], bool] = lambda update: False,
    add: Callable[[int], float] = lambda update: 0.0,
) -> list[float]:
    """Train on fixed random tokens.

    Updates chosen by `spoil` get a gradient with a NaN in it; `add` is added to an update's loss.

    Returns:
        The loss of each update.
    """

    def hook(gradient: Tensor) -> Tensor:
        return gradient * math.nan if spoil(module.progress.step) else gradient

    [p for p in module.model.parameters() if p.requires_grad][-1].register_hook(hook)
    loss_of, losses = module.model.loss, []

    def loss(*batch: Tensor, **documents: Tensor | None) -> Tensor:
        return loss_of(*batch, **documents) + add(module.progress.step)

    module.model.loss = loss  # type: ignore[method-assign]

    class Note(Callback):
        def on_train_batch_end(self, *args: object) -> None:
            if module.last_update is not None:
                losses.append(module.last_update.loss)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu", strategy=Single(torch.device("cpu")), max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[Note()],
        )  # fmt: skip
        trainer.fit(module, batches(num_updates, micro_batch))
    return losses


def test_micro_batches_average_to_the_whole_batch() -> None:
    whole, parts = build(8), build(2)
    fit(whole, 3, 8)
    fit(parts, 3, 2)
    assert not parts.progress.skipped
    assert (parts.progress.step, parts.progress.samples) == (3, 3 * SAMPLES)
    assert parts.progress.tokens == 3 * SAMPLES * CONTEXT
    for one, other in zip(parts.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert parts.last_update is not None
    assert whole.last_update is not None
    assert parts.last_update.loss == pytest.approx(whole.last_update.loss, rel=1e-5)


def test_a_larger_update_averages_over_more_and_its_rate_grows_with_the_root() -> None:
    larger = LargerUpdateConfig(at_tokens=SAMPLES * CONTEXT + 1, factor=3)
    module = build(4, larger_updates=[larger], beta2=0.9, gradient_clip=0.3)
    model = copy.deepcopy(module.model).double()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.9), weight_decay=0)
    whole = next(iter(batches(5, 5 * SAMPLES)))
    wanted = []
    # Two updates of 8 samples and, from 256 tokens on, one of 24.
    for rows, size in ((slice(0, 8), 1), (slice(8, 16), 1), (slice(16, 40), 3)):
        optimizer.param_groups[0]["lr"] = 6e-4 * size**0.5
        loss = model.loss(whole["input"][rows], whole["target"][rows])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        wanted.append(loss.item())
    assert fit(module, 5, 4) == pytest.approx(wanted, rel=1e-5)
    progress = module.progress
    assert (progress.step, progress.samples, progress.tokens) == (5, 40, 40 * CONTEXT)
    assert module.last_update is not None
    assert module.last_update.steps == 3
    for found, right in zip(module.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-3, atol=2e-5)


def test_losses_of_sources_change_no_bit_of_the_training() -> None:
    plain, told = build(2), build(2, num_sources=4)
    assert fit(plain, 3, 2) == fit(told, 3, 2)
    for one, other in zip(plain.parameters(), told.parameters(), strict=True):
        assert torch.equal(one, other)
    assert plain.last_update is not None
    assert told.last_update is not None
    assert plain.last_update.source_losses == ()
    losses = torch.tensor(told.last_update.source_losses)
    assert losses.isnan().tolist() == [False, False, False, True]
    counts = torch.bincount(torch.arange(2 * SAMPLES, 3 * SAMPLES) % 3)
    mean = (losses[:3] * counts).sum() / SAMPLES
    assert mean.item() == pytest.approx(told.last_update.loss, rel=1e-6)
    # Each is the mean over the source's own samples.
    first = build(2, num_sources=4)
    rows = next(iter(batches(1, SAMPLES)))
    wanted, _ = first.model.token_losses(rows["input"], rows["target"])
    fit(first, 1, 2)
    assert first.last_update is not None
    for number, loss in enumerate(first.last_update.source_losses[:3]):
        own = wanted[rows["source"] == number].mean().item()
        assert loss == pytest.approx(own, rel=1e-6)


def test_z_loss_is_trained_on_and_reported_apart() -> None:
    plain, parts, whole = build(2), build(2, z_loss=0.1), build(8, z_loss=0.1)
    rows = next(iter(batches(1, SAMPLES)))
    normalizers = plain.model(rows["input"]).double().logsumexp(-1)
    wanted = 0.1 * normalizers.square().mean().item()
    without = plain.model.loss(rows["input"], rows["target"]).item()
    for module, micro_batch in ((plain, 2), (parts, 2), (whole, 8)):
        assert fit(module, 1, micro_batch) == [pytest.approx(without, rel=1e-6)]
    found = [module.last_update.z_loss for module in (plain, parts, whole) if module.last_update]
    assert found == [None, pytest.approx(wanted, rel=1e-6), pytest.approx(wanted, rel=1e-6)]
    weights = [module.model.embedding.weight for module in (plain, parts, whole)]
    assert not torch.allclose(weights[0], weights[1], atol=1e-5)
    torch.testing.assert_close(weights[1], weights[2])


def test_a_batch_says_which_tokens_begin_documents() -> None:
    module = build(1)
    tokens = torch.randint(64, (1, CONTEXT))
    is_first = torch.zeros(1, CONTEXT, dtype=torch.bool)
    is_first[0, 5] = True
    batch = {"input": tokens, "target": tokens, "is_first": is_first}
    parts = tokens.split([5, CONTEXT - 5], dim=1)
    wanted = sum(module.model.loss(one, one) * one.shape[1] for one in parts) / CONTEXT
    losses: list[Tensor] = []
    module._parallelism = Single(torch.device("cpu"))
    module.manual_backward = losses.append  # type: ignore[method-assign, assignment]
    module.training_step(batch, 0)
    assert losses[0].item() * module.accumulation == pytest.approx(wanted.item(), rel=1e-5)
    module.log = lambda name, value, **_: losses.append(value)  # type: ignore[method-assign]
    module.validation_step(batch | {"index": torch.tensor([0])}, 0)
    assert losses[1].item() == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_gradient_that_is_not_finite_changes_no_parameter_or_moment(name: str) -> None:
    spoiled = build(4, name=name)
    before = copy.deepcopy(spoiled.model.state_dict())
    fit(spoiled, 2, 4, spoil=lambda update: True)
    for name, value in spoiled.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not spoiled.optimizers().state_dict()["state"]
    assert spoiled.progress.skipped == [Skip(1, 0, 7, False), Skip(2, 8, 15, False)]
    assert (spoiled.progress.step, spoiled.progress.samples) == (2, 2 * SAMPLES)


def test_training_goes_on_after_a_skipped_update() -> None:
    module = build(4, max_skipped_updates=2)
    fit(module, 6, 4, spoil=lambda update: update in (1, 3))
    assert [skip.step for skip in module.progress.skipped] == [2, 4]
    assert module.progress.skipped_in_a_row == 0
    assert module.last_update is not None
    assert module.last_update.skip is None


def test_a_loss_is_a_spike_above_spike_sigma_deviations() -> None:
    calm = fit(build(8), 40, 8)
    for step, sigma, factor, is_spike in ((30, 4.0, 1.01, True), (30, 4.0, 0.99, False)):
        recent = torch.tensor(calm[:step], dtype=torch.float64)
        limit = (recent.mean() + sigma * recent.std(correction=0)).item()
        above = factor * (limit - recent.mean().item()) + recent.mean().item() - calm[step]
        module = build(8, spike_sigma=sigma)
        losses = fit(module, 40, 8, add=lambda at: above if at == step else 0.0)  # noqa: B023
        assert losses[: step + 1] == pytest.approx([*calm[:step], calm[step] + above], rel=1e-6)
        assert module.progress.skipped == ([Skip(step + 1, 240, 247, True)] if is_spike else [])


def test_spikes_are_detected_only_if_configured_and_after_enough_losses() -> None:
    for module, at in ((build(8, spike_sigma=3.0), 19), (build(8), 30)):
        fit(module, 32, 8, add=lambda update: 50.0 * (update == at))  # noqa: B023
        assert not module.progress.skipped


def test_only_the_last_hundred_good_losses_count() -> None:
    module = build(8, spike_sigma=5.0)
    losses = fit(module, 120, 8, add=lambda update: 50.0 * (update == 60))
    assert [skip.step for skip in module.progress.skipped] == [61]
    assert module.progress.recent_losses == [*losses[19:60], *losses[61:]][-100:]


def test_gradients_are_clipped_to_the_global_norm() -> None:
    free, clipped = build(8, gradient_clip=None, name="adam"), build(8, gradient_clip=1e-3)
    fit(free, 1, 8)
    fit(clipped, 1, 8)
    assert free.last_update is not None
    assert clipped.last_update is not None
    # The reported norm is the one before clipping.
    assert clipped.last_update.gradient_norm == pytest.approx(free.last_update.gradient_norm)
    moments = [state["exp_avg"] for state in clipped.optimizers().state_dict()["state"].values()]
    norm = torch.stack([moment.norm() for moment in moments]).norm() / (1 - 0.9)
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)


# What a kind has of projections in its most equipped form.
MATRICES = {
    "alibi": {"qkv", "out"},
    "cartan": {"qkv", "out", "diagonal"},
    "coca": {"qtv", "out"},
    "complex": {"qkv", "out"},
    "conformal_sympow": {"qkv", "out"},
    "deltanet": {"qkv", "out"},
    "fox": {"qkv", "out"},
    "gated_deltanet": {"qkv", "output_gate", "out"},
    "gated_linear": {"qkv", "output_gate", "out"},
    "kimi_delta": {"qkv", "output_gate.0", "output_gate.1", "out"},
    "linear": {"qkv", "out"},
    "mamba2": {"qkv", "output_gate", "out"},
    "power_delta": {"qkv", "out"},
    "sliding_window": {"qkv", "out"},
    "retention": {"qkv", "out", "swish"},
    "softmax": {"qkv", "out"},
    "sympow": {"qkv", "out"},
    "sympow_gated": {"qkv", "out"},
    "sympow_rotary": {"qkv", "out"},
    "zeros": {"qkv", "out", "logit.project"},
}
EQUIPPED = {
    "initial_state": "learned", "qk_norm": True, "gate_init": "long_memory", "swish_gate": True,
    "negative_diagonal": True, "speeds": True, "sizes": True,
}  # fmt: skip


def equipped(kind: str) -> LanguageModelConfig:
    """A model of a kind with every part that it can have, biases and a head of its own."""
    config = attention_config(kind)
    options: dict[str, Any] = {
        field.name: EQUIPPED[field.name]
        for field in dataclasses.fields(config)
        if field.name in EQUIPPED
    }
    return LanguageModelConfig(
        layers=2, width=16, heads=2, vocabulary=64, attention=config(**options), biases=True,
        tied_head=False,
    )  # fmt: skip


def decayed(model: LanguageModel) -> set[str]:
    """Names of the parameters that an optimizer with weight decay decays."""
    optim = OptimConfig(tokens_per_update=1, weight_decay=0.1)
    groups = build_optimizer(model, optim).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0]
    assert {id(p) for group in groups for p in group["params"]} == set(map(id, model.parameters()))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    # The same are orthogonalised, where they may be.
    own, other = build_optimizer(model, dataclasses.replace(optim, name="muon")).param_groups
    assert (own["kind"], other["kind"], other["weight_decay"]) == ("muon", "adam", 0)
    assert list(map(id, own["params"])) == list(map(id, groups[0]["params"]))
    assert [sum(rows) for rows in own["rows"]] == [len(p) for p in own["params"]]
    return {names[id(parameter)] for parameter in groups[0]["params"]}


@pytest.mark.parametrize("kind", registered_variants())
def test_only_the_matrices_of_blocks_decay(kind: str) -> None:
    with torch.device("meta"):
        model = LanguageModel(equipped(kind))
    wanted = {"mlp.up", "mlp.out"} | {f"attention.{name}" for name in MATRICES[kind]}
    assert decayed(model) == {f"blocks.{n}.{name}.weight" for n in range(2) for name in wanted}


@pytest.mark.parametrize("kind", registered_variants())
def test_queries_keys_and_values_are_orthogonalised_apart(kind: str) -> None:
    with torch.device("meta"):
        model = LanguageModel(equipped(kind))
    (group, _) = build_optimizer(model, OptimConfig(tokens_per_update=1, name="muon")).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rows = {names[id(p)]: own for p, own in zip(group["params"], group["rows"], strict=True)}
    attention: Any = model.blocks[0].attention
    name = f"blocks.0.attention.{attention.qkv_name}.weight"
    assert rows[name] == attention.qkv_widths
    assert {
        len(own) for other, own in rows.items() if "qkv" not in other and "qtv" not in other
    } == {1}


def test_a_sharded_model_decays_the_same() -> None:
    with torch.device("meta"):
        model = LanguageModel(equipped("conformal_sympow"))
        before = decayed(model)
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        try:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
            shard(model, device_mesh("cpu", 2, 1), policy)
            assert decayed(model) == before
        finally:
            dist.destroy_process_group()


def test_without_decay_parameters_have_the_order_of_earlier_versions() -> None:
    """The norm of all gradients is rounded in this order."""
    model = LanguageModel(equipped("sympow_gated"))
    groups = build_optimizer(model, OptimConfig(tokens_per_update=1)).param_groups
    parameters = list(model.parameters())
    wanted = [[p for p in parameters if (p.ndim >= 2) == is_first] for is_first in (True, False)]
    assert [[id(p) for p in group["params"]] for group in groups] == [
        [id(p) for p in one] for one in wanted
    ]


def test_a_layer_may_state_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attention, "roles", {"out.weight": "other"}, raising=False)
    with torch.device("meta"):
        model = LanguageModel(equipped("sympow_gated"))
    assert "blocks.0.attention.qkv.weight" in decayed(model)
    assert "blocks.0.attention.out.weight" not in decayed(model)
    monkeypatch.setattr(Attention, "roles", {"w": "matrix"})
    with pytest.raises(ValueError, match=r"SympowGated\.roles: found w, wanted names"):
        decayed(model)


def test_a_group_has_a_multiple_of_the_rate() -> None:
    optimizer = build_optimizer(build(8).model, OptimConfig(tokens_per_update=1))
    first, second = optimizer.param_groups
    second["lr_factor"] = 0.5
    set_learning_rate(optimizer, 0.3)
    assert (first["lr"], second["lr"]) == (0.3, 0.15)


def test_parameters_not_trained_are_frozen_without_moments() -> None:
    module = build(4, train_only="initial_state", weight_decay=0.1)
    before = copy.deepcopy(module.model.state_dict())
    fit(module, 2, 4)
    after = module.model.state_dict()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    names = {f"blocks.0.attention.initial_state.{name}" for name in ("key", "value")}
    assert changed == names
    (group,) = module.configure_optimizers().param_groups
    assert {id(p) for p in group["params"]} == {
        id(p) for name, p in module.model.named_parameters() if name in names
    }


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"name": "sgd"}, "name"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"beta2": 1.0}, "beta2"),
        ({"gradient_clip": 0.0}, "gradient_clip"),
        ({"name": "adam", "weight_decay": 0.1}, "weight_decay"),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_bad_values_are_named(options: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=f"optim.{field}: found"):
        OptimConfig(tokens_per_update=1, **options)  # type: ignore[arg-type]


def test_the_mean_loss_needs_no_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a barrier, the host would wait for the device once more."""
    ranks = SimpleNamespace(
        is_initialized=lambda: True,
        get_world_size=lambda: 2,
        all_reduce=lambda value: value.add_(3.0),  # the other rank's
    )
    monkeypatch.setattr(pretraining, "dist", ranks)
    assert pretraining._mean_over_ranks(torch.tensor(1.0)) == 2.0


class Host(TorchDispatchMode):
    """Notes what the host reads from a device, here torch's `meta`, and what it copies there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads = 0
        self.copies: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            self.reads += 1
            return 1.0
        if func is torch.ops.aten._to_copy.default and str((kwargs or {}).get("device")) == "cpu":
            self.reads += 1
            return torch.ones(args[0].shape, dtype=args[0].dtype)
        found = func(*args, **(kwargs or {}))
        leaves = [one for one in tree_leaves((args, kwargs, found)) if isinstance(one, Tensor)]
        if len({one.device for one in leaves}) > 1:
            self.copies.append(str(func))
        return found


def test_the_host_waits_for_the_device_once_an_update_for_its_loss_and_its_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copying a number to the device, such as the zero that a sum begins with, would wait too."""
    device = torch.device("meta")
    # Autocasting does not know the device, and fused optimizers refuse it, though they run on it.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    optim = sys.modules["torch.optim.optimizer"]
    monkeypatch.setattr(optim, "_get_fused_kernels_supported_devices", lambda: ["meta"])
    module = build(2).to(device)
    strategy: Any = Single(device)
    strategy.backward = lambda loss, _: loss.backward()
    optimizers = [module.configure_optimizers()]
    trainer: Any = SimpleNamespace(strategy=strategy, optimizers=optimizers)
    module._trainer = trainer
    module.on_fit_start()
    batch = dict.fromkeys(("input", "target"), torch.zeros(2, CONTEXT, dtype=int, device=device))
    reads = []
    for number in range(2 * module.accumulation):
        with Host() as host:
            module.training_step(batch, number)
        reads.append(host.reads)
        assert host.copies == []
    assert reads == 2 * [0, 0, 0, 1]
    assert [module.progress.step, module.progress.skipped] == [2, []]
