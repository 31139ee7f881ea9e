"""What README and docs show is what happens."""

import argparse
import ast
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from longhaul.configs import load_run_config
from longhaul.modules.attention import attention_config, base, build_attention
from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline import cli
from longhaul.pipeline.runs.axes import combinations

CHECKOUT = Path(__file__).parent.parent
DOCS = CHECKOUT / "docs"
PAGES = [CHECKOUT / "README.md", CHECKOUT / "kernels/power/README.md", *sorted(DOCS.glob("*.md"))]
TEXTS = {str(page.relative_to(CHECKOUT)): page.read_text(encoding="utf-8") for page in PAGES}


def blocks(text: str, *languages: str) -> list[str]:
    """Contents of the fenced blocks of these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [content for language, content in found if language in languages]


def block_after(page: str, heading: str, language: str) -> str:
    (found, *_) = blocks(TEXTS[page].split(f"# {heading}\n", 1)[1], language)
    return found


def lines_of(text: str) -> Iterator[str]:
    """Lines of shell blocks and consoles, those that a backslash cuts joined."""
    for block in blocks(text, "sh"):
        yield from block.replace("\\\n", " ").splitlines()
    for block in blocks(text, "console"):
        yield from (line[2:] for line in block.splitlines() if line.startswith("$ "))


LINES = [(page, line.strip()) for page, text in TEXTS.items() for line in lines_of(text)]
COMMANDS = [(page, line) for page, line in LINES if line.startswith("longhaul ")]


class ParsedError(BaseException):
    """Carries what a command line was parsed into, in place of running it."""


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], argparse.Namespace]:
    """The arguments of a command line, as the command itself parses them."""
    for name in ("parse_args", "parse_intermixed_args"):
        original = getattr(argparse.ArgumentParser, name)

        def stop(self: Any, args: Any = None, *, original: Any = original) -> None:
            raise ParsedError(original(self, args))

        monkeypatch.setattr(argparse.ArgumentParser, name, stop)

    def run(arguments: list[str]) -> argparse.Namespace:
        with pytest.raises(ParsedError) as parsed:
            cli.main(arguments)
        return parsed.value.args[0]  # type: ignore[no-any-return]

    return run


# What the loops of reproduction.md would set.
VARIABLES = {"$context": "256", "$batch": "8", "$run": "runs/demo"}


def words_of(line: str) -> list[str]:
    for name, value in VARIABLES.items():
        line = line.replace(name, value)
    return shlex.split(line, comments=True)[1:]


def make_imported_run(folder: Path) -> None:
    """What the config in docs/export.md inherits."""
    (folder / "runs" / "imported").mkdir(parents=True)
    (folder / "runs" / "imported" / "config.yaml").write_text("inherits: [run/demo.yaml]\n")


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_commands_parse_and_their_configs_load(
    page: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parse: Callable[[list[str]], argparse.Namespace],
) -> None:
    monkeypatch.chdir(tmp_path)
    make_imported_run(tmp_path)
    for block in blocks(TEXTS[page], "yaml"):
        if named := re.match(r"# (\S+\.yaml)\n", block):
            (tmp_path / named[1]).write_text(block)
    arguments = parse(words_of(line))
    if line in "".join(blocks(TEXTS[page], "console")):
        return  # a mistake, which has a test of its own
    config, overrides = getattr(arguments, "config", None), [*getattr(arguments, "overrides", [])]
    if getattr(arguments, "what", None) == "train":  # of bench
        config, *overrides = ["run/demo.yaml", *arguments.config_and_overrides]
        if overrides and "=" not in overrides[0]:
            config, *overrides = overrides
    if config is None:
        return
    overrides += combinations(getattr(arguments, "sweep", []))[0]
    load_run_config(config, overrides)
    kinds = getattr(arguments, "kinds", None)
    for kind in kinds.split(",") if isinstance(kinds, str) else []:
        load_run_config(config, overrides, kind=kind)


def test_commands_within_sentences_have_their_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    helps: dict[str, str] = {}
    for page, text in TEXTS.items():
        prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        for span in re.findall(r"`longhaul\s+([a-z][^`]*)`", prose):
            command, *rest = span.split()
            assert command in cli.COMMANDS, f"{page}: longhaul {span}"
            if command in ("bench", "prepare"):
                continue  # their options are those of sub-commands
            if command not in helps:
                with suppress(SystemExit):
                    cli.main([command, "--help"])
                helps[command] = capsys.readouterr().out
            for option in rest:
                assert not option.startswith("--") or option in helps[command], f"{page}: {span}"


def test_other_programs_of_the_pages_are_there() -> None:
    makefile = (CHECKOUT / "Makefile").read_text()
    for page, line in LINES:
        words = shlex.split(line, comments=True)
        if words[:1] == ["make"]:
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), f"{page}: {line}"
        if words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]), f"{page}: {line}"


# Most of a short command's time goes into its imports, so one process runs them all.
SESSION = """
import json, sys
from longhaul.pipeline.cli import main
for arguments in json.loads(sys.argv[1]):
    print("$", *arguments, file=sys.stderr, flush=True)
    status = main(arguments)
    if status:
        sys.exit(status)
