"""A longhaul language model for transformers, in one file that needs only torch and transformers.

Residual blocks of GPT-2's shape with one of twelve kinds of causal attention. Three kinds are a
softmax over all earlier tokens, with a cache of keys and values. The others are power attention,

    y_t = sum_(i <= t) exp(G_t - G_i) (scale q_t . k_i)^p v_i     [ / the same sum without v_i ]

with G the running sum of log gates. Since (a . b)^p = phi(a) . phi(b), the past of each head is a
matrix of constant size, sum_i exp(G_t - G_i) phi(k_i) v_i^T.

Shapes: B batch, T new tokens, S all tokens with cached ones, H heads, K head width, D model width.
`mask` is False at padding, on any side, which changes no output and no state.
"""

import itertools
import math
from collections import Counter, defaultdict
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_longhaul import LonghaulConfig

Options = dict[str, Any]
Past = dict[str, Tensor]  # state or cache of one layer; the first dimension of all is B
Mixed = tuple[Tensor, Past]

# Tokens mixed at a time, so that there is no T x T tensor, however long the input is.
CHUNK = 128
# With more rows per head than this (high degrees, wide heads), keys and values are cached instead.
LARGEST_STATE = 1 << 17
# The log of a gate that forgets all: its exp is 0 in float32, and sums of it stay finite.
LOG_ZERO = -200.0


def wide(x: Tensor) -> Tensor:
    """x in float32 or wider, since sums over tokens must not begin with rounded values."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def exact(linear: nn.Linear, x: Tensor) -> Tensor:  # in float32 or wider, also under autocast
    x = wide(x)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x, linear.weight.to(x), None if linear.bias is None else linear.bias.to(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_j, x_(j + K / 2)) by angles with these cosines and sines."""
    first, second = x.to(cos).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x)


