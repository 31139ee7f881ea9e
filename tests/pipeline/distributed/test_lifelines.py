"""Connections that tell which ranks are there."""

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from longhaul.pipeline.distributed import lifelines
from longhaul.pipeline.distributed.lifelines import ADDRESS_KEY, Lifelines


class Store(dict[str, bytes]):
    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()


class Job:
    """Ranks of a job, all in this process."""

    def __init__(self) -> None:
        self.store = Store()
        self.started: list[Lifelines] = []

    def start(self, rank: int, nodes: int = 1) -> Lifelines:
        self.started.append(Lifelines(rank, nodes, self.store))
        return self.started[-1]

    def connect(self) -> socket.socket:
        """A connection of somebody with rank 0."""
        return socket.create_connection(("127.0.0.1", int(self.store[ADDRESS_KEY].split()[0])))

    @property
    def token(self) -> bytes:
        return self.store[ADDRESS_KEY].split()[1]


def wait_until(holds: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    job = Job()
    yield job
    for lines in job.started:
        lines.close()


def test_the_first_rank_and_another_notice_each_others_end(job: Job) -> None:
    first, *others = (job.start(rank) for rank in range(3))
    wait_until(lambda: all(first.has(rank) for rank in (1, 2)))
    wait_until(lambda: all(other.has(0) for other in others))
    others[1].close()
    wait_until(lambda: first.lost == {2})
    first.close()
    wait_until(lambda: others[0].lost == {0})


def test_threads_may_ask_while_a_line_ends(job: Job) -> None:
    first = job.start(0)
    found: list[set[int]] = []

    def ask() -> None:
        wait_until(lambda: 300 in first.lost)
        found.append(set(first.lost))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    # All connect at once, as many as the usual limit of open files lets one process have.
    lines = {rank: job.connect() for rank in range(1, 301)}
    for rank, line in lines.items():
        line.sendall(job.token + f" {rank}\n".encode())
    wait_until(lambda: all(map(first.has, lines)))
    assert not first.lost
    for line in lines.values():
        line.close()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    wait_until(lambda: first.lost == lines.keys())
    # The ended connections are closed here too: what remains is the server and the waker.
    assert len(first._selector.get_map()) == 2


def test_nothing_remains_of_closed_lines(job: Job) -> None:
    first, second = job.start(0), job.start(1)
    wait_until(lambda: first.has(1) and second.has(0))
    stranger = job.connect()
    first.close()
    assert not first._thread.is_alive()
    assert stranger.recv(1) == b""
    assert [server.fileno() for server in first._servers] == [-1]


@pytest.mark.parametrize(
    "said", [b"wrong 1\n", b"\n", "\xe9 1\n".encode(), b"\x16\x03\x01\n", b"1" * 128, b"half"]
)
def test_who_does_not_know_the_token_is_no_rank(
    job: Job, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    if b"\n" not in said:
        monkeypatch.setattr(lifelines, "_SECONDS_TO_IDENTIFY", 0.1)
    first = job.start(0)
    with job.connect() as stranger:
        stranger.sendall(said)
        assert stranger.recv(1) == b""
    assert not first.has(1)
    job.start(2)
    wait_until(lambda: first.has(2))


def test_a_rank_neither_waits_for_a_silent_stranger_nor_has_to_send_its_line_at_once(
    job: Job,
) -> None:
    first = job.start(0)
    with job.connect(), job.connect() as slow:
        slow.sendall(job.token[:5])
        job.start(1)
        wait_until(lambda: first.has(1), seconds=10)  # less than a stranger has
        assert not first.has(2)
        slow.sendall(job.token[5:] + b" 2\n")
        wait_until(lambda: first.has(2))


def test_all_ranks_on_one_machine_use_its_loopback_interface(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "a-name-that-none-has.invalid")
    first, second = job.start(0), job.start(1)
    wait_until(lambda: first.has(1) and second.has(0))
    assert [server.getsockname()[0] for server in first._servers] == ["127.0.0.1"]


@pytest.mark.parametrize(
    "addresses", [("127.0.0.2",), ("192.0.2.77", "127.0.0.3"), ("127.0.0.2", "127.0.0.3", "::1")]
)
def test_ranks_of_several_machines_use_the_address_through_which_they_connected(
    job: Job, addresses: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [socket.getaddrinfo(one, None, type=socket.SOCK_STREAM)[0] for one in addresses]
    own_getaddrinfo = socket.getaddrinfo

    def getaddrinfo(host: str, *args: int, **kwargs: int) -> object:
        return found if host == "the-first-node" else own_getaddrinfo(host, *args, **kwargs)

    monkeypatch.setenv("MASTER_ADDR", "the-first-node")
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    first = job.start(0, nodes=2)
    # 192.0.2.0/24 is for documentation, and no machine here has 192.0.2.77.
    wanted = {one for one in addresses if one != "192.0.2.77"}
    listens_at = {server.getsockname()[0] for server in first._servers}
    assert listens_at in (wanted, wanted - {"::1"})  # IPv6 may be switched off
    port = job.store[ADDRESS_KEY].split()[0]
    assert {server.getsockname()[1] for server in first._servers} == {int(port)}
    for rank, address in enumerate(sorted(listens_at), 1):
        monkeypatch.setenv("MASTER_ADDR", address)
        job.start(rank, nodes=2)
        wait_until(lambda rank=rank: first.has(rank))  # type: ignore[misc]


def test_a_first_rank_that_cannot_listen_says_so_for_all(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.77")
    first, second = job.start(0, nodes=2), job.start(1, nodes=2)
    assert not first.has(1)
    assert not second.has(0)
    (message,) = caplog.messages
    assert message.startswith("rank 0 cannot listen at 192.0.2.77, so no rank has a lifeline: ")


def test_a_rank_that_cannot_connect_is_told_of(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    job.store.set(ADDRESS_KEY, f"{port} token")
    second = job.start(1)
    said = f"rank 1 has no lifeline, port {port} of rank 0 at 127.0.0.1: "
    wait_until(lambda: said in caplog.text)
    assert not second.has(0)


def test_a_rank_sends_heartbeats_while_a_firewall_swallows_its_connection(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answered = threading.Event(), threading.Event()

    def create_connection(*_: object) -> socket.socket:
        asked.set()
        answered.wait(20)
        raise TimeoutError

    job.start(0)
    monkeypatch.setattr(socket, "create_connection", create_connection)
    second = job.start(1)  # in the thread that sends heartbeats
    assert asked.wait(20)
    assert not second.has(0)
    answered.set()
