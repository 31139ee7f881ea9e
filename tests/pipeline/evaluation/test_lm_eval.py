"""lm_eval on exported checkpoints: the bundled task, and what it finds, by a plain loop."""

import argparse
import importlib.util
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from longhaul.pipeline.commands.evaluate import add_task_arguments, task_options
from longhaul.pipeline.evaluation.tasks import lm_eval, lm_eval_task
from longhaul.pipeline.evaluation.tasks.lm_eval_task.run import main as run_harness
from longhaul.pipeline.evaluation.tasks.lm_eval_task.shortening import Shortening, TooShortError
from longhaul.pipeline.runs.trained_model import load_trained_model

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other
PAIRS = [
    json.loads(line)
    for line in Path(lm_eval_task.__file__)
    .with_name("longhaul_pairs.jsonl")
    .read_text()
    .splitlines()
]


@pytest.fixture(scope="module")
def base(make_run: Callable[[int], Run]) -> Run:
    """A finished run of a few updates."""
    run = make_run(8)
    run.longhaul("train", "small.yaml")
    return run


def test_the_bundled_pairs_have_one_right_answer_each_and_none_stands_out_by_its_place() -> None:
    assert len({json.dumps(pair) for pair in PAIRS}) == len(PAIRS) == 80
    assert sum(pair["answer"] for pair in PAIRS) == 40
    for pair in PAIRS:
        assert len(set(pair["choices"])) == 2
        assert pair.keys() == {"context", "choices", "answer"}


def test_names_of_metrics_are_those_that_mlflow_takes() -> None:
    results = {
        "a": {"alias": "a", "sample_len": 80, "acc,none": 0.5, "acc_stderr,none": "N/A"},
        "b": {"exact_match,strict-match": 1, "exact_match,none": 0},
    }
    assert lm_eval._numbers({"results": results}) == {
        "a/acc": 0.5,
        "b/exact_match/strict-match": 1.0,
        "b/exact_match": 0.0,
    }


def test_lengths_without_samples_are_no_scores() -> None:
    """RULER's tasks say -1 of these, and their group's mean contains it."""
    results = {
        "niah": {"4096,none": -1, "1024,none": 0.5, "mean,none": -1.0},
        "vt": {"4096,none": 0.75, "1024,none": 0.25},
        "ruler": {"4096,none": -0.125, "1024,none": 0.375},
        "all": {"4096,none": -1.0},
    }
    members = {"ruler": ["niah", "vt"], "all": ["niah"], "niah": []}
    assert lm_eval._numbers({"results": results, "group_subtasks": members}) == {
        "niah/1024": 0.5,
        "niah/mean": -1.0,
        "vt/4096": 0.75,
        "vt/1024": 0.25,
        "ruler/1024": 0.375,
    }


def test_a_request_that_is_cut_keeps_bos_and_is_counted() -> None:
    cutting = Shortening(9, 8)
    assert cutting.cut([9, 1, 2, 3], 4) == [9, 1, 2, 3]
    assert cutting.cut([9, 1, 2, 3], 5) == [9, 2, 3]
    assert cutting.cut([9, 1, 2, 3], 7) == [9]
    assert cutting.cut([1, 2, 3], 6) == [2, 3]  # of a tokenizer without bos
    assert (cutting.requests, cutting.shortened, cutting.longest) == (4, 3, 11)
    with pytest.raises(
        TooShortError, match="--context: found 8 tokens with an answer of 9, wanted"
    ):
        cutting.cut([9], 9)


