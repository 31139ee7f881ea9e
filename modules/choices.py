"""Checks options that are one of a few words, without pydantic, which exports do not have."""

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
