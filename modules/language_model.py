"""The language model: the shape of GPT-2 with a norm after the embedding, of Llama, and others."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Literal, cast, get_type_hints

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor, nn

from longhaul.modules.attention import AttentionConfig, LayerShape, attention_config
from longhaul.modules.attention.base import overwrite
from longhaul.modules.block import MLP, Block
from longhaul.modules.choices import check_bounds, check_choices
from longhaul.modules.cross_entropy import ROWS_AT_ONCE, RowLosses
from longhaul.modules.documents import Documents, first_tokens
from longhaul.modules.initialisation import initialise
from longhaul.modules.learned_positions import LearnedPositions
from longhaul.modules.norms import RMSNorm
from longhaul.modules.roles import Role
from longhaul.modules.rotary import PositionScaling
from longhaul.modules.sequence_part import SequencePart
from longhaul.modules.vocabulary import Embedding, Head

# Every layer is looked at before anything runs.
_MOST_LAYERS = 1024

_BIASES = ("qkv", "out", "mlp", "norms")


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """Shape of the model. The default is that of GPT-2 with 124M parameters."""

    attention: AttentionConfig
    """The attention variant, by its `kind`, and the options of that kind."""

    layer_attention: dict[str, AttentionConfig] = field(default_factory=dict)
    """Other variants for the layers of a number ("5") or slice ("3::4"); the last match wins."""

    layers: int = 12
    """Number of residual blocks, 1 to 1024."""

    width: int = 768
    """Model width D; without head_dim a multiple of 2 x heads, because positions rotate pairs."""

    heads: int = 12
    """Number of query heads per layer, 1 or more."""

    kv_heads: int | None = None
    """Number of key and value heads per layer, a divisor of heads; null: as many as heads."""

    head_dim: int | None = None
    """Width of a head, an even number, 2 or more; null: width / heads."""

    qk_norm: Literal["none", "head", "full"] = "none"
    """none | head (RMS norm of each query and key head, before rotation) | full (all together)."""

    learned_positions: int | None = None
    """Positions with a learned vector each, added to the embedding, the longest text; or null."""

    vocabulary: int = 50_304
    """Rows of the embedding, at least the tokenizer's number of ids; multiples of 64 are fast."""

    embedding_norm: bool = True
    """A norm after the embedding; GPT-NeoX has none."""

    parallel_residual: bool = False
    """Attention and MLP of a block read the same x, as in GPT-NeoX; false: one, then the other."""

    biases: bool | list[str] = False
    """Where they are: true (not in the head) | some of qkv (projections of x), out, mlp, norms."""

    tied_head: bool = True
    """The matrix of the logits is that of the embedding; false: it is one of its own."""

    norm: Literal["layer", "rms", "rms_offset"] = "layer"
    """layer | rms | rms_offset (times 1 + w, as in Gemma): every norm of width D."""

    norm_eps: float = 1e-5
    """Added to the variance or mean square in these norms, more than 0."""

    norm_order: Literal["pre", "post", "sandwich"] = "pre"
    """pre | post (OLMo-2) | sandwich (both: Gemma): norms before or after attention and MLP."""

    mlp: Literal["gelu", "gelu_erf", "relu2", "swiglu", "geglu"] = "gelu"
    """gelu (by tanh) | gelu_erf | relu2 | swiglu | geglu (by tanh): the last two have a gate."""

    mlp_width: int | None = None
    """Hidden width F of the MLP, 1 or more; null: 4 x width. Gated, 8/3 x width is as large."""

    embedding_scale: float = 1.0
    """Factor of the embedding, more than 0. Gemma has the root of the width."""

    logit_softcap: float | None = None
    """c of c tanh(logit / c), more than 0, as in Gemma 2; null: logits are not capped."""

    init: Literal["gpt2", "normal", "olmo", "llama", "nanochat"] = "gpt2"
    """gpt2 | normal (std 0.02) | olmo (std 0.02, cut) | llama (torchtitan's) | nanochat."""

    def __post_init__(self) -> None:
        check_choices(self, "model.")
        check_bounds(self, "layers", least=1, most=_MOST_LAYERS, prefix="model.")
        # torch can still count the bytes of vectors of this width for each token id.
        widths = ("width", "heads", "kv_heads", "mlp_width")
        check_bounds(self, *widths, least=1, most=1 << 20, prefix="model.")
        check_bounds(self, "learned_positions", least=1, most=1 << 32, prefix="model.")
        check_bounds(self, "head_dim", least=2, most=1 << 20, prefix="model.")
        positive = ("norm_eps", "embedding_scale", "logit_softcap")
        check_bounds(self, *positive, above=0, below=math.inf, prefix="model.")
        check_bounds(self, "vocabulary", least=1, most=1 << 32, prefix="model.")
        places = [] if isinstance(self.biases, bool) else self.biases
        if unknown := [one for one in places if one not in _BIASES]:
            raise ValueError(
                f"model.biases: found {unknown[0]!r}, wanted true, false or some of "
                f"{', '.join(_BIASES)}"
            )
        if len(self.layer_attention) > self.layers:
            raise ValueError(
                f"model.layer_attention: found {len(self.layer_attention)} entries, wanted at "
                f"most one for each of {self.layers} layers"
            )
        if self.head_dim is None and self.width % (2 * self.heads):
            raise ValueError(
                f"model.width: found {self.width}, wanted a multiple of 2 x model.heads = "
                f"{2 * self.heads}"
            )
        if self.head_dim is not None and self.head_dim % 2:
            raise ValueError(f"model.head_dim: found {self.head_dim}, wanted an even number")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(
                f"model.kv_heads: found {self.kv_heads}, wanted a divisor of model.heads = "
                f"{self.heads}"
            )
        used = [self._entry_of(layer) for layer in range(self.layers)]
        for key in self.layer_attention:
            self._layers_of(key)
            if key not in used:
                raise ValueError(
                    f"model.layer_attention: found {key!r}, all of whose layers match later "
                    "entries, which win; wanted at least one layer for every entry"
                )

    def attention_of(self, layer: int) -> AttentionConfig:
        """The config of a layer, counted from 0."""
        key = self._entry_of(layer)
        return self.attention if key is None else self.layer_attention[key]

    def shape_of(self, layer: int) -> LayerShape:
        """The shape of the attention of a layer, counted from 0."""
        return LayerShape(
            width=self.width,
            heads=self.heads,
            key_heads=self.heads if self.kv_heads is None else self.kv_heads,
            head_dim=self.width // self.heads if self.head_dim is None else self.head_dim,
            biases=self._has_biases("qkv"),
            out_bias=self._has_biases("out"),
            layer=layer,
            qk_norm=self.qk_norm,
            norm_eps=self.norm_eps,
            norm_offset=self.norm == "rms_offset",
        )

    def build_norm(self, is_there: bool = True) -> nn.Module:
        """A norm of activations (..., D); the identity in a place without one."""
        if not is_there:
            return nn.Identity()
        if self.norm == "layer":
            return nn.LayerNorm(self.width, eps=self.norm_eps, bias=self._has_biases("norms"))
        return RMSNorm(self.width, eps=self.norm_eps, has_offset=self.norm == "rms_offset")

    def build_block(self, layer: int) -> Block:
        """The block of a layer, counted from 0."""
        before, after = self.norm_order != "post", self.norm_order != "pre"
        return Block(
            attention=self.attention_of(layer).build(self.shape_of(layer)),
            mlp=MLP(
                self.width,
                4 * self.width if self.mlp_width is None else self.mlp_width,
                kind=self.mlp,
                biases=self._has_biases("mlp"),
            ),
            attention_norm=self.build_norm(before),
            mlp_norm=self.build_norm(before),
            attention_post_norm=self.build_norm(after),
            mlp_post_norm=self.build_norm(after),
            parallel=self.parallel_residual,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LanguageModelConfig":
        """The config with these fields, attention configs as their `kind` and options.

        Raises ValueError or TypeError for values of other names or types.
        """
        layers = {key: _attention_of(one) for key, one in values.get("layer_attention", {}).items()}
        attention = _attention_of(values["attention"])
        return cls(**{**values, "attention": attention, "layer_attention": layers})

    def _has_biases(self, place: str) -> bool:
        return self.biases if isinstance(self.biases, bool) else place in self.biases

    def _entry_of(self, layer: int) -> str | None:
        """The key of the last entry of `layer_attention` that matches the layer."""
        keys = [key for key in self.layer_attention if layer in self._layers_of(key)]
        return keys[-1] if keys else None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of all layers, each once, in the order of their first layer."""
        return tuple(dict.fromkeys(self.attention_of(layer).kind for layer in range(self.layers)))

    def _layers_of(self, key: str) -> range:
        """The layers of a key: a number, or a slice as in Python."""
        layers = range(self.layers)
        try:
            if ":" in key:
                found = layers[slice(*(int(bound) if bound else None for bound in key.split(":")))]
            else:
                found = layers[layers.index(int(key)) :][:1]
        except (ValueError, TypeError):
            found = range(0)
        if not found:
            raise ValueError(
                f"model.layer_attention: found {key!r}, wanted a number or slice of the layers 0 "
                f'to {self.layers - 1}, such as "0" or "::2"'
            )
        return found


def _attention_of(options: Mapping[str, Any]) -> AttentionConfig:
    cls, values = attention_config(options["kind"]), {}
    hints = get_type_hints(cls)
    for key, value in options.items():
        if key != "kind":
            is_nested = is_dataclass(hints.get(key)) and isinstance(value, Mapping)
            values[key] = hints[key](**value) if is_nested else value
    return cls(**values)


class Blocks(nn.ModuleList):
    """The blocks one after the other.

    It has a forward, because sharding strategies gather parameters when a module is called.
    """

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: list[Any] | None,
        *,
        documents: Documents | None,
        keep_state: bool,
    ) -> tuple[Float[Tensor, "B T D"], list[Any]]:
        """The output of the last block, and the state of each after the last token."""
        states = []
        for layer, block in enumerate(self):
            before = None if state is None else state[layer]
            x, after = block(x, before, documents=documents, keep_state=keep_state)
            states.append(after)
        return x, states


class LanguageModel(nn.Module):
    """From tokens to logits, losses, or final activations."""

    sequence_part: SequencePart | None = None
    roles: dict[str, Role]

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocabulary, config.width, config.embedding_scale)
        self.roles = {"embedding.weight": "embedding"}
        self.positions = None
        if config.learned_positions is not None:
            self.positions = LearnedPositions(config.learned_positions, config.width)
            self.roles["positions.weight"] = "embedding"
        self.embedding_norm = config.build_norm(config.embedding_norm)
        self.blocks = Blocks(config.build_block(layer) for layer in range(config.layers))
        self.final_norm = config.build_norm()
        if not config.tied_head:
            # By the name that transformers has for it.
            self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
            self.roles["lm_head.weight"] = "head"
        holder = self.embedding if config.tied_head else self.lm_head
        self.head = Head(holder, config.logit_softcap)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all matrices as `init` says, and set biases to zero."""
        config = self.config
        initialise(
            self, config.init, layers=config.layers, width=config.width, is_tied=config.tied_head
        )
        for module in self.modules():
            if config.biases and isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if self.positions is not None:
            self.positions.reset_parameters()

    def forward(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        """Logits after each of T tokens, in at least float32. `loss` needs far less memory."""
        hidden, _ = self.activations(tokens)
        return self.head(hidden.flatten(0, 1)).unflatten(0, tokens.shape)  # type: ignore[no-any-return]

    def activations(
        self,
        tokens: Int[Tensor, "B T"],
        state: list[Any] | None = None,
        *,
        cu_seqlens: Int[Tensor, "documents_plus_1"] | None = None,
        is_first: Bool[Tensor, "B T_whole"] | None = None,
        keep_state: bool = False,
    ) -> tuple[Float[Tensor, "B T D"], list[Any] | None]:
        """Final activations of T tokens that continue from state, and the state after them.

        Rows may hold several documents, which do not see each other. Under context parallelism both
        descriptions of them are of the whole sequence.

        Args:
            tokens: ids.
            state: the state after earlier tokens. It does not go with several documents.
            cu_seqlens: offsets of documents packed into B = 1.
            is_first: whether a token is the first of its document, for any B. The host never waits
                for the device to read it.
            keep_state: whether to return the state. It does not go with several documents.

        Raises:
            ValueError: documents are described badly or twice, or do not go with the rest.
        """
        documents = self._documents(tokens, cu_seqlens, is_first)
        if documents is not None:
            for block in self._blocks():
                block.attention.check_documents(has_state=state is not None or keep_state)
        x, last = self._placed(self.embedding(tokens), state, documents)
        x = self.embedding_norm(x)
        x, states = self.blocks(x, state, documents=documents, keep_state=keep_state)
        return self.final_norm(x), [*states, *last] if keep_state else None

    def _placed(
        self,
        x: Float[Tensor, "B T D"],
        state: list[Any] | None = None,
        documents: Documents | None = None,
    ) -> tuple[Float[Tensor, "B T D"], list[Float64[Tensor, "B"]]]:
        """x with learned positions, if there are any, and those of the last tokens.

        These are what the state has after those of all layers.
        """
        if self.positions is None:
            return x, []
        where = Documents(x, sequence_part=self.sequence_part) if documents is None else documents
        if state is None:
            self.positions.check_length(where.T)
            start = x.new_zeros(len(x), dtype=torch.float64)
        else:
            start = state[-1]
        position = where.positions(start)
        return self.positions(x, position), [where.last(position)]

    def _documents(
        self, tokens: Tensor, cu_seqlens: Tensor | None, is_first: Tensor | None
    ) -> Documents | None:
        """The documents of a batch, built once for all blocks, outside the compiled graph."""
        if cu_seqlens is not None:
            if is_first is not None:
                raise ValueError("is_first: found together with cu_seqlens, wanted one of them")
            parts = 1 if self.sequence_part is None else self.sequence_part.count
            is_first = first_tokens(cu_seqlens, tokens, parts * tokens.shape[1])
        return None if is_first is None else Documents(tokens, is_first, self.sequence_part)

    def loss(
        self,
        tokens: Int[Tensor, "B T"],
        target: Int[Tensor, "B T"],
        *,
        cu_seqlens: Int[Tensor, "documents_plus_1"] | None = None,
        is_first: Bool[Tensor, "B T_whole"] | None = None,
        row_losses: RowLosses | None = None,
        z_loss: float = 0.0,
    ) -> Float[Tensor, ""]:
        """Mean cross-entropy in nats per token. The full logits never exist, nor their gradient.

        cu_seqlens and is_first are as in `activations`. row_losses receives the B * T losses.
        z_loss is the factor of what is added as in `linear_cross_entropy`.
        """
        hidden, _ = self.activations(tokens, cu_seqlens=cu_seqlens, is_first=is_first)
        return self.head(hidden.flatten(0, 1), target.flatten(), row_losses, z_loss)  # type: ignore[no-any-return]

    @torch.no_grad()
    def token_losses(
        self,
        tokens: Int[Tensor, "B T"],
        target: Int[Tensor, "B T"],
        state: list[Any] | None = None,
        *,
        is_first: Bool[Tensor, "B T"] | None = None,
        keep_state: bool = False,
    ) -> tuple[Float[Tensor, "B T"], list[Any] | None]:
        """Cross-entropy of every token in nats, float32, and the state after the last token.

        is_first is as in `activations`.
        """
        hidden, state = self.activations(tokens, state, is_first=is_first, keep_state=keep_state)
        losses = [
            F.cross_entropy(self.head(rows), wanted, reduction="none")
            for rows, wanted in zip(
                hidden.flatten(0, 1).split(ROWS_AT_ONCE),
                target.flatten().split(ROWS_AT_ONCE),
                strict=True,
            )
        ]
        return torch.cat(losses).view_as(target), state

    @torch.no_grad()
    def prefill(
        self, tokens: Int[Tensor, "B T"], state: list[Any] | None = None
    ) -> tuple[Float[Tensor, "B V"], list[Any]]:
        """Logits of the token after the prompt, and the state to continue from."""
        hidden, state = self.activations(tokens, state, keep_state=True)
        assert state is not None
        return self.head(hidden[:, -1]), state

    @torch.no_grad()
    def step(
        self, token: Int[Tensor, "B"], state: list[Any], *, inplace: bool = False
    ) -> tuple[Float[Tensor, "B V"], list[Any]]:
        """Logits after one more token, at constant cost for variants of linear cost.

        With `inplace`, `state` may be overwritten: one of fixed size then needs no new memory.
        """
        x, last = self._placed(self.embedding(token[:, None]), state)
        x = self.embedding_norm(x)
        states = []
        for block, layer_state in zip(self._blocks(), state, strict=False):
            x, new_state = block.step(x, layer_state, inplace=inplace)
            states.append(new_state)
        last = overwrite(state[len(states) :], last) if inplace else last
        return self.head(self.final_norm(x[:, 0])), [*states, *last]

    def set_positions(self, scaling: PositionScaling) -> None:
        """Scale positions from now on. ValueError where a layer does not support it."""
        attentions = [block.attention for block in self._blocks()]
        for attention in attentions:
            attention.check_positions(scaling)
        for attention in attentions:
            attention.set_positions(scaling)

    def train_only(self, name: str | None) -> None:
        """Freeze all parameters outside submodules of this name; None freezes nothing."""
        for path, parameter in self.named_parameters():
            parameter.requires_grad_(name is None or name in path.split("."))

    def check_context_parallel(self) -> None:
        """Raise ValueError where a layer does not support context parallelism."""
        for block in self._blocks():
            block.attention.check_context_parallel()

    def split_sequence(self, part: SequencePart | None) -> None:
        """Treat all inputs from now on as one part of a sequence; None: as whole sequences.

        Raises ValueError where a layer does not support context parallelism.
        """
        if part is not None:
            self.check_context_parallel()
        for block in self._blocks():
            block.attention.sequence_part = part
        self.sequence_part = part

    def num_parameters(self) -> int:
        """Number of parameters; an embedding that is also the unembedding counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, T: int, backend: str = "torch") -> int:
        """Forward FLOPs per token at context T; training takes three times as many."""
        return self.weight_flops() + self.mixing_flops(T, backend)

    def weight_flops(self) -> int:
        """Forward FLOPs per token of all products with weights: projections, MLPs, unembedding."""
        blocks = sum(block.projection_flops() for block in self._blocks())
        return self.head.flops_per_token() + blocks

    def mixing_flops(self, T: int, backend: str = "torch") -> int:
        """Forward FLOPs per token of attention or state, over all layers, at context T."""
        return sum(block.attention.mixing_flops(T, backend) for block in self._blocks())

    def _blocks(self) -> list[Block]:
        return [cast(Block, block) for block in self.blocks]
