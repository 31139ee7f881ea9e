"""Strict configs: errors name the key, values survive a round trip."""

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest

from longhaul.configs import ConfigError, RunConfig, load_run_config, load_stored_config, to_yaml
from longhaul.configs.loader import flatten, to_dict
from longhaul.configs.yaml_text import parse_yaml
from longhaul.modules.attention import AttentionConfig, attention_config, registered_variants

CONFIGS = Path(str(resources.files("longhaul.configs")))


@pytest.mark.parametrize("kind", registered_variants())
def test_every_kind_is_the_same_after_yaml(kind: str, tmp_path: Path) -> None:
    overrides = [f"model.attention.kind={kind}"]
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(load_run_config("run/demo.yaml", overrides)))
    attention = load_run_config(file).model.attention
    assert isinstance(attention, attention_config(kind))
    assert attention.kind == kind


def test_command_line_wins_over_file_over_parent(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text("inherits: [run/demo.yaml]\ntrainer: {seed: 1}\nname: a")
    child = tmp_path / "child.yaml"
    child.write_text("inherits: [parent.yaml]\nname: b\ntrainer: {max_tokens: 7}")
    config = load_run_config(child, ["trainer.max_tokens=8"])
    assert (config.name, config.trainer.seed, config.trainer.max_tokens) == ("b", 1, 8)


def test_paths_of_an_inherited_run_begin_at_its_folder(tmp_path: Path) -> None:
    run, child = tmp_path / "runs" / "a", tmp_path / "child.yaml"
    run.mkdir(parents=True)
    (run / "DONE").touch()
    (run / "config.yaml").write_text(
        "inherits: [run/demo.yaml]\ndata: {manifest: data/train, validation_manifest: s3://a/b}\n"
        "trainer: {start_from: /c, branch_from: null}\ntracking: {uri: sqlite:///../../mlflow.db}"
    )
    child.write_text("inherits: [runs/a/config.yaml]\nname: b")
    config = load_run_config(child, ["data.cache_dir=d"])
    assert config.data.manifest == f"{run}/data/train"
    assert config.data.validation_manifest == "s3://a/b"
    assert (config.trainer.start_from, config.trainer.branch_from) == ("/c", None)
    assert config.tracking.uri == f"sqlite:///{run}/../../mlflow.db"
    # Those of any other file begin at the working folder.
    (run / "DONE").unlink()
    assert load_run_config(child, ["data.cache_dir=d"]).data.manifest == "data/train"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.attention.degre=2", "model.attention.degre: unknown key.* model.attention.degree"),
        (
            "model.layer_attention.0={kind: softmax, zzz: 5}",
            "0.zzz: unknown key, wanted one of sho",
        ),
        ("trainr.seed=2", "trainr: unknown key, the nearest known one is trainer"),
        ("model.attention.degree='2'", "model.attention.degree: found '2', wanted a valid integer"),
        ("model.attention.degree=3", "model.attention.degree: found 3, wanted an even number"),
        (
            "model.attention.kind=sofmax",
            "model.attention.kind: found 'sofmax', wanted one of .*softmax",
        ),
        (
            "trainer.activation_checkpointing=heavy",
            "trainer.activation_checkpointing: found 'heavy', wanted a valid integer or 'light'",
        ),
        ("trainer.activation_checkpointing=-1", "found -1, wanted .* equal to 0 or 'light'"),
        ("model.width=1.5", "model.width: found 1.5, wanted a valid integer"),
        ("model.width=true", "model.width: found true, wanted a valid integer"),
        ("optim.learning_rate=fast", "optim.learning_rate: found 'fast', wanted a valid number"),
        ("model.width=[1]", r"model.width: found \[1\], wanted a valid integer"),
        ("data=3", "data: expected a mapping of keys, got 3"),
        ("model=3", "model: expected a mapping of keys, got 3"),
        ("trainer=[1,2]", r"trainer: expected a mapping of keys, got \[1, 2\]"),
        ("model.attention=2", "model.attention: expected a mapping of keys, got 2"),
        ("model.attention.kind=[a]", "model.attention.kind: expected str"),
        ("model.width=[1", "command line: while parsing"),
        ("optim.schedule=[1]", r"optim.schedule: expected a mapping of keys, got \[1\]"),
        ("data.context=null", "data.context: "),
        ("trainer.strategy=dp", "trainer.strategy: found 'dp', wanted 'single', 'ddp', 'fsdp' or"),
        ("trainer.devices=2", "trainer.strategy: found single with 2 processes, wanted ddp"),
        (
            "trainer={start_from: a, branch_from: b}",
            "trainer.branch_from: found with trainer.start_from, wanted one of them",
        ),
        ("name=a/b", "name: found 'a/b'"),
        ("tracking.uri=file:///x", "tracking.uri: found 'file:///x'"),
        ("tracking.uri=sqlite:////me/.bashrc?.db", "tracking.uri: found 'sqlite:////me/.bashrc"),
        ("optim.schedule.name=step", "optim.schedule.name: found 'step'"),
        ("optim.name=adam", "optim.weight_decay: found 0.1, wanted 0 for adam"),
        ("model.width=190", "model.width: found 190, wanted a multiple of 2 x model.heads = 12"),
        ("seed", "command line: found 'seed', wanted key.sub=value"),
        (
            "model.layer_attention.4.kind=softmax",
            "model.layer_attention: found '4', wanted a number or slice of the layers 0 to 3",
        ),
        ("model.layer_attention.4::2.kind=softmax", "model.layer_attention: found '4::2', wanted"),
        ("model.layer_attention.-1.kind=softmax", "model.layer_attention: found '-1', wanted"),
        ("model.layer_attention.::0.kind=softmax", "model.layer_attention: found '::0', wanted"),
        ("model.layer_attention.0:1:1:1.kind=softmax", "model.layer_attention: found '0:1:1:1'"),
        ("model.layer_attention.last.kind=softmax", "model.layer_attention: found 'last', wanted"),
        ("model.layer_attention={1: {kind: softmax}}", "found the number 1 as a key, wanted text"),
        ("model.layer_attention=2", "model.layer_attention: expected a mapping of keys, got 2"),
        ("model.layer_attention.1=2", "model.layer_attention.1: expected a mapping .*, got 2"),
        ("model.layer_attention.1={}", "model.layer_attention.1.kind: missing, wanted one of"),
        ("model.norm=rmsnorm", "model.norm: found 'rmsnorm', wanted 'layer', 'rms' or 'rms_off"),
        ("model.norm_order=Pre", "model.norm_order: found 'Pre', wanted 'pre', 'post', 'sandwi"),
        ("model.mlp=silu", "model.mlp: found 'silu', wanted 'gelu', 'gelu_erf', 'relu2', 'swigl"),
        ("model.init=xavier", "model.init: found 'xavier', wanted 'gpt2', 'normal', 'olmo', 'll"),
        ("model.qk_norm=all", "model.qk_norm: found 'all', wanted 'none', 'head' or 'full'"),
        (
            "model.attention={kind: sympow, rotary_scaling: {rope_type: ntk}}",
            "model.attention.rotary_scaling.rope_type: found 'ntk', wanted 'none', 'linear', 'll",
        ),
        ("model.layer_attention.1.kind=sofmax", "model.layer_attention.1.kind: found 'sofmax'"),
        (
            "model.layer_attention.3::4={kind: sympow, degre: 4}",
            "model.layer_attention.3::4.degre: unknown key.* model.layer_attention.3::4.degree",
        ),
        (
            "model.layer_attention.3::4={kind: sympow, degree: '2'}",
            "model.layer_attention.3::4.degree: found '2', wanted a valid integer",
        ),
        (
            "model.layer_attention.3::4={kind: sympow, chunk_size: 0}",
            "model.layer_attention.3::4.chunk_size: found 0, wanted 1 or more",
        ),
    ],
)
def test_a_mistake_is_reported_in_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_run_config("run/demo.yaml", [override])
    assert "\n" not in str(caught.value)


