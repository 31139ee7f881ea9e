"""Contract tests: properties that every registered variant must have."""

import dataclasses

import pytest
import torch
from attention_cases import (
    CASES,
    HEADS,
    LEARNED,
    POWER,
    VARIANTS,
    WIDTH,
    assert_same,
    build,
    every_case,
    every_case_and_learned,
    fresh,
    name,
    parametrized,
    tokens,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree  # torch has no public name for it yet
from torch.utils.flop_counter import FlopCounterMode

from longhaul.kernels import state_features, symmetric_dim
from longhaul.kernels.power.cost import power_state_flops
from longhaul.modules.attention import (
    Attention,
    LayerShape,
    attention_config,
    build_attention,
    retention,
)
from longhaul.modules.attention.fused import ConvolvedCache, FusedAttention, GatedCache
from longhaul.modules.attention.parts.gates import log_decays
from longhaul.modules.attention.power import PowerAttention, PowerAttentionState

pytestmark = pytest.mark.usefixtures("chunks_of_16")
power_cases = parametrized(*(case for case in CASES + LEARNED if case[0] in POWER))


def has_matrices(attention: Attention) -> bool:
    """Whether a kind writes out its attention matrices, and what they multiply."""
    return type(attention).values is not Attention.values


@every_case_and_learned
def test_changing_a_token_changes_nothing_before_it(kind: str, options: dict[str, object]) -> None:
    attention, x = build(kind, options), tokens(63)
    before, _ = attention(x, keep_state=False)
    for change in (1.0, 1e3):
        changed = x.clone()
        changed[:, 40:] += change * torch.randn_like(x[:, 40:])
        after, _ = attention(changed, keep_state=False)
        assert torch.equal(before[:, :40], after[:, :40])
        assert not torch.equal(before[:, 40:], after[:, 40:])


# A state carries over splits of 100 tokens, of which parts are single ones, for every case below.
@pytest.mark.parametrize("T", [63, *(pytest.param(T, marks=pytest.mark.wide) for T in (1, 100))])
@every_case
def test_forward_equals_the_explicit_attention_matrix(
    kind: str, options: dict[str, object], T: int
) -> None:
    attention, x = build(kind, options), tokens(T)
    if not has_matrices(attention):
        with pytest.raises(ValueError, match=f"found {kind}, which does not write out"):
            attention.values(x)
        return
    weights, values = attention.weights(x), attention.values(x)
    assert weights.shape == (2, values.shape[2], T, T)
    assert not weights.triu(1).any()
    mixed = torch.einsum("bhti,bihv->bthv", weights, values)
    assert_same(attention(x, keep_state=False)[0], attention.read_out(x, mixed))


@every_case_and_learned
def test_state_carries_over_any_split(kind: str, options: dict[str, object]) -> None:
    attention, x = build(kind, options), tokens(100)
    whole, _ = attention(x)
    state, outputs = None, []
    for part in x.split([1, 49, 49, 1], dim=1):
        y, state = attention(part, state)
        outputs.append(y)
    assert_same(torch.cat(outputs, 1), whole)


@every_case_and_learned
def test_steps_continue_a_prefill(kind: str, options: dict[str, object]) -> None:
    attention, x = build(kind, options), tokens(40)
    whole, _ = attention(x)
    y, state = attention(x[:, :30])
    outputs = [y]
    for t in range(30, 40):
        y, state = attention.step(x[:, t : t + 1], state)
        outputs.append(y)
    assert_same(torch.cat(outputs, 1), whole)


@every_case_and_learned
def test_rows_of_different_lengths_go_on_together(kind: str, options: dict[str, object]) -> None:
    """Where their states have the same shapes, generation joins them along the first dimension."""
    attention, x = build(kind, options), tokens(40)
    rows, lengths = x.split(1), (20, 33)
    states = [attention(row[:, :T])[1] for row, T in zip(rows, lengths, strict=True)]
    leaves = [pytree.tree_leaves(state) for state in states]
    assert all(isinstance(leaf, Tensor) and leaf.shape[0] == 1 for leaf in leaves[0])
    if [leaf.shape for leaf in leaves[0]] != [leaf.shape for leaf in leaves[1]]:
        return
    together = pytree.tree_map(lambda *parts: torch.cat(parts), *states)
    following = torch.cat([row[:, T : T + 1] for row, T in zip(rows, lengths, strict=True)])
    found, _ = attention.step(following, together)
    for row, T, one in zip(rows, lengths, found.split(1), strict=True):
        assert_same(one, attention(row[:, : T + 1])[0][:, -1:])


@every_case_and_learned
def test_batch_rows_are_independent(kind: str, options: dict[str, object]) -> None:
    attention, x = build(kind, options), tokens(63, batch=3)
    whole, _ = attention(x, keep_state=False)
    assert_same(attention(x[1:2], keep_state=False)[0], whole[1:2])


@power_cases
def test_chunk_size_changes_nothing(kind: str, options: dict[str, object]) -> None:
    x = tokens(100)
    attention = build(kind, options)
    outputs = []
    for attention.chunk_size in (24, 64, None):
        outputs.append(attention(x, keep_state=False)[0])
    assert_same(outputs[0], outputs[2])
    assert_same(outputs[1], outputs[2])
    if attention.degree <= 4:  # different rounding shows that the chunks really were different
        assert not torch.equal(outputs[0], outputs[2])


@every_case
def test_gradients_equal_those_of_the_explicit_attention_matrix(
    kind: str, options: dict[str, object]
) -> None:
    attention, x = build(kind, options), tokens(63).requires_grad_()
    if not has_matrices(attention):
        return
    parameters = [x, *attention.parameters()]
    probe = torch.randn(2, 63, WIDTH, dtype=torch.float64)
    found = torch.autograd.grad((attention(x, keep_state=False)[0] * probe).sum(), parameters)
    mixed = torch.einsum("bhti,bihv->bthv", attention.weights(x), attention.values(x))
    wanted = torch.autograd.grad((attention.read_out(x, mixed) * probe).sum(), parameters)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(("kind", "options"), LEARNED, ids=name)
def test_gradients_of_a_learned_state_equal_those_through_steps(
    kind: str, options: dict[str, object]
) -> None:
    attention, x = build(kind, options), tokens(20).requires_grad_()
    parameters = dict(attention.named_parameters())
    learned = [key for key in parameters if key.startswith("initial_state.")]
    probe = torch.randn(2, 20, WIDTH, dtype=torch.float64)
    whole = (attention(x, keep_state=False)[0] * probe).sum()
    found = torch.autograd.grad(whole, [x, *parameters.values()])
    y, state = attention(x[:, :1])
    outputs = [y]
    for t in range(1, 20):
        y, state = attention.step(x[:, t : t + 1], state)
        outputs.append(y)
    wanted = torch.autograd.grad((torch.cat(outputs, 1) * probe).sum(), [x, *parameters.values()])
    for key, one, other in zip(["x", *parameters], found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7)
        assert key not in learned or one.abs().max() > 0


@every_case_and_learned
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.wide), torch.bfloat16]
)
def test_output_has_the_dtype_of_the_input(
    kind: str, options: dict[str, object], dtype: torch.dtype
) -> None:
    attention = build(kind, options).to(dtype)
    y, state = attention(tokens(20).to(dtype))
    assert y.dtype == dtype
    assert y.isfinite().all()
    y, _ = attention.step(tokens(1).to(dtype), state)
    assert y.dtype == dtype


