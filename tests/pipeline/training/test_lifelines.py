"""Connections that tell which ranks are there."""

import socket
import time

import pytest

from longhaul.pipeline.training.lifelines import _ADDRESS_KEY, Lifelines


class Store(dict[str, bytes]):
    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()


def wait_for(lifelines: Lifelines, rank: int, *, lost: bool) -> None:
    deadline = time.monotonic() + 20
    while rank not in lifelines.lost if lost else not lifelines.has(rank):
        assert time.monotonic() < deadline
        lifelines.look()
        time.sleep(0.005)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    return Store()


def test_the_first_rank_and_another_notice_each_others_end(store: Store) -> None:
    first = Lifelines(0, store)
    others = {rank: Lifelines(rank, store) for rank in (1, 2)}
    for rank, other in others.items():
        wait_for(first, rank, lost=False)
        assert other.has(0)
    for key in list(others[2]._connections.get_map().values()):
        key.fileobj.close()
    wait_for(first, 2, lost=True)
    assert first.lost == {2}
    for key in list(first._connections.get_map().values()):
        key.fileobj.close()
    wait_for(others[1], 0, lost=True)


def test_who_does_not_know_the_token_is_no_rank(store: Store) -> None:
    first = Lifelines(0, store)
    port = int(store[_ADDRESS_KEY].split()[0])
    with socket.create_connection(("localhost", port)) as stranger:
        stranger.sendall(b"wrong 1\n")
        assert stranger.recv(1) == b""
    assert not first.has(1)


def test_a_rank_that_cannot_connect_is_told_of(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    store.set(_ADDRESS_KEY, f"{port} token")
    assert not Lifelines(1, store).has(0)
    assert f"rank 1 has no lifeline, port {port} of rank 0: " in caplog.text
