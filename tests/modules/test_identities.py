"""Every attention variant against the formula of its source, written out over pairs of tokens.

Only parameters are taken from the modules. A matrix over pairs (t, i) is filled entry by entry.
Rows and columns count from 0 and positions from 1; i = -1 stands for position 0, where a learned
initial state has its pivot tokens. This is one long file, because tests are not a package and
cannot import helpers from each other.
"""

import math
from collections.abc import Callable
from itertools import combinations_with_replacement

import pytest
import torch
from torch import Tensor

from longhaul.kernels import power_attention, symmetric_dim
from longhaul.kernels.power.torch.features import expand, multiplicity
from longhaul.modules.attention import Attention, alibi, attention_config

HEADS, T = 2, 19  # heads are 8 wide
SYMPOW = ["sympow", "sympow_gated", "sympow_rotary", "conformal_sympow"]
GENERATORS = ["additive", "product", "full"]
INITIAL_STATE = pytest.mark.parametrize("initial_state", ["zero", "learned"])
PairWeight = Callable[[int, int], Tensor]  # from (t, i) to a weight for every row and head, (B, H)


def build(kind: str, *, heads: int = HEADS, layer: int = 0, **options: object) -> Attention:
    """A float64 module with large parameters, so that each of them influences the output."""
    torch.manual_seed(0)
    if options.get("initial_state") == "learned":
        options["rank"] = 3
    attention = attention_config(kind)(**options).build(8 * heads, heads, layer).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(std=0.5)
    return attention


def tokens(length: int = T, heads: int = HEADS) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(2, length, 8 * heads, dtype=torch.float64, generator=generator)


