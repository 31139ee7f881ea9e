"""`longhaul export`: what is in the folder, what is refused, and the way back into training."""

import dataclasses
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.dynamic_module_utils import get_imports, get_relative_import_files

from longhaul.configs import ConfigError, load_run_config
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.progress import Progress
from longhaul.pipeline import exporting
from longhaul.pipeline.checkpoints.integrity import CheckpointError
from longhaul.pipeline.exporting import folder as export_folder
from longhaul.pipeline.exporting import tokenizer_files
from longhaul.pipeline.exporting.folder import export
from longhaul.pipeline.exporting.source import file_of, model_code
from longhaul.pipeline.runs.initial_weights import load_initial_weights
from longhaul.pipeline.runs.trained_model import load_trained_model

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other

CHECKOUT = Path(exporting.__file__).parents[2]


@pytest.fixture(scope="module")
def base(make_run: Callable[[int], Run]) -> Run:
    """A finished run of two updates."""
    run = make_run(2)
    run.longhaul("train", "small.yaml")
    return run


@pytest.fixture(scope="module")
def exported(base: Run) -> Path:
    """That run, evaluated and exported."""
    results = base.path / "small" / "evaluation"
    for label, loss in (("step-000000002", 3.25), ("step-000000002-linear-4", 4.5)):
        (results / label).mkdir(parents=True)
        values = {"positions": {"loss": loss}, "curve": [1, 2]}
        (results / label / "results.json").write_text(json.dumps(values))
    (results / "step-000000001").mkdir()
    (results / "step-000000001" / "results.json").write_text('{"loss": 7.125}')
    result = base.longhaul("export", "small", "exported/folder")
    assert "written: exported/folder/model.safetensors" in result.stdout
    return Path(base.path / "exported" / "folder")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def refused(result: Any, message: str) -> None:
    assert result.returncode == 2, result.stderr
    assert re.match(f"longhaul: {message}", result.stderr), result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr


def test_the_folder_holds_what_transformers_looks_for(exported: Path, base: Run) -> None:
    files = sorted(file.name for file in exported.iterdir())
    assert [name for name in files if not name.endswith(".py")] == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    code = [name for name in files if name.endswith(".py")]
    # Names end in one hash of the code, so that no other export has modules of these names.
    digest = file_of(code, "architecture").removeprefix("architecture_")
    assert {f"{name}_{digest}" for name in ("configuration_longhaul", "modeling_longhaul")} < {
        *code
    }
    assert all(name.endswith(f"_{digest}") for name in code)
    # The kind of the run, what it is built on, and no other kind.
    attention = [name for name in code if name.startswith("modules_attention_")]
    assert f"modules_attention_conformal_sympow_{digest}" in attention
    assert f"modules_attention_sympow_{digest}" in attention
    assert f"modules_attention_softmax_{digest}" not in attention
    # transformers copies the files that it finds by the relative imports of the model's file.
    found = get_relative_import_files(exported / f"modeling_longhaul_{digest}")
    assert {*code} == {Path(file).name for file in found} | {f"modeling_longhaul_{digest}"}
    for name in code:
        assert {*get_imports(exported / name)} <= {
            "torch",
            "transformers",
            *sys.stdlib_module_names,
        }
    same(weights(exported), load_trained_model(base.path / "small").model.state_dict())
    # Nothing is left beside it, and it is as readable as other folders.
    assert [entry.name for entry in exported.parent.iterdir()] == ["folder"]
    assert exported.stat().st_mode == exported.parent.stat().st_mode


def test_the_model_card_tells_where_the_model_comes_from(exported: Path, base: Run) -> None:
    card = (exported / "README.md").read_text()
    commit = json.loads((base.path / "small" / "environment.json").read_bytes())["commit"]
    for told in (
        "library_name: transformers",
        "needs torch and transformers 5",
        "conformal_sympow",
        "degree 2",
        "1,024 of 1,024 tokens, 2 updates of 512",
        "64 tokens",
        f"longhaul {commit}",
        "| step-000000002 | positions.loss | 3.25 |",
        "| step-000000002-linear-4 | positions.loss | 4.5 |",
    ):
        assert told in card, told
    assert "7.125" not in card  # another checkpoint's


def test_no_path_of_this_machine_is_published(exported: Path, base: Run) -> None:
    manifest = load_run_config(base.path / "small" / "config.yaml").data.manifest
    for private in (base.path, Path(manifest).parent, Path.home(), CHECKOUT):
        for file in exported.iterdir():
            assert f"{private}/".encode() not in file.read_bytes(), (private, file)