def test_muon_is_refused_where_the_optimizer_sees_no_matrices() -> None:
    with pytest.raises(ConfigError, match=r"optim.name: found muon with .* deepspeed, .* wanted"):
        load_run_config("run/demo.yaml", ["optim.name=muon", "trainer.strategy=deepspeed"])


def test_a_required_key_that_is_missing_is_named(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "inherits: [data/stdlib.yaml]\nname: a\nmodel: {attention: {kind: softmax}}\n"
        "data: {context: 8}\noptim: {tokens_per_update: 8}\ntrainer: {micro_batch: 1}"
    )
    with pytest.raises(ConfigError, match=r"trainer.max_tokens: missing"):
        load_run_config(file)


def test_another_kind_keeps_the_options_that_it_has(tmp_path: Path) -> None:
    degree = "model.attention.degree=4"
    config = load_run_config("run/demo.yaml", [degree, "model.attention.kind=sympow"])
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config) + "inherits: []")
    gated = load_run_config(file, ["model.attention.kind=sympow_gated"]).model.attention
    assert (gated.kind, gated.degree) == ("sympow_gated", 4)  # type: ignore[attr-defined]
    softmax = load_run_config(file, ["model.attention.kind=softmax"]).model.attention
    assert softmax == attention_config("softmax")(longest_document=65_536)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"model.attention.degree: unknown key"):
        load_run_config(file, ["model.attention.kind=softmax", degree])


