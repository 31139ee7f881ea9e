"""Every measurement, in lists: what is asked first comes first."""

from __future__ import annotations

from longhaul.kernels.power.verify.benchmark import Task
from longhaul.kernels.power.verify.peers import DECODERS, RETENTION_CHUNKS, SDPA, Shape
from longhaul.kernels.verify.candidates import MOST_CANDIDATES

HEADLINE = "degree 2, K 64"
DEGREE_1 = "degree 1, K 64"
NARROW = "degree 2, K 32"
ATTENTION = "attention form"
# The shapes that are timed for training.
ROWS = {
    HEADLINE: Shape(),
    DEGREE_1: Shape(degree=1, normalize=False),
    NARROW: Shape(K=32),
    ATTENTION: Shape(T=8192, form="attention"),
}
# The rows of decoding, and their batches.
DECODING = {"decoding, batch 8": 8, "decoding, batch 1": 1}
_CROSSOVER_TOKENS = (1024, 2048, 4096, 8192, 16_384)

# The peers that try many configurations, and how many processes compile them. `retention` tunes the
# same kernels for every chunk size; the longest take least memory.
COMPILED_BEFORE = {"chunk_simple_gla": 2, f"retention, chunk {max(RETENTION_CHUNKS)}": 12}


def headline_tasks() -> list[Task]:
    """The time of the op as training calls it, and what it is compared with."""
    return [
        *_training(HEADLINE, "longhaul", "sdpa flash"),
        Task(what="matmul", row="matmul", implementation="torch"),
    ]


def op_tasks() -> list[Task]:
    """The op at other shapes and lengths, in parts, by configuration, and one token at a time."""
    tasks = [Task(what="profile", row=row, shape=shape) for row, shape in ROWS.items()]
    tasks += _training(HEADLINE, "sdpa cudnn")
    for row in (DEGREE_1, NARROW, ATTENTION):
        tasks += _training(row, "longhaul", *SDPA)
    for row, batch in DECODING.items():
        tasks += [
            Task(what="decoding", row=row, implementation=implementation, shape=Shape(B=batch))
            for implementation in (*DECODERS, *SDPA)
        ]
    for T in _CROSSOVER_TOKENS:
        shape = Shape(T=T, form="auto")
        tasks += [
            Task(
                what="training",
                row=f"T {T}",
                implementation=implementation,
                shape=shape,
                with_graph=True,
            )
            for implementation in ("longhaul", *SDPA)
        ]
    tasks.append(Task(what="copy", row="copy", implementation="torch"))
    for row, shape in ROWS.items():
        for index in range(MOST_CANDIDATES):
            label = f"{row}, candidate {index}"
            tasks.append(Task(what="profile", row=label, shape=shape, candidate=index))
    return tasks


def peer_tasks() -> list[Task]:
    """Other projects' kernels for the same operation. Their autotuners try many configurations."""
    retention = [f"retention, chunk {C}" for C in RETENTION_CHUNKS]
    retention += [f"retention, compiled, chunk {C}" for C in RETENTION_CHUNKS]
    return [*_training(DEGREE_1, "chunk_simple_gla"), *_training(HEADLINE, *retention)]


def _training(row: str, *implementations: str) -> list[Task]:
    return [
        Task(what="training", row=row, implementation=implementation, shape=ROWS[row])
        for implementation in implementations
    ]
