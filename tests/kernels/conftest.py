"""Fixtures of all kernel tests, and a faster interpreter of Triton's kernels."""

import functools
import inspect
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import jaxtyping
import pytest
import torch

from longhaul.kernels.testing import poisoned_memory

if find_spec("triton") is not None:
    from triton import language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction

    initialize = InterpretedFunction.__init__
    patch_lang, numpy_dtype = interpreter._patch_lang, interpreter._get_np_dtype
    known_dtype = functools.cache(numpy_dtype)

    def initialize_unwrapped(self: Any, fn: Callable[..., Any], **settings: Any) -> None:
        """Remove the run-time check of annotations, whose wrapper hides a kernel's globals."""
        initialize(self, inspect.unwrap(fn), **settings)

    def patch_lang_once(fn: Callable[..., Any]) -> Any:
        """Skip functions called by a kernel, since that kernel has already been patched."""
        used = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        is_done = not any(tl.core.is_builtin(lang.load) for lang in used)
        return interpreter._LangPatchScope() if is_done else patch_lang(fn)

    def quick_numpy_dtype(dtype: Any) -> Any:
        """Look up the dtype without building the table for each operation."""
        return known_dtype(dtype.scalar) if type(dtype.scalar) is tl.dtype else numpy_dtype(dtype)

    # The last two save a quarter of an interpreted kernel's time and do not change results.
    InterpretedFunction.__init__ = initialize_unwrapped
    interpreter._patch_lang = patch_lang_once
    interpreter._get_np_dtype = quick_numpy_dtype


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Fill uninitialised memory with NaN, so that no kernel can rely on it being zero."""
    with poisoned_memory():
        yield


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Disable run-time checks of annotations, so that the functions' own errors are raised."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """At these sizes a second thread would only wait for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
