"""The language model: GPT-2's shape, rotary positions, an extra norm after the embedding."""

import math
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import LinearCrossEntropyOptions

from longhaul.modules.attention import AttentionConfig
from longhaul.modules.block import Block
from longhaul.modules.rotary import PositionScaling
from longhaul.modules.sequence_parts import SequenceParts

# Rows of logits computed at a time where no gradient is wanted: 1,024 x 50,304 float32 are 206 MB.
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """Shape of the model; the default is GPT-2's 124M."""

    attention: AttentionConfig
    """The variant, by its `kind`, and its options."""

    layer_attention: dict[str, AttentionConfig] = field(default_factory=dict)
    """Other variants for some layers, by number ("5") or slice ("3::4"); later entries win."""

    layers: int = 12
    """Residual blocks."""

    width: int = 768
    """Model width D; a multiple of 2 x heads, since rotary positions turn pairs."""

    heads: int = 12
    """Query heads a layer."""

    vocabulary: int = 50_304
    """Rows of the embedding; at least the tokenizer's ids, best a multiple of 64."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}: found {getattr(self, name)}, wanted 1 or more")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"model.width: found {self.width}, wanted a multiple of 2 x model.heads = "
                f"{2 * self.heads}"
            )
        deciding = [self._entry_of(layer) for layer in range(self.layers)]
        for key in self.layer_attention:
            self._layers_of(key)
            if key not in deciding:
                raise ValueError(
                    f"model.layer_attention: found {key!r} below entries that take all its layers, "
                    "wanted it to decide one; later entries win"
                )

    def attention_of(self, layer: int) -> AttentionConfig:
        """The variant of a layer, counted from 0."""
        key = self._entry_of(layer)
        return self.attention if key is None else self.layer_attention[key]

    def _entry_of(self, layer: int) -> str | None:
        """The last entry of `layer_attention` that names the layer."""
        keys = [key for key in self.layer_attention if layer in self._layers_of(key)]
        return keys[-1] if keys else None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds in use, each once, in the order of the first layer that has it."""
        return tuple(dict.fromkeys(self.attention_of(layer).kind for layer in range(self.layers)))

    def _layers_of(self, key: str) -> range:
        """The layers that a number or a slice, as Python reads it, names."""
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


