"""Every measurement, in lists: what is asked first comes first."""

from __future__ import annotations

from dataclasses import dataclass, replace

from longhaul.kernels.power.verify.benchmark import Task
from longhaul.kernels.power.verify.peers import DECODERS, RETENTION_CHUNKS, SDPA, Shape
from longhaul.kernels.verify.candidates import MOST_CANDIDATES

HEADLINE = "degree 2, K 64"
DEGREE_1 = "degree 1, K 64"
NARROW = "degree 2, K 32"
ATTENTION = "attention form"
# The rows of decoding, and their batches.
DECODING = {"decoding, batch 8": 8, "decoding, batch 1": 1}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of all measurements; tests on a CPU use smaller ones."""

    tokens: int = 65_536
    attention_tokens: int = 8192
    crossover_tokens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16_384)
    heads: int = 8
    widths: tuple[int, int] = (64, 32)
    matmul: int = 8192

    @property
    def headline(self) -> Shape:
        return Shape(T=self.tokens, H=self.heads, K=self.widths[0])

    @property
    def rows(self) -> dict[str, Shape]:
        """The shapes that are timed for training."""
        return {
            HEADLINE: self.headline,
            DEGREE_1: replace(self.headline, degree=1, normalize=False),
            NARROW: replace(self.headline, K=self.widths[1]),
            ATTENTION: replace(self.headline, T=self.attention_tokens, form="attention"),
        }


def headline_tasks(sizes: Sizes) -> list[Task]:
    """The time of the op as training calls it, and what it is compared with."""
    return [
        *_training(HEADLINE, sizes.headline, "longhaul", "sdpa flash"),
        Task(what="matmul", row="matmul", implementation="torch", size=sizes.matmul),
    ]


def op_tasks(sizes: Sizes) -> list[Task]:
    """The op at other shapes and lengths, in parts, by configuration, and one token at a time."""
    rows = sizes.rows
    tasks = [Task(what="profile", row=row, shape=shape) for row, shape in rows.items()]
    tasks += _training(HEADLINE, rows.pop(HEADLINE), "sdpa cudnn")
    for row, shape in rows.items():
        tasks += _training(row, shape, "longhaul", *SDPA)
    for row, batch in DECODING.items():
        decoded = replace(sizes.headline, B=batch)
        tasks += [
            Task(what="decoding", row=row, implementation=implementation, shape=decoded)
            for implementation in (*DECODERS, *SDPA)
        ]
    for T in sizes.crossover_tokens:
        shape = replace(sizes.headline, T=T, form="auto")
        short = _training(f"T {T}", shape, "longhaul", *SDPA)
        tasks += [replace(task, with_graph=True) for task in short]
    tasks.append(Task(what="copy", row="copy", implementation="torch", size=sizes.matmul))
    for row, shape in sizes.rows.items():
        for index in range(MOST_CANDIDATES):
            label = f"{row}, candidate {index}"
            tasks.append(Task(what="profile", row=label, shape=shape, candidate=index))
    return tasks


def peer_tasks(sizes: Sizes) -> list[Task]:
    """Other projects' kernels for the same operation. Their autotuners try many configurations."""
    retention = [f"retention, chunk {C}" for C in RETENTION_CHUNKS]
    retention += [f"retention, compiled, chunk {C}" for C in RETENTION_CHUNKS]
    rows = sizes.rows
    return [
        *_training(DEGREE_1, rows[DEGREE_1], "chunk_simple_gla"),
        *_training(HEADLINE, rows[HEADLINE], *retention),
    ]


def _training(row: str, shape: Shape, *implementations: str) -> list[Task]:
    return [
        Task(what="training", row=row, implementation=implementation, shape=shape)
        for implementation in implementations
    ]