def test_slopes_of_a_trace_are_not_remembered() -> None:
    """`longhaul plan` traces with fake tensors, which no later call in the process may meet."""
    attention, x = build("alibi", {"heads": 2}).float(), tokens(20).float()
    with FakeTensorMode(allow_non_fake_inputs=True):
        attention(x)
    assert not isinstance(attention(x)[0], FakeTensor)


@every_case_and_learned
def test_trains_under_autocast(kind: str, options: dict[str, object]) -> None:
    attention = build(kind, options).float()
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = attention(tokens(70).float(), keep_state=False)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    for parameter in attention.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


@every_case_and_learned
def test_builds_on_meta_without_memory(kind: str, options: dict[str, object]) -> None:
    with torch.device("meta"):
        attention = fresh(kind, 768, 12, **options)
        tensors = [*attention.parameters(), *attention.buffers()]
    assert all(tensor.is_meta for tensor in tensors)
    x = torch.empty(2, 64, 768, device="meta")
    y, _ = attention(x, keep_state=False)
    assert y.shape == (2, 64, 768)
    # A tensor on another device than x, where it is not meta, would be an error.
    if has_matrices(attention):
        assert attention.weights(x).is_meta


@every_case_and_learned
def test_sizes_and_flops_match_measured_ones(kind: str, options: dict[str, object]) -> None:
    attention = build(kind, options).float().requires_grad_(False)
    T = max(96, getattr(attention, "window", None) or 0)  # a window's state is full then
    with FlopCounterMode(display=False) as counter:
        _, state = attention(tokens(T, batch=1).float())
    assert attention.flops_per_token(T) == (
        attention.projection_flops() + attention.mixing_flops(T)
    )
    tensors = pytree.tree_leaves(state)
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    if kind not in POWER:  # the memory under a view counts too
        assert attention.allocated_bytes(T, torch.float32) == sum(held.values())
        assert attention.state_size() in (None, sum(x.numel() for x in tensors))
    if isinstance(attention, FusedAttention):
        pairs = sum(min(t, attention.window or T) for t in range(1, T + 1))
        width = attention.num_heads * attention.head_dim
        assert attention.mixing_flops(T) == 4 * pairs * width // T
    if kind not in POWER:
        return
    counted = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    products = counted.get("aten.mm", 0) + counted.get("aten.addmm", 0)
    assert attention.projection_flops() * T == products
    assert attention.allocated_bytes(T, torch.float32) == sum(x.nbytes for x in tensors)
    assert attention.mixing_flops(T) * T == counted["longhaul.power_forward"]
    pivots = 3 if options.get("initial_state") == "learned" else 0
    learned = power_state_flops(pivots, attention.key_dim, attention.value_dim, attention.degree)
    assert counted.get("longhaul.power_state", 0) == attention.num_states * learned
    assert attention.state_size() == sum(x.numel() for x in tensors) - padding(attention)


