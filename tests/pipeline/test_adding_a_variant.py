"""The steps of docs/adding-a-variant.md: its files in a copy of the package, its commands run."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other

CHECKOUT = Path(__file__).parents[2]
PAGE = (CHECKOUT / "docs" / "adding-a-variant.md").read_text()
LOADER = Path(__file__).parent / "exporting" / "load_exported.py"
KINDS = {"window_softmax": "window", "gated_delta": "delta"}
LENGTHS = ["--contexts", "32,64", "--stride", "16", "--lengths", "256", "--prompts", "5"]

# One process runs all commands, since imports take most of a short one's time. Then it writes the
# logits of the runs.
SESSION = """
import json, sys
from longhaul.pipeline.cli import main
for arguments in json.loads(sys.argv[1]):
    print("$", *arguments, flush=True)
    status = main(arguments)
    if status:
        print(status, *arguments, file=sys.stderr)
        sys.exit(status)
import torch
from safetensors.torch import load_file, save_file
from longhaul.pipeline.runs.trained_model import load_trained_model
wanted = {}
with torch.no_grad():
    for name in ("window", "delta"):
        model = load_trained_model(name).model
        for T, tokens in load_file("inputs.safetensors").items():
            wanted[f"{name}/{T}/float32"] = model(tokens)
save_file(wanted, "wanted.safetensors")
"""


def block(heading: str, language: str) -> str:
    found = re.search(
        rf"## {heading}\n.*?^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE
    )
    assert found is not None, heading
    return found[1]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which longhaul is the checkout and two files of the page."""
    top = tmp_path_factory.mktemp("package")
    packages = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for name, folder in sorted(packages["package-dir"].items()):
        _link(CHECKOUT / folder, top.joinpath(*name.split(".")), ("attention",))
    for heading, kind in (
        ("A softmax over a window", "window_softmax"),
        ("The gated delta rule", "gated_delta"),
    ):
        file = top / "longhaul" / "modules" / "attention" / f"{kind}.py"
        file.write_text(block(heading, "python"))
    paths = [str(top), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _link(source: Path, target: Path, copied: tuple[str, ...]) -> None:
    """Links to everything in a folder; folders of the names in `copied` become folders of links."""
    target.mkdir(parents=True)
    for entry in source.iterdir():
        if entry.name in copied:
            _link(entry, target / entry.name, copied)
        elif entry.name != "__pycache__":
            (target / entry.name).symlink_to(entry)


@pytest.fixture(scope="module")
def run(package: dict[str, str], make_run: Callable[[int], Run]) -> Run:
    """The folder in which the commands of the page have run, on a small corpus."""
    folder = make_run(4).path
    generator = torch.Generator().manual_seed(0)
    inputs = {str(T): torch.randint(256, (2, T), generator=generator) for T in (1, 63, 150)}
    save_file(inputs, folder / "inputs.safetensors")
    lines = block("Run them", "text").splitlines()
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("longhaul ")]
    names = {"run/demo.yaml": "small.yaml", "runs": ".", "demo": "tests"}
    for command in commands:
        command[:] = [names.get(word, word.removeprefix("runs/")) for word in command]
        command += {"train": ["data.workers=0"], "evaluate": LENGTHS}.get(command[0], [])
    assert len(commands) >= 10
    result = subprocess.run(
        [sys.executable, "-P", "-c", SESSION, json.dumps(commands)],
        cwd=folder,
        env=package,
        capture_output=True,
        text=True,
        timeout=600,
    )
    (folder / "output.txt").write_text(result.stdout)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return folder


@pytest.mark.wide
def test_every_command_works_with_an_added_kind(run: Path) -> None:
    output = (run / "output.txt").read_text()
    for kind, name in KINDS.items():
        assert json.loads((run / name / "DONE").read_text())["step"] == 4
        (results,) = (run / name / "evaluation").glob("*/results.json")
        values = json.loads(results.read_text())
        for wanted in ("loss_at", "loss_in_context", "perplexity", "passkey", "recall", "bigram"):
            assert any(wanted in key for key in values), (name, wanted)
        assert f"written: exported/{name}/*.py" in output
        assert re.search(rf"^{kind} ", output, re.MULTILINE)  # a row of the plan
    assert (run / "report" / "index.html").is_file()
    (page,) = (run / "report").glob("*.html")
    assert all(kind in page.read_text() for kind in KINDS)


@pytest.mark.wide
def test_exported_logits_are_those_of_the_run(run: Path) -> None:
    """In a process without longhaul and jaxtyping."""
    work = {"models": {name: str(run / "exported" / name) for name in KINDS.values()}}
    work |= {"beams": [*KINDS.values()], "tokenizers": {}, "texts": []}  # type: ignore[dict-item]
    (run / "work.json").write_text(json.dumps(work))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-P", str(LOADER), str(run)],
        env=environment | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(run / "home")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    found, facts = (
        load_file(run / "found.safetensors"),
        json.loads((run / "found.json").read_text()),
    )
    for name, wanted in load_file(run / "wanted.safetensors").items():
        torch.testing.assert_close(found[name], wanted, rtol=0, atol=1e-5)
    for name in KINDS.values():
        assert (found[f"{name}/parts/float64"] - found[f"{name}/150/float64"]).abs().max() < 1e-6
        for count in (9, 4):
            difference = (
                found[f"{name}/padded {count}/float64"] - found[f"{name}/alone {count}/float64"]
            )
            assert difference.abs().max() < 1e-6
        of = facts["models"][name]
        assert of["cached"] == of["uncached"] == of["padded"]
        assert of["beams"] == of["beams uncached"]
        # Of 3 and of 150 tokens; the window is one of 32.
        assert of["cache_bytes"][1] <= 12 * of["cache_bytes"][0]


@pytest.mark.wide
def test_the_files_pass_the_linter(package: dict[str, str]) -> None:
    folder = Path(package["PYTHONPATH"].split(os.pathsep)[0], "longhaul", "modules", "attention")
    files = [folder / f"{kind}.py" for kind in KINDS]
    for check in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *check, "--config", CHECKOUT / "pyproject.toml"]
        result = subprocess.run([*command, *files], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout


@pytest.mark.wide
def test_added_kinds_keep_the_contract(package: dict[str, str]) -> None:
    (line,) = [one for one in PAGE.splitlines() if one.startswith("pytest ")]
    result = subprocess.run(
        [sys.executable, "-P", "-m", *shlex.split(line), "-q", "-p", "no:cacheprovider"],
        cwd=CHECKOUT,
        env=package,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout
    assert int(re.findall(r"(\d+) passed", result.stdout)[0]) > 25
