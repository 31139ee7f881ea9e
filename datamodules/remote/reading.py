"""Reads URLs with fsspec: object stores, hubs and web servers, as far as the user names them.

Credentials, proxies and addresses of services are those that each store's own library finds in its
environment and files; longhaul knows none. A file system of fsspec does not survive a fork, so none
is kept: whoever reads asks fsspec for it, which keeps one for each process and thread.
"""

import logging
import random
import time
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar, cast

from longhaul.datamodules.files.untrusted import one_line
from longhaul.datamodules.urls import MissingInputError

_log = logging.getLogger(__name__)

# The package that opens a scheme, and what brings it: an extra of longhaul, or longhaul itself.
_PACKAGES = {
    **{"s3": ("s3fs", "longhaul[s3]"), "gs": ("gcsfs", "longhaul[gs]")},
    **dict.fromkeys(("az", "abfs", "abfss"), ("adlfs", "longhaul[az]")),
    "hf": ("huggingface_hub", "longhaul[hf]"),
    **dict.fromkeys(("http", "https", "memory"), ("aiohttp", "longhaul")),
}
_BLOCK_BYTES = 16 << 20
"""Bytes that an object store is asked for at a time."""
_CONNECT_SECONDS = 30.0
_STALL_SECONDS = 60.0
"""Time without a byte after which a server has stalled."""
_SLOWEST = 10_000
"""Bytes per second on average below which it has stalled too."""
_FIRST_WAIT_SECONDS = 0.5
# What a server says that may be otherwise a moment later: too slow, too early, too many requests.
_PASSING = (408, 425, 429)

Result = TypeVar("Result")


class ContentError(ValueError):
    """What was received is not what was wanted."""


class _RedirectError(OSError):
    """A server sends the reader to another host, which nobody has named."""


def read_remote(url: str, largest: int) -> bytes:
    """The content of a URL.

    Raises:
        MissingInputError: there is no such file.
        ValueError: no store is known by this scheme, or its package is not installed.
        OSError: it cannot be read, or has more than `largest` bytes.
    """

    def read() -> bytes:
        content = bytearray()
        for block in blocks(url):
            content += block
            if len(content) > largest:
                break
        return bytes(content)

    content = retrying(url, read, attempts=3)
    if len(content) > largest:
        raise OSError(f"{url}: found more than {largest:,} bytes, wanted {largest:,} at most")
    return content


def blocks(url: str) -> Iterator[bytes]:
    """The content of a URL in pieces.

    Raises MissingInputError and ValueError as above, and the errors of the URL's own library.
    """
    began, received = time.monotonic(), 0
    try:
        stream = _open(url)
    except FileNotFoundError:
        raise MissingInputError(f"{url}: no such file") from None
    with stream:
        while block := stream.read(_BLOCK_BYTES):
            yield block
            received += len(block)
            spent = time.monotonic() - began
            if spent > _STALL_SECONDS + received / _SLOWEST:
                raise TimeoutError(f"{received:,} bytes in {spent:.0f} s")


def retrying(url: str, action: Callable[[], Result], *, attempts: int) -> Result:
    """What `action` returns, which reads a URL and is repeated after growing waits if it fails.

    Raises:
        MissingInputError: there is no such file.
        ContentError: it received something else, in the last attempt too.
        ValueError: as of `read_remote`.
        OSError: any other error, one line with the URL; permissions are not asked for twice.
    """
    _store_of(url)
    for attempt in range(1, attempts + 1):
        try:
            return action()
        except MissingInputError:
            raise
        # The libraries of the stores have no class of errors in common, and torch raises an error
        # of a worker again by calling its class with one text, which few of theirs allow.
        except Exception as error:
            cause = _cause(error)
            if attempt == attempts or not _may_pass(error):
                times = f"{attempt} attempts" if attempt > 1 else "not tried again"
                kind = ContentError if isinstance(error, ContentError) else OSError
                raise kind(f"{url}: cannot be fetched ({cause}), {times}") from None
        # Not the generator of the random module, whose state is the caller's.
        wait = _FIRST_WAIT_SECONDS * 2 ** (attempt - 1) * random.SystemRandom().uniform(0.7, 1.3)
        _log.warning("%s: %s; tried again in %.1f s", url, cause, wait)
        time.sleep(wait)
    raise AssertionError("unreachable")


def _may_pass(error: Exception) -> bool:
    if isinstance(error, PermissionError | _RedirectError):
        return False
    status = getattr(error, "status", None)  # of aiohttp's errors
    return not (isinstance(status, int) and 400 <= status < 500 and status not in _PASSING)


def _cause(error: Exception) -> str:
    status = getattr(error, "status", None)
    if isinstance(status, int) and status:
        return one_line(f"HTTP {status} {getattr(error, 'message', '')}")
    if isinstance(error, TimeoutError):
        return one_line(f"stalled: {str(error) or 'nothing came'}")
    if isinstance(error, OSError | ContentError):
        return one_line(error)
    return one_line(f"{type(error).__name__}: {error}")


def _store_of(url: str) -> Any:
    """The class of file systems that reads a URL."""
    scheme = url.partition(":")[0]
    if scheme not in _PACKAGES:
        wanted = ", ".join(_PACKAGES)
        raise ValueError(f"{url}: found {scheme}, wanted a path or a URL of one of {wanted}")
    # Imported here, because a local manifest needs none of it.
    import fsspec

    package, source = _PACKAGES[scheme]
    try:
        return fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise ValueError(
            f"{url}: needs the package {package} ({one_line(error)}); `pip install '{source}'` "
            "installs it"
        ) from None


def _open(url: str) -> IO[bytes]:
    scheme, store = url.partition(":")[0], _store_of(url)
    # Not fsspec.open: it would follow `::` in a URL to other schemes and hosts.
    options: dict[str, Any] = {}
    reading: dict[str, Any] = {"block_size": _BLOCK_BYTES, "cache_type": "none"}
    if scheme in ("http", "https"):
        options = {"get_client": _web_client}
        # One request for all, also of servers that know no ranges. With a size it asks for none.
        reading = {"block_size": 0, "size": 1}
    elif scheme != "memory":
        options = store._get_kwargs_from_urls(url)
    path = store._strip_protocol(url)
    return cast(IO[bytes], store(**options).open(path, "rb", **reading))


async def _web_client(**options: Any) -> Any:
    import aiohttp

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(_refuse_other_hosts)
    return aiohttp.ClientSession(
        trace_configs=[trace],
        # Proxies and ~/.netrc.
        trust_env=True,
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_SECONDS, sock_read=_STALL_SECONDS
        ),
        # Else a server may compress what is hashed as it is.
        headers={"Accept-Encoding": "identity"},
        **options,
    )


async def _refuse_other_hosts(session: Any, context: Any, redirect: Any) -> None:
    from yarl import URL

    location = redirect.response.headers.get("Location", "")
    target = redirect.url.join(URL(location))
    is_upgrade = redirect.url.with_scheme("https").origin() == target.origin()
    if target.origin() != redirect.url.origin() and not is_upgrade:
        redirect.response.close()
        raise _RedirectError(f"redirected to {one_line(target.origin())}, which is not named")