class Attention(nn.Module):
    """forward(x, mask, past) maps x (B, T, D) to an output (B, T, D) and the new past."""

    def __init__(self, options: Options, width: int, num_heads: int) -> None:
        super().__init__()
        self.options, self.kind = options, options["kind"]
        self.num_heads, self.head_dim = num_heads, width // num_heads
        self.out = nn.Linear(width, width, bias=False)

    def phases(self, rotation: Tensor, x: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines (B, T, 1, width / 2) of rotations (B, T), in tokens, float64."""
        longest = self.options.get("longest_document")
        first, base = (1.0, longest) if longest else (0.5 / math.pi, self.options["rotary_base"])
        pairs = torch.arange(width // 2, dtype=torch.float64, device=x.device)
        turns = rotation[:, :, None, None] * (first * float(base) ** (-2 * pairs / width))
        angle = (2 * math.pi) * (turns % 1).to(torch.promote_types(x.dtype, torch.float32))
        return angle.cos(), angle.sin()


class SoftmaxAttention(Attention):
    """softmax: of q_t . k_i / sqrt(K), with q and k rotated by their positions;
    alibi: of q_t . k_i / sqrt(K) - m_h (t - i), without rotations;
    coca: with keys that are their queries times coefficients c_i >= 0, so that they share angles.
    """

    def __init__(self, options: Options, width: int, num_heads: int, layer: int) -> None:
        super().__init__(options, width, num_heads)
        qkv = nn.Linear(width, 3 * width, bias=False)
        self.add_module("qtv" if self.kind == "coca" else "qkv", qkv)

    def project(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.qtv(x) if self.kind == "coca" else self.qkv(x)
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).unbind(dim=2)
        if self.kind == "alibi":
            return q, k, v
        phases = self.phases(position, x, self.head_dim)
        if self.kind == "softmax":
            return rotate(q, *phases), rotate(k, *phases), v
        c = k.unflatten(-1, (2, -1)).mean(dim=-2).relu()
        if self.options["mode"] == "slack":
            return q * rotate(q, *phases), rotate(torch.cat([c, c], dim=-1), *phases), v
        size, none = q.square().unflatten(-1, (2, -1)).sum(dim=-2), torch.zeros_like(c)
        q, k = (rotate(torch.cat([one, none], dim=-1), *phases) for one in (size, c))
        return q, k, v

    def bias(self, distance: Tensor) -> Tensor:
        """The bias of logits at these distances: (B, T, S) to (B, 1 or H, T, S)."""
        if self.kind != "alibi":
            return torch.zeros_like(distance)[:, None]
        n = 1 << (self.num_heads.bit_length() - 1)
        slopes = [2.0 ** (-8 * h / n) for h in range(1, n + 1)]
        slopes += [2.0 ** (-4 * h / n) for h in range(1, 2 * n + 1, 2)]
        return -distance[:, None] * distance.new_tensor(slopes[: self.num_heads])[:, None, None]

    def forward(self, x: Tensor, mask: Tensor, past: Past) -> Mixed:
        # Positions count from 1. Padding is cached with position 0, and no token attends to it.
        before = past["position"].amax(dim=1, keepdim=True) if past else 0.0
        position = mask.cumsum(dim=1).double() + before
        q, k, v = self.project(x, position)
        kept = {"k": k, "v": v, "position": position * mask}
        if past:
            kept = {name: torch.cat([past[name], new], dim=1) for name, new in kept.items()}
        k, v = kept["k"].transpose(1, 2), kept["v"].transpose(1, 2)
        position, past_tokens, outputs = kept["position"], k.shape[2] - q.shape[1], []
        index = torch.arange(k.shape[2], device=x.device)
        for now in index[past_tokens:].split(CHUNK):
            # Padding sees itself, since a softmax over nothing would be NaN.
            seen = (index < now[:, None]) & (position > 0)[:, None] | (index == now[:, None])
            bias = self.bias((position[:, now, None] - position[:, None]).to(q.dtype))
            bias = bias.masked_fill(~seen[:, None], -math.inf)
            queries = q[:, now - past_tokens].transpose(1, 2)
            outputs.append(F.scaled_dot_product_attention(queries, k, v, attn_mask=bias))
        return self.out(torch.cat(outputs, dim=2).transpose(1, 2).flatten(2)), kept


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # Tensors cached by generation must also work in training.
def symmetric_power(width: int, degree: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Coordinates (p, P) of all products of p of them, and roots of how often each occurs."""
    chosen = list(itertools.combinations_with_replacement(range(width), degree))
    repeats = [math.prod(map(math.factorial, Counter(one).values())) for one in chosen]
    orders = math.factorial(degree) / torch.tensor(repeats, dtype=torch.float64)
    return torch.tensor(chosen, device=device).T, orders.sqrt().to(device)


def features(x: Tensor, degree: int) -> Tensor:
    """phi(x), (..., K) to (..., P), with phi(a) . phi(b) = (a . b)^p."""
    if degree == 1:
        return x
    coordinates, roots = symmetric_power(x.shape[-1], degree, x.device)
    product = roots.to(x)
    for one in coordinates:
        product = product * x[..., one]
    return product


def power_weights(q: Tensor, k: Tensor, G_q: Tensor, G_k: Tensor, degree: int) -> Tensor:
    """exp(G_t - G_i) (q_t . k_i)^p, 0 for i > t; the queries are those of the last tokens of k."""
    T, S = q.shape[-2], k.shape[-2]
    future = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1)
    log_decay = (G_q[..., :, None] - G_k[..., None, :]).to(q.dtype).masked_fill(future, -math.inf)
    return (q @ k.mT) ** degree * log_decay.exp()


class Read(NamedTuple):
    """One of several power attentions; the output is their sum, each times its factor `row`."""

    k: Tensor  # (B, T, H, K)
    v: Tensor  # (B, T, H, V)
    log_g: Tensor | None = None  # (B, T, H); None means no decay
    row: Tensor | None = None  # (B, T, H, 1 or V); None means 1


