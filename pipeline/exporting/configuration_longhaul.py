"""The shape of a longhaul model, for transformers."""

from typing import Any

from transformers import PreTrainedConfig


class LonghaulConfig(PreTrainedConfig):
    """Sizes, and the attention kind and options of every layer."""

    model_type = "longhaul"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012, which Trainer would take for a prediction

    def __init__(
        self,
        longhaul: dict[str, Any] | None = None,
        vocab_size: int | None = None,
        use_cache: bool = True,
        tie_word_embeddings: bool | None = None,
        caches_tokens: bool = False,
        **kwargs: Any,
    ) -> None:
        """`longhaul` is the shape of the model, the `model` of the run's config.

        With caches_tokens the cache holds tokens, which are all read again for each new one: states
        would be too large.
        """
        shape = {"vocabulary": 50_304, "width": 768, "heads": 12, "layers": 12, "tied_head": True}
        shape |= {"attention": {"kind": "softmax"}} | (longhaul or {})
        tied = shape["tied_head"] if tie_word_embeddings is None else tie_word_embeddings
        self.longhaul = shape
        self.vocab_size = shape["vocabulary"] if vocab_size is None else vocab_size
        self.hidden_size = shape["width"]
        self.num_attention_heads = shape["heads"]
        self.num_hidden_layers = shape["layers"]
        self.use_cache = use_cache
        self.caches_tokens = caches_tokens
        self.tie_word_embeddings = tied
        for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"):
            kwargs.pop(name, None)
        super().__init__(**kwargs)
