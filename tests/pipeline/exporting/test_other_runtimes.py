"""An exported Llama in a runtime that is not transformers, where one is installed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

LLAMA = (
    "model={norm: rms, mlp: swiglu, mlp_width: 96, heads: 4, kv_heads: 2, embedding_norm: false}",
    "model.attention={kind: softmax, rotary_base: 500000.0}",
)
PROMPTS = (
    "def main(",
    "import ",
    "class A:\n    def f(",
    "for one in ",
    "    return ",
    "# é",
)


@pytest.mark.soak
def test_mistral_rs_writes_what_transformers_writes(
    make_run: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistralrs = pytest.importorskip("mistralrs", reason="the package mistralrs is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("MISTRALRS_CPU_KV_F32", "1")
    run = make_run(300)
    run.longhaul("train", "small.yaml", "data.context=128", *LLAMA)
    run.longhaul("export", "small", "new")
    folder = run.path / "new"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(model).__name__ == "LlamaForCausalLM"
    which = mistralrs.Which.Plain(
        model_id=str(folder),
        arch=mistralrs.Architecture.Llama,
        dtype=mistralrs.ModelDType.F32,
    )
    other = mistralrs.Runner(which=which, no_paged_attn=True)
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        assert other.tokenize_text(prompt, True, False) == ids.input_ids[0].tolist()
        text = model.generate(**ids, max_new_tokens=64, do_sample=False)[0]
        wanted = tokenizer.decode(text[ids.input_ids.shape[1] :], skip_special_tokens=True)
        request = mistralrs.CompletionRequest(
            model="default", prompt=prompt, max_tokens=64, temperature=0.0
        )
        assert other.send_completion_request(request).choices[0].text == wanted
