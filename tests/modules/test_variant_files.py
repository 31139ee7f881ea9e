"""Files of kinds that cannot be imported, and two that register the same kind."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from longhaul.modules.attention import attention_config, base, registered_variants
from longhaul.modules.attention.variant_files import import_variants

FINISHED = """
from longhaul.modules.attention.base import AttentionConfig, register

@register("{kind}")
class Config(AttentionConfig):
    def build(self, shape): ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An importable package for files of kinds, which are forgotten after the test."""
    for name in ("_REGISTRY", "_DUPLICATES", "_LEFT_OUT"):
        monkeypatch.setattr(base, name, getattr(base, name).copy())
    (tmp_path / "own_kinds").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "own_kinds"
    for name in [one for one in sys.modules if one.partition(".")[0] == "own_kinds"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("def broken(:", "1: SyntaxError: "),
        ("\nimport nothere", "2: ModuleNotFoundError: No module named 'nothere'"),
        ("import torch\ntorch.zeros(-1)", "2: RuntimeError: "),
        (FINISHED.format(kind="c") + "1 / 0", "7: ZeroDivisionError: division by zero"),
        (FINISHED.format(kind="c").replace("build", "b"), "4: ValueError: attention.kind: found c"),
    ],
)
def test_a_broken_file_is_named_and_leaves_the_others(
    folder: Path, caplog: pytest.LogCaptureFixture, content: str, said: str
) -> None:
    (folder / "b.py").write_text("from own_kinds import c\n" + FINISHED.format(kind="b"))
    (folder / "c.py").write_text(content)
    (folder / "d.py").write_text(FINISHED.format(kind="d"))
    before = set(registered_variants())
    import_variants("own_kinds", [str(folder)])
    assert set(registered_variants()) - before == {"d"}
    (warning,) = caplog.messages
    assert warning.startswith(f"{folder}/c.py:{said}")
    assert warning.endswith("; the kinds that need this file are left out")
    with pytest.raises(ValueError, match=r"^attention.kind: found .b., wanted [^\n]*$") as e:
        attention_config("b")
    assert f"not imported: {folder}/c.py:{said}" in str(e.value)


def test_a_kind_of_two_files_is_refused(folder: Path) -> None:
    for name in ("one", "two"):
        (folder / f"{name}.py").write_text(FINISHED.format(kind="softmax"))
    import_variants("own_kinds", [str(folder)])
    with pytest.raises(ValueError, match=r"found .softmax. in .*one and .*two, wanted one of them"):
        attention_config("softmax")
