"""`data.sources` in a config: what is read, what is refused, and what is written back."""

import re
from pathlib import Path

import pytest

from longhaul.configs import ConfigError, load_run_config, to_yaml

PRESET = "run/two-sources.yaml"


def test_sources_and_a_schedule_are_the_same_after_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    overrides = ["data.sources.code.weight=1e-3", "data.sources.math={manifest: ~/m, weight: 2}"]
    overrides += ["data.sources.prose.manifest=1e3", "data.sources.prose.max_epochs=null"]
    overrides += ["data.schedule=[{at_tokens: 100k, weights: {code: 1, prose: 0.5}}]"]
    config = load_run_config(PRESET, overrides)
    assert list(config.data.sources) == ["code", "prose", "math"]
    assert config.data.sources["code"].weight == 0.001
    assert config.data.sources["math"].manifest == f"{tmp_path}/m"
    assert config.data.sources["prose"].manifest == "1e3"
    assert config.data.sources["prose"].max_epochs is None
    assert config.data.schedule[0].at_tokens == 100_000
    assert config.data.schedule[0].weights == {"code": 1.0, "prose": 0.5}
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert load_run_config(file) == config


CODE = "data.sources.code"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            f"{CODE}.weight=0",
            f"{CODE}.weight: found 0, wanted more than 0 (leave the source out instead)",
        ),
        (f"{CODE}.weight=-1", f"{CODE}.weight: found -1, wanted greater than or equal to 0"),
        (f"{CODE}.weight=null", f"{CODE}.weight: missing, and others have one; wanted a weight"),
        (f"{CODE}.weight=much", f"{CODE}.weight: found 'much', wanted a valid number"),
        (f"{CODE}.wieght=1", f"{CODE}.wieght: unknown key, the nearest known one is {CODE}.weight"),
        (f"{CODE}.max_epochs=0", f"{CODE}.max_epochs: found 0, wanted greater than 0"),
        ("data.sources.x.weight=1", "data.sources.x.manifest: missing, and it has no default"),
        ("data.sources.no.manifest=x", "data.sources: found the name 'no', wanted a letter, and"),
        ("data.sources.9.manifest=x", "data.sources: found the name '9', wanted a letter, and"),
        ("data.sources=3", "data.sources: expected a mapping of keys, got 3"),
        (f"{CODE}=3", f"{CODE}: expected a mapping of keys, got 3"),
        ("data.manifest=x", "data.manifest: found 'x' with data.sources, wanted null, or no"),
        (
            "data.validation_manifest=x",
            f"data.validation_manifest: found 'x' with {CODE}.validation_manifest, wanted one of",
        ),
        ("data.schedule=3", "data.schedule: expected a list of mappings, got 3"),
        ("data.schedule=[3]", "data.schedule.0: expected a mapping of keys, got 3"),
        (
            "data.schedule=[{at_tokens: 3}]",
            "data.schedule.0.weights: missing, and it has no default",
        ),
        (
            "data.schedule=[{at_tokens: 3, weights: {cod: 1}}]",
            "data.schedule.0.weights: found 'cod', wanted one of code, prose",
        ),
        (
            "data.schedule=[{at_tokens: 3, weights: {code: 0}}]",
            "data.schedule.0.weights: found no weight, wanted one that is more than 0",
        ),
        (
            "data.schedule=[{at_tokens: 3, weights: &w {code: 1}}, {at_tokens: 3, weights: *w}]",
            "data.schedule.1.at_tokens: found 3, wanted more than the 3 before it",
        ),
        ("data.from_tokens=0", "data.from_tokens: found 0, wanted greater than or equal to 1"),
    ],
)
def test_a_mistake_in_sources_is_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_run_config(PRESET, [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.manifest=null", "data.manifest: missing, and there are no data.sources"),
        ("data.from_tokens=5", "data.from_tokens: found without data.sources, wanted sources"),
        (
            "data.schedule=[{at_tokens: 3, weights: {code: 1}}]",
            "data.schedule: found without data.sources, wanted sources",
        ),
    ],
)
def test_what_is_of_several_sources_is_refused_with_one(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run_config("run/demo.yaml", [override])
