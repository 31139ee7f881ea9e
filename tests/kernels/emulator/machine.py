"""Run a compiled kernel as numpy operations on many programs at once, lane by lane in step.

Programs that run the same block go together. Where they part at a branch, those that are furthest
behind run first, and meet the others again at the next common block.

What is modelled: registers, predicates, shuffles, global and shared memory with their bounds and
alignment, barriers, cp.async, ldmatrix, stmatrix, mma.sync, wgmma with its descriptors and
swizzles. A cp.async writes and a wgmma delivers its sums when it is waited for. What two warps do
to a byte without a barrier between, or two programs to a byte of global memory, is a fault; so is a
wgmma that reads what no fence made visible (memories.py). Warps have no order of their own: a race
is a fault whichever warp would come first.

What is not: branches in which lanes of a program part, races of two lanes of a warp except in one
store, the order in which other warps see stores to global memory, atomics, barriers of some of the
warps, rounding of sums within a matrix product, and the errors of approximate ex2, sqrt and
division, which are computed as exactly as numpy does. Subnormal numbers are kept.
"""

from __future__ import annotations

import numpy as np
import products
from arithmetic import Array, f4, i8, u4
from assembly import Assembly, parse
from contexts import Context, Copies, Product, joined
from memories import NUM_WARPS, FaultError, GlobalMemory, SharedMemory, Words, join, split, words_at
from translation import Translation

_LANES_AT_ONCE = 16384
_PARTED = -1


