"""Models that are exported as an architecture of transformers, loaded without remote code."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from longhaul.configs import RunConfig, load_run_config, to_yaml
from longhaul.modules.attention import attention_config
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.modules.progress import Progress
from longhaul.pipeline.architectures.architecture import canonical
from longhaul.pipeline.architectures.registry import ARCHITECTURES, architecture_of
from longhaul.pipeline.checkpoints.store import CheckpointStore
from longhaul.pipeline.exporting import transformers_check
from longhaul.pipeline.exporting.folder import export
from longhaul.pipeline.runs.exported import exported_model, exported_weights
from longhaul.pipeline.runs.initial_weights import load_initial_weights
from longhaul.pipeline.runs.loaded_model import load_model

NEOX: dict[str, Any] = {"embedding_norm": False, "parallel_residual": True, "biases": True}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def base(make_run: Callable[[int], Any]) -> RunConfig:
    return load_run_config(make_run(1).path / "small.yaml")


def model_config(kind: str = "softmax", options: Any = None, **others: Any) -> LanguageModelConfig:
    attention = attention_config(kind)(**(options or {}))
    sizes = {"layers": 2, "width": 32, "heads": 4, "vocabulary": 320}
    return LanguageModelConfig(attention=attention, **{**sizes, **NEOX, **others})


def disturbed(model: Any) -> Any:
    """The model with weights so large, and norms so far from 1, that errors show."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                0.2 * torch.randn_like(parameter)
                if parameter.ndim > 1
                else parameter + 0.2 * torch.randn_like(parameter)
            )
    return model.eval()


def write_run(folder: Path, base: RunConfig, model: LanguageModel) -> Path:
    """A run folder with one checkpoint, as training leaves it."""
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(dataclasses.replace(base, model=model.config)))
    store = CheckpointStore(folder / "checkpoints", keep_last=1)
    progress = dataclasses.asdict(Progress(step=3, tokens=1536))
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    store.start(3, tensors, {"progress": progress, "shards_sha256": ""})
    store.wait()
    return folder


def tokens(T: int = 40, B: int = 2, most: int = 256) -> Tensor:
    return torch.randint(most, (B, T), generator=torch.Generator().manual_seed(1))


def close(found: Tensor, wanted: Tensor) -> None:
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def greedy(model: LanguageModel, prompt: Tensor, count: int) -> Tensor:
    """The most likely tokens after a prompt, each from the whole text before it."""
    text = prompt
    for _ in range(count):
        logits = model(text)[:, -1]
        logits[:, 257:] = -torch.inf  # no token's rows
        text = torch.cat([text, logits.argmax(dim=-1, keepdim=True)], dim=1)
    return text


@torch.no_grad()
def test_an_architecture_computes_what_the_run_does(base: RunConfig, tmp_path: Path) -> None:
    options = {"rotary_base": 3000.0, "rotary_share": 0.5}
    config = model_config(options=options, parallel_residual=False, tied_head=True)
    model = disturbed(LanguageModel(config))
    run = write_run(tmp_path / "run", base, model)
    files = export(run, tmp_path / "new", shard_bytes=30_000)
    assert not [file for file in files if file.suffix == ".py"]
    assert len([file for file in files if file.suffix == ".safetensors"]) > 2
    described = json.loads((tmp_path / "new" / "config.json").read_bytes())
    assert described["architectures"] == ["GPTNeoXForCausalLM"]
    assert "auto_map" not in described
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "new", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    close(loaded.eval()(tokens()).logits, model(tokens()))
    prompt = tokens(5)
    found = loaded.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(found, greedy(model, prompt, 12))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new")
    assert tokenizer("def f").input_ids == [256, *b"def f"]
    card = (tmp_path / "new" / "README.md").read_text()
    assert "trust_remote_code" not in card
    # And in again, to the bit.
    assert canonical(exported_model(tmp_path / "new")) == canonical(config)
    again = exported_weights(tmp_path / "new")
    assert again.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(again[name], weight), name
    assert load_model(tmp_path / "new").encode("a").tolist() == [[256, 97]]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            model_config("alibi"),
            "attention.kind: found alibi, wanted softmax in GPTNeoXForCausalLM",
        ),
        (model_config(embedding_norm=True), "model.embedding_norm: found True, wanted False in G"),
        (
            model_config(biases=False),
            r"model.biases: found \[\], wanted \['mlp', 'norms'\] in GPTNeoX",
        ),
        (
            model_config(options={"longest_document": 64}),
            "model.attention.longest_document: found 64, wanted None in GPTNeoX",
        ),
        (
            model_config(
                layer_attention={"1": attention_config("softmax")(rotary_base=7.0)},
            ),
            "model.attention.rotary_base: found 7.0, wanted 10000.0 in GPTNeoX",
        ),
    ],
)
def test_what_no_architecture_expresses_brings_its_code(
    config: LanguageModelConfig, message: str
) -> None:
    assert architecture_of(config) is None
    with pytest.raises(ValueError, match=f"^{message}"):
        ARCHITECTURES["gpt_neox"].config_of(config)