class Harness:
    """lm_eval's results, and what it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answer: Any) -> None:
        monkeypatch.setattr(lm_eval, "_run_harness", self)
        self.answer = {"results": {}, "longhaul": {"requests": 9, "shortened": 0, "longest": 5}}
        self.answer |= answer

    def __call__(self, work: dict[str, Any], exported: Path, modules: Path) -> None:
        self.work, self.config = work, json.loads((exported / "config.json").read_text())
        Path(work["found"]).write_text(json.dumps(self.answer))


@pytest.mark.wide
def test_the_harness_keeps_no_states_and_makes_logits_of_a_gigabyte(
    base: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    harness = Harness(monkeypatch)
    trained = load_trained_model(base.path / "small")
    lm_eval.measure(trained, lm_eval.Options(), tmp_path)
    assert harness.config["use_cache"] is False
    assert harness.work["model_args"]["max_length"] == 64
    assert harness.work["batch_size"] == 4096 // 64
    monkeypatch.setattr(lm_eval, "_MOST_LOGITS", 320 * 640)  # 640 tokens of 320 logits
    lm_eval.measure(trained, lm_eval.Options(), tmp_path)
    assert harness.work["batch_size"] == 10


def test_options_reach_the_harness_and_samples_are_written(
    base: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    counts = {"requests": 7, "shortened": 3, "longest": 300}
    samples = {"a": [{"doc_id": 0}, {"doc_id": 1}]}
    harness = Harness(monkeypatch, longhaul=counts, samples=samples)
    parser = argparse.ArgumentParser()
    add_task_arguments(parser)
    given = ["--lm-eval-limit", "5", "--lm-eval-shots", "0", "--lm-eval-samples"]
    given += ["--lm-eval-metadata", '{"max_seq_lengths": [512]}']
    given += ["--lm-eval-generation", '{"max_gen_toks": 8}']
    options = lm_eval.Options(**task_options(parser.parse_args(given), ["lm-eval"]))
    trained = load_trained_model(base.path / "small")
    result = lm_eval.measure(trained, options, tmp_path)
    assert harness.work["metadata"] == {"max_seq_lengths": [512]}
    assert harness.work["options"] == {
        "limit": 5,
        "num_fewshot": 0,
        "gen_kwargs": {"max_gen_toks": 8},
        "log_samples": True,
    }
    assert (
        "lm-eval: 3 of 7 requests were longer than the context, 64 tokens, and have lost text "
        "after their first token; with --context 300 all of them fit" in caplog.messages
    )
    assert [file.name for file in result.files] == ["lm-eval-results.json", "lm-eval-samples.jsonl"]
    lines = result.files[1].read_text().splitlines()
    assert list(map(json.loads, lines)) == [{"task": "a", "doc_id": n} for n in range(2)]
    assert json.loads(result.files[0].read_text()) == {"results": {}, "longhaul": counts}


class PretendedLM:
    """What lm_eval's Hugging Face model has of methods that ours calls or replaces."""

    prefix_token_id, max_length, add_bos_token = 256, 8, True

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool) -> list[bool]:
        return [self.add_bos_token for _ in requests]

    def _loglikelihood_tokens(self, requests: Any) -> Any:
        return requests


