"""Formats numbers for people."""

from collections.abc import Sequence


def amount(number: float) -> str:
    """Format 124,000,000 as 124M."""
    value, unit = _scaled(number, ("", "K", "M", "B", "T", "Q"))
    return value + unit


def in_bytes(number: float) -> str:
    """Format 39,000,000 as 39 MB. Units are decimal, as in the papers."""
    return " ".join(_scaled(number, ("B", "kB", "MB", "GB", "TB", "PB", "EB")))


def digits(number: float) -> str:
    """Format with two significant digits, and with all digits before the decimal point."""
    if number < 1:
        return f"{number:.2g}"
    return f"{number:.1f}" if number < 9.95 else f"{number:.0f}"


def _scaled(number: float, units: Sequence[str]) -> tuple[str, str]:
    """The number scaled below 1,000, if there is a unit for it, and that unit."""
    power = 0
    while round(number) >= 1000 and power < len(units) - 1:
        number, power = number / 1000, power + 1
    return (digits(number) if power else f"{number:.0f}"), units[power]
