"""Stands in for jaxtyping in an exported model: its annotations say shapes, and check nothing."""

from typing import Any


class _Annotation:
    def __class_getitem__(cls, given: tuple[Any, str]) -> Any:
        return given[0]


def __getattr__(name: str) -> type[_Annotation]:
    """Float, Int and all the others."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _Annotation
