"""What is typed is what is read: text stays text for every reader of YAML, numbers have units."""

import dataclasses
import io
import os
import random
import sys
import typing
from pathlib import Path

import pytest
import yaml
from everyday import everyday
from omegaconf import OmegaConf

from longhaul.configs import ConfigError, RunConfig, load_run_config, load_stored_config, to_yaml
from longhaul.configs.counts import parse_count, with_unit
from longhaul.configs.fields import (
    KIND,
    KINDS,
    Entries,
    Fields,
    Leaf,
    entry_class,
    fields_of_kind,
    run_fields,
)
from longhaul.configs.loader import to_dict
from longhaul.configs.schema import SlurmConfig, TrainerConfig
from longhaul.configs.values import read_values
from longhaul.datamodules.config import DataConfig
from longhaul.modules.attention import AttentionConfig, attention_config, registered_variants
from longhaul.modules.optim import OptimConfig

# What readers of YAML 1.1 or 1.2 take for something else than text, or for the end of it.
LIKE_OTHERS = [
    *("1e3", "25921e05", "1E5", "1_000", "010", "0o17", "0x1f", "0b11", "1:30", "190:20:30", "1."),
    *("+1", "-1", "-.5", ".5", ".inf", "-.INF", ".nan", "1e-3", "685_230.15", "12:00:00", "00"),
    *("yes", "No", "on", "OFF", "y", "N", "true", "False", "null", "Null", "~", "=", "<<", "???"),
    *("2001-12-14", "2001-12-14t21:59:43.10-05:00", "2026-01-01 10:00", "nan", "inf", "Infinity"),
    *(" a", "a ", "a: b", "a #b", "#a", "- a", "-", "?", "a:", ":", "[a]", "{a}", "*a", "&a", "!a"),
    *("|", ">", "%a", "@a", "`a", "'a'", '"a"', "'", '"', "", "a'b", "---", "...", "\U0001f600 a"),
    *("\t", "\\", "\\n", "ünï", "\u0085", "\u2028", "\ufeffa", "\x7f", "a, b", "{", "a" * 300),
]
# Those of them that `make test` writes and reads back one by one.
EVERYDAY = (
    *("1e3", "010", "0x1f", "1:30", "685_230.15", "12:00:00", "2001-12-14", ".nan", "yes", "null"),
    *("~", " a", "a: b", "a #b", "{", "\U0001f600 a"),
)


def random_texts(count: int) -> list[str]:
    draw = random.Random(0)
    pieces = [*LIKE_OTHERS, *"0123456789+-._:eExob ,#'\"\\{}[]&*!|>%@`~=<?\t", "\U0001f4a5", "é"]
    return ["".join(draw.choices(pieces, k=draw.randrange(1, 6))) for _ in range(count)]


def test_text_is_the_same_for_every_reader() -> None:
    texts = [*LIKE_OTHERS, *random_texts(400)]
    config = load_run_config("run/demo.yaml")
    slurm = dataclasses.replace(config.slurm, extra=[f"--{text}" for text in texts])
    text = to_yaml(dataclasses.replace(config, slurm=slurm))
    for read in (yaml.safe_load, yaml.full_load, lambda one: OmegaConf.load(io.StringIO(one))):
        assert list(read(text)["slurm"]["extra"]) == [f"--{one}" for one in texts]


@pytest.mark.parametrize(
    "typed", everyday((one for one in LIKE_OTHERS if one.strip() and one != "???"), EVERYDAY)
)
def test_a_typed_name_is_read_back_by_all(typed: str, tmp_path: Path) -> None:
    if typed[0] in "'\"" or any(ord(one) < 32 for one in typed):
        return  # a quoted name is what is in the quotes; the others are refused
    tree = read_values("run/demo.yaml", [f"tracking.experiment={typed}", f"name={typed}"]).tree
    assert (tree["name"], tree["tracking"]["experiment"]) == (typed, typed)
    config = load_run_config("run/demo.yaml", [f"name={typed}", f"slurm.account={typed}"])
    written, file = to_yaml(config), tmp_path / "config.yaml"
    file.write_text(written, encoding="utf-8")
    omegaconf, loaded = OmegaConf.load(io.StringIO(written)), load_run_config(file)
    for read in (yaml.safe_load(written), OmegaConf.to_container(omegaconf), to_dict(loaded)):
        assert read["name"] == typed
        assert read["slurm"]["account"] == (None if typed == "null" else typed)
    assert loaded == load_stored_config(file) == config


