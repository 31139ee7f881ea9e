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
from contextlib import suppress
from typing import Any

logger = logging.getLogger(__name__)

_ADDRESS_KEY = "longhaul/lifeline"
_SECONDS_TO_CONNECT = 20.0
# A machine that has answered none of so many probes, so many seconds apart, is gone: after two
# minutes. The first is sent when the connection was silent for so long.
_PROBES = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 9}


class Lifelines:
    """On rank 0 a connection with each other rank, on the others one with rank 0."""

    def __init__(self, rank: int, store: Any) -> None:
        """Connect, without waiting for others.

        Args:
            rank: this process's global rank.
            store: the key-value store through which the ranks connected.
        """
        self.lost: set[int] = set()
        """Ranks whose process, or machine, was there and is gone."""
        self._connections = selectors.DefaultSelector()
        self._connected: set[int] = set()
        if rank == 0:
            self._token = secrets.token_hex(16)
            self._server = _listen()
            port = self._server.getsockname()[1]
            store.set(_ADDRESS_KEY, f"{port} {self._token}")
            threading.Thread(target=self._accept, name="lifelines", daemon=True).start()
            return
        port, token = store.get(_ADDRESS_KEY).decode().split()
        try:
            line = socket.create_connection(
                (os.environ["MASTER_ADDR"], int(port)), _SECONDS_TO_CONNECT
            )
            line.sendall(f"{token} {rank}\n".encode())
        except OSError as error:
            # Then silence alone tells that a rank is gone, though it may only be stopped.
            logger.warning("rank %d has no lifeline, port %s of rank 0: %s", rank, port, error)
        else:
            self._add(0, line)

    def has(self, rank: int) -> bool:
        """Whether a connection tells if this rank is there."""
        return rank in self._connected

    def look(self) -> None:
        """Add to `lost` the ranks whose connection has ended."""
        for key, _ in self._connections.select(timeout=0):
            line: Any = key.fileobj
            try:
                has_ended = not line.recv(64)
            except BlockingIOError:
                has_ended = False
            except OSError:
                has_ended = True
            if has_ended:
                self._connections.unregister(line)
                self.lost.add(key.data)

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._server.accept()
            except OSError:
                return
            try:
                line.settimeout(_SECONDS_TO_CONNECT)
                token, rank = line.recv(128).decode().split()
                if not secrets.compare_digest(token, self._token):
                    raise ValueError("found another token")
                self._add(int(rank), line)
            except (OSError, ValueError):
                line.close()

    def _add(self, rank: int, line: socket.socket) -> None:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES.items():
            if hasattr(socket, name):
                line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        line.setblocking(False)
        self._connections.register(line, selectors.EVENT_READ, rank)
        self._connected.add(rank)


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # on a machine whose administrator has switched IPv6 off
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
