"""`longhaul import`: a run of a folder that transformers has saved."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from longhaul.configs import load_run_config
from longhaul.datamodules.tokenizer import build_tokenizer
from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.cli import main
from longhaul.pipeline.exporting.folder import export
from longhaul.pipeline.exporting.tokenizer_files import write_tokenizer
from longhaul.pipeline.importing.folder import import_folder
from longhaul.pipeline.runs.initial_weights import load_initial_weights
from longhaul.pipeline.runs.trained_model import load_trained_model

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other

FIELDS: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    "bos_token_id": 256,
    "eos_token_id": [256],
}


def save(folder: Path, dtype: torch.dtype = torch.float32) -> GPTNeoXForCausalLM:
    torch.manual_seed(0)
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**FIELDS)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size=30_000)
    write_tokenizer(folder, build_tokenizer("bytes"), 320)
    return model


@torch.no_grad()
def test_the_run_of_weights_in_bfloat16_computes_what_transformers_does(tmp_path: Path) -> None:
    save(tmp_path / "theirs", torch.bfloat16)
    theirs = GPTNeoXForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32).eval()
    checkpoint = import_folder(tmp_path / "theirs", tmp_path / "run")
    assert checkpoint == tmp_path / "run" / "checkpoints" / "step-000000000"
    trained = load_trained_model(tmp_path / "run")
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(1))
    found, wanted = trained.model(tokens), theirs(tokens).logits
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert trained.config.data.context == 64
    tokenizer = trained.corpus.load_tokenizer()
    assert (tokenizer.bos_id, tokenizer.decode(tokenizer.encode("é").tolist())) == (256, "é")
    # And out again, to the bit.
    export(tmp_path / "run", tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    files = (tmp_path / "theirs").glob("*.safetensors")
    first = {name: value for file in files for name, value in load_file(file).items()}
    assert again.keys() == first.keys()
    for name, value in first.items():
        assert torch.equal(again[name], value.float()), name


@pytest.mark.wide
def test_commands_take_the_run(make_run: Callable[[int], Run], tmp_path: Path) -> None:
    theirs = save(tmp_path / "theirs")
    # As some published folders have it, such as that of GPT-2; the ids are in config.json.
    (tmp_path / "theirs" / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    run = make_run(1)
    result = run.longhaul("import", str(tmp_path / "theirs"), "imported")
    assert result.stdout == f"written: {run.path}/imported/checkpoints/step-000000000\n"
    made = run.longhaul(
        "generate", "imported", "--prompt", "def f", "--tokens", "4", "--top-k", "1"
    )
    prompt = torch.tensor([[256, *b"def f"]])
    wanted = theirs.generate(
        prompt, max_new_tokens=4, do_sample=False, suppress_tokens=[*range(257, 320)],
        eos_token_id=-1,
    )  # fmt: skip
    assert build_tokenizer("bytes").decode(wanted[0, 6:].tolist()) in made.stdout
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 40)
    text = str(tmp_path / "text.txt")
    run.longhaul("evaluate", "imported", "--tasks", "positions", "--text", text)
    label = next((run.path / "imported" / "evaluation").iterdir())
    assert json.loads((label / "results.json").read_bytes())
    config = load_run_config(run.path / "imported" / "config.yaml")
    model = LanguageModel(config.model)
    load_initial_weights(model, str(run.path / "imported"))
    assert torch.equal(model.final_norm.weight, theirs.gpt_neox.final_layer_norm.weight)
    assert (
        "transformers loads it as GPTNeoXForCausalLM"
        in run.longhaul("export", "imported", "exported").stdout
    )
    card = (run.path / "exported" / "README.md").read_text()
    assert "parameters, imported from gpt_neox." in card
    assert "The tokenizer puts the token 256 before a text." in card
    assert "| weights | imported from gpt_neox; how they were trained is unknown |" in card
    assert "| embedding_norm | false |" in card
    for untrue in ("trained with", "In training", "optimizer", "seed", "budget"):
        assert untrue not in card
    again = run.longhaul("train", "imported/config.yaml")
    assert again.stdout == (
        f"run {run.path}/imported holds imported weights and trains nothing; a new run continues "
        f"them with trainer.start_from={run.path}/imported\n"
    )


def test_what_cannot_be_imported_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "theirs"
    save(folder)
    capsys.readouterr()

    def refused(message: str) -> None:
        assert main(["import", str(folder), str(tmp_path / "run")]) == 2
        line = capsys.readouterr().err
        assert message in line
        assert line.count("\n") == 1
        assert [entry.name for entry in tmp_path.iterdir()] == ["theirs"]

    described = json.loads((folder / "config.json").read_bytes())

    def describe(**changes: Any) -> None:
        (folder / "config.json").write_text(json.dumps(described | changes))

    describe(vocab_size=256)
    refused("found 258 ids of the tokenizer, wanted at most 256, the rows of the embedding")
    describe(hidden_act="relu")
    refused("hidden_act: found 'relu', wanted one of gelu_pytorch_tanh, gelu_new, gelu_fast, gelu")
    describe(rotary_emb_base=5e5, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    refused("rope_theta: found 500000.0 beside 10000.0 in rope_parameters, wanted one value")
    describe(max_position_embeddings=10**12)
    refused("found a context of 1,000,000,000,000 tokens, wanted at most 16,777,216")
    describe()
    index = folder / "model.safetensors.index.json"
    names = sorted({*json.loads(index.read_bytes())["weight_map"].values()})
    last = load_file(folder / names[-1])
    first = next(iter(last))
    save_file(last | {first: last[first].int()}, folder / names[-1])
    refused(f"{first}: found numbers of type I32, wanted one of F64, F32, BF16, F16")
    save_file(last | {first: last[first] * math.nan}, folder / names[-1])
    refused("found values that are not finite, wanted numbers")
    save_file(load_file(folder / names[0]), folder / names[-1])
    refused(f"{folder / names[0]} has too")
    (folder / names[-1]).unlink()
    refused(f"found no {names[-1]}, wanted it as in {index.name}")
    index.unlink()
    refused(f"found no model.safetensors, wanted model.safetensors, or {index.name} and its files")
    (folder / "pytorch_model.bin").touch()
    refused("the weights cannot be read, found pytorch_model.bin, a pickle, wanted model.safeten")
    (folder / "tokenizer.json").unlink()
    refused("the tokenizer cannot be read, found no tokenizer.json, wanted one")


def test_an_export_with_its_code_is_imported_whole_or_not_at_all(
    make_run: Callable[[int], Run], tmp_path: Path
) -> None:
    run = make_run(1)
    run.longhaul("train", "small.yaml")
    export(run.path / "small", tmp_path / "own", form="longhaul")
    import_folder(tmp_path / "own", tmp_path / "run")
    found, wanted = (
        load_trained_model(path).model.state_dict()
        for path in (tmp_path / "run", run.path / "small")
    )
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    file = tmp_path / "own" / "model.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    for changed, message in (
        ({key: tensors[key] for key in tensors if key != name}, f"{name}: found shape None, want"),
        (tensors | {"more": torch.ones(2)}, r"more: found shape \(2,\), wanted None as in config"),
    ):
        save_file(changed, file)
        with pytest.raises(ValueError, match=message):
            import_folder(tmp_path / "own", tmp_path / "again")
        assert not (tmp_path / "again").exists()
