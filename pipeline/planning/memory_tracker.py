"""Bytes alive while code runs on tensors that have no data, and what they are alive for."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "copies", "workspace")


class MemoryTracker(TorchDispatchMode):
    """Counts the storages that operations make, until they die; `peak` is the most at a time.

    torch.distributed._tools.mem_tracker does the same five times slower, does not see the memory
    inside of custom ops, and its numbers agree where both count (tests).
    """

    def __init__(self, workspace_of: Callable[..., int] | None = None) -> None:
        """`workspace_of(op, args, kwargs)`: bytes that an opaque op takes while it runs."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.part = "activations"  # of storages that are made from now on
        self.communicated_bytes = 0  # that all-gathers have filled and reduce-scatters have read
        self._workspace_of = workspace_of
        self._alive: dict[int, tuple[weakref.ref[Any], int, str]] = {}
        self._now = dict.fromkeys(CATEGORIES, 0)
        self._total = 0
        self.reset_peak()

    def reset_peak(self) -> None:
        """Begin to look for the peak here."""
        self.peak = dict(self._now)
        self.peak_besides_gradients = dict(self._now)
        self._highest, self._highest_besides = self._total, self._total - self._now["gradients"]

    @property
    def now(self) -> dict[str, int]:
        """Bytes alive at present, by part."""
        return dict(self._now)

    def assign(self, tensors: Any, part: str) -> None:
        """Count these tensors' memory as this part, whoever made it."""
        for x in _local_tensors(tensors):
            storage = x.untyped_storage()
            self._track(storage, part)
            ref, size, before = self._alive[storage._cdata]
            self._alive[storage._cdata] = ref, size, part
            self._now[before] -= size
            self._now[part] += size

    def reassign(self, before: str, after: str) -> None:
        """Count all that is alive as one part as another."""
        for key, (ref, size, part) in self._alive.items():
            if part == before:
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
            self._track(x.untyped_storage(), "copies" if is_cast else self.part)
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
            self.assign(tensors[0], "gradients")  # the sharded gradient is a view of it
            self.communicated_bytes += tensors[1].nbytes

    def __enter__(self) -> "MemoryTracker":
        resize = self._resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._alive:
                ref, old, part = self._alive[storage._cdata]
                part = part if part == "parameters" else "copies"
                self._add(self._alive[storage._cdata][2], -old)
                self._alive[storage._cdata] = ref, storage.nbytes(), part
                self._add(part, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _is_parameter(self, x: Tensor) -> bool:
        """Whether x is one, or the whole of one that was gathered."""
        return any(self._category_of(one) in ("parameters", "copies") for one in _local_tensors(x))

    def _category_of(self, x: Tensor) -> str | None:
        key = x.untyped_storage()._cdata
        return self._alive[key][2] if key in self._alive else None

    def _track(self, storage: torch.UntypedStorage, part: str) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        size = storage.nbytes()
        self._alive[key] = weakref.ref(storage, lambda _: self._forget(key)), size, part
        self._add(part, size)

    def _forget(self, key: int) -> None:
        _, size, part = self._alive.pop(key)
        self._add(part, -size)

    def _add(self, part: str, size: int) -> None:
        self._now[part] += size
        self._total += size
        if self._total > self._highest:
            self._highest, self.peak = self._total, dict(self._now)
        besides = self._total - self._now["gradients"]
        if besides > self._highest_besides:
            self._highest_besides, self.peak_besides_gradients = besides, dict(self._now)


def _local_tensors(tree: Any) -> list[Tensor]:
    """All tensors, those inside of distributed ones in their place."""
    found = []
    for x in [tree] if isinstance(tree, Tensor) else tree_leaves(tree):
        if not isinstance(x, Tensor):
            continue
        while is_traceable_wrapper_subclass(x):
            x = getattr(x, x.__tensor_flatten__()[0][0])
        found.append(x)
    return found
