"""Which ranks' processes are there, by a TCP connection of each with rank 0, which carries nothing.

A process that ends, however it ends, closes its connection at once. One that is stopped for a while
does not: its machine still answers for it. A machine that is gone, or cut off, answers nothing.
"""

import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger(__name__)

ADDRESS_KEY = "longhaul/lifeline"
_SECONDS_TO_CONNECT = 20.0
# A rank sends its line at once. Whoever else connects does not keep a connection for longer.
_SECONDS_TO_IDENTIFY = 20.0
_LONGEST_LINE = 128
_SECONDS_TO_CLOSE = 5.0
# All ranks connect at about the same time. The system may allow fewer to wait.
_BACKLOG = 4096
# A machine that has answered none of so many probes, so many seconds apart, is gone: after two
# minutes. The first is sent when the connection was silent for so long.
_PROBES = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 9}


class Lifelines:
    """On rank 0 a connection with each other rank, on the others one with rank 0.

    One thread alone connects, accepts, reads and closes, so that any other may ask what it found.
    """

    def __init__(self, rank: int, nodes: int, store: Any) -> None:
        """Begin to connect. Waits only until rank 0 has done so too.

        Rank 0 listens on the loopback interface if all ranks are on one machine, and else at the
        address through which the ranks connected, MASTER_ADDR. A rank that cannot connect logs a
        warning.

        Args:
            rank: this process's global rank.
            nodes: number of machines.
            store: the key-value store through which the ranks connected.
        """
        self.lost: set[int] = set()
        """Ranks whose process, or machine, was there and is gone."""
        self._connected: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._servers: list[socket.socket] = []
        # What those have sent who connected and may be ranks, and until when they have time.
        self._strangers: dict[socket.socket, tuple[bytes, float]] = {}
        self._token = b""
        # Once one end is closed, the other end can be read, which wakes the thread.
        self._waker, self._closing = socket.socketpair()
        self._selector.register(self._closing, selectors.EVENT_READ)
        host = "127.0.0.1" if nodes == 1 else os.environ["MASTER_ADDR"]
        address = ""
        if rank == 0:
            self._listen(host, store)
        else:
            address = store.get(ADDRESS_KEY).decode()
        self._thread = threading.Thread(
            target=self._watch, args=(rank, host, address), name="lifelines", daemon=True
        )
        self._thread.start()

    def has(self, rank: int) -> bool:
        """Whether a connection tells if this rank is there."""
        return rank in self._connected

    def close(self) -> None:
        """Close all connections. The other ranks then take this process for gone."""
        self._waker.close()
        self._thread.join(_SECONDS_TO_CLOSE)  # it may be connecting

    def _listen(self, host: str, store: Any) -> None:
        self._token = secrets.token_hex(16).encode()
        try:
            self._servers = list(_listen_at(host))
        except OSError as error:
            logger.warning("rank 0 cannot listen at %s, so no rank has a lifeline: %s", host, error)
            store.set(ADDRESS_KEY, "")  # the others wait for this key
            return
        for server in self._servers:
            server.setblocking(False)
            self._selector.register(server, selectors.EVENT_READ)
        port = self._servers[0].getsockname()[1]
        store.set(ADDRESS_KEY, f"{port} {self._token.decode()}")

    def _connect(self, rank: int, host: str, address: str) -> None:
        port, token = address.split()
        try:
            line = socket.create_connection((host, int(port)), _SECONDS_TO_CONNECT)
            line.sendall(f"{token} {rank}\n".encode())
        except OSError as error:
            # Then silence alone tells that a rank is gone, though it may only be stopped.
            logger.warning(
                "rank %d has no lifeline, port %s of rank 0 at %s: %s", rank, port, host, error
            )
            return
        line.setblocking(False)
        self._keep(line, 0)

    def _keep(self, line: socket.socket, rank: int) -> None:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES.items():
            if hasattr(socket, name):
                line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._selector.register(line, selectors.EVENT_READ, rank)
        self._connected.add(rank)

    def _watch(self, rank: int, host: str, address: str) -> None:
        if address:
            self._connect(rank, host, address)
        while True:
            for key, _ in self._selector.select(timeout=1.0 if self._strangers else None):
                readable: Any = key.fileobj
                if readable is self._closing:
                    self._close()
                    return
                if readable in self._servers:
                    self._accept(readable)
                elif readable in self._strangers:
                    self._identify(readable)
                elif _has_ended(readable):
                    self._selector.unregister(readable)
                    readable.close()
                    self.lost.add(key.data)
            now = time.monotonic()
            for stranger, (_, until) in list(self._strangers.items()):
                if now > until:
                    self._forget(stranger)
                    stranger.close()

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            line: Any = key.fileobj
            line.close()
        self._selector.close()

    def _accept(self, server: socket.socket) -> None:
        try:
            stranger, _ = server.accept()
        except BlockingIOError:  # who came has gone again
            return
        except OSError as error:
            logger.warning("rank 0 cannot accept a lifeline: %s", error)
            time.sleep(1.0)  # it may have too many open files, and would find the same at once
            return
        stranger.setblocking(False)
        self._strangers[stranger] = b"", time.monotonic() + _SECONDS_TO_IDENTIFY
        self._selector.register(stranger, selectors.EVENT_READ)

    def _identify(self, stranger: socket.socket) -> None:
        sent, until = self._strangers[stranger]
        try:
            more = stranger.recv(_LONGEST_LINE - len(sent))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        sent += more
        if more and b"\n" not in sent and len(sent) < _LONGEST_LINE:
            self._strangers[stranger] = sent, until
            return
        self._forget(stranger)
        try:
            token, rank = sent.split(b"\n")[0].split()
            if not more or not secrets.compare_digest(token, self._token):
                raise ValueError("found no rank")
            self._keep(stranger, int(rank))
        except (OSError, ValueError):
            stranger.close()

    def _forget(self, stranger: socket.socket) -> None:
        del self._strangers[stranger]
        self._selector.unregister(stranger)


def _has_ended(line: socket.socket) -> bool:
    try:
        return not line.recv(64)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _listen_at(host: str) -> Iterator[socket.socket]:
    """A server for each address that the name has here, all at one port.

    Which of them the name has on another machine, this one cannot know.

    Raises:
        OSError: the name has no address here.
    """
    port = 0
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    error: OSError | None = None
    for family, _, _, _, address in found:
        try:
            server = socket.create_server(
                (address[0], port, *address[2:]), family=family, backlog=_BACKLOG
            )
        except OSError as reason:
            error = reason
        else:
            port = server.getsockname()[1]
            yield server
    if not port and error is not None:
        raise error
