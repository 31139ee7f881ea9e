"""The code of an exported model: what is copied, what stands in, and what is refused."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from longhaul.modules.attention import AttentionConfig, base
from longhaul.pipeline.exporting.source import file_of, model_code

KIND = """
from dataclasses import dataclass
from longhaul.modules.attention import AttentionConfig
from longhaul.modules.attention.base import register
{imports}

@register("{name}")
@dataclass(frozen=True, kw_only=True)
class Config(AttentionConfig):
    def build(self, shape):
        raise NotImplementedError
"""


@pytest.fixture
def kind_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], AttentionConfig]]:
    """Makes a kind whose module has these imports, as a user would: in a file on the path."""
    monkeypatch.syspath_prepend(tmp_path)
    before, names = set(base._REGISTRY), []

    def make(imports: str) -> AttentionConfig:
        names.append(f"own_kind_{len(names)}")
        (tmp_path / f"{names[-1]}.py").write_text(KIND.format(imports=imports, name=names[-1]))
        importlib.invalidate_caches()
        module: ModuleType = importlib.import_module(names[-1])
        return module.Config()  # type: ignore[no-any-return]

    yield make
    for name in set(base._REGISTRY) - before:
        del base._REGISTRY[name]
    for name in names:
        del sys.modules[name]


def test_a_kind_of_another_package_goes_along(
    kind_with: Callable[[str], AttentionConfig],
) -> None:
    imports = """
import math, numpy, jaxtyping
import longhaul.modules.rotary as turning
from longhaul.kernels import power_attention as attend, state_features
from longhaul.modules.attention import base
try:
    import a_faster_package
except ImportError:
    pass
"""
    code = model_code([kind_with(imports)])
    name = file_of(code, "own_kind_0")
    digest = name.removeprefix("own_kind_0_").removesuffix(".py")
    lines = code[name].replace(f"_{digest}", "").splitlines()
    for line in (
        "from .modules_attention_base import AttentionConfig",
        "import math",
        "import numpy",
        "from . import stand_ins_jaxtyping as jaxtyping",
        "from . import modules_rotary as turning",
        "from .kernels_power_op import power_attention as attend",
        "from .kernels_shapes import state_features",
        "from . import modules_attention_base as base",
        "    import a_faster_package",
    ):
        assert line in lines, line
    registration = f"from .own_kind_0_{digest} import __name__ as _  # registers own_kind_0"
    assert registration in code[file_of(code, "architecture")]
    assert f"kernels_power_op_{digest}.py" in code
    # What a package's __init__ would import, but the kind does not need.
    assert f"modules_attention_softmax_{digest}.py" not in code
    assert all(name.endswith(f"_{digest}.py") for name in code)


def test_the_names_of_files_follow_the_code_of_all_files(
    kind_with: Callable[[str], AttentionConfig],
) -> None:
    names = [set(model_code([kind_with(imports)])) for imports in ("", "", "import math")]
    bare = [{name.rpartition("_")[0] for name in one if "own_kind" not in name} for one in names]
    assert bare[0] == bare[1] == bare[2]
    assert not names[1] & names[2]


@pytest.mark.parametrize(
    ("imports", "message"),
    [
        ("import lightning", "imports lightning in own_kind_0, which an export cannot carry"),
        ("import einops", "imports einops in own_kind_0, which an export cannot carry"),
        ("from omegaconf import OmegaConf", "imports omegaconf in own_kind_0"),
        ("from longhaul.configs import RunConfig", "imports longhaul.configs in own_kind_0"),
        ("import longhaul.modules.rotary", "has `import longhaul.modules.rotary` in own_kind_0; w"),
        ("from longhaul.modules.rotary import *", r"imports \* from longhaul.modules.rotary"),
    ],
)
def test_what_cannot_go_along_is_named(
    kind_with: Callable[[str], AttentionConfig], imports: str, message: str
) -> None:
    config = kind_with(imports)
    with pytest.raises(
        ValueError, match=f"^attention.kind: found own_kind_0, whose code {message}"
    ):
        model_code([config])


def test_a_kind_without_a_file_is_refused(
    kind_with: Callable[[str], AttentionConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = kind_with("")
    monkeypatch.setattr(type(config), "__module__", "__main__")
    with pytest.raises(ValueError, match="found own_kind_0, whose code is defined in __main__"):
        model_code([config])
