"""Where programs are in a kernel, and what they hold there: registers, and what is in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from arithmetic import Array


class Registers(dict[str, Array]):
    """Values by name. What was never written reads as zero, as compilers leave such registers."""

    def __missing__(self, name: str) -> Array:
        kind = {"p": "?", "rs": "u2", "r": "u4", "rd": "u8"}[name.rstrip("0123456789")]
        return np.zeros((1, 1), kind)


@dataclass
class Copies:
    """A cp.async of some lanes: where (w, p, l), and what, which arrives when it is waited for."""

    indices: Array  # (p, w, l)
    size: int
    values: Array  # (p, w, l)


@dataclass
class Product:
    """A wgmma: the registers of its sums, and the words of shared memory that it reads."""

    names: tuple[str, ...]
    reads: list[Array]  # each (p, g, n)


@dataclass
class Context:
    """Programs at the same place of a kernel. Arrays have one row per program, or one for all."""

    programs: Array  # (p, 1), within the batch
    place: tuple[Array, Array, Array]  # each (p, 1): the grid's x, y and z
    registers: Registers = field(default_factory=Registers)
    # Of wgmma that nothing waited for yet: sums (n, p, l) by the name of the first register.
    sums: dict[str, Array] = field(default_factory=dict)
    open_products: list[Product] = field(default_factory=list)
    products: list[list[Product]] = field(default_factory=list)
    open_copies: list[Copies] = field(default_factory=list)
    copies: list[list[Copies]] = field(default_factory=list)

    def rows(self, which: Array) -> Context:
        """Some of the programs."""
        n = len(self.programs)

        def take(x: Array) -> Array:
            return x[which] if len(x) == n else x

        def take_products(group: list[Product]) -> list[Product]:
            return [Product(one.names, [take(x) for x in one.reads]) for one in group]

        def take_copies(group: list[Copies]) -> list[Copies]:
            return [Copies(take(one.indices), one.size, take(one.values)) for one in group]

        return Context(
            self.programs[which],
            (take(self.place[0]), take(self.place[1]), take(self.place[2])),
            Registers({name: take(x) for name, x in self.registers.items()}),
            {name: x[:, which] for name, x in self.sums.items()},
            take_products(self.open_products),
            [take_products(group) for group in self.products],
            take_copies(self.open_copies),
            [take_copies(group) for group in self.copies],
        )

    def outline(self) -> object:
        """Equal for contexts that can be joined."""

        def products(group: list[Product]) -> object:
            return [(one.names, [x.shape[1:] for x in one.reads]) for one in group]

        def copies(group: list[Copies]) -> object:
            return [(one.size, one.indices.shape[1:]) for one in group]

        return (
            [(name, self.sums[name].shape[::2]) for name in sorted(self.sums)],
            products(self.open_products),
            [products(group) for group in self.products],
            copies(self.open_copies),
            [copies(group) for group in self.copies],
        )


def _pair(a: Context, b: Context) -> Context:
    """Both as one. Their outlines are equal."""

    def join_rows(x: Array, y: Array) -> Array:
        if x is y or (len(x) == len(y) == 1 and x.shape == y.shape and np.array_equal(x, y)):
            return x
        lanes = max(x.shape[1], y.shape[1])
        rest = x.shape[2:]
        return np.concatenate(
            [
                np.broadcast_to(x, (len(a.programs), lanes, *rest)),
                np.broadcast_to(y.view(x.dtype), (len(b.programs), lanes, *rest)),
            ]
        )

    def join_products(x: list[Product], y: list[Product]) -> list[Product]:
        return [
            Product(p.names, [join_rows(r, s) for r, s in zip(p.reads, q.reads, strict=True)])
            for p, q in zip(x, y, strict=True)
        ]

    def join_copies(x: list[Copies], y: list[Copies]) -> list[Copies]:
        return [
            Copies(join_rows(p.indices, q.indices), p.size, join_rows(p.values, q.values))
            for p, q in zip(x, y, strict=True)
        ]

    names = a.registers.keys() | b.registers.keys()
    x, y, z = (join_rows(p, q) for p, q in zip(a.place, b.place, strict=True))
    return Context(
        np.concatenate([a.programs, b.programs]),
        (x, y, z),
        Registers({name: join_rows(a.registers[name], b.registers[name]) for name in names}),
        {name: np.concatenate([a.sums[name], b.sums[name]], axis=1) for name in a.sums},
        join_products(a.open_products, b.open_products),
        [join_products(p, q) for p, q in zip(a.products, b.products, strict=True)],
        join_copies(a.open_copies, b.open_copies),
        [join_copies(p, q) for p, q in zip(a.copies, b.copies, strict=True)],
    )


def joined(contexts: list[Context]) -> list[Context]:
    """Contexts of one block, with those of equal outline as one."""
    found: list[tuple[object, Context]] = []
    for context in contexts:
        outline = context.outline()
        for i, (other, first) in enumerate(found):
            if other == outline:
                found[i] = (outline, _pair(first, context))
                break
        else:
            found.append((outline, context))
    return [context for _, context in found]