def test_tasks_get_metadata_and_rolling_texts_no_second_bos(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With stand-ins for lm_eval, which need not be installed; the soak tests have the real one."""
    given: dict[str, Any] = {}

    class TaskManager:
        all_tasks = ("ruler",)

        def __init__(self, include_path: str, metadata: dict[str, Any]) -> None:
            given["metadata"] = metadata

    class Panic(BaseException):
        pass

    def simple_evaluate(model: Any, **settings: Any) -> dict[str, Any]:
        if settings["limit"] == 0:
            raise Panic("index out of range")
        given.update(settings)
        assert model.loglikelihood_rolling(["a", "b"]) == [False, False]
        assert model.add_bos_token
        long, answer = [256, *range(10)], [1, 2]
        assert model._loglikelihood_tokens([("", long, answer)]) == [
            ("", [256, *range(4, 10)], answer)
        ]
        return {"results": {}}

    for name, content in {
        "lm_eval": {"simple_evaluate": simple_evaluate},
        "lm_eval.tasks": {"TaskManager": TaskManager},
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": PretendedLM},
        "lm_eval.models.utils": {"normalize_gen_kwargs": None},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, f"{lm_eval_task.__name__}.model", raising=False)
    work: dict[str, Any] = {
        "tasks": ["ruler"],
        "model_args": {"pretrained": "model"},
        "batch_size": 3,
        "metadata": {"max_seq_lengths": [512]},
        "options": {"limit": 7},
        "found": str(tmp_path / "found.json"),
    }
    run_harness(work)
    assert given["metadata"] == {"pretrained": "model", "max_seq_lengths": [512]}
    assert (given["limit"], given["batch_size"]) == (7, 3)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["longhaul"] == {"requests": 1, "shortened": 1, "longest": 12}
    run_harness(work | {"tasks": ["ruler", "nothing"]})
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["refused"].startswith("--lm-eval-tasks: found nothing, wanted longhaul_pairs or")
    run_harness(work | {"options": {"limit": 0}})
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == {"refused": "tokenizer: fails at a text of lm_eval, index out of range"}
    del sys.modules[f"{lm_eval_task.__name__}.model"]


@pytest.mark.parametrize("text", ["{", "[1]", "{}", "max_seq_lengths=4096"])
def test_metadata_that_is_no_object_is_refused(text: str) -> None:
    parser = argparse.ArgumentParser()
    add_task_arguments(parser)
    for option in ("--lm-eval-metadata", "--lm-eval-generation"):
        with pytest.raises(ValueError, match=f"{option}: found '.*', wanted a JSON object such"):
            task_options(parser.parse_args([option, text]), ["lm-eval"])


def test_what_it_cannot_run_is_refused(base: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec("json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="lm-eval without the package lm_eval, wanted it"):
        lm_eval.check(load_trained_model(base.path / "small"), lm_eval.Options())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    scaled = load_trained_model(base.path / "small", "linear", 2.0)
    with pytest.raises(ValueError, match="--positions: found linear with lm-eval, wanted none"):
        lm_eval.check(scaled, lm_eval.Options())
    trained = load_trained_model(base.path / "small")
    with pytest.raises(ValueError, match="--lm-eval-limit: found 0, wanted 1 or more"):
        lm_eval.check(trained, lm_eval.Options(lm_eval_limit=0))
    with pytest.raises(ValueError, match="--lm-eval-shots: found -1, wanted 0 or more"):
        lm_eval.check(trained, lm_eval.Options(lm_eval_shots=-1))


@pytest.mark.soak
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed")
def test_the_harness_finds_what_a_plain_loop_finds(
    base: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    trained = load_trained_model(base.path / "small")
    context, right = 128, {"acc": 0, "acc_norm": 0}
    for pair in PAIRS:
        sums = []
        for choice in pair["choices"]:
            text, added = pair["context"].encode(), choice.encode()
            # bos stays in front of what is cut.
            tokens = torch.tensor([[256, *[*text, *added][-context:]]])
            hidden, _ = trained.model.activations(tokens[:, :-1])
            logs = (hidden[0] @ trained.model.embedding.weight.T).log_softmax(-1)
            own = logs.gather(1, tokens[0, 1:, None])[-len(added) :]
            sums.append((own.sum().item(), own.sum().item() / len(choice)))
        for place, metric in enumerate(right):
            best = max((0, 1), key=lambda index: sums[index][place])
            right[metric] += best == pair["answer"]
    given = ("evaluate", "small", "--tasks", "lm-eval", "--context", str(context))
    result = base.longhaul(*given)
    folder = base.path / "small" / "evaluation" / "step-000000008-context-128"
    record = json.loads((folder / "lm-eval.json").read_text())
    prefix = "evaluation/context-128/lm-eval/longhaul_pairs"
    for metric, count in right.items():
        assert record["values"][f"{prefix}/{metric}"] == count / len(PAIRS), metric
    assert f"{prefix}/acc" in result.stdout
    assert record["options"]["context"] == context
    assert record["options"]["lm_eval_tasks"] == ["longhaul_pairs"]
    harness = json.loads((folder / "lm-eval-results.json").read_text())
    assert harness["n-samples"]["longhaul_pairs"]["effective"] == len(PAIRS)
    assert "results are already there" in base.longhaul(*given).stdout
    refused = base.longhaul(*given, "--lm-eval-tasks", "longhaul_pairs,no_such", check=False)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith("longhaul: --lm-eval-tasks: found no_such,")


def test_what_the_harness_prints_reaches_no_terminal_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nprintf '\\033[2Jout\\n'; printf 'a\\r\\377\\302' >&2; exit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(RuntimeError, match="lm-eval: ended with status 3, for the reason above"):
        lm_eval._run_harness({"model_args": {}}, tmp_path, tmp_path)
    printed = capfd.readouterr()
    assert printed.err == "\\x1b[2Jout\na\r\\xff\\xc2"
    assert not printed.out


def test_a_failure_of_the_harness_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run", '{"model_args": {}}'])
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(
        SystemExit, match=r"^lm-eval: ModuleNotFoundError: import of lm_eval [^\n]*$"
    ):
        runpy.run_path(str(Path(lm_eval_task.__file__).with_name("run.py")), run_name="__main__")


@pytest.mark.soak
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed")
def test_bos_is_read_once_in_front_of_whatever_is_cut(base: Run, tmp_path: Path) -> None:
    # Imported here: an optional dependency.
    from lm_eval.api.instance import Instance

    from longhaul.pipeline.evaluation.tasks.lm_eval_task.model import LonghaulLM

    base.longhaul("export", "small", str(tmp_path / "model"))
    window = 64
    model = LonghaulLM(
        pretrained=str(tmp_path / "model"),
        trust_remote_code=True,
        add_bos_token=True,
        max_length=window,
        device="cpu",
        batch_size=2,
    )
    trained = load_trained_model(base.path / "small").model

    def ask(kind: str, *arguments: Any) -> Any:
        requests = [Instance(kind, {}, one, 0) for one in arguments]
        return getattr(model, kind)(requests, disable_tqdm=True)

    @torch.no_grad()
    def likelihood(tokens: bytes, last: int) -> float:
        """Of the last tokens after bos."""
        given = torch.tensor([[256, *tokens]])
        hidden, _ = trained.activations(given[:, :-1])
        logs = (hidden[0] @ trained.embedding.weight.T).log_softmax(-1)
        return float(logs.gather(1, given[0, 1:, None])[-last:].sum())

    text = "def f(x):\n    return x"
    (rolled,) = ask("loglikelihood_rolling", (text,))
    assert rolled == pytest.approx(likelihood(text.encode(), len(text)), rel=1e-4)
    assert model.shortening.shortened == 0
    long = "a = 1;" * 50
    ((found, _),) = ask("loglikelihood", (long, " end"))
    assert found == pytest.approx(likelihood((long + " end").encode()[-window:], 4), rel=1e-4)
    assert (model.shortening.shortened, model.shortening.longest) == (1, 1 + len(long) + 3)
    read: list[list[int]] = []
    generate = model.model.generate

    def record(input_ids: torch.Tensor, attention_mask: torch.Tensor, **options: Any) -> Any:
        for row, mask in zip(input_ids, attention_mask.bool(), strict=True):
            read.append(row[mask].tolist())
        return generate(input_ids=input_ids, attention_mask=attention_mask, **options)

    monkeypatch.setattr(model.model, "generate", record)
    options = {"until": [], "max_gen_toks": 8}
    ask("generate_until", (long, options), ("ab", options))
    assert read == [[256, *long.encode()[-window + 8 + 1 :]], [256, *b"ab"]]
    assert (model.shortening.requests, model.shortening.shortened) == (4, 2)