@pytest.mark.parametrize(
    "kind",
    [
        # It makes hundreds of chunks, one after another.
        pytest.param(kind, marks=pytest.mark.wide if kind == "power_delta" else ())
        for kind in VARIANTS
        if attention_config(kind).cost == "linear"
    ],
)
def test_a_linear_kind_has_bounded_state_and_cost(kind: str) -> None:
    with torch.device("meta"):
        attention = build_attention(kind, WIDTH, HEADS)
    short, long = 4096, 8192
    sizes = [attention.allocated_bytes(T, torch.float32) for T in (short, long)]
    assert sizes[0] == sizes[1]
    costs = []
    for T in (short, long):
        with FlopCounterMode(display=False) as counter:
            attention(torch.empty(1, T, WIDTH, device="meta"), keep_state=False)
        costs.append(counter.get_total_flops() / T)
    assert costs[1] < 1.05 * costs[0], f"{kind}: wanted cost = 'quadratic' in its config"


def padding(attention: PowerAttention) -> int:
    """Numbers allocated but not counted: padding of tiles above C(K + p - 1, p), unused norms."""
    K, V, p = attention.key_dim, attention.value_dim, attention.degree
    allocated = state_features(K, p) * (V + 1)
    needed = symmetric_dim(K, p) * (V + attention.normalize)
    return attention.num_states * (allocated - needed)


D, H, K, N = WIDTH, HEADS, WIDTH // HEADS, 128
PARAMETERS: dict[str, int] = {
    "alibi": 4 * D * D,
    "cartan": 4 * D * D + 2 * H * D + 2 * D,  # full: key logit, gate; norm
    "coca": 4 * D * D,
    "complex": 4 * D * D + 2 * D,
    "conformal_sympow": 4 * D * D + H * D + D,
    # Convolutions of q, k and v; write strengths; norm of a head; decays; A and its bias; gates.
    "deltanet": 4 * D * D + 4 * 3 * D + H * D + K,
    "gated_deltanet": 6 * D * D + 4 * 3 * D + 2 * H * D + 2 * H + 3 * K // 2,
    "gated_linear": 4 * D * D + 16 * D + 17 * D // 2 + K,
    "kimi_delta": 4 * D * D + 4 * 3 * D + H * D + 2 * 2 * K * D + H + D + K,
    "linear": 4 * D * D,
    # x, z and out of twice the width; B and C; dt; the convolution and its bias; A, D and b; norm
    "mamba2": 6 * D * D + 2 * N * D + 2 * H * D + 5 * (2 * D + 2 * N) + 3 * 2 * H + 2 * D,
    "power_delta": 4 * D * D + 2 * H * D + K,
    "retention": 4 * D * D + 2 * D,
    "softmax": 4 * D * D,
    "sympow": 4 * D * D,
    "sympow_gated": 4 * D * D + H * D,
    "sympow_rotary": 4 * D * D + D,
    "zeros": 5 * D * D + 2 * H * D + D + H + 2 * D,  # logit's projection, gates; mu, tau; norm
}


def test_numbers_of_parameters_match_the_formulas() -> None:
    found = {
        kind: sum(parameter.numel() for parameter in build(kind).parameters())
        for kind in PARAMETERS
    }
    assert found == PARAMETERS


@pytest.mark.parametrize("kind", POWER)
def test_a_learned_state_adds_rank_keys_and_values_per_head(kind: str) -> None:
    attention = build(kind, {"initial_state": "learned", "rank": 5})
    added = sum(p.numel() for p in attention.parameters()) - sum(
        p.numel() for p in build(kind).parameters()
    )
    heads = attention.num_key_heads
    masses = heads * attention.logits_per_head
    assert added == heads * 5 * (attention.key_dim + attention.value_dim) + masses