class Head(nn.Module):
    """Logits h E^T with the embedding's own matrix, or their mean cross-entropy.

    A module, since strategies that gather parameters do so around the modules that read them.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        # Not registered a second time: the matrix has one name in checkpoints.
        self._embedding = (embedding,)

    def forward(
        self, hidden: Float[Tensor, "rows D"], target: Int[Tensor, "rows"] | None = None
    ) -> Tensor:
        """Logits (rows, vocabulary), or the mean loss, whose logits exist only in pieces."""
        weight = self._embedding[0].weight
        # linear_cross_entropy's chunked path is outside autocast's lists: cast by hand.
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        if target is None:
            return F.linear(hidden, weight).float()
        options = LinearCrossEntropyOptions()
        if hidden.dtype.itemsize > 2:
            return F.linear_cross_entropy(hidden, weight, target, options=options)
        # The mean would have three digits, and with it what gradients are scaled by.
        losses = F.linear_cross_entropy(hidden, weight, target, reduction="none", options=options)
        return losses.float().mean()


class LanguageModel(nn.Module):
    """Tokens to hidden activations, losses, or the next token's logits."""

    parts: SequenceParts | None = None

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.embedding_norm = nn.LayerNorm(config.width, bias=False)
        blocks = [
            Block(config.attention_of(layer).build(config.width, config.heads, layer))
            for layer in range(config.layers)
        ]
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = nn.LayerNorm(config.width, bias=False)
        self.head = Head(self.embedding)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GPT-2's initialisation: std 0.02, residual projections divided by sqrt(2 L)."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                residual = name.endswith(".out")
                nn.init.normal_(
                    module.weight,
                    std=0.02 / math.sqrt(2 * self.config.layers) if residual else 0.02,
                )
        # The unembedding is the embedding; the norm after it makes its scale there irrelevant.
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        state: list[Any] | None = None,
        *,
        cu_seqlens: Int[Tensor, "documents_plus_1"] | None = None,
        keep_state: bool = False,
    ) -> tuple[Float[Tensor, "B T D"], list[Any] | None]:
        """Final activations of T tokens that follow state, and the state after them."""
        x = self.embedding_norm(self.embedding(tokens))
        states = []
        for layer, block in enumerate(self.blocks):
            x, layer_state = block(
                x,
                None if state is None else state[layer],
                cu_seqlens=cu_seqlens,
                keep_state=keep_state,
            )
            states.append(layer_state)
        return self.final_norm(x), states if keep_state else None

    def loss(self, tokens: Int[Tensor, "B T"], target: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
        """Mean cross-entropy, nats a token; logits exist only in pieces, also in the backward."""
        hidden, _ = self(tokens)
        return self.head(hidden.flatten(0, 1), target.flatten())  # type: ignore[no-any-return]

    @torch.no_grad()
    def token_losses(
        self,
        tokens: Int[Tensor, "B T"],
        target: Int[Tensor, "B T"],
        state: list[Any] | None = None,
        *,
        keep_state: bool = False,
    ) -> tuple[Float[Tensor, "B T"], list[Any] | None]:
        """Cross-entropy of every token, nats, float32, and the state after the last."""
        hidden, state = self(tokens, state, keep_state=keep_state)
        losses = [
            F.cross_entropy(self.head(rows), wanted, reduction="none")
            for rows, wanted in zip(
                hidden.flatten(0, 1).split(_ROWS_AT_ONCE),
                target.flatten().split(_ROWS_AT_ONCE),
                strict=True,
            )
        ]
        return torch.cat(losses).view_as(target), state

    @torch.no_grad()
    def prefill(
        self, tokens: Int[Tensor, "B T"], state: list[Any] | None = None
    ) -> tuple[Float[Tensor, "B V"], list[Any]]:
        """Logits of the token after a prompt, and the state to continue from."""
        hidden, state = self(tokens, state, keep_state=True)
        assert state is not None
        return self.head(hidden[:, -1]), state

    @torch.no_grad()
    def step(
        self, token: Int[Tensor, "B"], state: list[Any]
    ) -> tuple[Float[Tensor, "B V"], list[Any]]:
        """Logits after one more token, at constant cost for linear kinds."""
        x = self.embedding_norm(self.embedding(token[:, None]))
        states = []
        for block, layer_state in zip(self._blocks(), state, strict=True):
            x, new_state = block.step(x, layer_state)
            states.append(new_state)
        return self.head(self.final_norm(x[:, 0])), states

    def set_positions(self, scaling: PositionScaling) -> None:
        """Read positions another way from now on; ValueError where a layer has no such way."""
        attentions = [block.attention for block in self._blocks()]
        for attention in attentions:
            attention.check_positions(scaling)
        for attention in attentions:
            attention.set_positions(scaling)

    def train_only(self, name: str | None) -> None:
        """Freeze what is not in a submodule of this name; None freezes nothing."""
        for path, parameter in self.named_parameters():
            parameter.requires_grad_(name is None or name in path.split("."))

    def check_parts(self) -> None:
        """ValueError where the kind of a layer cannot mix a sequence in parts."""
        for block in self._blocks():
            block.attention.check_parts()

    def split_sequence(self, parts: SequenceParts | None) -> None:
        """Take all tokens from now on as one part of a sequence, or (None) as whole ones.

        Raises ValueError where the kind of a layer cannot.
        """
        if parts is not None:
            self.check_parts()
        for block in self._blocks():
            block.attention.parts = parts
        self.parts = parts

    def num_parameters(self) -> int:
        """Numbers in all parameters; the tied unembedding counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, T: int) -> int:
        """Forward FLOPs a token at context T; training takes three times as many."""
        return self.weight_flops() + self.mixing_flops(T)

    def weight_flops(self) -> int:
        """Forward FLOPs a token of all products with weights: projections, MLPs, unembedding."""
        head = 2 * self.config.vocabulary * self.config.width
        mlp = 16 * self.config.width**2
        return head + sum(mlp + block.attention.projection_flops() for block in self._blocks())

    def mixing_flops(self, T: int, backend: str = "torch") -> int:
        """Forward FLOPs a token of attention or state, all layers, at context T."""
        return sum(block.attention.mixing_flops(T, backend) for block in self._blocks())

    def _blocks(self) -> list[Block]:
        return [cast(Block, block) for block in self.blocks]