def test_any_model_can_bring_its_code(base: RunConfig, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", base, LanguageModel(model_config()))
    export(run, tmp_path / "own", form="longhaul")
    described = json.loads((tmp_path / "own" / "config.json").read_bytes())
    assert described["architectures"] == ["LonghaulForCausalLM"]
    assert exported_model(tmp_path / "own") == model_config()
    # Both are what a run of the same config may begin with.
    export(run, tmp_path / "standard")
    for folder in ("own", "standard"):
        load_initial_weights(LanguageModel(model_config()), str(tmp_path / folder))


def test_an_export_that_transformers_reads_as_another_model_is_refused(
    base: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", base, disturbed(LanguageModel(model_config())))
    load = transformers_check.load_architecture

    def other(folder: Path) -> Any:
        described = json.loads((folder / "config.json").read_bytes())
        described["rope_parameters"]["rope_theta"] = 9000.0
        (folder / "config.json").write_text(json.dumps(described))
        return load(folder)

    monkeypatch.setattr("longhaul.pipeline.exporting.check.load_architecture", other)
    message = (
        r"logits of the exported GPTNeoXForCausalLM that differ from the run's by \S+ for 64 t"
    )
    with pytest.raises(RuntimeError, match=message) as error:
        export(run, tmp_path / "new")
    assert "\n" not in str(error.value)
    monkeypatch.setattr(
        "longhaul.pipeline.exporting.transformers_check.has_transformers", lambda: False
    )
    with pytest.raises(ValueError, match="transformers: found no version 5, wanted it, to check"):
        export(run, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("gemma3_text", "sliding_window_pattern", 0, "found 0, wanted greater than or equal to 1"),
        ("qwen2", "max_window_layers", "a", "found 'a', wanted a valid integer"),
        ("gemma3_text", "rope_parameters", {"full_attention": 1}, "found 1, wanted a valid dict"),
        ("gemma3_text", "rope_parameters", {"other": {}}, "wanted 'full_attention' or 'sliding_"),
        ("llama", "rope_scaling", {"type": [1]}, r"rope_type: found \[1\], wanted one of default"),
        ("gemma2", "hidden_size", 10**400, "model.width: found 1000"),
        ("llama", "rope_interleaved", True, "rope_interleaved: found True, wanted None"),
    ],
)
def test_a_damaged_field_is_named(
    tmp_path: Path, name: str, field: str, value: Any, message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, field: value}))
    with pytest.raises(ValueError, match=message):
        exported_model(tmp_path)


def test_fields_of_published_files_that_change_no_logit_are_read(tmp_path: Path) -> None:
    for name, fields in (
        ("llama", {"is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 2}),
        ("gemma2", {"sliding_window_size": 4096, "cache_implementation": "hybrid"}),
        ("smollm3", {"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}}),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": name, **fields}))
        assert exported_model(tmp_path) == ARCHITECTURES[name].model_of({})