def test_a_context_that_hardly_divides_blocks_is_blamed_first() -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config("run/demo.yaml", ["data.context=300"])
    message = str(caught.value)
    assert message.startswith("data.context: found 300 with optim.tokens_per_update 8192, which")
    assert "wanted data.context 256, or optim.tokens_per_update 7200 or 9600 if" in message
    load_run_config("run/demo.yaml", ["data.context=256"])


def test_indivisible_update_says_which_number_to_change_to_what() -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config("run/demo.yaml", ["optim.tokens_per_update=10000"])
    message = str(caught.value)
    assert "found 10000" in message
    assert "data.context 512 x trainer.micro_batch 8 x 1 ranks" in message
    assert "change it to 8192 or 12288" in message
    for tokens in (8192, 12288):
        load_run_config("run/demo.yaml", [f"optim.tokens_per_update={tokens}"])


def test_indivisible_micro_batch_suggests_one_that_fits() -> None:
    overrides = ["optim.tokens_per_update=8192", "trainer.micro_batch=5"]
    with pytest.raises(ConfigError, match=r"or trainer.micro_batch to 4$"):
        load_run_config("run/demo.yaml", overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "found '- 1', wanted a mapping of keys"),
        ("", "found nothing, wanted a mapping of keys"),
        ("some words", "found 'some words', wanted a mapping of keys"),
        ("3", "found '3', wanted a mapping of keys"),
        ("a: [", "while parsing"),
        ("name: a\nname: b", "found duplicate key name"),
        ("? [a, b]\n: 1", "found a key that is a list, wanted text"),
        ("data: {? {a: b} : 1}", "found a key that is a mapping, wanted text"),
        ("a: " + "[" * 100_000, "found more than 100 brackets inside one another"),
        ("inherits: [self.yaml]", "inherits itself"),
        ("inherits: [none.yaml]", "found no file none.yaml"),
        ("inherits: none.yaml", "wanted a list of file names"),
        ("inherits: 3", "wanted a list of file names"),
        ("inherits:", "wanted a list of file names"),
    ],
)
def test_a_broken_file_is_named_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "self.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_run_config(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: demo", "name: ${oc.env:PATH}", r"name: found '\$\{oc.env:PATH\}', wanted a plain"),
        ("name: demo", "inherits: [run/demo.yaml]", "inherits: unknown key"),
        ("layers: 4", "layers: 1000000000", "layers: found 1000000000, wanted 1 or more"),
        ("layers: 4", f"layers: {10**30}", f"layers: found {10**30}, wanted a finite number"),
        ("layers: 4", f"layers: {10**400}", "layers: found 10+[.][.][.]0+, wanted a finite number"),
        ("hang_seconds: 1800.0", "hang_seconds: .inf", "hang_seconds: found inf, wanted a finite"),
        ("hang_seconds: 1800.0", "hang_seconds: .nan", "hang_seconds: found nan, wanted a finite"),
        (
            "epsilon: 1.0e-08",
            "epsilon: 2026-13-45",
            "epsilon: found .2026-13-45., wanted a valid number",
        ),
        ("learning_rate:", "epsilon: 1.0\n  learning_rate:", "found duplicate key epsilon"),
        ("name: demo", "name: !!python/object/apply:os.getcwd []", "could not determine a con"),
        ("name: demo", "name: " + "{" * 100_000, "found more than 100 brackets inside"),
        ("name: demo", "a: &a [1, *a]", "found deeper nesting than 20"),
    ],
)
def test_a_stored_config_is_taken_as_it_is(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    config = load_run_config("run/demo.yaml")
    file.write_text(to_yaml(config))
    assert load_stored_config(file) == config
    assert old in to_yaml(config)
    file.write_text(to_yaml(config).replace(old, new, 1))
    with pytest.raises(ConfigError, match=f"^{file}: [^\n]*{message}[^\n]*$"):
        load_stored_config(file)


def test_aliases_in_a_stored_config_do_not_multiply(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    names = "abcdefghi"
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    for old, new in itertools.pairwise(names):
        lines.append(f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]")
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="found more than 100000 values"):
        load_stored_config(file)


@pytest.mark.parametrize("load", [load_stored_config, load_run_config])
@pytest.mark.parametrize(
    "merges",
    ["{<<: [*{0}, *{0}, *{0}, *{0}, *{0}, *{0}]}", "{<<: [{<<: [*{0}, *{0}, *{0}]}, *{0}, *{0}]}"],
)
def test_merges_in_merges_do_not_multiply(
    tmp_path: Path, load: Callable[[Path], object], merges: str
) -> None:
    file = tmp_path / "config.yaml"
    lines = ["a: &a {x: 1}"]
    for old, new in itertools.pairwise("abcdefgh"):
        lines.append(f"{new}: &{new} {merges.replace('{0}', old)}")
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=f"^{file}: found more than 100000 values$"):
        load(file)