def assert_same(found: Tensor, wanted: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def by_head(x: Tensor, weight: Tensor, heads: int = HEADS) -> Tensor:
    """W x as (B, T, H, K)."""
    return (x @ weight.mT).unflatten(-1, (heads, -1))


def projections(x: Tensor, weight: Tensor, heads: int = HEADS) -> list[Tensor]:
    """Queries, keys and values, whose projections are the three thirds of one weight."""
    return [by_head(x, part, heads) for part in weight.chunk(3)]


def rotary_rates(width: int = 8, base: float = 10_000.0) -> list[float]:
    return [base ** (-2 * j / width) for j in range(width // 2)]


def sympow_rates(longest_document: int) -> list[float]:
    return [2 * math.pi / longest_document ** (2 * j / 8) for j in range(4)]


def rotation(position: float, theta: list[float]) -> Tensor:
    """The matrix that rotates the plane (j, j + K / 2) by position theta_j."""
    J = len(theta)
    R = torch.zeros(2 * J, 2 * J, dtype=torch.float64)
    for j, rate in enumerate(theta):
        R[j, j] = R[j + J, j + J] = math.cos(position * rate)
        R[j + J, j] = math.sin(position * rate)
        R[j, j + J] = -R[j + J, j]
    return R


def rotated(x: Tensor, theta: list[float], position: Tensor | None = None) -> Tensor:
    """x (B, T, H, K) rotated by positions (B, T), which default to 1, 2, ..."""
    y = torch.empty_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            mu = t + 1 if position is None else position[b, t].item()
            y[b, t] = x[b, t] @ rotation(mu, theta).mT
    return y


def unit(x: Tensor) -> Tensor:
    return x / x.square().sum(-1, keepdim=True).sqrt()


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1)


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def matrix(weight: PairWeight) -> Tensor:
    """(B, H, T, T), zero where i > t."""
    zero = torch.zeros_like(weight(0, 0))
    rows = [[weight(t, i) if i <= t else zero for i in range(T)] for t in range(T)]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def product(gates: Tensor, t: int, i: int) -> Tensor:
    """gamma_(i+1) ... gamma_t, of gates (B, T, H)."""
    kept = torch.ones_like(gates[:, 0])
    for j in range(i + 1, t + 1):
        kept = kept * gates[:, j]
    return kept


def softmax_rows(logits: Tensor) -> Tensor:
    exponentials = logits.exp().tril()
    return exponentials / exponentials.sum(-1, keepdim=True)


def mix(weights: Tensor, v: Tensor) -> Tensor:
    """sum_i w_ti v_i, (B, T, H, V)."""
    return torch.einsum("bhti,bihv->bthv", weights, v)


def pivots(
    attention: Attention,
    q: Tensor,
    weight: PairWeight,
    scale: float = 1.0,
    degree: int = 1,
    f: Callable[[Tensor], Tensor] = lambda key: key,
) -> tuple[Tensor, Tensor]:
    """What pivot tokens add to the numerator (B, T, H, V) and the denominator (B, T, H)."""
    start = attention.initial_state
    if start is None:
        return torch.zeros_like(q), torch.zeros_like(q[..., 0])
    numerator, denominator = torch.zeros_like(q), torch.zeros_like(q[..., 0])
    for t in range(T):
        for r in range(3):
            w = weight(t, -1) * (scale * dot(q[:, t], f(start.key[:, r]))) ** degree
            numerator[:, t] += w[..., None] * start.value[:, r]
            denominator[:, t] += w
    return numerator, denominator


def head_norm(attention: Attention, mixed: Tensor) -> Tensor:
    """Normalise each head of each token, then apply a gain and a bias per channel."""
    y = mixed - mixed.mean(-1, keepdim=True)
    eps = 1e-10 if attention.config.kind in ("cartan", "zeros") else 1e-5
    y = y / (y.square().mean(-1, keepdim=True) + eps).sqrt()
    return y.flatten(2) * attention.norm.weight + attention.norm.bias


def assert_forward(attention: Attention, x: Tensor, mixed: Tensor) -> None:
    has_norm = getattr(attention, "norm", None) is not None
    y = head_norm(attention, mixed) if has_norm else mixed.flatten(2)
    assert_same(attention(x, keep_state=False)[0], y @ attention.out.weight.mT)


# Variants with a softmax over queries and keys


@pytest.mark.parametrize(
    ("options", "theta"),
    [
        ({}, rotary_rates()),
        ({"rotary_base": 500.0}, rotary_rates(base=500.0)),
        ({"longest_document": 512}, sympow_rates(512)),
    ],
)
def test_softmax_uses_products_of_rotated_vectors(
    options: dict[str, int], theta: list[float]
) -> None:
    attention, x = build("softmax", **options), tokens()
    q, k, v = projections(x, attention.qkv.weight)
    q, k = rotated(q, theta), rotated(k, theta)
    logits = matrix(lambda t, i: dot(q[:, t], k[:, i]) / 8**0.5)
    assert_same(attention.logits(x).tril(), logits)
    assert_forward(attention, x, mix(softmax_rows(logits), v))


SLOPES = {
    1: [2**-8],
    2: [2**-4, 2**-8],
    3: [2**-4, 2**-8, 2**-2],
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
    8: [2.0**-h for h in range(1, 9)],
    12: [*(2.0**-h for h in range(1, 9)), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
}


@pytest.mark.parametrize("heads", SLOPES)
def test_alibi_slopes_are_geometric_with_extra_heads_from_twice_as_many(heads: int) -> None:
    assert alibi.alibi_slopes(heads) == pytest.approx(SLOPES[heads], rel=1e-15)


@pytest.mark.parametrize("heads", [2, 3])
def test_alibi_is_a_fixed_gate(heads: int) -> None:
    attention, x = build("alibi", heads=heads), tokens(heads=heads)
    q, k, v = projections(x, attention.qkv.weight, heads)
    gates = torch.tensor([math.exp(-m) for m in SLOPES[heads]], dtype=x.dtype).expand(2, T, heads)
    weights = matrix(lambda t, i: product(gates, t, i) * (dot(q[:, t], k[:, i]) / 8**0.5).exp())
    assert_forward(attention, x, mix(weights / weights.sum(-1, keepdim=True), v))


@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize("queries", [T, 5, 1])
@torch.no_grad()
def test_alibi_with_flex_attention_equals_its_explicit_bias(heads: int, queries: int) -> None:
    attention, x = build("alibi", heads=heads), tokens(heads=heads)
    q, cache = attention.project(x, 0)
    q = q[:, :, T - queries :]
    assert_same(alibi._mix_flex(q, *cache), attention.mix(q, cache))


@pytest.mark.parametrize("queries", [T, 5])
def test_alibi_takes_queries_in_blocks(monkeypatch: pytest.MonkeyPatch, queries: int) -> None:
    attention = build("alibi")
    q, cache = attention.project(tokens(), 0)
    q = q[:, :, T - queries :]
    whole = attention.mix(q, cache)
    monkeypatch.setattr(alibi, "_QUERIES_AT_ONCE", 4)
    assert_same(attention.mix(q, cache), whole)


def coca_operands(attention: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, the coefficients [t, t], and v."""
    q, u, v = projections(x, attention.qtv.weight)
    t = torch.relu((u[..., :4] + u[..., 4:]) / 2)
    return q, torch.cat([t, t], -1), v


def test_coca_strict_depends_on_distance_alone() -> None:
    attention, x = build("coca", mode="strict"), tokens()
    (q, coefficient, v), theta = coca_operands(attention, x), rotary_rates()

    def summed(m: int, n: int) -> Tensor:
        logit = torch.zeros(2, HEADS, dtype=x.dtype)
        for j in range(4):
            size = q[:, m, :, j] ** 2 + q[:, m, :, j + 4] ** 2
            logit += size * coefficient[:, n, :, j] * math.cos((m - n) * theta[j])
        return logit / 8**0.5

    def expanded(m: int, n: int) -> Tensor:
        query, key = q[:, m], q[:, m] * coefficient[:, n]
        return dot(query @ rotation(m, theta).mT, key @ rotation(n, theta).mT) / 8**0.5

    logits = matrix(summed)
    assert_same(matrix(expanded), logits)
    assert_same(attention.logits(x).tril(), logits)
    assert_forward(attention, x, mix(softmax_rows(logits), v))


def test_coca_slack_rotates_coefficients_before_the_product() -> None:
    attention, x = build("coca", mode="slack"), tokens()
    q, coefficient, v = coca_operands(attention, x)
    query, turned = rotated(q, rotary_rates()), rotated(coefficient, rotary_rates())
    logits = matrix(lambda m, n: dot(query[:, m], q[:, m] * turned[:, n]) / 8**0.5)
    assert_same(matrix(lambda m, n: dot(q[:, m] * query[:, m], turned[:, n]) / 8**0.5), logits)
    assert_same(attention.logits(x).tril(), logits)
    assert_forward(attention, x, mix(softmax_rows(logits), v))


@pytest.mark.parametrize(("mode", "is_invariant"), [("strict", True), ("slack", False)])
def test_coca_strict_alone_is_shift_invariant(mode: str, is_invariant: bool) -> None:
    attention, x = build("coca", mode=mode), tokens()
    shifted = attention.logits(torch.cat([tokens(7), x], 1))[:, :, 7:, 7:]
    change = (shifted - attention.logits(x)).abs().max()
    assert change < 1e-11 if is_invariant else change > 1


# Variants with a feature map or a fixed decay


def no_decay(t: int, i: int) -> Tensor:
    return torch.ones(2, HEADS, dtype=torch.float64)


def fixed_decay(t: int, i: int) -> Tensor:
    """gamma_h^(t - i), gamma_h = 1 - 2^(-5 - h), h = 0, 1, ..."""
    gamma = 1 - 2.0 ** (-5 - torch.arange(HEADS, dtype=torch.float64))
    return (gamma ** (t - i)).expand(2, -1)


@INITIAL_STATE
@pytest.mark.parametrize(
    ("feature_map", "normalizer", "f"),
    [
        ("elu", "sum", lambda x: torch.where(x > 0, x + 1, x.exp())),
        ("relu", "sum", lambda x: x.clamp(min=0)),
        ("relu", "head_norm", lambda x: x.clamp(min=0)),
        ("identity", "head_norm", lambda x: x),
    ],
)
def test_linear_weights_are_products_of_features(
    feature_map: str, normalizer: str, f: Callable[[Tensor], Tensor], initial_state: str
) -> None:
    options = {"feature_map": feature_map, "normalizer": normalizer, "initial_state": initial_state}
    attention, x = build("linear", **options), tokens()
    q, k, v = projections(x, attention.qkv.weight)
    weights = matrix(lambda t, i: dot(f(q[:, t]), f(k[:, i])) / 8**0.5)
    before, mass = pivots(attention, f(q), no_decay, 8**-0.5, f=f)
    mixed = mix(weights, v) + before
    if normalizer == "sum":
        total = weights.sum(-1).mT + mass
        mixed = mixed / torch.where(total == 0, 1, total)[..., None]  # 0 where all weights are 0
    assert_forward(attention, x, mixed)


@INITIAL_STATE
@pytest.mark.parametrize("group_norm", [True, False])
@pytest.mark.parametrize("swish_gate", [True, False])
def test_retention_matches_its_decay_matrix(
    group_norm: bool, swish_gate: bool, initial_state: str
) -> None:
    options = {"group_norm": group_norm, "swish_gate": swish_gate, "initial_state": initial_state}
    attention, x = build("retention", **options), tokens()
    q, k, v = projections(x, attention.qkv.weight)
    q, k = rotated(q, rotary_rates()), rotated(k, rotary_rates())
    weights = matrix(fixed_decay) * matrix(lambda t, i: dot(q[:, t], k[:, i]) / 8**0.5)
    mixed = mix(weights, v) + pivots(attention, q, fixed_decay, 8**-0.5)[0]
    y = head_norm(attention, mixed) if group_norm else mixed.flatten(2)
    if swish_gate:
        gate = x @ attention.swish.weight.mT
        y = y * gate * sigmoid(gate)
    assert_same(attention(x, keep_state=False)[0], y @ attention.out.weight.mT)


@INITIAL_STATE
@pytest.mark.parametrize(("decay", "fade"), [(False, no_decay), (True, fixed_decay)])
def test_complex_uses_real_and_imaginary_part_of_the_inner_product(
    decay: bool, fade: PairWeight, initial_state: str
) -> None:
    attention, x = build("complex", decay=decay, initial_state=initial_state), tokens()
    parts = (one.chunk(2, -1) for one in projections(x, attention.qkv.weight))
    q, k, v = (torch.complex(*one) for one in parts)
    theta = torch.tensor(rotary_rates(), dtype=x.dtype)

    def weight(n: int, m: int, key: Tensor) -> Tensor:
        turned = torch.exp(1j * (n - m) * theta) * key
        return fade(n, m) * dot(q[:, n].conj(), turned) / 8**0.5

    weights = matrix(lambda n, m: weight(n, m, k[:, m]))
    assert weights.dtype == torch.complex128
    assert_same(attention.weights(x), weights)
    mixed = mix(weights, v)
    if (start := attention.initial_state) is not None:
        keys, values = (torch.complex(*one.chunk(2, -1)) for one in (start.key, start.value))
        for n in range(T):
            mixed[:, n] += sum(
                weight(n, -1, keys[:, r])[..., None] * values[:, r] for r in range(3)
            )
    assert_forward(attention, x, torch.cat([mixed.real, mixed.imag], -1))


# Symmetric powers


@INITIAL_STATE
@pytest.mark.parametrize("degree", [2, 4, 6, 8])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("kind", SYMPOW)
def test_sympow_weights_are_powers_times_products_of_gates(
    kind: str, qk_norm: bool, degree: int, initial_state: str
) -> None:
    options = {"degree": degree, "qk_norm": qk_norm, "initial_state": initial_state}
    if degree > 4 and initial_state == "learned":
        with pytest.raises(ValueError, match=f"initial_state: found learned with degree {degree}"):
            build(kind, **options)
        return
    attention, x = build(kind, longest_document=100 * degree, **options), tokens()
    q, k, v = projections(x, attention.qkv.weight)
    if qk_norm:
        q = q / q.square().mean(-1, keepdim=True).sqrt() * attention.q_norm.weight
        k = k / k.square().mean(-1, keepdim=True).sqrt() * attention.k_norm.weight
    rate, gates = torch.ones_like(x[..., 0]), torch.ones_like(x[..., :HEADS])
    if kind in ("sympow_rotary", "conformal_sympow"):
        rate = 1 + torch.tanh(x @ attention.rate.weight[0])
    if kind in ("sympow_gated", "conformal_sympow"):
        gates = sigmoid(x @ attention.gate.weight.mT + attention.gate.bias)
    mu = torch.stack([rate[:, : t + 1].sum(1) for t in range(T)], 1)
    q, k = (rotated(one, sympow_rates(100 * degree), mu) for one in (q, k))

    def fade(t: int, i: int) -> Tensor:
        return product(gates, t, i)

    weights = matrix(lambda t, i: fade(t, i) * (dot(q[:, t], k[:, i]) / 8**0.5) ** degree)
    before, mass = pivots(attention, q, fade, 8**-0.5, degree)
    total = weights.sum(-1).mT + mass
    assert_forward(attention, x, (mix(weights, v) + before) / total[..., None])


@pytest.mark.parametrize("degree", [2, 4, 6, 8])
def test_symmetric_power_is_the_multinomial_embedding(degree: int) -> None:
    torch.manual_seed(degree)
    a, b = torch.randn(2, 10, 8, dtype=torch.float64)
    chosen = list(combinations_with_replacement(range(8), degree))
    repeats = [math.prod(math.factorial(one.count(c)) for c in set(one)) for one in chosen]
    orders = math.factorial(degree) / torch.tensor(repeats, dtype=torch.float64)
    assert len(chosen) == math.comb(8 + degree - 1, degree) == symmetric_dim(8, degree)
    phi = [orders.sqrt() * x[:, torch.tensor(chosen)].prod(-1) for x in (a, b)]
    assert_same(dot(*phi), dot(a, b) ** degree)
    # The state layout multiplies by the multiplicity of a feature on the side of the query only.
    query = expand(a, degree) * multiplicity(8, degree, a)
    assert_same(dot(query, expand(b, degree)), dot(a, b) ** degree)


# Cartan kernels


def key_softmax(attention: Attention, s: Tensor) -> PairWeight:
    """exp(s_i) / sum_j exp(s_j), where the sum includes pivot tokens at position 0."""
    start = attention.initial_state
    mass = torch.zeros_like(s[:, 0]) if start is None else start.log_mass.exp().expand(2, -1)
    return lambda t, i: (mass if i < 0 else s[:, i].exp()) / (mass + s[:, : t + 1].exp().sum(1))


def cartan_generator(attention: Attention, x: Tensor) -> PairWeight:
    """g_ti, also for position 0."""
    generator = attention.config.generator
    if generator != "product":
        softmax = key_softmax(attention, x @ attention.logit.weight.mT)
    if generator == "additive":
        return softmax
    gates = sigmoid(x @ attention.gate.weight.mT + attention.gate.bias)
    if generator == "product":
        return lambda t, i: product(gates, t, i)
    return lambda t, i: softmax(t, i) * product(gates, t, i)


@INITIAL_STATE
@pytest.mark.parametrize("negative_diagonal", [False, True])
@pytest.mark.parametrize("generator", GENERATORS)
def test_cartan_weighs_inner_products_of_rotated_unit_vectors(
    generator: str, negative_diagonal: bool, initial_state: str
) -> None:
    options = {"negative_diagonal": negative_diagonal, "initial_state": initial_state}
    attention, x = build("cartan", generator=generator, **options), tokens()
    q, k, v = projections(x, attention.qkv.weight)
    q, k = rotated(unit(q), rotary_rates()), rotated(unit(k), rotary_rates())
    if negative_diagonal:
        diagonal = torch.tanh(1 + by_head(x, attention.diagonal.weight))
        assert (diagonal < 0).any()
        k = diagonal * k
    g = cartan_generator(attention, x)
    weights = matrix(lambda t, i: g(t, i) * dot(q[:, t], k[:, i]))
    assert_forward(attention, x, mix(weights, v) + pivots(attention, q, g)[0])


@INITIAL_STATE
@pytest.mark.parametrize("generator", GENERATORS)
def test_cartan_without_bilinear_form_sums_per_channel(generator: str, initial_state: str) -> None:
    attention = build("cartan", generator=generator, bilinear=False, initial_state=initial_state)
    x = tokens()
    q, k, v = (by_head(x, weight) for weight in attention.qkv.weight.split([32, 32, 16]))
    theta = rotary_rates(width=16)  # one rate for each of the 8 channels of a head
    q, k = (rotated(one, theta).unflatten(-1, (2, 8)).mT for one in (q, k))  # (B, T, H, V, 2)
    g = cartan_generator(attention, x)
    initial = torch.zeros_like(k[0, 0])
    if (start := attention.initial_state) is not None:
        initial = (start.key * start.value).sum(1).unflatten(-1, (2, 8)).mT
    mixed = torch.zeros_like(v)
    for t in range(T):
        mixed[:, t] = g(t, -1)[..., None] * dot(q[:, t], initial)
        for i in range(t + 1):
            mixed[:, t] += g(t, i)[..., None] * dot(q[:, t], k[:, i]) * v[:, i]
    assert_forward(attention, x, mixed)


# ZeroS


def zeros_logits(attention: Attention, x: Tensor) -> Tensor:
    """s_i (B, T, H): how far u_i points away from the running mean of u_1 .. u_i."""
    u, mass = by_head(x, attention.logit.project.weight), attention.logit.tau.exp()[:, None]
    means = [(mass * attention.logit.mu + u[:, : i + 1].sum(1)) / (mass + i + 1) for i in range(T)]
    return torch.stack([-dot(u[:, i], mean) / 8**0.5 for i, mean in enumerate(means)], 1)


def zeros_gates(attention: Attention, x: Tensor, names: str) -> dict[str, Tensor]:
    """The gates sigma of these names, (B, T, H); only sigma^0 may be negative."""
    assert set(attention.sigma) == set(names)
    logits = {name: x @ attention.sigma[name].weight.mT for name in names}
    return {name: one.tanh() if name == "0" else sigmoid(one) for name, one in logits.items()}


def orders(s: Tensor, t: int, i: int) -> list[Tensor]:
    """The terms of order 0, 1 and 2 in s of softmax_i(s_1 .. s_t)."""
    count, mean = t + 1, s[:, : t + 1].mean(1)
    variance = (s[:, : t + 1] - mean[:, None]).square().mean(1)
    first = s[:, i] - mean
    return [torch.ones_like(mean) / count, first / count, (first**2 - variance) / (2 * count)]


def zeros_radial(attention: Attention, x: Tensor, names: str) -> Tensor:
    """w_ti (B, H, T, T): the weights without the inner products of unit vectors."""
    s, sigma = zeros_logits(attention, x), zeros_gates(attention, x, names)
    softmax, num_orders = key_softmax(attention, s), 3 if "2" in names else 2
    fading = [torch.ones_like(s)] * num_orders
    if attention.config.ordered:
        fading = [sigmoid(x @ one.weight.mT + one.bias) for one in attention.fading]

    def weight(t: int, i: int) -> Tensor:
        terms = orders(s, t, i)[:num_orders]
        rest = softmax(t, i)
        for gates, term in zip(fading, terms, strict=True):
            rest = rest - product(gates, t, i) * term
        kept = sum(sigma[name][:, t] * terms[int(name)] for name in names if name != "h")
        return kept + sigma["h"][:, t] * rest

    return matrix(weight)


def zeros_directions(attention: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = projections(x, attention.qkv.weight)
    return rotated(unit(q), rotary_rates()), rotated(unit(k), rotary_rates()), v


# Options, layer, and the names of the gates sigma that follow from them.
ZEROS = [
    ({}, 0, "1h"),
    ({"second_order": True}, 0, "12h"),
    ({"zeroth": "first_layer"}, 0, "01h"),
    ({"zeroth": "first_layer"}, 1, "1h"),
    ({"ordered": True}, 0, "1h"),
    ({"ordered": True, "second_order": True, "zeroth": "first_layer"}, 0, "012h"),
]


@INITIAL_STATE
@pytest.mark.parametrize(("options", "layer", "names"), ZEROS)
def test_zeros_matches_its_formula(
    options: dict[str, object], layer: int, names: str, initial_state: str
) -> None:
    attention, x = build("zeros", layer=layer, initial_state=initial_state, **options), tokens()
    q, k, v = zeros_directions(attention, x)
    radial = zeros_radial(attention, x, names)
    assert_same(attention.coefficients(attention.operands(x)), radial)
    mixed = mix(radial * matrix(lambda t, i: dot(q[:, t], k[:, i])), v)
    high = zeros_gates(attention, x, names)["h"]
    softmax = key_softmax(attention, zeros_logits(attention, x))
    mixed += pivots(attention, q, lambda t, i: high[:, t] * softmax(t, i))[0]
    assert_forward(attention, x, mixed)


@pytest.mark.parametrize(("options", "layer", "names"), ZEROS)
def test_zeros_weights_sum_to_zero_or_to_the_gate_of_the_mean(
    options: dict[str, object], layer: int, names: str
) -> None:
    attention, x = build("zeros", layer=layer, **options), tokens()
    sums = attention.coefficients(attention.operands(x)).sum(-1).mT  # (B, T, H)
    if attention.config.ordered:
        assert (sums.abs() > 0.1).any()
    elif "0" in names:
        assert_same(sums, zeros_gates(attention, x, names)["0"])
    else:
        assert_same(sums, torch.zeros_like(sums), 1e-12)


def test_zeros_terms_are_the_taylor_terms_of_the_softmax() -> None:
    s, rests = tokens()[..., :HEADS], []
    for size in (1e-2, 5e-3):
        softmax = softmax_rows(matrix(lambda t, i, s=size * s: s[:, i]))
        terms = matrix(lambda t, i, s=size * s: sum(orders(s, t, i)))
        rests.append((softmax - terms).abs().max().item())
    assert rests[0] / rests[1] == pytest.approx(2**3, rel=0.02)


@pytest.mark.parametrize("second_order", [False, True])
def test_ordered_zeros_with_gates_of_one_equals_unordered(second_order: bool) -> None:
    ordered = build("zeros", ordered=True, second_order=second_order)
    unordered = build("zeros", second_order=second_order)
    unordered.load_state_dict(ordered.state_dict(), strict=False)
    wanted = unordered(tokens(), keep_state=False)[0]
    assert not torch.allclose(ordered(tokens(), keep_state=False)[0], wanted, rtol=1e-2)
    with torch.no_grad():
        for gate in ordered.fading:
            gate.weight.zero_()
            gate.bias.fill_(60.0)  # gamma = 1 - 1e-26
    assert_same(ordered(tokens(), keep_state=False)[0], wanted)


def test_zeros_is_three_calls_of_the_op() -> None:
    attention, x = build("zeros"), tokens()
    q, k, v = zeros_directions(attention, x)
    s, sigma = zeros_logits(attention, x), zeros_gates(attention, x, "1h")
    mass = torch.stack([s[:, : t + 1].exp().sum(1) for t in range(T)], 1).log()
    mean_s = torch.stack([s[:, : t + 1].mean(1) for t in range(T)], 1)[..., None]
    count = torch.arange(1, T + 1, dtype=x.dtype)[:, None].expand_as(s)

    def gated_sum(log_g: Tensor, value_scale: Tensor) -> Tensor:
        options = {"degree": 1, "scale": 1.0, "normalize": False, "backend": "reference"}
        return power_attention(q, k, v * value_scale[..., None], log_g, **options)[0]

    before = torch.cat([torch.full_like(mass[:, :1], -math.inf), mass[:, :-1]], 1)
    soft = gated_sum(before - mass, (s - mass).exp())
    mean, mean_sv = (gated_sum(((count - 1) / count).log(), one / count) for one in (s**0, s))
    high, low = sigma["h"][..., None], (sigma["1"] - sigma["h"])[..., None]
    mixed = high * soft + low * mean_sv - (low * mean_s + high) * mean
    radial = zeros_radial(attention, x, "1h")
    assert_same(mixed, mix(radial * matrix(lambda t, i: dot(q[:, t], k[:, i])), v))
    assert_forward(attention, x, mixed)