"""

# Two updates of one window each and four to validate on, not the whole budget.
BRIEF = ("trainer.max_tokens=1024", "optim.tokens_per_update=512", "trainer.micro_batch=1")
BRIEF += ("data.validation_tokens=2048",)
# Workers of a run that ended in this process are collected late, 10 s each.
BRIEF += ("data.workers=0",)


@pytest.mark.wide
def test_the_commands_for_a_laptop_run(tmp_path: Path) -> None:
    lines = block_after("docs/getting-started.md", "A laptop", "sh").splitlines()
    commands = [words_of(line) for line in lines]
    commands = [[*each, *(BRIEF if each[0] == "train" else ())] for each in commands]
    assert len(commands) >= 6
    script = [sys.executable, "-P", "-c", SESSION, json.dumps(commands)]
    result = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    for name in ("demo", "wide"):
        assert json.loads((tmp_path / "runs" / name / "DONE").read_text())["step"] == 2
    assert list((tmp_path / "runs/demo/evaluation").glob("*/positions.png"))


def test_the_mistakes_print_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (shown,) = blocks(TEXTS["docs/getting-started.md"], "console")
    examples = shown.split("$ ")[1:]
    assert len(examples) == 2
    for example in examples:
        command, _, message = example.partition("\n")
        assert cli.main(shlex.split(command)[1:]) == 2
        assert capsys.readouterr().err.split() == message.split()


def test_pieces_of_configs_load_over_the_demo(tmp_path: Path) -> None:
    make_imported_run(tmp_path)
    for text in TEXTS.values():
        for block in blocks(text, "yaml"):
            file = tmp_path / "piece.yaml"
            file.write_text(
                yaml.safe_dump({"inherits": ["run/demo.yaml"], **yaml.safe_load(block)})
            )
            load_run_config(file)


# The first are kinds, run below and in tests/pipeline/test_adding_a_variant.py; the second needs a
# folder that `longhaul export` wrote, and tests/pipeline/exporting/test_models.py loads those.
RUN_ELSEWHERE = ("docs/adding-a-variant.md", "docs/export.md")
# tests/pipeline/runs/test_loaded_model.py runs blocks that load this run.
TRAINED = '"runs/demo"'


@pytest.mark.parametrize("page", [p for p in TEXTS if blocks(TEXTS[p], "python")])
def test_python_blocks_run(page: str) -> None:
    for code in blocks(TEXTS[page], "python"):
        program = compile(code, page, "exec")
        if page not in RUN_ELSEWHERE and TRAINED not in code:
            exec(program, {"__name__": "__main__"})


def test_the_ten_lines_print_two_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    exec(block_after("README.md", "Ten lines of Python", "python"), {})
    assert capsys.readouterr().out == "torch.Size([1, 1, 4, 64]) torch.Size([1, 4, 2304, 64])\n"


@pytest.fixture
def example(tmp_path: Path) -> Iterator[str]:
    """The kind that adding-a-variant.md adds, registered while a test runs."""
    file = tmp_path / "decayed_linear.py"
    page = "docs/adding-a-variant.md"
    file.write_text(block_after(page, "A kind of power attention", "python"))
    before = set(base._REGISTRY)
    module = module_of(file)
    (kind,) = set(base._REGISTRY) - before
    assert kind == module.__name__
    yield kind
    del base._REGISTRY[kind]


def module_of(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tokens(T: int) -> Tensor:
    return torch.randn(2, T, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(T))


@pytest.mark.parametrize("options", [{}, {"initial_state": "learned", "rank": 3}])
def test_the_worked_example_keeps_the_contract(example: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = build_attention(example, 16, 2, chunk_size=8, **options).double()
    x = tokens(40).requires_grad_()
    whole, _ = layer(x)
    changed = x.detach().clone()
    changed[:, 30:] += 1
    assert torch.equal(layer(changed)[0][:, :30], whole[:, :30])

    y, state = layer(x[:, :25])
    outputs = [y]
    for t in range(25, 40):
        y, state = layer.step(x[:, t : t + 1], state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-8, atol=1e-9)
    if options:
        return
    mixed = torch.einsum("bhti,bihv->bthv", layer.weights(x), layer.values(x))
    wanted = layer.read_out(x, mixed)
    torch.testing.assert_close(whole, wanted, rtol=1e-8, atol=1e-9)
    parameters = [x, *layer.parameters()]
    for one, other in zip(
        torch.autograd.grad(whole.square().sum(), parameters),
        torch.autograd.grad(wanted.square().sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7)


def test_the_worked_example_is_a_kind_of_configs_and_models(example: str) -> None:
    overrides = [f"model.attention.kind={example}", "model.attention.memory=128"]
    config = load_run_config(
        "run/demo.yaml", [*overrides, "model.width=24", "model.layers=1"]
    ).model
    assert config.attention == attention_config(example)(memory=128.0)
    model = LanguageModel(config)
    ids = torch.randint(320, (2, 33))
    model.loss(ids[:, :-1], ids[:, 1:]).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(ValueError, match=r"memory: found 1\.0"):
        build_attention(example, 16, 2, memory=1.0)


def anchors(page: Path) -> set[str]:
    """What GitHub and mkdocs make of headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    kept = (re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings)
    return {one.strip().replace(" ", "-") for one in kept}


