"""Loads exported folders where there is no longhaul, and writes down what they compute.

Not a test; one process loads all folders, since importing transformers takes seconds. Arguments: a
folder that holds `work.json`, whose answers `found.safetensors` and `found.json` go beside it.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# What a machine without longhaul would not have. Importing one of these is an error.
FOREIGN = ("longhaul", "jaxtyping", "lightning", "deepspeed", "mlflow", "omegaconf", "einops")
PROMPT = 5


class _WithoutForeign:
    """A finder of modules that does not find the foreign ones, as if they were not installed."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(self, name: str, *more: Any) -> Any:
        is_foreign = name.partition(".")[0] in FOREIGN
        return None if is_foreign else self._finder.find_spec(name, *more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


sys.meta_path[:] = [_WithoutForeign(finder) for finder in sys.meta_path]

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402


def _kept_bytes(cache: Any) -> int:
    return sum(one.nbytes for _, state in cache.groups for one in pytree.tree_leaves(state))


def _bits(model: Any, tokens: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Logits of tokens read in three parts, one after the other.

    And of two rows' second halves, with the rows swapped in between, as a beam search does.
    """
    cache, outputs = None, []
    for part in tokens.tensor_split([1, tokens.shape[1] // 2], dim=1):
        if part.shape[1]:
            output = model(part, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            outputs.append(output.logits)
    yield "parts", torch.cat(outputs, dim=1)
    first, second = tokens.tensor_split(2, dim=1)
    cache = model(first, use_cache=True).past_key_values
    cache.reorder_cache(torch.tensor([1, 0]))
    yield "swapped", model(second.flip(0), past_key_values=cache).logits


def _examine(
    model: Any, inputs: dict[str, Tensor], has_beams: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    found: dict[str, Tensor] = {}
    for name, tokens in inputs.items():
        found[f"{name}/float32"] = model(tokens).logits
    longest = inputs[max(inputs, key=lambda name: inputs[name].shape[1])]
    found["kept/float32"] = model(longest, logits_to_keep=2).logits
    cache_bytes = [
        _kept_bytes(model(longest[:, :length], use_cache=True).past_key_values)
        for length in (3, longest.shape[1])
    ]
    prompts = longest[:, :PROMPT]
    length = {"max_new_tokens": 8, "do_sample": False}
    fill = torch.full_like(prompts[:, :3], 7)
    padded = torch.cat([fill, prompts], dim=1)
    mask = torch.cat([torch.zeros_like(fill), torch.ones_like(prompts)], dim=1)
    generated = {
        "cached": model.generate(prompts, **length),
        "uncached": model.generate(prompts, use_cache=False, **length),
        "padded": model.generate(padded, attention_mask=mask, **length)[:, 3:],
    }
    if has_beams:
        generated["beams"] = model.generate(prompts, num_beams=3, **length)
        generated["beams uncached"] = model.generate(
            prompts, num_beams=3, use_cache=False, **length
        )
    loss = float(model(longest, labels=longest).loss)
    model.double()
    for name, tokens in inputs.items():
        found[f"{name}/float64"] = model(tokens).logits
    found |= {f"{name}/float64": value for name, value in _bits(model, longest)}
    mask = torch.ones_like(longest)
    mask[0, :9] = mask[1, :4] = mask[1, -3:] = 0
    left = model(longest, attention_mask=mask).logits
    found["padded 9/float64"], found["padded 4/float64"] = left[:1, 9:], left[1:, 4:-3]
    found["alone 9/float64"] = model(longest[:1, 9:]).logits
    found["alone 4/float64"] = model(longest[1:, 4:-3]).logits
    facts = {"cache_bytes": cache_bytes, "loss": loss}
    return found, facts | {name: one.tolist() for name, one in generated.items()}


@torch.inference_mode()
def main(folder: Path) -> None:
    torch.set_num_threads(1)
    work = json.loads((folder / "work.json").read_bytes())
    inputs = load_file(folder / "inputs.safetensors")
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Any] = {"models": {}, "tokenizers": {}}
    for name, path in work["models"].items():
        model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).eval()
        found, facts["models"][name] = _examine(model, inputs, name in work["beams"])
        tensors |= {f"{name}/{key}": value.contiguous() for key, value in found.items()}
    for name, path in work["tokenizers"].items():
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
        ids = [tokenizer(text).input_ids for text in work["texts"]]
        bare = AutoTokenizer.from_pretrained(path, trust_remote_code=True, add_bos_token=False)
        facts["tokenizers"][name] = {
            "ids": ids,
            "together": tokenizer(work["texts"]).input_ids,
            "bare": [bare(text).input_ids for text in work["texts"]],
            "unbegun": [
                tokenizer(text, add_special_tokens=False).input_ids for text in work["texts"]
            ],
            "decoded": [tokenizer.decode(one[1:]) for one in ids],
        }
    save_file(tensors, folder / "found.safetensors")
    (folder / "found.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
