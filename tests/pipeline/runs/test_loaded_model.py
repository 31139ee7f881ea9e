"""`longhaul.load`: the model of a run, a checkpoint and an export, with its tokenizer."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import longhaul
from longhaul.pipeline.exporting.folder import export
from longhaul.pipeline.runs.trained_model import load_trained_model

PAGE = Path(__file__).parents[3] / "docs/library.md"
Run = Any  # conftest.RunFolder: modules of this folder cannot import each other


def test_a_run_a_checkpoint_and_an_export_give_the_same_logits(
    uninterrupted: Run, tmp_path: Path
) -> None:
    run = uninterrupted.path / "small"
    export(run, tmp_path / "exported")
    trained = load_trained_model(run)
    of_run = longhaul.load(run)
    tokens = of_run.encode("def f(é):")
    assert tokens.tolist() == [[256, *"def f(é):".encode()]]
    assert of_run.decode(tokens[0, 1:]) == "def f(é):"
    with torch.no_grad():
        wanted = trained.model(tokens)
        assert wanted.shape == (1, 11, 320)
        for path in (str(run), trained.checkpoint, tmp_path / "exported"):
            model = longhaul.load(path)
            assert not model.training
            assert torch.equal(model.encode("def f(é):"), tokens)
            # Equal but for rounding: an export does not keep the run's chunk size.
            torch.testing.assert_close(model(tokens), wanted, rtol=0, atol=1e-5)


def test_the_block_of_the_documentation_runs(
    uninterrupted: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = [one for one in PAGE.read_text().split("```python\n") if '"runs/demo"' in one]
    code = block.partition("```")[0].replace("runs/demo", str(uninterrupted.path / "small"))
    names: dict[str, Any] = {}
    exec(compile(code, "library.md", "exec"), names)
    assert names["logits"].shape == (1, 320)
    assert len(names["written"]) == 20
    assert capsys.readouterr().out


def test_mistakes_are_named(uninterrupted: Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"found no config\.yaml, wanted a run folder"):
        longhaul.load(tmp_path)
    exported = tmp_path / "exported"
    export(uninterrupted.path / "small", exported)
    config = json.loads((exported / "config.json").read_bytes())
    config["longhaul"]["attention"]["degree"] = "two"
    (exported / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json: .*degree"):
        longhaul.load(exported)
    config["longhaul"]["attention"]["degree"] = 2
    config["vocab_size"] = 64
    (exported / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"embedding\.weight: found shape .* as in config\.json"):
        longhaul.load(exported)
    without = {key: value for key, value in config.items() if key != "longhaul"}
    (exported / "config.json").write_text(json.dumps(without))
    with pytest.raises(ValueError, match=r"longhaul: found nothing, .*; export the run again"):
        longhaul.load(exported)
    (exported / "config.json").write_text(json.dumps(config))
    (exported / "tokenizer_config.json").unlink()
    os.mkfifo(exported / "tokenizer_config.json")  # whose reader would wait for a writer
    found = r"the tokenizer cannot be read, .*tokenizer_config\.json: found a FIFO, wanted a"
    with pytest.raises(ValueError, match=found):
        longhaul.load(exported)


def test_importing_longhaul_imports_nothing_else() -> None:
    code = "import sys, longhaul; print(longhaul.__version__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout == f"{longhaul.__version__} False\n"
    assert longhaul.__doc__
