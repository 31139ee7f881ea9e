import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.http import HTTPFileSystem

from longhaul.datamodules.remote import cache, reading


class LyingServer(http.server.ThreadingHTTPServer):
    """Serves the files of a folder on the loopback interface, except where it is told to lie."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.asked: list[str] = []
        """The path of each request."""
        self.lies: list[str] = []
        """What happens to the next requests, the first one first; `always` is repeated."""
        self.always = ""
        self.elsewhere = ""
        """Where it redirects to."""
        self.freed = threading.Event()
        """Set: what has stalled goes on."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: LyingServer

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        lie = self.server.lies.pop(0) if self.server.lies else self.server.always
        file = self.server.folder / self.path.partition("?")[0].lstrip("/")
        status = int(lie) if lie.isdigit() else 200 if file.is_file() else 404
        if status != 200:
            self.send_error(status)
            return
        body = file.read_bytes()
        if lie in ("redirect", "move"):
            self.send_response(302)
            other = self.server.url if lie == "move" else self.server.elsewhere
            self.send_header("Location", f"{other}{self.path}?moved")
            self.end_headers()
            return
        if lie == "other":
            body = body[:-1] + bytes([body[-1] ^ 1])
        if lie == "short":
            body = body[:-5]
        if lie == "long":
            body += b"12345"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if lie in ("stall", "cut"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if lie == "stall":
                self.server.freed.wait(60)
            return
        for start in range(0, len(body), 64) if lie == "slow" else ():
            self.wfile.write(body[start : start + 64])
            time.sleep(0.02)
        if lie != "slow":
            self.wfile.write(body)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LyingServer]:
    """A web server for `tmp_path`."""
    made = LyingServer(tmp_path)
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.freed.set()
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two attempts without a wait; a server stalls after a tenth of a second."""
    monkeypatch.setattr(cache, "_ATTEMPTS", 2)
    monkeypatch.setattr(reading, "_FIRST_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(reading, "_STALL_SECONDS", 0.1)
    HTTPFileSystem.clear_instance_cache()  # whose sessions know the old times
    yield monkeypatch
    HTTPFileSystem.clear_instance_cache()
