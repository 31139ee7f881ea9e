"""Uninitialised memory holds NaN in every kernel test, so that nothing can lean on zeros."""

import inspect
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import jaxtyping
import pytest
import torch

from longhaul.kernels.testing import poisoned_memory

if find_spec("triton") is not None:
    from triton.runtime.interpreter import InterpretedFunction

    initialize = InterpretedFunction.__init__

    def initialize_unwrapped(self: Any, fn: Callable[..., Any], **settings: Any) -> None:
        """Without the run-time check of annotations, whose wrapper hides a kernel's globals."""
        initialize(self, inspect.unwrap(fn), **settings)

    InterpretedFunction.__init__ = initialize_unwrapped


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned_memory():
        yield


@pytest.fixture
def unchecked() -> Iterator[None]:
    """No run-time check of the annotations: a user meets the functions' own errors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """At these sizes a second thread only waits for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