def test_plain_words_are_written_without_quotes() -> None:
    written = to_yaml(load_run_config("run/demo.yaml", ["name=my-run_2.a"]))
    assert "\nname: " not in written
    assert written.startswith("name: my-run_2.a\n")
    assert "manifest: data/stdlib/train\n" in written


@pytest.mark.parametrize("typed", ["1e3", "010", "12:00:00", "no", "2001-12-14", "0x1f", "1_0"])
def test_text_in_a_file_is_what_stands_there(typed: str, tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(
        f"inherits: [run/demo.yaml]\nname: {typed}\n"
        f"slurm: {{account: {typed}, extra: [-{typed}]}}\n"
    )
    tree = read_values(file).tree
    assert tree["name"] == tree["slurm"]["account"] == typed
    assert tree["slurm"]["extra"] == [f"-{typed}"]


@pytest.mark.parametrize("typed", ["010", "1:30", "0o17", "1,000", "4 k k", "4x", "1.5k1", "-4k"])
def test_what_two_readers_take_for_two_numbers_is_refused(typed: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"trainer.max_tokens: found '.*', wanted a valid integer"
    ):
        read_values("run/demo.yaml", [f"trainer.max_tokens={typed}"])
    file = tmp_path / "own.yaml"
    file.write_text(f"inherits: [run/demo.yaml]\ntrainer:\n  max_tokens: {typed}\n")
    with pytest.raises(
        ConfigError, match=f"^{file}: trainer.max_tokens: found '.*', wanted a valid integer"
    ):
        read_values(file)


@pytest.mark.parametrize(
    ("typed", "tokens"),
    [
        ("65_536", 65_536),
        ("1e9", 10**9),
        ("10B", 10**10),
        ("1.5M", 1_500_000),
        ("2G", 2 * 10**9),
        ("4k", 4000),
        ("4Ki", 4096),
        ("1mi", 1 << 20),
        ("1T", 10**12),
    ],
)
def test_numbers_have_units(typed: str, tokens: int) -> None:
    assert parse_count(typed, "--tokens") == tokens
    tree = read_values("run/demo.yaml", [f"trainer.max_tokens={typed}"]).tree
    assert tree["trainer"]["max_tokens"] == tokens


def test_bytes_may_be_written_with_a_b() -> None:
    for typed, found in (("200GB", 200 * 10**9), ("64GiB", 64 << 30), ("5M", 5_000_000)):
        values = read_values("run/demo.yaml", [f"data.cache_bytes={typed}"])
        assert values.tree["data"]["cache_bytes"] == found
    with pytest.raises(ConfigError, match=r"trainer.max_tokens: found '2GB', wanted a valid int"):
        read_values("run/demo.yaml", ["trainer.max_tokens=2GB"])


def test_k_of_a_length_is_a_power_of_two_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        tree = read_values("run/demo.yaml", ["data.context=3k"]).tree
        read_values("run/demo.yaml", ["data.context=3k"])
    assert tree["data"]["context"] == 3072
    assert parse_count("1M", "--contexts") == 1 << 20
    assert parse_count("64k", "--doc-tokens") == 65_536
    assert caplog.text.count("data.context: 3k is 3,072") == 1
    assert with_unit("1.0001k", "x") is None
    for typed in ("", "k", "1,000", "-1", "1e-3", "1.5", "٣"):
        with pytest.raises(ValueError, match=r"^--top-k: found '.*', wanted a whole number"):
            parse_count(typed, "--top-k")


@pytest.mark.parametrize("key", ["optim", "tracking", "model.layer_attention", "optim.schedule"])
def test_a_mapping_of_nothing_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: found {{}}, which changes nothing, wanted"):
        read_values("run/demo.yaml", [f"{key}={{}}"])


def test_the_file_of_a_refused_key_is_named(tmp_path: Path) -> None:
    parent, child = tmp_path / "parent.yaml", tmp_path / "child.yaml"
    parent.write_text("inherits: [run/demo.yaml]\noptim: {beta1: 2, beta2: 0.9}\n")
    child.write_text("inherits: [parent.yaml]\ntrainer: {sed: 1}\n")
    with pytest.raises(ConfigError, match=f"^{child}: trainer.sed: unknown key"):
        load_run_config(child)
    with pytest.raises(ConfigError, match=r"^model.widht: unknown key"):
        load_run_config(parent, ["model.widht=1"])
    with pytest.raises(ConfigError, match=f"^{parent}: optim.beta1: found 2"):
        load_run_config(parent, ["optim.beta2=0.8"])
    with pytest.raises(ConfigError, match=r"^run/demo.yaml: optim.tokens_per_update: found 8192"):
        load_run_config("run/demo.yaml", ["trainer.micro_batch=3"])
    with pytest.raises(ConfigError, match=r"^optim.beta1: found 3"):
        load_run_config(parent, ["optim.beta1=3"])


def test_a_tilde_in_paths_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "own.yaml"
    file.write_text("inherits: [run/demo.yaml]\ndata: {manifest: ~/a, cache_dir: ~/c~}\n")
    overrides = ["root=~", "tracking.uri=sqlite:///~/m.db", "trainer.start_from=~/run", "name=~"]
    config = load_run_config("~/own.yaml", overrides)
    assert (config.data.manifest, config.data.cache_dir) == (f"{tmp_path}/a", f"{tmp_path}/c~")
    assert (config.root, config.tracking.uri) == (str(tmp_path), f"sqlite:///{tmp_path}/m.db")
    assert (config.trainer.start_from, config.name) == (f"{tmp_path}/run", "~")
    slurm = ["slurm.container=~/i.sqsh", "slurm.container_mounts=[~/a:/b:ro, /c:/d]"]
    job = load_run_config("~/own.yaml", slurm).slurm
    assert job.container == f"{tmp_path}/i.sqsh"
    assert job.container_mounts == [f"{tmp_path}/a:/b:ro", "/c:/d"]
    assert not os.path.exists("~")


def hints_of(cls: typing.Any) -> Fields:
    fields: Fields = {}
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        if typing.get_origin(hint) is typing.ClassVar:
            continue
        if hint is AttentionConfig:
            fields[name] = KIND
        elif hint == dict[str, AttentionConfig]:
            fields[name] = KINDS
        elif (entry := entry_class(hint)) is not None:
            fields[name] = Entries(hints_of(entry), is_list=typing.get_origin(hint) is list)
        elif hasattr(hint, "__dataclass_fields__"):
            fields[name] = hints_of(hint)
        else:
            fields[name] = Leaf(hint)
    return fields


def test_keys_of_the_sources_are_those_of_the_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    # Bounds of one text are not equal as objects.
    assert repr(run_fields()) == repr(hints_of(RunConfig))
    found = {kind: fields_of_kind(kind) for kind in registered_variants()}
    assert found == {kind: hints_of(attention_config(kind)) for kind in registered_variants()}
    monkeypatch.delitem(sys.modules, "longhaul.modules.attention")
    assert {kind: fields_of_kind(kind) for kind in registered_variants()} == found
    with pytest.raises(ValueError, match="found 'sofmax', wanted one of alibi, "):
        fields_of_kind("sofmax")


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (DataConfig, {"manifest": "a", "context": "2"}, "data.context: found '2', wanted a valid"),
        (DataConfig, {"manifest": "a", "context": 0}, "data.context: found 0, wanted greater than"),
        (SlurmConfig, {"then": ["exprt"]}, "slurm.then.0: found 'exprt', wanted 'evaluate' or 'ex"),
        (SlurmConfig, {"cpus_per_task": 1.5}, "slurm.cpus_per_task: found 1.5, .* integer or null"),
        (TrainerConfig, {"max_tokens": True, "micro_batch": 1}, "trainer.max_tokens: found true, "),
        (OptimConfig, {"tokens_per_update": 1, "name": "sgd"}, "optim.name: found 'sgd', wanted"),
        (attention_config("zeros"), {"form": "note"}, "form: found 'note', wanted one of publish"),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_a_config_made_in_python_is_checked(
    cls: typing.Any, values: dict[str, typing.Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        cls(**values)
    assert "\n" not in str(caught.value)
