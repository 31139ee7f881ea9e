"""What is mistyped is refused before anything heavy is imported: in each command, by what it loads.

One process per command would import as much as it should not; one process tries them all, since a
refusal that imported nothing leaves nothing behind.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from longhaul.pipeline.cli import COMMANDS

HEAVY = ("torch", "lightning", "mlflow", "deepspeed", "transformers", "matplotlib", "webdataset")
MISTYPED = {
    "prepare": [["prepare", "text", "a.txt", "out", "--doc-tokens", "4x"]],
    "data": [
        ["data", "out", "data.context=8"],
        ["data", "nowhere"],
        ["data", "run/demo.yaml", "--sample", "4x"],
        ["data", "run/demo.yaml", "data.contxt=8", "--sample", "4"],
    ],
    "config": [["config", "run/demo.yaml", "model.widht=8"], ["config", "run/dmo.yaml"]],
    "train": [
        ["train", "run/demo.yaml", "trainer.sed=1"],
        ["train", "run/demo.yaml", "trainer.seed=-1"],
        ["train", "run/demo.yaml", f"trainer.seed={2**32}"],
        ["train", "run/demo.yaml", "slurm.time=soon"],
        ["train", "run/demo.yaml", "model.attention.degre=2"],
        ["train", "run/demo.yaml", "model.attention.kind=sofmax"],
        ["train", "run/demo.yaml", "model.attention.gate=dta"],
        ["train", "run/demo.yaml", "optim.name=adm"],
        ["train", "own.yaml"],
        ["train", "run/demo.yaml", "--sweep", "trainer.sed=1,2"],
        ["train", "run/demo.yaml", "--sweep", "trainer.seed,data.context=1:256,2"],
        ["train", "run/demo.yaml", "--seeds", "0"],
    ],
    "status": [["status", "--exprimnt", "a"]],
    "evaluate": [
        ["evaluate", "runs/demo", "--tasks", "positons"],
        ["evaluate", "runs/demo", "--contexts", "4x"],
        ["evaluate", "runs/demo", "--factor", "2"],
        ["evaluate", "nowhere"],
    ],
    "average": [["average", "runs/demo", "mean", "--last", "1"], ["average", "nowhere", "mean"]],
    "generate": [["generate", "runs/demo", "--tokens", "4x"], ["generate", "nowhere"]],
    "export": [["export", "runs/demo"], ["export", "nowhere", "out"]],
    "import": [["import", "folder"], ["import", "nowhere", "out"]],
    "report": [["report", "demo", "out", "--sequences", "4x"]],
    "submit": [
        ["submit", "run/demo.yaml", "slurm.acount=a"],
        ["submit", "run/demo.yaml", "--sweep", "trainer.sed=1,2", "--dry-run"],
    ],
    "plan": [
        ["plan", "run/demo.yaml", "data.contxt=8"],
        ["plan", "run/demo.yaml", "--kinds", "sofmax"],
        ["plan", "run/demo.yaml", "--contexts", "4x"],
    ],
    "doctor": [["doctor", "run/demo.yaml", "trainer.devces=2"]],
    "verify": [["verify", "--json", "nowhere/a.json"], ["verify", "--minutes", "x"]],
    "bench": [
        ["bench", "train", "optm.name=adam"],
        ["bench", "train", "--kinds", "cartan:generatr=full"],
    ],
    "help": [["help", "trian"]],
}
LIGHT = [["report", "--help"], ["status", "."]]  # do their work without what is heavy

TRY = """
import json, sys
from longhaul.pipeline.cli import main
for arguments in json.load(sys.stdin):
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code
    print("loaded", status, *(name for name in sys.argv[1:] if name in sys.modules))
"""


def test_what_is_mistyped_is_refused_before_heavy_imports(tmp_path: Path) -> None:
    assert MISTYPED.keys() == COMMANDS.keys()
    (tmp_path / "own.yaml").write_text("inherits: [run/demo.yaml]\ntrainer: {sed: 1}\n")
    commands = [*LIGHT, *(one for each in MISTYPED.values() for one in each)]
    result = subprocess.run(
        [sys.executable, "-P", "-c", TRY, *HEAVY],
        cwd=tmp_path,
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=300,
    )
    answers = [line for line in result.stdout.splitlines() if line.startswith("loaded")]
    wanted = ["loaded 0" if command in LIGHT else "loaded 2" for command in commands]
    assert dict(enumerate(answers)) == dict(enumerate(wanted)), result
    assert sorted(file.name for file in tmp_path.iterdir()) == ["own.yaml"]


def test_a_number_in_an_option_may_have_a_unit(capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    from longhaul.pipeline.cli import _Parser

    parser = _Parser()
    parser.add_argument("--doc-tokens", type=int, default=3)
    parser.add_argument("--json", type=Path)
    assert parser.parse_args(["--doc-tokens", "4k"]) == argparse.Namespace(
        doc_tokens=4096, json=None
    )
    assert parser.parse_args(["--json=~/a"]).json == Path.home() / "a"
    assert parser.parse_args(["--doc-tokens=-1"]).doc_tokens == -1
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--doc-tokens", "4x"])
    assert "argument --doc-tokens: found '4x', wanted a whole number, such as" in (
        capsys.readouterr().err
    )
