"""Which configurations kernels run with, for checks and times of others than the usual ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any
from unittest.mock import patch

MOST_CANDIDATES = 3
"""The largest number of configurations that a kernel of power attention has to choose from."""


def with_candidate(index: int | None) -> AbstractContextManager[None]:
    """Run candidate `index` of each kernel of the op, or its last one; None: the chip's own."""
    if index is None:
        return nullcontext()
    # It imports Triton, which takes long, and which a CPU needs not have.
    from longhaul.kernels.common.triton.launch import configuration

    return configuration(index)


def does_not_fit(error: Exception) -> bool:
    """Whether a kernel needs more shared memory or registers than the chip has."""
    # Triton takes long to import.
    from triton.runtime.errors import OutOfResources, PTXASError

    return isinstance(error, OutOfResources | PTXASError)


@contextmanager
def untimed_tuning(part: int, parts: int) -> Iterator[None]:
    """Make a peer's autotuner run every `parts`-th configuration, from number `part`, untimed.

    Compiled kernels stay in Triton's cache on disk, where a later run with timing finds them. No
    choice of a configuration is stored, as the device may be busy with other work. Configurations
    that do not fit the chip are passed over.
    """
    # Triton takes long to import.
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.errors import OutOfResources, PTXASError

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        configs = self.prune_configs(kwargs)
        result = None
        for config in configs[part::parts] or configs[:1]:
            settings = config.all_kwargs()
            if config.pre_hook is not None:
                config.pre_hook(self.nargs | kwargs | settings)
            with suppress(CompileTimeAssertionFailure, OutOfResources, PTXASError):
                result = self.fn.run(*args, **kwargs, **settings)
        return result

    with patch.object(Autotuner, "run", run):
        yield
