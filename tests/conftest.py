"""What holds for all tests: where Triton's kernels run, how processes start, what is first."""

import gc
import inspect
import os
import re
import sys
import tempfile
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import jaxtyping
import pytest

# Triton's kernels run in its interpreter, on any machine, wherever a test asks for them. Before
# anything imports Triton: many packages do, and what it decorates is then compiled for good.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Processes that tests start leave out imports that nothing uses.
_PATHS = [str(Path(__file__).parent / "startup"), os.environ.get("PYTHONPATH")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _PATHS))

# What the user names is remembered in a folder of their own, and must not be there after tests.
_STATE = tempfile.TemporaryDirectory(prefix="longhaul-state-")
os.environ["XDG_STATE_HOME"] = _STATE.name

# transformers copies the code of exports here to import it. Two processes that fill one folder race
# for it, and a test that turned to another in between would leave the imported package behind.
_CODE = tempfile.TemporaryDirectory(prefix="longhaul-code-")
os.environ["HF_MODULES_CACHE"] = _CODE.name

# Shapes are checked at the first call of each form. Where there are none, mypy has checked types.
_SHAPE = re.compile(r"\b(Bool|Complex|Float|Int|Shaped)\d*\[")
_jaxtyped = jaxtyping.jaxtyped


def _check_shapes(*, typechecker: Any) -> Callable[[Any], Any]:
    def decorate(fn: Any) -> Any:
        called = fn.__init__ if inspect.isclass(fn) else fn
        if not _SHAPE.search(str(getattr(called, "__annotations__", ""))):
            return fn
        checked = _jaxtyped(fn, typechecker=typechecker)
        # Here, because it imports torch, which the process that starts the workers leaves out.
        from shape_checks import once_per_form

        return checked if inspect.isclass(fn) else once_per_form(fn, checked)

    return decorate


jaxtyping.jaxtyped = _check_shapes

_FIRST = ("slurm", "pipeline")


def _call(function: Callable[[], object]) -> None:
    function()


# CPython maps memory for its stack in pieces of 16 kB, and unmaps a piece with the last call in it:
# loops that call across an edge do so each time, which is half of an interpreted kernel's time.
# This function's frame is so large that the rest of its piece, 0.9 MB, holds all calls below it.
_call.__code__ = _call.__code__.replace(co_stacksize=150_000)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    names = pyfuncitem._fixtureinfo.argnames
    _call(partial(pyfuncitem.obj, **{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without a search for garbage among the million objects that collection makes.

    All of them stay until the end: no later search looks at them either.
    """
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_pycollect_makeitem() -> None:
    """No test runs while a kind's file is broken: it may be the one that was to be tested."""
    kinds = sys.modules.get("longhaul.modules.attention")
    if kinds is not None and kinds.left_out():
        raise pytest.Collector.CollectError("; ".join(kinds.left_out()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long and mostly waits begins first: nothing long is left to one worker alone."""

    def turn(item: pytest.Item) -> int:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        return _FIRST.index(folder) if folder in _FIRST else len(_FIRST)

    items.sort(key=turn)


@pytest.fixture
def unchecked_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call our code as users do: the tests' own check of types would refuse a word first."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