def test_what_cannot_be_exported_is_refused(
    exported: Path, base: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def try_export(*arguments: str) -> Any:
        return base.longhaul("export", *arguments, check=False)

    entries = len(list(exported.iterdir()))
    full = f"exported/folder: found {entries} entries, wanted a new or empty folder"
    refused(try_export("small", "exported/folder"), full)
    refused(try_export("small", "small.yaml"), "small.yaml: found a file, wanted a new or empty")
    refused(try_export("small", "small.yaml/new"), "small.yaml/new: found the file ")
    refused(try_export("nowhere", "new"), "nowhere: found no such folder, wanted a run folder")
    (base.path / ".new.unfinished").mkdir()
    with (base.path / ".new.unfinished" / ".lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        busy = try_export("small", "new")
    assert busy.returncode == 1
    assert "new: found another process writing it, wanted one at a time" in busy.stderr
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "mounted")
    with pytest.raises(ValueError, match="mounted: found a mount point, wanted a new or empty"):
        export(base.path / "small", tmp_path / "mounted")
    begun = base.path / "begun"
    begun.mkdir()
    shutil.copy(base.path / "small" / "config.yaml", begun)
    refused(try_export("begun", "new"), "begun: found no intact checkpoint, wanted one")
    assert not (base.path / "new").exists()


def test_an_export_that_fails_leaves_nothing(
    base: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(export_folder, "write_card", fail)
    with pytest.raises(OSError, match="no space left"):
        export(base.path / "small", tmp_path / "new")
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000000002"
    shutil.copytree(base.path / "small", tmp_path / "run")
    (file,) = checkpoint.glob("model-*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"damaged: {file.name}"):
        export(checkpoint, tmp_path / "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_what_differs_from_the_run_is_not_exported(
    base: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export_with(change: Callable[[dict[str, str]], None]) -> None:
        def changed(kinds: Any) -> dict[str, str]:
            code = model_code(kinds)
            change(code)
            return code

        monkeypatch.setattr(export_folder, "model_code", changed)
        export(base.path / "small", tmp_path / "new")

    for module, old, new, where in (
        ("modules_block", "y = x + ", "y = x / 2 + ", "64 tokens"),
        ("modules_block", "y = x + ", "y = x / (1 + len(x[0]) // 65) + ", "192 tokens"),
        ("modules_attention_power", "project(x, Documents(x), s", "project(x / 2, Documents(x), s",
         "65 tokens and 8 more, one at a time"),
        ("modeling_longhaul", "(count - 1)", "(count - 2)", "a row with padding before it"),
    ):  # fmt: skip

        def change(code: dict[str, str], module: str = module, pair: Any = (old, new)) -> None:
            name = file_of(code, module)
            assert code[name].count(pair[0]) == 1
            code[name] = code[name].replace(*pair)

        message = f"logits of the exported conformal_sympow that differ.* for {where}, wanted"
        with pytest.raises(RuntimeError, match=message):
            export_with(change)
    with pytest.raises(ValueError, match="conformal_sympow, whose exported code does not run: Mo"):
        export_with(lambda code: code.pop(file_of(code, "modules_rotary")))
    monkeypatch.undo()
    weights = export_folder.write_shards

    def round_weights(folder: Path, *arguments: Any) -> Any:
        files = weights(folder, *arguments)
        tensors = load_file(files[0])
        save_file({k: v.bfloat16().float() for k, v in tensors.items()}, files[0])
        return files

    monkeypatch.setattr(export_folder, "write_shards", round_weights)
    with pytest.raises(RuntimeError, match="wanted at most 1e-05"):
        export(base.path / "small", tmp_path / "new")
    monkeypatch.undo()

    def begin_with_another(token: str, token_id: int) -> dict[str, Any]:
        return begin_with(token, token_id - 1)

    begin_with = tokenizer_files._begin_with
    monkeypatch.setattr(tokenizer_files, "_begin_with", begin_with_another)
    with pytest.raises(RuntimeError, match=r"tokenizer: found ids \[255, .* wanted \[256, "):
        export(base.path / "small", tmp_path / "new")
    assert not list(tmp_path.iterdir())
    assert not [name for name in sys.modules if name.startswith("longhaul_export_")]


@pytest.mark.parametrize("failure", [OSError(5, "Input/output error"), MemoryError()])
def test_weights_that_cannot_be_read_back_are_no_fault_of_the_kind(
    base: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def fail(*_: Any) -> None:
        raise failure

    monkeypatch.setattr("longhaul.pipeline.runs.exported.safe_open", fail)
    wanted = "model.safetensors cannot be read: Input/output error"
    with pytest.raises((OSError, MemoryError), match=wanted if failure.args else "^$"):
        export(base.path / "small", tmp_path / "new")
    assert not list(tmp_path.iterdir())


@pytest.mark.wide
def test_what_a_killed_export_left_goes_with_the_next(base: Run, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, tokenizers; from longhaul.pipeline.exporting import folder\n"
        "folder.write_card = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)\n"
        "folder.export(sys.argv[1], sys.argv[2])"
    )
    target = tmp_path / "new"
    command_line = [sys.executable, "-P", "-c", code, str(base.path / "small"), str(target)]
    assert subprocess.run(command_line, timeout=60).returncode == -signal.SIGTERM
    (left,) = tmp_path.iterdir()
    (left / "model-00001-of-00009.safetensors").touch()
    names = [file.name for file in export(base.path / "small", target)]
    assert list(tmp_path.iterdir()) == [target]
    assert names == sorted(file.name for file in target.iterdir())
    assert "model-00001-of-00009.safetensors" not in names


def test_an_empty_folder_behind_a_link_is_filled(base: Run, tmp_path: Path) -> None:
    (tmp_path / "disk" / "real").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "real")
    export(base.path / "small", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "real" / "config.json").is_file()


def test_transformers_is_not_needed(
    base: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    export(base.path / "small", tmp_path / "new")
    assert (tmp_path / "new" / "config.json").is_file()


def test_shards_of_any_size_hold_the_same(base: Run, exported: Path, tmp_path: Path) -> None:
    export(base.path / "small", tmp_path / "new", shard_bytes=30_000)
    shards = sorted(tmp_path.glob("new/*.safetensors"))
    assert len(shards) > 3
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    same(weights(tmp_path / "new"), weights(exported))
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_bytes())
    for file in shards:
        names = set(load_file(file))
        assert names == {k for k, name in index["weight_map"].items() if name == file.name}
        sizes = [4 * value.numel() for value in load_file(file).values()]
        assert len(sizes) == 1 or sum(sizes) <= 30_000


@pytest.mark.wide
@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.strategy=fsdp"],
        pytest.param(["trainer.strategy=ddp"], marks=pytest.mark.soak),
        *(
            pytest.param(
                ["trainer.strategy=deepspeed", f"trainer.deepspeed_stage={stage}"],
                marks=pytest.mark.soak,
            )
            for stage in (1, 2, 3)
        ),
    ],
)
def test_a_checkpoint_of_two_ranks_is_exported(
    make_run: Callable[[int], Run], tmp_path: Path, overrides: list[str]
) -> None:
    run = make_run(1)
    run.longhaul("train", "small.yaml", "trainer.devices=2", *overrides)
    (checkpoint,) = (run.path / "small" / "checkpoints").iterdir()
    assert len(list(checkpoint.glob("model-*.safetensors"))) == 2
    export(checkpoint, tmp_path / "new")
    same(weights(tmp_path / "new"), load_trained_model(checkpoint).model.state_dict())


MEASURE = """
import sys, threading, time, psutil, tokenizers
from longhaul.pipeline.exporting.folder import export
export(sys.argv[3], sys.argv[4])  # which loads what is imported where it is first needed
process, peak, done = psutil.Process(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.001)  # else each op of the export would wait for this thread's turn
before = process.memory_info().rss
thread = threading.Thread(target=watch)
thread.start()
export(sys.argv[1], sys.argv[2], shard_bytes=30_000_000)
done = True
thread.join()
print(peak - before)
"""


@pytest.mark.wide
def test_memory_is_that_of_a_few_blocks(base: Run, tmp_path: Path) -> None:
    """Of a model of 217 MB in one file of its checkpoint, in shards of 30 MB, blocks of 20 MB."""
    from longhaul.configs import to_yaml
    from longhaul.pipeline.checkpoints.store import CheckpointStore

    wide = ["model.width=640", "model.vocabulary=7800", "model.layers=10", "model.heads=10"]
    config = load_run_config(base.path / "small.yaml", wide)
    model = LanguageModel(config.model)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(config))
    store = CheckpointStore(run / "checkpoints", keep_last=1)
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    assert sum(4 * tensor.numel() for tensor in tensors.values()) > 200_000_000
    progress = dataclasses.asdict(Progress(step=3, tokens=1))
    store.start(3, tensors, {"progress": progress, "shards_sha256": ""})
    store.wait()
    exports = [str(run), str(tmp_path / "new"), str(base.path / "small"), str(tmp_path / "small")]
    result = subprocess.run(
        [sys.executable, "-P", "-c", MEASURE, *exports],
        # malloc keeps what is freed in pieces below 32 MB, which tensors of larger models exceed.
        env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    largest = max(file.stat().st_size for file in (tmp_path / "new").glob("*.safetensors"))
    assert 25_000_000 < largest < 31_000_000
    print(f"peak {int(result.stdout):,} bytes, largest shard {largest:,}")
    # The check holds a block in float32 and float64, one tensor more and a mapped file of 20 MB:
    # about 120 MB.
    assert int(result.stdout) < 5 * largest
    same(weights(tmp_path / "new"), model.state_dict())


def begins_with(folder: Path, base: Run, *options: str) -> LanguageModel:
    config = load_run_config(base.path / "small.yaml", options)
    torch.manual_seed(1)
    model = LanguageModel(config.model)
    assert load_initial_weights(model, str(folder)) == folder
    return model


@pytest.mark.wide
def test_a_run_begins_with_what_was_exported(
    exported: Path, base: Run, make_run: Callable[[int], Run], tmp_path: Path
) -> None:
    same(begins_with(exported, base).state_dict(), weights(exported))
    export(base.path / "small", tmp_path / "parts", shard_bytes=30_000)
    model = begins_with(tmp_path / "parts", base, "model.attention.initial_state=learned")
    learned = {k for k in model.state_dict() if "initial_state" in k}
    assert learned
    same({k: v for k, v in model.state_dict().items() if k not in learned}, weights(exported))

    run = make_run(1)
    still = ("optim.schedule.name=constant", "optim.learning_rate=1e-30", "optim.weight_decay=0")
    run.longhaul("train", "small.yaml", f"trainer.start_from={exported}", *still)
    assert (
        f"the run begins with the weights of {exported}"
        in (run.path / "small" / "logs" / "train.log").read_text()
    )
    same(load_trained_model(run.path / "small").model.state_dict(), weights(exported))


def test_an_export_of_an_earlier_version_has_the_defaults_of_later_options(
    exported: Path, base: Run, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    shutil.copytree(exported, old)
    config = json.loads((old / "config.json").read_bytes())
    for name in ("norm", "norm_eps", "norm_order", "mlp", "mlp_width"):
        del config["longhaul"][name]
    for name in ("embedding_scale", "logit_softcap", "init"):
        del config["longhaul"][name]
    (old / "config.json").write_text(json.dumps(config))
    same(begins_with(old, base).state_dict(), weights(exported))
    # How the matrices began says nothing of what they mean.
    same(begins_with(exported, base, "model.init=llama").state_dict(), weights(exported))


def test_a_run_does_not_begin_with_another_model(exported: Path, base: Run, tmp_path: Path) -> None:
    def refuses(folder: Path, message: str, *options: str) -> None:
        with pytest.raises(ConfigError) as error:
            begins_with(folder, base, *options)
        assert str(error.value).startswith(f"trainer.start_from: {message}"), error.value

    found = "found model.attention.degree 2 in"
    refuses(exported, found, "model.attention.degree=4")
    refuses(exported, "found model.width 32 in", "model.width=64")
    refuses(exported, "found model.layers 2 in", "model.layers=3")
    refuses(exported, "found model.tied_head True in", "model.tied_head=false")
    refuses(exported, "found model.norm 'layer' in", "model.norm=rms")
    refuses(exported, "found model.parallel_residual False in", "model.parallel_residual=true")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "bloom"}')
    refuses(
        other,
        f"{other}/config.json: model_type: found 'bloom', wanted one that longhaul can read: "
        "longhaul, gpt2, llama",
    )
    (other / "config.json").write_text("[")
    refuses(other, f"{other}/config.json: ")
    shutil.copy(exported / "config.json", other)
    refuses(other, f"{other}: the weights cannot be read, found no model.safetensors, wanted")
    content = (exported / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(content[:-1])
    refuses(other, f"{other}: the weights cannot be read")
