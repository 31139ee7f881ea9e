"""Checks the values of options without pydantic, which exports do not have."""

import operator
from typing import Literal, get_args, get_origin, get_type_hints


def check_choices(options: object, prefix: str = "") -> None:
    """Raise ValueError at the first field of a dataclass whose value its Literal does not have.

    Args:
        prefix: what the message puts before the field's name, such as "optim.".
    """
    for name, hint in get_type_hints(type(options)).items():
        if get_origin(hint) is not Literal:
            continue
        found, choices = getattr(options, name), get_args(hint)
        if found not in choices:
            wanted = ", ".join(choices)
            raise ValueError(f"{prefix}{name}: found {found!r}, wanted one of {wanted}")


def check_bounds(
    options: object,
    *names: str,
    least: int | float | None = None,
    above: int | float | None = None,
    most: int | float | None = None,
    below: int | float | None = None,
    prefix: str = "",
) -> None:
    """Raise ValueError at the first of these fields whose number is out of bounds; None is not.

    Args:
        prefix: as in `check_choices`.
    """
    bounds = [
        (holds, bound, text)
        for holds, bound, text in (
            (operator.ge, least, "{} or more"),
            (operator.gt, above, "more than {}"),
            (operator.le, most, "at most {}"),
            (operator.lt, below, "less than {}"),
        )
        if bound is not None
    ]
    for name in names:
        found = getattr(options, name)
        if found is not None and not all(holds(found, bound) for holds, bound, _ in bounds):
            wanted = ", ".join(text.format(bound) for _, bound, text in bounds)
            raise ValueError(f"{prefix}{name}: found {found}, wanted {wanted}")
