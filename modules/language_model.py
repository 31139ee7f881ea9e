"""The language model: the shape of GPT-2 with a norm after the embedding, of Llama, and others."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor, nn

from longhaul.modules.attention.base import overwrite
from longhaul.modules.block import Block
from longhaul.modules.cross_entropy import ROWS_AT_ONCE, RowLosses
from longhaul.modules.documents import Documents, first_tokens
from longhaul.modules.initialisation import initialise
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.modules.roles import Role
from longhaul.modules.rotary import PositionScaling
from longhaul.modules.sequence_part import SequencePart
from longhaul.modules.vocabulary import Embedding, Head, LearnedPositions


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
