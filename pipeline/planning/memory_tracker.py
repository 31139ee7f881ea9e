"""Counts the bytes that are alive, by category, while code runs on tensors without data."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "copies", "workspace")


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of storages while they exist; `peak` holds the highest count.

    torch.distributed._tools.mem_tracker does the same, but is five times slower and does not see
    the memory inside of custom ops. The numbers agree for what both count (see the tests).
    """

    def __init__(self, workspace_of: Callable[..., int] | None = None) -> None:
        """`workspace_of(op, args, kwargs)`: the bytes that an opaque op needs while it runs."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.category = "activations"  # of storages that are created from now on
        # Filled by all-gathers, read by reduce-scatters, or this rank's in an exchange among all.
        self.communicated_bytes = 0
        self._workspace_of = workspace_of
        self._alive: dict[int, tuple[weakref.ref[Any], int, str]] = {}
        self._now = dict.fromkeys(CATEGORIES, 0)
        self._total = 0
        self.reset_peak()

    def reset_peak(self) -> None:
        """Forget earlier peaks: from now on, `peak` is the highest sum since this call."""
        self.peak = dict(self._now)
        self.peak_besides_gradients = dict(self._now)
        self._highest, self._highest_besides = self._total, self._total - self._now["gradients"]

    @property
    def now(self) -> dict[str, int]:
        """Bytes that are alive now, by category."""
        return dict(self._now)

    def assign(self, tensors: Any, category: str) -> None:
        """Count the memory of these tensors in this category, whatever created it."""
        for x in _local_tensors(tensors):
            storage = x.untyped_storage()
            self._track(storage, category)
            ref, size, before = self._alive[storage._cdata]
            self._alive[storage._cdata] = ref, size, category
            self._now[before] -= size
            self._now[category] += size

    def reassign(self, before: str, after: str) -> None:
        """Move everything alive from one category to another."""
        for key, (ref, size, category) in self._alive.items():
            if category == before:
                self._alive[key] = ref, size, after
        self._now[after] += self._now[before]
        self._now[before] = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._workspace_of is not None and func.namespace not in ("aten", "prim"):
            self._add("workspace", size := self._workspace_of(func, args, kwargs))
            self._add("workspace", -size)
        result = func(*args, **kwargs)
        is_cast = func is torch.ops.aten._to_copy.default and self._is_parameter(args[0])
        for x in _local_tensors(result):
            self._track(x.untyped_storage(), "copies" if is_cast else self.category)
        if func.namespace in ("c10d", "fsdp"):
            self._track_collective(func.__name__.split(".")[0], args, kwargs)
        return result

    def _track_collective(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = _local_tensors((args, kwargs))
        for x in tensors:
            if self._category_of(x) == "activations":
                self.assign(x, "copies")
        if name == "_allgather_base_":
            self.communicated_bytes += tensors[0].nbytes
        if name == "_reduce_scatter_base_":
            self.assign(tensors[0], "gradients")  # of which the sharded gradient is a view
            self.communicated_bytes += tensors[1].nbytes
        if name == "alltoall_base_":
            self.communicated_bytes += tensors[1].nbytes

    def __enter__(self) -> "MemoryTracker":
        resize = self._resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._alive:
                ref, old, category = self._alive[storage._cdata]
                category = category if category == "parameters" else "copies"
                self._add(self._alive[storage._cdata][2], -old)
                self._alive[storage._cdata] = ref, storage.nbytes(), category
                self._add(category, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _is_parameter(self, x: Tensor) -> bool:
        """Whether x is a parameter, or a gathered copy of a sharded one."""
        return any(self._category_of(one) in ("parameters", "copies") for one in _local_tensors(x))

    def _category_of(self, x: Tensor) -> str | None:
        key = x.untyped_storage()._cdata
        return self._alive[key][2] if key in self._alive else None

    def _track(self, storage: torch.UntypedStorage, category: str) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        size = storage.nbytes()
        self._alive[key] = weakref.ref(storage, lambda _: self._forget(key)), size, category
        self._add(category, size)

    def _forget(self, key: int) -> None:
        _, size, category = self._alive.pop(key)
        self._add(category, -size)

    def _add(self, category: str, size: int) -> None:
        self._now[category] += size
        self._total += size
        if self._total > self._highest:
            self._highest, self.peak = self._total, dict(self._now)
        besides = self._total - self._now["gradients"]
        if besides > self._highest_besides:
            self._highest_besides, self.peak_besides_gradients = besides, dict(self._now)


def _local_tensors(tree: Any) -> list[Tensor]:
    """All tensors in a tree; each distributed tensor is replaced by its local tensor."""
    tensors = []
    for x in [tree] if isinstance(tree, Tensor) else tree_leaves(tree):
        if not isinstance(x, Tensor):
            continue
        while is_traceable_wrapper_subclass(x):
            x = getattr(x, x.__tensor_flatten__()[0][0])
        tensors.append(x)
    return tensors
