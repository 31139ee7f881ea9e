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

        vocab_size and tie_word_embeddings, which transformers may change, win over those of the
        shape. With caches_tokens the cache holds tokens, which are all read again for each new one:
        states would be too large.
        """
        shape = {"vocabulary": 50_304, "width": 768, "heads": 12, "layers": 12, "tied_head": True}
        self.longhaul = shape | {"attention": {"kind": "softmax"}} | (longhaul or {})
        if vocab_size is not None:
            self.longhaul["vocabulary"] = vocab_size
        if tie_word_embeddings is not None:
            self.longhaul["tied_head"] = tie_word_embeddings
        self.vocab_size = self.longhaul["vocabulary"]
        self.tie_word_embeddings = self.longhaul["tied_head"]
        self.hidden_size = self.longhaul["width"]
        self.num_attention_heads = self.longhaul["heads"]
        self.num_hidden_layers = self.longhaul["layers"]
        self.use_cache = use_cache
        self.caches_tokens = caches_tokens
        derived = ("hidden_size", "num_attention_heads", "num_hidden_layers")
        super().__init__(**{key: value for key, value in kwargs.items() if key not in derived})
