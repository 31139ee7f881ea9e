"""Reads the option --contexts, which several commands have."""


def parse_contexts(text: str | None) -> list[int] | None:
    """The contexts of "N,N,..." in tokens, in the given order; None for None."""
    if text is None:
        return None
    if not all(number.isdecimal() and int(number) for number in text.split(",")):
        raise ValueError(f"--contexts: found {text!r}, wanted tokens, such as 1024,65536")
    return [int(number) for number in text.split(",")]
