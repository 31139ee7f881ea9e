"""A longhaul language model for transformers: a cache, padding and a head around the model.

The model itself is in the files beside this one, which are copies of longhaul's own modules.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from longhaul.pipeline.exporting.architecture import build_model
from longhaul.pipeline.exporting.configuration_longhaul import LonghaulConfig

Rows = list[int]


class LonghaulCache:
    """The states of all layers after the tokens so far, for groups of rows with the same shapes.

    Rows that have read different numbers of tokens are in different groups, where the states of a
    kind grow. A group without tokens has no state, None.
    """

    is_compileable = False

    def __init__(self, num_rows: int) -> None:
        self.groups: list[tuple[Rows, Any]] = [(list(range(num_rows)), None)]
        self.num_tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_tokens

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row n becomes a copy of row beam_idx[n]."""
        wanted, groups = beam_idx.tolist(), []
        for rows, state in self.groups:
            if now := [row for row, source in enumerate(wanted) if source in rows]:
                places = [rows.index(wanted[row]) for row in now]
                groups.append((now, _select(state, places)))
        self.groups = groups

    def join_groups(self) -> None:
        """Join the groups whose states have the same shapes."""
        alike: dict[Any, list[tuple[Rows, Any]]] = {}
        for rows, state in self.groups:
            shapes = tuple(leaf.shape[1:] for leaf in _leaves(state))
            alike.setdefault(shapes, []).append((rows, state))
        self.groups = [
            (
                [row for rows, _ in groups for row in rows],
                pytree.tree_map(_join, *(state for _, state in groups)),
            )
            for groups in alike.values()
        ]


def _leaves(state: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(state) if leaf is not None]


def _select(state: Any, rows: Rows) -> Any:
    return pytree.tree_map(lambda leaf: None if leaf is None else leaf[rows], state)


def _join(*leaves: Tensor | None) -> Tensor | None:
    return None if leaves[0] is None else torch.cat(leaves)


class LonghaulForCausalLM(PreTrainedModel, GenerationMixin):
    """longhaul's language model, with logits from a head that may be tied to the embedding."""

    config_class = LonghaulConfig
    _no_split_modules = ("Block",)
    _is_stateful = True  # a state cannot be cut back to fewer tokens
    _supports_default_dynamic_cache = classmethod(lambda cls: False)  # it uses LonghaulCache
    _input_embed_layer = "embedding"
    _tied_weights_keys = {"lm_head.weight": "embedding.weight"}  # noqa: RUF012
    accepts_loss_kwargs = False  # the loss is a mean, whatever Trainer counts

    def __init__(self, config: LonghaulConfig) -> None:
        super().__init__(config)
        model = build_model(
            attention=config.attention,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            vocab_size=config.vocab_size,
            embedding_norm=config.embedding_norm,
            parallel_residual=config.parallel_residual,
            biases=config.biases,
            tie_word_embeddings=config.tie_word_embeddings,
        )
        # In a tuple, and its parts as this module's own: weights have their names of training.
        self._model = (model,)
        for name, part in model.named_children():
            self.add_module(name, part)
        if config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
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

        Only the last T columns of attention_mask are read: 0 is padding, on any side, which no
        token sees. At padding stand the logits of the last token before it. labels are tokens, or
        -100. In training there is no cache, unless use_cache asks for one.
        """
        if kwargs.get("position_ids") is not None:
            raise ValueError("position_ids: found some, wanted none: attention_mask implies them")
        B, T = input_ids.shape
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        mask = None if attention_mask is None else attention_mask[:, -T:].bool()
        cache = LonghaulCache(B) if past_key_values is None else past_key_values
        x = self._read_rows(input_ids, mask, cache, use_cache)
        cache.num_tokens += T
        x = x if labels is not None else x[:, -logits_to_keep:]
        logits, loss = self.lm_head(x).float(), None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss, logits, cache if use_cache else None)

    def _read_rows(
        self, tokens: Tensor, mask: Tensor | None, cache: LonghaulCache, keep: bool
    ) -> Tensor:
        """Final activations (B, T, D) of all rows. Rows with padding are read one at a time."""
        # Without a state, what follows a token is of no importance.
        if mask is not None and (mask.all() or (not keep and (mask[:, 1:] <= mask[:, :-1]).all())):
            mask = None
        order = list(range(len(tokens)))
        if mask is None and [rows for rows, _ in cache.groups] == [order]:
            x, after = self._read(tokens, cache.groups[0][1], keep)
            if keep:
                cache.groups = [(order, after)]
            return x
        nothing = self.embedding.weight.new_zeros(tokens.shape[1], self.config.hidden_size)
        outputs = dict.fromkeys(order, nothing)
        groups = []
        for rows, state in cache.groups:
            if mask is None or mask[rows].all():
                x, after = self._read(tokens[rows], state, keep)
                outputs |= dict(zip(rows, x, strict=True))
                groups.append((rows, after))
                continue
            for place, row in enumerate(rows):
                after = None if state is None else _select(state, [place])
                if (kept := mask[row]).any():
                    x, after = self._read(tokens[row : row + 1, kept], after, keep)
                    outputs[row] = x[0, (kept.cumsum(dim=0) - 1).clamp(min=0)]
                groups.append(([row], after))
        if keep:
            cache.groups = groups
            cache.join_groups()
        return torch.stack([outputs[row] for row in order])

    def _read(self, tokens: Tensor, state: Any, keep: bool) -> tuple[Tensor, Any]:
        """Final activations of rows without padding, and the states of all layers after them."""
        (model,) = self._model
        T = tokens.shape[1]
        if self.config.caches_tokens:
            if state is not None:
                tokens = torch.cat([state, tokens], dim=1)
            return model.activations(tokens)[0][:, -T:], tokens if keep else None
        if T > 1 or state is None or torch.is_grad_enabled():
            return model.activations(tokens, state, keep_state=keep)
        x, states = model.embedding_norm(model.embedding(tokens)), []
        for block, before in zip(model.blocks, state, strict=True):
            x, after = block.step(x, before)
            states.append(after)
        return model.final_norm(x), states