@pytest.mark.parametrize("kind", POWER)
def test_a_new_learned_state_has_values_of_zero(kind: str) -> None:
    torch.manual_seed(0)
    attention = build_attention(kind, WIDTH, HEADS, initial_state="learned")
    assert not attention.initial_state.value.any()
    assert attention.initial_state.key.any()


@every_case
def test_bf16_is_near_float64_late_in_a_document(kind: str, options: dict[str, object]) -> None:
    # Freshly initialised, as in training: sums of both signs must not consist of rounding errors.
    torch.manual_seed(0)
    attention = fresh(kind, 64, 2, **options)
    x = torch.randn(1, 700, 64)
    wanted, _ = attention.double()(x.double(), keep_state=False)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = attention.float()(x, keep_state=False)
    late = slice(500, 700)
    error = (found[:, late].double() - wanted[:, late]).norm() / wanted[:, late].norm()
    assert error < 0.02


@parametrized(*(case for case in CASES if case[0] in POWER))
def test_head_norm_gives_late_tokens_unit_variance(kind: str, options: dict[str, object]) -> None:
    torch.manual_seed(0)
    attention = fresh(kind, 64, 2, **options)
    norm = attention.norm
    if norm is None:
        return
    heads: list[Tensor] = []
    norm.register_forward_hook(lambda module, inputs, output: heads.append(output))
    with torch.no_grad():
        attention(torch.randn(1, 700, 64), keep_state=False)
    late = heads[0].unflatten(-1, (attention.num_heads, -1))[500:]
    assert 0.98 < late.std(dim=-1, unbiased=False).mean() < 1.01


@parametrized(*(case for case in CASES + LEARNED if "key_heads" in case[1]))
def test_query_heads_share_a_key_head_as_if_each_had_its_own(
    monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, object]
) -> None:
    # Fixed decays differ between key heads.
    monkeypatch.setattr(
        retention, "log_decays", lambda x, heads: log_decays(x, 1).expand(-1, -1, heads)
    )
    grouped, x = build(kind, options), tokens(40)
    H, G = grouped.num_heads, grouped.num_key_heads
    alone = build(kind, {**options, "key_heads": H})

    def for_each_query_head(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (G, -1)).repeat_interleave(H // G, dim=0).flatten(0, 1)

    with torch.no_grad():
        for path, weight in alone.named_parameters():
            given = grouped.get_parameter(path)
            if path.startswith(("qkv.", "qtv.", "convolution.")):  # of queries, of keys, of values
                q, *others = given.split(grouped.qkv_widths)
                given = torch.cat([q, *map(for_each_query_head, others)])
            elif given.shape != weight.shape:
                given = for_each_query_head(given)
            weight.copy_(given)
    found, state = grouped(x)
    wanted, larger = alone(x)
    assert_same(found, wanted)
    sizes = [
        sum(one.numel() for one in pytree.tree_leaves(of_key_heads(each)))
        for each in (state, larger)
    ]
    assert H // G * sizes[0] <= sizes[1] + 2 * H  # all but two rotations


def of_key_heads(state: object) -> object:
    """A state without what query heads have a share of."""
    if isinstance(state, ConvolvedCache):
        state = state.cache
    if isinstance(state, GatedCache):
        return state[:2]
    if isinstance(state, PowerAttentionState):
        carried = {name: x for name, x in state.carried.items() if name != "convolved"}
        return state._replace(carried=carried)
    return state


def test_a_kind_that_knows_no_key_heads_refuses_them() -> None:
    shape = LayerShape(width=WIDTH, heads=HEADS, key_heads=1, head_dim=8)
    found = "^model.kv_heads: found 1 for kind softmax, which has a key head for each query head; w"
    with pytest.raises(ValueError, match=found):
        Ungrouped(attention_config("softmax")(), shape)


class Ungrouped(Attention):
    """A kind of someone who did not think of key heads."""

    def forward(self, x, state=None, *, documents=None, keep_state=True):  # type: ignore
        return x, None


def test_forget_gates_of_many_heads_all_learn() -> None:
    gate = build_attention("conformal_sympow", 256, 64, gate_init="long_memory").gate
    assert gate.bias.isfinite().all()
    assert gate.bias.diff().gt(0).all()


@pytest.mark.parametrize("kind", VARIANTS)
def test_config_names_its_kind_and_is_frozen(kind: str) -> None:
    config = attention_config(kind)()
    assert config.kind == kind
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.kind = "other"  # type: ignore[misc]
