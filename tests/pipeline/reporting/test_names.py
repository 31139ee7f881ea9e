"""Names of variants and labels, and the thinning of curves, without a store."""

import argparse
import dataclasses
import math

from longhaul.configs import RunConfig, load_run_config
from longhaul.configs.schema import TrackingConfig
from longhaul.modules.attention import registered_variants
from longhaul.pipeline.commands import report
from longhaul.pipeline.evaluation.figures import KIND_COLOURS
from longhaul.pipeline.evaluation.labels import Label, parse_label
from longhaul.pipeline.reporting.runs import Data, Point
from longhaul.pipeline.reporting.training import _thinned
from longhaul.pipeline.reporting.variants import looks, name_variants
from longhaul.pipeline.tracking.mlflow_limits import without_secrets


def config(*overrides: str) -> RunConfig:
    return load_run_config("run/demo.yaml", overrides)


def test_variants_are_named_by_what_they_differ_in() -> None:
    configs = [
        config("model.attention.kind=softmax", "data.context=128"),
        config("model.attention.kind=softmax", "trainer.seed=3"),
        config("optim.learning_rate=0.001"),
        config("optim.learning_rate=0.01", "model.attention.degree=4"),
        config("optim.learning_rate=0.01"),
    ]
    names = name_variants(configs, [Data("gpt2/train", "a" * 64)] * len(configs))
    assert names[:2] == ["softmax", "softmax"]
    assert names[2:] == [
        "conformal_sympow p=2, learning_rate=0.001",
        "conformal_sympow p=4",
        "conformal_sympow p=2, learning_rate=0.01",
    ]
    short = config("data.short_first=[{context: 128, until_tokens: 9000}]")
    names = name_variants([config(), short], [Data("gpt2/train", "a" * 64)] * 2)
    assert names == [
        "conformal_sympow p=2",
        "conformal_sympow p=2, short_first=[{'context': 128, 'until_tokens': 9000}]",
    ]
    many = looks({f"variant {index:02d}": "softmax" for index in range(70)})
    assert len(set(many.values())) == 70


def test_options_at_their_default_are_not_in_names() -> None:
    softmax, biases = "model.attention.kind=softmax", "model.biases=true"
    neox = (biases, "model.embedding_norm=false", "optim.learning_rate=0.001")
    every = [config(softmax, "optim.learning_rate=6e-4"), config(softmax, *neox), config(softmax)]
    assert name_variants(every, [Data("gpt2/train", "a" * 64)] * len(every)) == [
        "softmax",
        "softmax, embedding_norm=False, biases=True, learning_rate=0.001",
        "softmax, learning_rate=0.002",
    ]
    # Two settings of one last name are both named, or these two would look alike.
    layer = 'model.layer_attention={"0":{kind: linear, rotary_base: 500.0}}'
    other = 'model.layer_attention={"0":{kind: linear}}'
    mixed = [config(softmax, layer), config(softmax, other, "model.attention.rotary_base=500")]
    names = name_variants(mixed, [Data("gpt2/train", "a" * 64)] * len(mixed))
    assert [name.partition(", ")[2] for name in names] == [
        "rotary_base=10000, rotary_base=500",
        "rotary_base=500, rotary_base=10000",
    ]


def test_data_are_told_apart_by_their_hash_and_not_by_their_path() -> None:
    here, elsewhere = "data.manifest=data/mine/train", "data.manifest=../../data/mine/train"
    softmax = "model.attention.kind=softmax"
    a, b, c = (Data("mine/train", one * 64) for one in "abc")
    configs = [config(here), config(elsewhere)]
    # The same shards at another path, or in a copy of another name, are the same data.
    for other in (a, Data("copy/train", a.sha256)):
        assert name_variants(configs, [a, other]) == ["conformal_sympow p=2"] * 2
    # Other shards at the same path are other data, also for another kind.
    configs = [config(here), config(here), config(here, softmax), config(here)]
    names = name_variants(configs, [a, b, c, Data("gpt2/train", "d" * 64)])
    assert names == [
        "conformal_sympow p=2, data=mine/train aaaaaaaa",
        "conformal_sympow p=2, data=mine/train bbbbbbbb",
        "softmax, data=mine/train cccccccc",
        "conformal_sympow p=2, data=gpt2/train",
    ]


def test_a_kind_has_one_colour_and_each_of_its_variants_a_marker() -> None:
    known = ("softmax", "linear", "sympow")
    own = [f"own{index:02d}" for index in range(19)]
    kinds = {f"{kind}, lr={rate}": kind for kind in (*known, *own) for rate in (1, 2, 3)}
    found = looks(kinds)
    colours = {kind: {found[name].colour for name in kinds if kinds[name] == kind} for kind in own}
    assert all(len(of_kind) == 1 for of_kind in colours.values())
    # Kinds of ours have the colour of the documentation's figures, and nobody else has it.
    for kind in known:
        assert {found[name].colour for name in kinds if kinds[name] == kind} == {KIND_COLOURS[kind]}
        assert all({KIND_COLOURS[kind]} != of_kind for of_kind in colours.values())
    assert looks({"a": "softmax", "b": "zeros"})["b"].colour == KIND_COLOURS["zeros"]
    assert len(set(found.values())) == len(kinds)
    # Beside the marker, the line tells those of one colour apart: there are 18 free colours.
    shared = [look for name, look in found.items() if kinds[name] in ("own00", "own18")]
    assert len({look.colour for look in shared}) == 1
    assert len({look.line for look in shared[:3]}) == 3
    assert len({look.colour for look in looks(dict.fromkeys("xyz", "a")).values()}) == 3
    assert len(set(KIND_COLOURS.values())) == len(KIND_COLOURS)
    assert set(KIND_COLOURS) == set(registered_variants())


def test_long_curves_are_means_of_equal_parts() -> None:
    points = [Point(step, 10 * step, float(step)) for step in range(1, 1001)]
    points[1] = dataclasses.replace(points[1], value=math.nan)
    found = _thinned(points)
    assert len(found) == 334
    assert found[0] == (Point(3, 30, 2.0), 2)
    assert found[1] == (Point(6, 60, 5.0), 3)
    assert found[-1] == (Point(1000, 10000, 1000.0), 1)


def test_labels_are_read_as_they_are_written() -> None:
    for text, wanted in (
        ("step-000000150", Label(150, None, "", "")),
        ("step-000000150-context-4096-linear-1.5", Label(150, 4096, "linear-1.5", "")),
        ("step-000000150-dynamic_ntk-1e+06", Label(150, None, "dynamic_ntk-1e+06", "")),
        ("step-000000001-text-book-1_and_2", Label(1, None, "", "book-1_and_2")),
        ("notes", None),
    ):
        assert parse_label(text) == wanted, text


def test_addresses_lose_their_passwords() -> None:
    assert without_secrets("uri: http://a:b@c/d e@f") == "uri: http://***@c/d e@f"


def test_the_report_reads_where_a_config_logs_to_by_default() -> None:
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    assert parser.parse_args(["experiment", "folder"]).uri == TrackingConfig.uri