def test_a_merge_gives_what_the_mapping_lacks() -> None:
    found = parse_yaml("{a: &a {x: 1, y: 2}, b: {<<: [*a, {y: 3, z: 3}], x: 4}}")
    assert found["b"] == {"x": 4, "y": 2, "z": 3}


def test_no_number_takes_long_to_read() -> None:
    """In YAML 1.1, 1:30 is a number to the base of 60, whose digits are multiplied one by one."""
    assert parse_yaml("a: " + "1:" * 20_000 + "1")["a"].startswith("1:1:")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.hang_seconds=.inf", "trainer.hang_seconds: found inf, wanted a finite number"),
        ("trainer.stop_seconds=.nan", "trainer.stop_seconds: found nan, wanted a finite number"),
        ("optim.gradient_clip=.inf", "optim.gradient_clip: found inf, wanted a finite number"),
        (
            "trainer.hang_seconds=1e9",
            "trainer.hang_seconds: found 1000000000.0, wanted less than or equal to 100000000",
        ),
        (f"trainer.seed={10**30}", f"trainer.seed: found {10**30}, wanted a finite number"),
        # No float is as large.
        (f"trainer.seed={10**400}", "trainer.seed: found 10+[.][.][.]0+, wanted a finite number"),
        (f"model.layers={10**400}", "model.layers: found 10+[.][.][.]0+, wanted a finite number"),
        (f"data.context={10**400}", "data.context: found 10+[.][.][.]0+, wanted a finite number"),
        (f"data.workers={10**400}", "data.workers: found 10+[.][.][.]0+, wanted a finite number"),
        (f"trainer.nodes=-{10**400}", "trainer.nodes: found -10+[.][.][.]0+, wanted a finite"),
        (f"trainer.seed=0x{'f' * 5000}", "trainer.seed: found a large int, wanted a finite"),
        ("trainer.devices=1e300", r"trainer.devices: found 1e\+300, wanted a finite number"),
        (
            "model.layers=1000000000",
            "model.layers: found 1000000000, wanted 1 or more, at most 1024",
        ),
        ("model.width=1000000000", "model.width: found 1000000000, wanted 1 or more, at most"),
        (
            "data.workers=1000000000",
            "data.workers: found 1000000000, wanted less than or equal to 4096",
        ),
        (
            "trainer.micro_batch=1000000000",
            "trainer.micro_batch: found 1000000000, wanted less than or equal to 1048576",
        ),
    ],
)
def test_numbers_that_nothing_could_run_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        load_run_config("run/demo.yaml", [override])


def test_a_context_of_the_command_line_may_be_any_number() -> None:
    data = load_run_config("run/demo.yaml").data
    with pytest.raises(ValueError, match=r"^data.context: found 10+[.][.][.]0+, wanted less than"):
        dataclasses.replace(data, context=10**400)


def test_flatten_names_every_leaf() -> None:
    flat = flatten(to_dict(load_run_config("run/demo.yaml")))
    assert flat["model.attention.kind"] == "conformal_sympow"
    assert flat["optim.schedule.name"] == "wsd"
    assert not any(isinstance(value, dict) for value in flat.values())


HYBRID = """
inherits: [run/demo.yaml]
model:
  layers: 8
  layer_attention:
    "3::4": {kind: softmax}
    "7": {kind: sympow, degree: 4}
    ":1": {kind: sympow_gated}
"""


def hybrid(tmp_path: Path, *overrides: str) -> RunConfig:
    file = tmp_path / "hybrid.yaml"
    file.write_text(HYBRID)
    return load_run_config(file, overrides)


def test_a_layer_has_the_kind_of_its_last_matching_entry(tmp_path: Path) -> None:
    model = hybrid(tmp_path).model
    kinds = [model.attention_of(layer).kind for layer in range(8)]
    base = ["conformal_sympow"] * 2
    assert kinds == ["sympow_gated", *base, "softmax", "conformal_sympow", *base, "sympow"]
    assert model.kinds == ("sympow_gated", "conformal_sympow", "softmax", "sympow")