class Kernel:
    """A compiled kernel, ready to run."""

    def __init__(self, text: str, shared_bytes: int) -> None:
        self.assembly: Assembly = parse(text)
        self.functions = Translation(self.assembly).functions
        self.shared_bytes = shared_bytes

    def run(self, memory: GlobalMemory, arguments: list[int], grid: tuple[int, int, int]) -> None:
        """Run every program of a grid. Arguments are bits of numbers and addresses.

        Raises:
            FaultError: an access or a race that memories.py describes.
        """
        z, y, x = (i.reshape(-1, 1) for i in np.indices(grid[::-1], np.uint32))
        batch = max(1, _LANES_AT_ONCE // self.assembly.num_threads)
        with np.errstate(all="ignore"):
            for start in range(0, len(x), batch):
                some = slice(start, start + batch)
                place = (x[some], y[some], z[some])
                numbers = np.arange(start, start + len(place[0]))[:, None]
                _Batch(self, memory, arguments, numbers).run(place)
        try:
            memory.check()
        except FaultError as error:
            raise FaultError(f"{self.assembly.name}: {error}") from None


class _Batch:
    """Some programs of a launch. Translated functions call its methods."""

    def __init__(
        self, kernel: Kernel, memory: GlobalMemory, arguments: list[int], numbers: Array
    ) -> None:
        self._kernel = kernel
        self._memory = memory
        self._numbers = numbers  # (p, 1) in the launch
        lanes = kernel.assembly.num_threads
        self._num_lanes = lanes
        self.threads = np.arange(lanes, dtype=u4)[None]
        warps = np.arange(lanes) // 32
        if lanes % 32 or lanes > 256:
            raise ValueError(f"threads: found {lanes}, wanted a multiple of 32 up to 256")
        self._warps = warps[None]
        self._num_barriers = np.zeros((len(numbers), 1), np.int64)  # of each program so far
        self._shared = SharedMemory(len(numbers), kernel.shared_bytes, warps)
        values = (*arguments, 0, 0, 0, 0)  # the last are pointers to scratch memory
        self.parameters = {
            name: np.array([[value]], i8)
            for (_, name), value in zip(kernel.assembly.parameters, values, strict=False)
        }

    def run(self, place: tuple[Array, Array, Array]) -> None:
        programs = np.arange(len(place[0]))[:, None]
        self._waiting: dict[int, list[Context]] = {0: [Context(programs, place)]}
        end = len(self._kernel.functions)
        while self._waiting:
            block = min(self._waiting)
            contexts = self._waiting.pop(block)
            if block == end:
                continue
            for context in joined(contexts):
                after = self._run_block(block, context)
                if after != _PARTED:
                    self._waiting.setdefault(after, []).append(context)

    def _run_block(self, block: int, context: Context) -> int:
        self._line = 0
        try:
            return self._kernel.functions[block](self, context)
        except FaultError as error:
            assembly = self._kernel.assembly
            raise FaultError(
                f"{assembly.name}: {error}; PTX, line {self._line}: "
                f"{assembly.lines[self._line - 1].strip()[:200]}"
            ) from None

    def branch(self, c: Context, line: int, condition: Array, to: int, otherwise: int) -> int:
        """The next block, or _PARTED if programs part."""
        self._line = line
        if condition.shape[1] > 1:
            if (condition != condition[:, :1]).any():
                raise FaultError("lanes of a program part: not known to the emulator")
            condition = condition[:, :1]
        if condition.all():
            return to
        if not condition.any():
            return otherwise
        for block, which in ((to, condition[:, 0]), (otherwise, ~condition[:, 0])):
            self._waiting.setdefault(block, []).append(c.rows(which))
        return _PARTED

    # -- memory --------------------------------------------------------------------------------

    def load_global(
        self, c: Context, line: int, address: Array, active: Array | None, size: int, count: int
    ) -> list[Array]:
        self._line = line
        flat = self._memory.locate(address, active, size * count)
        if flat is None:
            return [np.zeros((1, 1), f"u{size}")] * count
        where = words_at(flat, size * count)
        self._note(c, where, is_store=False)
        return split(self._memory.buffer.load(where), size)

    def store_global(
        self,
        c: Context,
        line: int,
        address: Array,
        active: Array | None,
        size: int,
        values: tuple[Array, ...],
    ) -> None:
        self._line = line
        shape = (len(c.programs), self._num_lanes)
        address = np.broadcast_to(address, shape)
        flat = self._memory.locate(address, active, size * len(values))
        if flat is None:
            return
        where = words_at(flat, size * len(values))
        self._note(c, where, is_store=True)
        self._memory.buffer.store(where, join(values, size * len(values), shape))

    def load_shared(
        self, c: Context, line: int, address: Array, active: Array | None, size: int, count: int
    ) -> list[Array]:
        self._line = line
        flat = self._shared.locate(c.programs, address, active, size * count)
        if flat is None:
            return [np.zeros((1, 1), f"u{size}")] * count
        return split(self._shared.load(words_at(flat, size * count)), size)

    def store_shared(
        self,
        c: Context,
        line: int,
        address: Array,
        active: Array | None,
        size: int,
        values: tuple[Array, ...],
    ) -> None:
        self._line = line
        flat = self._shared.locate(c.programs, address, active, size * len(values))
        if flat is None:
            return
        words = join(values, size * len(values), (len(c.programs), self._num_lanes))
        self._shared.store(words_at(flat, size * len(values)), words)

    def _note(self, c: Context, where: Words, *, is_store: bool) -> None:
        programs = c.programs[:, 0]
        is_uniform = where.indices.shape[2] == 1 and self._num_lanes > 32
        warps = np.full((1, 1), NUM_WARPS - 1) if is_uniform else self._warps
        turns = self._num_barriers[programs] * NUM_WARPS + warps
        self._memory.note(where, self._numbers[programs], turns, is_store=is_store)

    def barrier(self, c: Context) -> None:
        self._num_barriers[c.programs[:, 0]] += 1
        self._shared.barrier(c.programs)

    def fence(self, c: Context) -> None:
        self._shared.fence(c.programs)

    # -- asynchronous copies -------------------------------------------------------------------

    def copy(
        self,
        c: Context,
        line: int,
        to: Array,
        start: Array,
        active: Array | None,
        size: int,
        kept: Array | None,
    ) -> None:
        """cp.async of `size` bytes a lane, of which the first `kept` are read: none or all."""
        self._line = line
        flat = self._shared.locate(c.programs, to, active, size)
        if flat is None:
            return
        loads = active
        if kept is not None:
            if ((kept != 0) & (kept != size)).any():
                raise FaultError("a cp.async of parts: not known to the emulator")
            loads = kept != 0 if active is None else active & (kept != 0)
        where = words_at(flat, size)
        values = np.zeros((1, 1, 1), f"u{where.size}")
        found = self._memory.locate(start, loads, size)
        if found is not None:
            source = words_at(found, size)
            self._note(c, source, is_store=False)
            values = self._memory.buffer.load(source)
            if loads is not None:
                values = np.where(loads, values, values.dtype.type(0))
        self._shared.check_store(where)
        self._shared.set_landing(where, is_landing=True)
        values = np.broadcast_to(values, where.indices.shape)
        c.open_copies.append(
            Copies(where.indices.swapaxes(0, 1), where.size, values.swapaxes(0, 1))
        )

    def commit_copies(self, c: Context) -> None:
        c.copies.append(c.open_copies)
        c.open_copies = []

    def wait_copies(self, c: Context, num_left: int) -> None:
        done = len(c.copies) - num_left
        for group in c.copies[: max(0, done)]:
            for one in group:
                where = Words(one.indices.swapaxes(0, 1), one.size)
                self._shared.land(where, one.values.swapaxes(0, 1))
        c.copies = c.copies[max(0, done) :]

    # -- warps ---------------------------------------------------------------------------------

    def shuffled(self, value: Array, mode: str, by: Array) -> Array:
        if value.shape[1] == 1:
            return value
        lane = np.arange(self._num_lanes)[None]
        offset = by.astype(i8)
        if mode == "bfly":
            source = lane ^ offset
        elif mode == "up":
            source = np.where(lane % 32 >= offset, lane - offset, lane)
        elif mode == "down":
            source = np.where(lane % 32 + offset < 32, lane + offset, lane)
        elif mode == "idx":
            source = (lane & ~31) | (offset & 31)
        else:
            raise FaultError(f"shfl.{mode}: not known to the emulator")
        if len(source) == 1:
            return value[:, source[0]]
        shape = (len(source), self._num_lanes)
        return np.take_along_axis(np.broadcast_to(value, shape), source, axis=1)

    def reduced(self, value: Array, operation: str) -> Array:
        """redux.sync: every lane gets the sum or an extremum of its warp."""
        value = np.broadcast_to(value, (len(value), self._num_lanes))
        by_warp = value.reshape(len(value), -1, 32)
        reduce = {"add": np.add, "min": np.minimum, "max": np.maximum}[operation].reduce
        return np.repeat(reduce(by_warp, axis=2, dtype=value.dtype), 32, axis=1)

    def load_matrices(
        self, c: Context, line: int, address: Array, count: int, is_turned: bool
    ) -> list[Array]:
        """ldmatrix: lane 8 i + r has the address of row r of the 8 x 8 matrix i."""
        self._line = line
        active = None if count == 4 else self.threads % 32 < 8 * count
        flat = self._shared.locate(c.programs, address, active, 16)
        assert flat is not None
        words = self._shared.load(words_at(flat, 16))  # (2, p, l)
        rows = np.ascontiguousarray(words.transpose(1, 2, 0))
        return products.matrices_of_rows(rows, count, is_turned)

    def store_matrices(
        self, c: Context, line: int, address: Array, values: tuple[Array, ...], is_turned: bool
    ) -> None:
        self._line = line
        shape = (len(c.programs), self._num_lanes)
        active = None if len(values) == 4 else self.threads % 32 < 8 * len(values)
        flat = self._shared.locate(c.programs, address, active, 16)
        assert flat is not None
        rows = products.rows_of_matrices([np.broadcast_to(x, shape) for x in values], is_turned)
        self._shared.store(words_at(flat, 16), np.ascontiguousarray(rows.transpose(2, 0, 1)))

    # -- matrix products -----------------------------------------------------------------------

    def small_product(
        self,
        kind: str,
        a: tuple[Array, ...],
        b: tuple[Array, ...],
        start: tuple[Array, ...],
    ) -> Array:
        """mma.sync: float32 sums (4, p, l)."""
        total = products.of_warps(kind, a, b, self._num_lanes)
        return np.stack([x + y for x, y in zip(start, total, strict=True)])

    def product(
        self,
        c: Context,
        line: int,
        kind: str,
        names: tuple[str, ...],
        start: tuple[Array, ...],
        left: tuple[Array, ...] | Array,
        right: Array,
        keep: Array,
        turns_left: bool,
        turns_right: bool,
    ) -> None:
        """wgmma.mma_async: the sums arrive in their registers when they are waited for."""
        self._line = line
        shape = (len(c.programs), self._num_lanes)
        reads: list[Array] = []
        operands = []
        for operand, rows, is_turned in (
            (left, 64, turns_left),
            (right, 2 * len(names), turns_right),
        ):
            if isinstance(operand, tuple):
                operands.append(products.left_of_registers(kind, operand, shape))
                continue
            lead = np.broadcast_to(operand, shape)[:, ::128]  # (p, g)
            chunks = products.chunks_of(lead, kind, rows, is_turned)  # (p, g, n)
            if chunks.min() < 0 or chunks.max() + 16 > self._shared.size:
                raise FaultError("wgmma reads past the end of shared memory")
            chunks = (chunks + (c.programs * self._shared.stride)[:, :, None]) >> 4
            bits = np.uint64(0x0F0F0F0F0F0F0F0F) << np.arange(0, 4 * lead.shape[1], 4, dtype="u8")
            words = (2 * chunks[..., None] + np.arange(2)).reshape(*chunks.shape[:2], -1)
            self._shared.start_reading(words, bits[None, :, None])
            reads.append(words)
            found = self._shared.values.bytes.reshape(-1, 16)[chunks]  # (p, g, n, 16)
            operands.append(products.matrix_of_chunks(found, kind, rows, is_turned))
        if not isinstance(left, tuple):
            operands[0] = operands[0].swapaxes(2, 3)
        total = products.of_groups(operands[0], operands[1])
        if names[0] in c.sums:
            if not np.isnan(start[0]).all():
                raise FaultError("a register of a wgmma in flight was written")
            total += np.where(keep, c.sums[names[0]], f4.type(0))
        elif keep.any():
            for i, x in enumerate(start):
                total[i] += np.where(keep, x, f4.type(0))
        c.sums[names[0]] = total
        c.open_products.append(Product(names, reads))

    def commit_products(self, c: Context) -> None:
        c.products.append(c.open_products)
        c.open_products = []

    def wait_products(self, c: Context, num_left: int) -> None:
        done = max(0, len(c.products) - num_left)
        finished = [one for group in c.products[:done] for one in group]
        c.products = c.products[done:]
        busy = {one.names[0] for group in c.products for one in group}
        busy |= {one.names[0] for one in c.open_products}
        for one in finished:
            for indices in one.reads:
                self._shared.end_reading(indices)
            if one.names[0] not in busy and one.names[0] in c.sums:
                for name, value in zip(one.names, c.sums.pop(one.names[0]), strict=True):
                    c.registers[name] = value
