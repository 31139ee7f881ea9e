"""What MLflow takes: names, lengths, and which of its answers are final."""

import re

MAX_PARAM_CHARACTERS = 6000
MAX_TAG_CHARACTERS = 8000
MAX_NAME_CHARACTERS = 250

# Answers that will be the same the next time. Everything else is worth trying again.
_REFUSALS = {
    "BAD_REQUEST",
    "INVALID_PARAMETER_VALUE",
    "INVALID_STATE",
    "RESOURCE_ALREADY_EXISTS",
    "RESOURCE_DOES_NOT_EXIST",
}


def is_refusal(error: Exception) -> bool:
    """Whether MLflow understood the request and will never carry it out."""
    return getattr(error, "error_code", None) in _REFUSALS


def clean_name(name: str) -> str:
    """The nearest name MLflow takes: letters, digits and `_-.: /`, as a plain relative path."""
    allowed = re.sub(r"[^\w.\-/ :]", "_", name)
    parts = [part for part in allowed.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:MAX_NAME_CHARACTERS].rstrip("/") or "_"


def one_line(error: BaseException) -> str:
    """An error's first words; some of MLflow's hold whole statements in SQL."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def cut(value: str, limit: int) -> str:
    """At most `limit` characters; dots at the end say that there were more."""
    return value if len(value) <= limit else f"{value[: limit - 3]}..."


def without_secrets(text: str) -> str:
    """Text whose addresses have lost their users and passwords."""
    return re.sub(r"://[^/\s@]+@", "://***@", text)