def test_a_hybrid_keeps_the_order_of_its_entries_in_yaml(tmp_path: Path) -> None:
    config = hybrid(tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    again = load_run_config(file)
    assert again == config
    assert list(again.model.layer_attention) == ["3::4", "7", ":1"]
    flat = flatten(to_dict(config))
    assert flat["model.layer_attention.3::4.kind"] == "softmax"
    assert flat["model.layer_attention.7.degree"] == 4


def test_another_kind_of_a_layer_keeps_the_options_that_it_has(tmp_path: Path) -> None:
    kind = "model.layer_attention.7.kind"
    gated = hybrid(tmp_path, f"{kind}=sympow_gated").model.attention_of(7)
    assert gated == attention_config("sympow_gated")(degree=4)  # type: ignore[call-arg]
    softmax = hybrid(tmp_path, f"{kind}=softmax").model.attention_of(7)
    assert softmax == attention_config("softmax")()
    deeper = hybrid(tmp_path, "model.layer_attention.7.degree=6").model.attention_of(7)
    assert deeper == attention_config("sympow")(degree=6)  # type: ignore[call-arg]


def test_a_kind_argument_keeps_the_options_that_the_kind_has(tmp_path: Path) -> None:
    overrides = ["model.attention.degree=4", "model.attention.qk_norm=true"]
    gated = load_run_config("run/demo.yaml", overrides, kind="sympow_gated").model.attention
    assert gated == attention_config("sympow_gated")(degree=4, qk_norm=True)  # type: ignore[call-arg]
    softmax = load_run_config("run/demo.yaml", overrides, kind="softmax").model.attention
    assert softmax == attention_config("softmax")()


def nested_configs(cls: type) -> set[type]:
    """The config class and all dataclasses in its fields, every registered kind included."""
    found = {cls}
    for hint in typing.get_type_hints(cls).values():
        for one in (hint, *typing.get_args(hint)):
            if one is AttentionConfig:
                found |= {attention_config(kind) for kind in registered_variants()}
            elif dataclasses.is_dataclass(one):
                found |= nested_configs(one)  # type: ignore[arg-type]
    return found | {base for one in found for base in one.__mro__ if dataclasses.is_dataclass(base)}


CONFIG_CLASSES = sorted(nested_configs(RunConfig), key=lambda cls: cls.__qualname__)


@pytest.mark.parametrize("cls", CONFIG_CLASSES, ids=lambda cls: cls.__qualname__)
def test_every_field_is_followed_by_a_docstring_of_one_line(cls: type) -> None:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    for statement, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or "ClassVar" in ast.dump(statement.annotation):
            continue
        assert isinstance(following, ast.Expr), ast.unparse(statement)
        assert isinstance(following.value, ast.Constant), ast.unparse(statement)
        text = following.value.value
        assert isinstance(text, str), ast.unparse(statement)
        assert text.endswith("."), text
        assert "\n" not in text, text


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("folder", "config: found the folder folder, wanted a YAML file"),
        ("empty.yaml", "empty.yaml: found nothing, wanted a mapping of keys"),
        ("text.yaml", "text.yaml: found 'hello', wanted a mapping of keys"),
        ("list.yaml", "list.yaml: found '- a', wanted a mapping of keys"),
        ("child.yaml", "child.yaml: inherits: found no file run/dmo.yaml and no such preset, the "),
        ("model.width=3", "config: found 'model.width=3', wanted a YAML file or a preset before"),
        ("run/demo", "found no file run/demo and no such preset, the nearest preset is run/demo.y"),
        ("softmax-256", "the nearest preset is run/paper/softmax-256.yaml"),
        ("llama-340m", "the nearest preset is run/llama-340m.yaml"),
        ("xyzzy", "config: found no file xyzzy and no such preset, wanted a YAML file"),
    ],
)
def test_what_is_no_config_is_named(
    path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    files = {"empty": "", "text": "hello", "list": "- a", "child": "inherits: [run/dmo.yaml]"}
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_run_config(path)
    assert message in str(raised.value)


def test_whole_numbers_may_be_written_with_an_exponent(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("inherits: [run/demo.yaml]\ndata: {validation_tokens: 3.0e4}\n")
    config = load_run_config(file, ["trainer.max_tokens=1e6", "model.attention.degree=4e0"])
    found = (config.trainer.max_tokens, config.data.validation_tokens, config.model.attention)
    assert found == (1_000_000, 30_000, attention_config("conformal_sympow")(degree=4))
    assert all(type(one) is int for one in found[:2])
    for value in ("1.5", "1e-3"):
        with pytest.raises(
            ConfigError, match=r"trainer\.max_tokens: found .*, wanted a valid integer"
        ):
            load_run_config(file, [f"trainer.max_tokens={value}"])
