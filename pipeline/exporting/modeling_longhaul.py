"""A longhaul language model for transformers: a cache, padding and a head around the blocks.

The blocks themselves are in the files beside this one, which are copies of longhaul's own modules.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from longhaul.modules.vocabulary import as_logits
from longhaul.pipeline.exporting.architecture import build_model
from longhaul.pipeline.exporting.cache_longhaul import LonghaulCache, Tokens, select_rows
from longhaul.pipeline.exporting.configuration_longhaul import LonghaulConfig

_REFUSED = {
    "position_ids": "attention_mask implies them",
    "output_attentions": "kinds of linear cost have no matrices to return",
}


class LonghaulForCausalLM(PreTrainedModel, GenerationMixin):
    """longhaul's language model, with logits from a head that may be tied to the embedding."""

    config_class = LonghaulConfig
    _no_split_modules = ["Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_default_dynamic_cache = classmethod(lambda cls: False)  # it uses LonghaulCache
    _input_embed_layer = "embedding"
    _tied_weights_keys = {"lm_head.weight": "embedding.weight"}  # noqa: RUF012
    supports_gradient_checkpointing = True

    def __init__(self, config: LonghaulConfig) -> None:
        super().__init__(config)
        model = build_model(config.longhaul)
        # The parts are this module's own, so that weights have their names of training.
        self.embedding = model.embedding
        self.positions = model.positions
        self.embedding_norm = model.embedding_norm
        self.blocks = model.blocks
        self.final_norm = model.final_norm
        if config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        else:
            self.lm_head = model.lm_head
        self.logit_softcap = model.config.logit_softcap
        self.gradient_checkpointing = False
        # Assisted generation cuts the cache back, which only some kinds allow.
        can_cut = self.positions is None and all(b.attention.can_cut_state for b in self.blocks)
        self._is_stateful = not (config.caches_tokens or can_cut)
        self.post_init()

    def _prepare_cache_for_generation(
        self, config: Any, values: dict[str, Any], mode: str, batch_size: int, *others: Any
    ) -> None:
        """Make the cache that assisted generation wants before its first call."""
        super()._prepare_cache_for_generation(config, values, mode, batch_size, *others)
        if mode == "assisted_generation" and values.get("past_key_values") is None:
            values["past_key_values"] = LonghaulCache(batch_size)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: LonghaulCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Logits after each of (B, T) tokens, which follow those in past_key_values if given.

        Args:
            input_ids: (B, T) tokens, or inputs_embeds in their place.
            attention_mask: its last T columns are read: 0 is padding, on any side, which no token
                sees. At padding stand the logits of the last token before it, or zeros.
            past_key_values: what an earlier call returned. It is changed.
            inputs_embeds: (B, T, D), as the embedding returns them.
            labels: (B, T) tokens, or -100. Padding is not judged, nor is the first token of a row.
            use_cache: whether to return the cache; by default it is returned, but not in training.
            output_hidden_states: whether to return the input of each block, and the final norm's
                output.
            logits_to_keep: the number of last positions whose logits are returned, 0 for all; or
                a tensor: positions (N) of all rows, positions (B, N) of each, or booleans (B, T),
                whose logits are (N, vocabulary).
            num_items_in_batch: what to divide the summed loss by, if not by the judged tokens.
            others: options of transformers that the model does not have, which must be off.
        """
        for name, value in others.items():
            if value is not None and value is not False:
                reason = _REFUSED.get(name, "the model has no such option")
                raise ValueError(f"{name}: found some, wanted none: {reason}")
        if (input_ids is None) == (inputs_embeds is None):
            found = "neither" if input_ids is None else "both"
            raise ValueError(f"input_ids, inputs_embeds: found {found}, wanted one of them")
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        B, T = x.shape[:2]
        cache = _cache_of(past_key_values, B)
        mask = _mask_of(attention_mask, B, T)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        keep_state = use_cache or past_key_values is not None
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if self.positions is not None:
            self.positions.check_length(cache.num_tokens + T)
        hidden = self._read_rows(x, mask, cache, keep_state, bool(output_hidden_states))
        last = hidden[-1]
        kept = last if labels is not None else _kept(last, logits_to_keep)
        logits = as_logits(self.lm_head(kept), self.logit_softcap)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits,
                labels if mask is None else _judged(labels, mask),
                vocab_size=logits.shape[-1],
                num_items_in_batch=num_items_in_batch,
            )
            logits = _kept(logits, logits_to_keep)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=cache if use_cache else None,
            hidden_states=tuple(hidden) if output_hidden_states else None,
        )

    def _read_rows(
        self, x: Tensor, mask: Tensor | None, cache: LonghaulCache, keep: bool, every: bool
    ) -> list[Tensor]:
        """`_read` of all rows, for the cache if it is to `keep` them. Padded rows are read alone.

        Blocks may be on different devices, and so may what they return.
        """
        mask = None if mask is None or mask.all() else mask.to(x.device)
        # Without a state, what follows a token is of no importance.
        is_after = mask is not None and not keep and bool((mask[:, 1:] <= mask[:, :-1]).all())
        order = list(range(len(x)))
        if (mask is None or is_after) and [rows for rows, _ in cache.groups] == [order]:
            hidden, after = self._read(x, cache.groups[0][1], keep, every)
            if keep:
                cache.store([(order, after)], x.shape[1], mask)
            return hidden if mask is None else [_filled_up(one, mask) for one in hidden]
        outputs: dict[int, list[Tensor]] = {}
        groups = []
        for rows, state in cache.groups:
            if mask is None or mask[rows].all():
                hidden, after = self._read(x[rows], state, keep, every)
                for place, row in enumerate(rows):
                    outputs[row] = [one[place] for one in hidden]
                groups.append((rows, after))
                continue
            for place, row in enumerate(rows):
                after = None if state is None else select_rows(state, [place])
                if (kept := mask[row]).any():
                    hidden, after = self._read(x[row : row + 1, kept], after, keep, every)
                    outputs[row] = [_filled_up(one, kept[None])[0] for one in hidden]
                groups.append(([row], after))
        if keep:
            cache.store(groups, x.shape[1], mask)
        like = next(iter(outputs.values()), [x[0]] * (len(self.blocks) + 1 if every else 1))
        nothing = [torch.zeros_like(one) for one in like]
        by_row = [outputs.get(row, nothing) for row in order]
        return [torch.stack(ones) for ones in zip(*by_row, strict=True)]

    def _read(
        self, x: Tensor, state: list[Any] | None, keep: bool, every: bool
    ) -> tuple[list[Tensor], list[Any] | None]:
        """Activations of rows without padding, and the states of all layers after them.

        Activations are (B, T, D) after the final norm, with `every` those before each block, too.
        """
        T, after = x.shape[1], list[Any]()
        if self.config.caches_tokens:
            x = x if state is None else torch.cat([state[0].x, x], dim=1)
            state, after = None, [Tokens(x)]
        if self.positions is not None:
            start = x.new_zeros(len(x), dtype=torch.float64) if state is None else state[-1]
            position = start[:, None] + torch.arange(1, x.shape[1] + 1, device=x.device)
            x = self.positions(x, position)
        x = self.embedding_norm(x)
        hidden = []
        for layer, block in enumerate(self.blocks):
            if every:
                hidden.append(x)
            call = partial(block, keep_state=keep and not self.config.caches_tokens)
            before = None if state is None else state[layer]
            if self.gradient_checkpointing and self.training:
                x, layer_after = self._gradient_checkpointing_func(call, x, before)
            else:
                x, layer_after = call(x, before)
            if not self.config.caches_tokens:
                after.append(layer_after)
        hidden.append(self.final_norm(x))
        if self.positions is not None and not self.config.caches_tokens:
            after.append(position[:, -1])
        return [one[:, -T:] for one in hidden], after if keep else None


def _kept(x: Tensor, positions: int | Tensor) -> Tensor:
    """x (B, T, D) at its last positions, at those of all rows or of each, or where True."""
    if isinstance(positions, int):
        return x[:, -positions:]  # 0 keeps all
    positions = positions.to(x.device)
    if positions.ndim < 2:
        return x[:, positions]
    if positions.dtype == torch.bool:
        return x[positions]
    return x.take_along_dim(positions[..., None], dim=1)


def _filled_up(hidden: Tensor, mask: Tensor) -> Tensor:
    """At padding those of the token before it, or zeros: (B, T, D) from those of the tokens."""
    count = mask.to(hidden.device).cumsum(dim=1)  # of tokens so far
    last = (count - 1).clamp(min=0)
    return hidden.take_along_dim(last[..., None], dim=1) * (count > 0)[..., None]


def _mask_of(attention_mask: Tensor | None, B: int, T: int) -> Tensor | None:
    """Which of the T tokens of each row are not padding."""
    if attention_mask is None:
        return None
    shape = tuple(attention_mask.shape)
    if len(shape) != 2 or shape[0] != B or shape[1] < T:
        raise ValueError(
            f"attention_mask: found shape {shape}, wanted ({B}, {T}), or more columns for tokens "
            "that the cache has read"
        )
    return attention_mask[:, -T:].bool()


def _cache_of(found: Any, B: int) -> LonghaulCache:
    """The cache to continue from, or an empty one."""
    if found is None:
        return LonghaulCache(B)
    if not isinstance(found, LonghaulCache):
        raise ValueError(
            f"past_key_values: found a {type(found).__name__}, wanted a LonghaulCache, which "
            "a call with use_cache=True returns, or none: states are no keys and values"
        )
    if found.batch_size != B:
        raise ValueError(f"past_key_values: found {found.batch_size} rows, wanted {B}")
    return found


def _judged(labels: Tensor, mask: Tensor) -> Tensor:
    """The labels of a padded batch that its rows alone would have."""
    is_first = mask & (mask.cumsum(dim=1) == 1)
    return labels.masked_fill((~mask | is_first).to(labels.device), -100)
