"""GPT-2 (Radford et al., 2019), whose projections are stored transposed."""

from longhaul.pipeline.architectures.architecture import Architecture, Dropout, Field, Fixed
from longhaul.pipeline.architectures.gpt_neox import GELUS
from longhaul.pipeline.architectures.layers import Layers

GPT2 = Architecture(
    name="GPT2LMHeadModel",
    model_type="gpt2",
    fields=(
        Field("vocab_size", 50257, "vocabulary"),
        Field("n_positions", 1024, "learned_positions"),
        Field("n_embd", 768, "width"),
        Field("n_layer", 12, "layers"),
        Field("n_head", 12, "heads"),
        Field("n_inner", None, "mlp_width"),
        Field("activation_function", "gelu_new", "mlp", GELUS),
        Field("layer_norm_epsilon", 1e-5, "norm_eps"),
        Field("tie_word_embeddings", True, "tied_head"),
        Fixed("scale_attn_weights", True, True),
        Fixed("scale_attn_by_inverse_layer_idx", False, False),
        Fixed("reorder_and_upcast_attn", False, False, (True,)),
        Fixed("add_cross_attention", False, False),
        Dropout("resid_pdrop", 0.1),
        Dropout("embd_pdrop", 0.1),
        Dropout("attn_pdrop", 0.1),
    ),
    constants={"embedding_norm": False},
    biases=("qkv", "out", "mlp", "norms"),
    ignored_fields=(
        *("n_ctx", "task_specific_params", "summary_type", "summary_use_proj"),
        *("summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    ),
    context=1024,
    layers=Layers(is_rotated=False),
    modules={
        "transformer.wte": "embedding",
        "transformer.wpe": "positions",
        "transformer.ln_f": "final_norm",
        "lm_head": "lm_head",
    },
    layer="transformer.h.{}",
    layer_modules={
        "ln_1": "attention_norm",
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.out",
        "ln_2": "mlp_norm",
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.out",
    },
    transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    old_prefix="transformer.",
    ignored_tensors=r"\.attn\.(bias|masked_bias)$",
)