@pytest.mark.parametrize("page", PAGES, ids=list(TEXTS))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    links += re.findall(r'(?:src|srcset)="([^"]+)"', text)
    for link in links:
        if re.match(r"https?://", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_every_page_is_in_the_menu_and_the_index() -> None:
    menu = (CHECKOUT / "mkdocs.yml").read_text()
    for page in DOCS.glob("*.md"):
        assert f": {page.name}\n" in menu
        assert page.name == "index.md" or f"]({page.name})" in TEXTS["docs/index.md"]


def test_the_page_of_config_keys_is_what_the_dataclasses_say() -> None:
    script, text = module_of(DOCS / "scripts/configuration.py"), TEXTS["docs/configuration.md"]
    assert text == script.page(text), "`make docs` writes it anew"


def test_the_table_of_measurements_is_that_of_the_results() -> None:
    script = module_of(DOCS / "scripts/measurements.py")
    text = TEXTS["kernels/power/README.md"]
    assert text == script.page(text), "`make docs` writes it anew"


def test_measurements_of_a_gpu_become_tables(tmp_path: Path) -> None:
    tensors = {"out": {"norm_error": 2.3e-3}, "dq": {"norm_error": 2.7e-3}}
    case = {"dtype": "bfloat16", "content": "normal"}
    times = {"forward_ms": 1.612, "forward_backward_ms": 7.3, "forward_backward_ms_graph": 6.9}
    result: dict[str, Any] = {"case": case, "forms": {"chunked": {"tensors": tensors}}}
    content: dict[str, Any] = {
        "machine": {
            "device": "cuda", "name": "NVIDIA H100 80GB HBM3", "devices": 1,
            "driver": "580.159.04", "versions": {"torch": "2.11.0"}, "commit": "",
        },
        "pieces": [{"began": "2026-11-23T01:00:00Z", "seconds": 470.0}],
        "results": {
            "kernels: bfloat16: degree 2, K 64": {"status": "passed", "result": result},
            "kernels: float16: packed": {"status": "crashed", "faults": ["x"], "result": {}},
            "timings: training: degree 2, K 64: longhaul": {
                "status": "passed",
                "result": times | {"forward_backward_tflops": 166.9, "peak_bytes": 861e6},
            },
        },
        "targets": [{"name": "times faster", "value": 7.0, "target": 8.0, "met": False}],
    }  # fmt: skip
    (tmp_path / "h100.json").write_text(json.dumps(content))
    script = module_of(DOCS / "scripts/measurements.py")
    for line in (
        "**1 x NVIDIA H100 80GB HBM3**, driver 580.159.04, torch 2.11.0; 2026-11-23",
        "- crashed: kernels: float16: packed",
        "| bfloat16, chunked | 2.3e-03 | 2.7e-03 |  |  |  |",
        "| training: degree 2, K 64: longhaul | 1.612 | 7.3 | 6.9 | 166.9 | 861 |",
        "| times faster | 7 | 8 | missed |",
    ):
        assert line in script.page(TEXTS["kernels/power/README.md"], tmp_path)
    content["machine"]["device"] = "cpu"
    (tmp_path / "h100.json").write_text(json.dumps(content))
    assert not script.measurements(tmp_path)


def test_every_key_of_a_config_is_explained() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \|.*\|(.*)\|$", TEXTS["docs/configuration.md"], re.MULTILINE)
    assert len(rows) > 80
    assert [key for key, told in rows if not told.strip()] == []


def test_messages_are_those_of_the_code() -> None:
    code = "\n".join(said_by_the_code())
    page = TEXTS["docs/troubleshooting.md"].split("# Configs\n", 1)[1]
    messages = [
        m for row in re.findall(r"^\| (`.*?) \|", page, re.M) for m in re.findall("`(.*?)`", row)
    ]
    assert len(messages) > 50
    for message in messages:
        # Capitals, numbers and dots stand for what differs from time to time.
        fixed = re.split(r"\.\.\.|\b[A-Z]+\b(?::[A-Z]+)?|\b\d[\d.]*\b|[()`:;,]", message)
        for part in map(str.strip, fixed):
            assert len(part) < 4 or part in code, f"{message}: {part!r}"


def said_by_the_code() -> Iterator[str]:
    """All texts, formatted ones with a space for each value, and scripts as they are."""
    for folder in ("configs", "datamodules", "kernels", "modules", "pipeline"):
        for file in (CHECKOUT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = (p.value if isinstance(p, ast.Constant) else " " for p in node.values)
                    yield " ".join("".join(map(str, parts)).split())
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield " ".join(node.value.split())
    for file in [*(CHECKOUT / "slurm").glob("*.sbatch"), CHECKOUT / "Makefile"]:
        yield re.sub(r"\$\{?\w+\}?", " ", file.read_text())


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip(
        "material", reason="mkdocs-material is not installed: pip install '.[docs]'"
    )
    command = [sys.executable, "-P", "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    result = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for page in tmp_path.glob("*.html"):
        assert not re.search(r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)"', page.read_text())
        assert 'iframe-worker.js"></script>' in page.read_text()
    assert (tmp_path / "search/search_index.js").read_text().startswith("var __index = {")


@pytest.mark.wide
def test_the_search_works_on_pages_opened_from_disk(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no Chromium")
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-P", "-m", "mkdocs", "build", "--quiet", "--site-dir", site],
        cwd=CHECKOUT,
        check=True,
    )
    fixed = ("--headless", "--no-sandbox", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom")
    page = f"file://{site}/index.html?q=retention"
    result = subprocess.run(
        [browser, *fixed, "--virtual-time-budget=10000", page],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert re.search(r"[1-9]\d* matching documents", result.stdout), result.stderr
