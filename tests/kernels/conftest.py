"""Uninitialised memory holds NaN in every kernel test, so that nothing can lean on zeros."""

from collections.abc import Iterator

import jaxtyping
import pytest
import torch

from longhaul.kernels.testing import poisoned_memory


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