class DeviationLogit(nn.Module):
    """s_i = -u_i . m_i / sqrt(K), with u = W x and m_i the mean of u so far, mixed with a prior."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, width, bias=False)
        self.mu = nn.Parameter(torch.empty(num_heads, width // num_heads))
        self.tau = nn.Parameter(torch.empty(num_heads))

    def forward(self, x: Tensor, mask: Tensor, count: Tensor, before: Tensor) -> tuple[Tensor, ...]:
        u = wide(self.project(x).unflatten(-1, self.mu.shape))
        total = before[:, None] + (u * mask[..., None, None]).cumsum(dim=1)
        count = count.clamp(min=1)[..., None, None].to(u)
        prior = (self.tau.to(u)[:, None] - count.log()).sigmoid()
        mean = prior * self.mu.to(u) + (1 - prior) * total / count
        return -(u * mean).sum(dim=-1) / u.shape[-1] ** 0.5, total


class PowerAttention(Attention):
    """The kinds of linear cost: each is a choice of queries, keys, values, gates and reads.

    linear: a feature map. retention: fixed decays. sympow: degree p, normalised; _gated with a
    learned gate per head, _rotary with a learned rotation rate, conformal_ with both. complex:
    [real, imaginary] vectors, two reads. cartan: cosines of q and k, with gates that are learned, a
    softmax over logits of the keys, or both. zeros: a softmax minus the first terms of its series.
    """

    def __init__(self, options: Options, width: int, num_heads: int, layer: int) -> None:
        super().__init__(options, width, num_heads)
        kind, option, H = self.kind, options.get, num_heads
        self.key_dim = self.value_dim = self.head_dim
        self.is_channels = not option("bilinear", True)
        if self.is_channels:  # keys of width 1, and one value R_i k_i v_i in R^2 per channel
            self.key_dim, self.value_dim = 1, 2 * self.head_dim
        self.degree = option("degree", 1)
        self.scale = 1.0 if kind in ("cartan", "zeros") else self.key_dim**-0.5
        self.normalize = "sympow" in kind or option("normalizer") == "sum"
        self.keeps_state = math.comb(self.key_dim + self.degree - 1, self.degree) <= LARGEST_STATE
        self.qkv = nn.Linear(width, (5 if self.is_channels else 3) * width, bias=False)
        # Weights times cosines are small: the usual 1e-5 would be most of a head's variance.
        norm = nn.GroupNorm(H, width, eps=1e-10 if self.scale == 1 else 1e-5)
        self.norm = norm if option("group_norm", not self.normalize) else None
        if option("qk_norm"):
            self.q_norm, self.k_norm = nn.RMSNorm(self.key_dim), nn.RMSNorm(self.key_dim)

        def linear(is_wanted: Any, size: int, bias: bool = False) -> nn.Linear | None:
            return nn.Linear(width, size, bias=bias) if is_wanted else None

        generator = option("generator")
        has_gate = kind in ("sympow_gated", "conformal_sympow") or generator in ("product", "full")
        self.gate = linear(has_gate, H, bias=True)
        self.rate = linear(kind in ("sympow_rotary", "conformal_sympow"), 1)
        self.logit = linear(generator in ("additive", "full"), H)
        self.swish = linear(option("swish_gate"), width)
        self.diagonal = linear(option("negative_diagonal"), width)
        self.moments: list[tuple[int | None, int]] = []
        if kind == "zeros":
            self.logit = DeviationLogit(width, H)
            self.add_terms(width, keeps_mean=option("zeroth") == "first_layer" and layer == 0)
        self.initial_state = None
        if options["initial_state"] == "learned":
            rank, sizes = options["rank"], {} if self.logit is None else {"log_mass": (H,)}
            sizes |= {"key": (H, rank, self.key_dim), "value": (H, rank, self.value_dim)}
            self.initial_state = nn.ParameterDict({n: torch.empty(s) for n, s in sizes.items()})

    def begin(self, x: Tensor) -> Past:
        """The past before the first token: learned keys and values, or nothing."""
        H, state = self.num_heads, self.initial_state
        if state is None:
            key, value = (x.new_zeros(1, 0, H, size) for size in (self.key_dim, self.value_dim))
        else:
            key, value = (state[name].transpose(0, 1)[None] for name in ("key", "value"))
        reads = self.split(self.mapped(key), value)
        # In zeros they take part in the softmax, but its means are over real tokens only.
        k, v, G = self.stack(reads + [Read(key, 0 * value)] * len(self.moments))
        kept = {"k": k, "v": v, "G": G}
        if self.keeps_state:
            kept = {"state": features(k, self.degree).mT @ v}
        none = torch.zeros(1, H, dtype=torch.float64, device=x.device)
        kept |= {"rotation": none[:, 0], "sum_s": none, "sum_s2": none, "log_mass": none.log()}
        if state is not None and "log_mass" in state:
            kept["log_mass"] = state["log_mass"][None].double()
        kept["sum_u"] = k.new_zeros(1, H, self.head_dim)
        return {name: one.expand(len(x), *one.shape[1:]) for name, one in kept.items()}

    def forward(self, x: Tensor, mask: Tensor, past: Past) -> Mixed:
        with torch.autocast(x.device.type, enabled=False):
            past = past or self.begin(x)
        q, reads, after = self.project(x, mask, past)
        k, v, log_g = self.stack(reads)
        q = wide(q).transpose(1, 2).repeat(1, len(reads), 1, 1) * self.scale
        log_g = log_g.clamp(min=LOG_ZERO) * mask[:, None]
        mix = self.mix if self.keeps_state else self.mix_all
        with torch.autocast(x.device.type, enabled=False):
            mixed, kept = mix(q, k, v * mask[:, None, :, None], log_g, past)
        parts = zip(mixed.transpose(1, 2).chunk(len(reads), dim=2), reads, strict=True)
        y = sum(part if read.row is None else part * read.row for part, read in parts)
        y = (y.unflatten(-1, (2, -1)).sum(dim=-2) if self.is_channels else y).flatten(2)
        if self.norm is not None:
            y = self.norm(y.flatten(0, 1).to(self.norm.weight.dtype)).view_as(y)
        y = y.to(x.dtype) if self.swish is None else y.to(x.dtype) * F.silu(self.swish(x))
        return self.out(y), kept | {name: one[:, -1] for name, one in after.items()}

    def project(self, x: Tensor, mask: Tensor, past: Past) -> tuple[Tensor, list[Read], Past]:
        """Queries, reads, and the running values of the past after every token."""
        D, H = x.shape[-1], self.num_heads
        sizes = (2 * D, 2 * D, D) if self.is_channels else (D, D, D)
        q, k, v = (one.unflatten(-1, (H, -1)) for one in self.qkv(x).split(sizes, dim=-1))
        if self.options.get("qk_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.mapped(q), self.mapped(k)
        if self.kind in ("cartan", "zeros") and not self.is_channels:
            q, k = F.normalize(wide(q), dim=-1), F.normalize(wide(k), dim=-1)
        rate = 1.0 if self.rate is None else 1 + exact(self.rate, x)[..., 0].tanh()
        # Without a learned rotation rate these are positions, counted from 1.
        after = {"rotation": past["rotation"][:, None] + (rate * mask.double()).cumsum(dim=1)}
        if self.kind != "linear":
            cos, sin = self.phases(after["rotation"], x, q.shape[-1])
            sin = -sin if self.kind == "complex" else sin
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.diagonal is not None:
            k = k * (1 + self.diagonal(x)).tanh().unflatten(-1, (H, -1))
        log_g = None if self.gate is None else F.logsigmoid(exact(self.gate, x))
        if self.kind == "retention" or self.options.get("decay"):
            head = torch.arange(H, dtype=torch.float64, device=x.device)
            log_g = torch.log1p(-(2.0 ** (-5 - head))).expand(*x.shape[:2], -1)
        if self.kind == "zeros":
            s, after["sum_u"] = self.logit(x, mask, after["rotation"], past["sum_u"])
            for n, power in (("sum_s", 1), ("sum_s2", 2)):
                after[n] = past[n][:, None] + (s.double() ** power * mask[..., None]).cumsum(dim=1)
        elif self.logit is not None:
            s = exact(self.logit, x)
        values = wide(v)
        if self.logit is not None:
            # A softmax over logits is a gate: softmax_i(s_1 .. s_t) = exp(G_t - G_i) alpha_i.
            real = s.double().masked_fill(~mask[..., None], -math.inf)
            log_mass = torch.cat([past["log_mass"][:, None], real], dim=1).logcumsumexp(dim=1)
            excess = (s - log_mass[:, :-1]).to(s.dtype).masked_fill(~mask[..., None], -math.inf)
            log_g = F.logsigmoid(-excess) + (0 if log_g is None else log_g)
            values = values * excess.sigmoid()[..., None]
            after["log_mass"] = log_mass[:, 1:]
        if self.is_channels:
            ones = torch.ones_like(v[..., :1])
            return ones, [Read(ones, k * torch.cat([values, values], dim=-1), log_g, q)], after
        reads = [read._replace(log_g=log_g) for read in self.split(k, values)]
        if self.kind == "zeros":
            reads = self.subtract(reads[0], x, wide(v), s, after)
        return q, reads, after

    def mapped(self, x: Tensor) -> Tensor:
        """x after the feature map, if there is one."""
        if self.options.get("feature_map") == "elu":  # elu(x) + 1
            return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
        return x.relu() if self.options.get("feature_map") == "relu" else x

    def split(self, k: Tensor, v: Tensor) -> list[Read]:
        """The two reads of a complex product, or the single read of other kinds."""
        if self.kind != "complex":
            return [Read(k, v)]
        (k_re, k_im), (v_re, v_im) = k.chunk(2, dim=-1), v.chunk(2, dim=-1)
        return [Read(k, v), Read(torch.cat([k_im, -k_re], -1), torch.cat([-v_im, v_re], -1))]

    def stack(self, reads: list[Read]) -> tuple[Tensor, Tensor, Tensor]:
        """k, v and log gates of all R reads, stacked as R H heads: (B, RH, T, ...)."""
        k, v = (wide(torch.cat([read[i] for read in reads], dim=2)).transpose(1, 2) for i in (0, 1))
        if self.normalize:  # the sum of the weights is one more column
            v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
        none = torch.zeros(reads[0].k.shape[:3], dtype=torch.float64, device=k.device)
        log_g = [none if read.log_g is None else read.log_g.double() for read in reads]
        return k, v, torch.cat(log_g, dim=2).transpose(1, 2)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor, past: Past) -> Mixed:
        """Power attention (B, RH, T, ...), and the state after the last token."""
        outputs, state = [], past["state"]
        chunks = (one.split(CHUNK, dim=2) for one in (q, k, v, log_g))
        for q, k, v, log_g in zip(*chunks, strict=True):
            G = log_g.cumsum(dim=-1)
            inside = power_weights(q, k, G, G, self.degree) @ v
            before = features(q, self.degree) @ state * G.exp().to(q)[..., None]
            # A sum below a few roundings of the largest possible sum is noise.
            bound = q.norm(dim=-1) ** self.degree * state[..., -1].norm(dim=-1, keepdim=True)
            outputs.append(self.divided(inside + before, bound if self.degree > 1 else 0 * bound))
            to_end, decay = (G[..., -1:] - G).exp().to(q), G[..., -1].exp().to(q)
            kv = features(k, self.degree).mT @ (v * to_end[..., None])
            state = state * decay[..., None, None] + kv
        return torch.cat(outputs, dim=2), {"state": state}

    def mix_all(self, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor, past: Past) -> Mixed:
        """The same from cached keys and values; their G is cached relative to the last token."""
        G, outputs = log_g.cumsum(dim=-1), []
        kept = {"k": k, "v": v, "G": G}
        kept = {name: torch.cat([past[name], new], dim=2) for name, new in kept.items()}
        end = kept["k"].shape[2] - q.shape[2]
        for q_part, G_part in zip(q.split(CHUNK, dim=2), G.split(CHUNK, dim=2), strict=True):
            end += q_part.shape[2]
            k, v, G_k = (one[:, :, :end] for one in kept.values())
            sums = power_weights(q_part, k, G_part, G_k, self.degree) @ v
            outputs.append(self.divided(sums, torch.zeros_like(sums[..., 0])))
        return torch.cat(outputs, dim=2), kept | {"G": kept["G"] - G[..., -1:]}

    def divided(self, sums: Tensor, bound: Tensor) -> Tensor:
        """Sums of weighted values divided by the sum of weights, if the kind is normalised."""
        if not self.normalize:
            return sums
        floor = (4 * torch.finfo(sums.dtype).eps * bound).clamp(min=1e-30)
        return sums[..., :-1] / torch.maximum(sums[..., -1], floor)[..., None]

    def add_terms(self, width: int, keeps_mean: bool) -> None:
        """Prepare what zeros subtracts from the softmax: terms of order n, polynomials in s_i of
        degree n. They are running means of s_i^m v_i, which may fade, times factors of token t.
        """
        orders, H = range(3 if self.options["second_order"] else 2), self.num_heads
        names = [str(n) for n in orders if n or keeps_mean]
        self.sigma = nn.ModuleDict({n: nn.Linear(width, H, bias=False) for n in (*names, "h")})
        fading = orders if self.options["ordered"] else ()
        self.fading = nn.ModuleList(nn.Linear(width, H) for _ in fading)
        # For each term: the gates that fade it, its order, its factor and its sign.
        self.terms = [(None, int(name), name, 1) for name in names]
        self.terms += [(n if fading else None, n, "h", -1) for n in orders]
        self.moments = list(dict.fromkeys((c, m) for c, n, *_ in self.terms for m in range(n + 1)))

    def subtract(self, softmax: Read, x: Tensor, v: Tensor, s: Tensor, after: Past) -> list[Read]:
        """The reads of zeros: the softmax, and one per gate and power of s in its terms."""
        count = after["rotation"].clamp(min=1)[..., None]
        sigma = {name: exact(one, x) for name, one in self.sigma.items()}
        # Without an initial state the first token's weight of itself is 0, except for rounding.
        later = 1 if self.initial_state is not None else count > 1
        sigma = {n: one.tanh() if n == "0" else one.sigmoid() * later for n, one in sigma.items()}
        mean, square = ((after[name] / count).to(s) for name in ("sum_s", "sum_s2"))
        coefficients: list[list[Any]] = [[1], [-mean, 1], [mean.square() - square / 2, -mean, 0.5]]
        rows: dict[Any, Tensor] = defaultdict(lambda: torch.zeros_like(s))
        for chain, order, name, sign in self.terms:
            for m, coefficient in enumerate(coefficients[order]):
                rows[chain, m] = rows[chain, m] + sign * sigma[name] * coefficient
        reads = [softmax._replace(row=sigma["h"][..., None])]
        for chain, m in self.moments:
            fade = 0 if chain is None else F.logsigmoid(exact(self.fading[chain], x))
            log_g = (-1 / count).log1p().expand_as(s) + fade
            value = v * (s**m / count.to(s))[..., None]
            reads.append(Read(softmax.k, value, log_g, rows[chain, m][..., None]))
        return reads


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LonghaulConfig, layer: int) -> None:
        super().__init__()
        width, options = config.hidden_size, config.attention[layer]
        attention = PowerAttention if "initial_state" in options else SoftmaxAttention
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = attention(options, width, config.num_attention_heads, layer)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        up, out = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.mlp = nn.ModuleDict({"up": up, "out": out})

    def forward(self, x: Tensor, mask: Tensor, past: Past) -> Mixed:
        mixed, past = self.attention(self.attention_norm(x), mask, past)
        x = x + mixed
        inner = F.gelu(self.mlp["up"](self.mlp_norm(x)), approximate="tanh")
        return x + self.mlp["out"](inner), past


class LonghaulCache:
    """The past of every layer after the tokens so far."""

    is_compileable = False

    def __init__(self, num_layers: int) -> None:
        self.layers: list[Past] = [{} for _ in range(num_layers)]
        self.num_tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_tokens

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for layer in self.layers:
            layer.update({name: one.index_select(0, beam_idx) for name, one in layer.items()})


class LonghaulForCausalLM(PreTrainedModel, GenerationMixin):
    """Embedding, norm, blocks, norm, and logits with the tied embedding matrix."""

    config_class = LonghaulConfig
    _no_split_modules = ("Block",)
    _is_stateful = True  # a state cannot be cut back to fewer tokens
    _supports_default_dynamic_cache = classmethod(lambda cls: False)  # it uses LonghaulCache
    _input_embed_layer = "embedding"
    _tied_weights_keys = {"lm_head.weight": "embedding.weight"}  # noqa: RUF012
    accepts_loss_kwargs = False  # the loss is a mean, whatever Trainer counts

    def __init__(self, config: LonghaulConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.embedding_norm = nn.LayerNorm(width, bias=False)
        self.blocks = nn.ModuleList(Block(config, n) for n in range(config.num_hidden_layers))
        self.final_norm = nn.LayerNorm(width, bias=False)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: LonghaulCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits after each of (B, T) tokens, which follow those in past_key_values if given.

        Only the last T columns of attention_mask are read. labels are tokens, or -100.
        """
        if kwargs.get("position_ids") is not None:
            raise ValueError("position_ids: found some, wanted none: attention_mask implies them")
        T = input_ids.shape[1]
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask[:, -T:]
        cache = LonghaulCache(len(self.blocks)) if past_key_values is None else past_key_values
        x = self.embedding_norm(self.embedding(input_ids))
        for layer, block in enumerate(self.blocks):
            x, cache.layers[layer] = block(x, mask.bool(), cache.layers[layer])
        cache.num_tokens += T
        x = self.final_norm(x if labels is not None else x[:, -logits_to_keep:])
        logits, loss = self.lm_head(x).float(), None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        use_cache = self.config.use_cache if use_cache is None else use_cache
        return CausalLMOutputWithPast(loss, logits, cache if use_cache else None)
