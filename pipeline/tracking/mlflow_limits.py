"""What MLflow accepts as names and values, and which of its errors are final."""

import re
import sqlite3

MAX_PARAM_CHARACTERS = 6000
MAX_TAG_CHARACTERS = 8000
MAX_NAME_CHARACTERS = 250

# Error codes that a retry would meet again. All other errors are worth a retry.
_REFUSALS = {
    "BAD_REQUEST",
    "INVALID_PARAMETER_VALUE",
    "INVALID_STATE",
    "RESOURCE_ALREADY_EXISTS",
    "RESOURCE_DOES_NOT_EXIST",
}


class InUseError(RuntimeError):
    """A database has a journal: it is open in another process, or was when that was killed."""


def is_refusal(error: Exception) -> bool:
    """Whether MLflow understood the request and will never carry it out."""
    return getattr(error, "error_code", None) in _REFUSALS


def is_lasting(error: Exception) -> bool:
    """Whether the fault is on this machine and lasts, so that another try soon would fail too.

    A file that cannot be read, or that is no database, stays so until somebody mends it; a missing
    package stays missing. Libraries derive the errors of servers from OSError too, and a lock of
    SQLite's is an OperationalError.
    """
    own = (OSError, PermissionError, IsADirectoryError, NotADirectoryError, sqlite3.DatabaseError)
    if isinstance(error, ValueError | RuntimeError | ImportError):
        return not isinstance(error, InUseError)
    return type(error) in own


def clean_name(name: str) -> str:
    """The nearest name that MLflow accepts: letters, digits and `_-.: /`, as a relative path."""
    allowed = re.sub(r"[^\w.\-/ :]", "_", name)
    parts = [part for part in allowed.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:MAX_NAME_CHARACTERS].rstrip("/") or "_"


def short_error(error: BaseException) -> str:
    """The beginning of an error message, without the SQL statements that SQLAlchemy adds.

    Of a request that failed it is the reason, which comes after the address in each of its layers.
    """
    text = " ".join(str(error).split()).partition(" [SQL: ")[0]
    text = re.sub(r"^\(raised as a result of [^)]*\) ", "", text)
    if (cause := re.search(r"\(Caused by \w+\((.*)\)\)", text)) is not None:
        # The object that could not connect stands before the reason.
        text = re.sub(r"^[\"']?(<[^>]*>|\w+\([^)]*\))[:,] ", "", cause[1]).strip("\"'")
    return f"{type(error).__name__}: {text[:200]}"


def truncate(value: str, limit: int) -> str:
    """At most `limit` characters; a longer value ends in '...'."""
    return value if len(value) <= limit else f"{value[: limit - 3]}..."


def without_secrets(text: str) -> str:
    """The text with the user names and passwords in its URLs replaced by ***."""
    return re.sub(r"://[^/\s@]+@", "://***@", text)
