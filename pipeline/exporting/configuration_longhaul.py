"""The shape of a longhaul model, for transformers."""

from typing import Any

from transformers import PreTrainedConfig


class LonghaulConfig(PreTrainedConfig):
    """Sizes, and the attention kind and options of every layer."""

    model_type = "longhaul"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012, which Trainer would take for a prediction

    def __init__(
        self,
        vocab_size: int = 50_304,
        hidden_size: int = 768,
        num_attention_heads: int = 12,
        attention: list[dict[str, Any]] | None = None,
        embedding_norm: bool = True,
        parallel_residual: bool = False,
        biases: bool = False,
        use_cache: bool = True,
        tie_word_embeddings: bool = True,
        caches_tokens: bool = False,
        **kwargs: Any,
    ) -> None:
        """`attention` has one dict per layer: its `kind`, and that kind's options.

        With caches_tokens the cache holds tokens, which are all read again for each new one: states
        would be too large.
        """
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_attention_heads = num_attention_heads
        self.attention = [{"kind": "softmax"}] * 12 if attention is None else attention
        self.embedding_norm = embedding_norm
        self.parallel_residual = parallel_residual
        self.biases = biases
        self.use_cache = use_cache
        self.caches_tokens = caches_tokens
        self.tie_word_embeddings = tie_word_embeddings
        self.num_hidden_layers = len(self.attention)
        kwargs.pop("num_hidden_layers", None)
        super().__init__(**kwargs)
