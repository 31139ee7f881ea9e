"""Global and shared memory, with a check of every access.

Global memory holds each tensor's storage far from all others, so that an address past the end of
one is never in another. Shared memory notes for every byte which warps wrote and read it since the
last barrier: two warps whose accesses conflict without a barrier between them are a fault in
whatever order they ran.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]

NUM_WARPS = 9  # that a turn tells apart: eight, and all of them together
_SPACING = 36  # bits of an address within a tensor
_WORDS = {1: (1, 1), 2: (2, 1), 4: (4, 1), 8: (8, 1), 16: (8, 2), 32: (8, 4)}
# What an unwritten 16-bit half holds: NaN as bfloat16, as float16, and in pairs as float32.
_POISON = 0x7FC1

# States of a byte of shared memory: the lowest bits, and a count of products that read it.
UNFENCED = 1  # written, and not yet visible to wgmma
LANDING = 2  # a cp.async may write it at any moment
READING = 4  # times the number of wgmma in flight that read it


class FaultError(Exception):
    """What a chip would not do, or would do at random."""


def repeated(value: int, size: int) -> int:
    """A byte repeated over a word."""
    return int.from_bytes(bytes([value]) * size, "little")


def split(words: Array, size: int) -> list[Array]:
    """Words (w, p, l) as numbers (p, l) of `size` bytes each, lowest first."""
    if words.itemsize == size:
        return list(words)
    per_word = words.itemsize // size
    numbers = words.view(f"u{size}")
    return [
        numbers[i // per_word, :, i % per_word :: per_word] for i in range(len(words) * per_word)
    ]


def join(numbers: tuple[Array, ...], total: int, shape: tuple[int, int]) -> Array:
    """The reverse: numbers (p, l) as words (w, p, l)."""
    size, count = _WORDS[total]
    if len(numbers) == count:
        return np.stack([np.broadcast_to(x, shape) for x in numbers])
    per_word = len(numbers) // count
    out = np.empty((count, shape[0], shape[1] * per_word), f"u{numbers[0].itemsize}")
    for i, x in enumerate(numbers):
        out[i // per_word, :, i % per_word :: per_word] = x
    return out.view(f"u{size}")


class Words(NamedTuple):
    """Where an access of a power of two bytes falls: indices (w, p, l) of words of `size` bytes."""

    indices: Array
    size: int


def words_at(flat: Array, total: int) -> Words:
    size, count = _WORDS[total]
    first = flat >> (size.bit_length() - 1)
    if count == 1:
        return Words(first[None], size)
    return Words(first + np.arange(count)[:, None, None], size)


class Buffer:
    """Bytes, seen as words of any size. The last 64 bytes take what masked lanes access."""

    def __init__(self, size: int) -> None:
        self.scratch = -(-size // 64) * 64
        self.bytes = np.zeros(self.scratch + 64, np.uint8)
        self.words = {size: self.bytes.view(f"u{size}") for size in (1, 2, 4, 8)}

    def load(self, where: Words) -> Array:
        found: Array = self.words[where.size][where.indices]
        return found

    def store(self, where: Words, values: Array) -> None:
        self.words[where.size][where.indices] = values


class GlobalMemory:
    """Copies of the storages of tensors, and who accessed them."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[int, Tensor]] = {}
        self._loads: list[tuple[Words, Array, Array]] = []
        self._stores: list[tuple[Words, Array, Array]] = []

    def pointer(self, tensor: Tensor) -> int:
        """The address of a tensor's first element."""
        storage = tensor.untyped_storage()
        number, _ = self._storages.setdefault(
            storage.data_ptr(),
            (
                len(self._storages) + 1,
                torch.empty(0, dtype=torch.uint8).set_(storage),
            ),
        )
        return (number << _SPACING) + tensor.data_ptr() - storage.data_ptr()

    def copy_in(self) -> None:
        """Take the tensors' values. Call it once, when all pointers are known."""
        sizes = [storage.numel() for _, storage in self._storages.values()]
        starts = np.cumsum([0, *(-(-size // 64) * 64 for size in sizes)])
        # Address 0 is no tensor's: number 0 has no bytes.
        self._sizes = np.array([0, *sizes])
        self._starts = np.array([0, *starts[:-1]])
        self.buffer = Buffer(int(starts[-1]))
        for (_, storage), start in zip(self._storages.values(), starts, strict=False):
            self.buffer.bytes[start : start + storage.numel()] = storage.numpy()

    def copy_out(self) -> None:
        for number, storage in self._storages.values():
            start = self._starts[number]
            storage.numpy()[:] = self.buffer.bytes[start : start + self._sizes[number]]

    def locate(self, address: Array, active: Array | None, total: int) -> Array | None:
        """Places (p, l) in the buffer; None if no lane is active."""
        if active is not None:
            if not active.any():
                return None
            if active.all():
                active = None
            else:
                address, active = np.broadcast_arrays(address, active)
        first = address.flat[0 if active is None else int(active.argmax())]
        # Nearly always, all lanes access one tensor.
        number = int(first) >> _SPACING
        offset = address - (number << _SPACING)
        size, start = self._last(number)
        is_inside = (offset >= 0) & (offset <= size - total)
        if active is not None:
            is_inside |= ~active
        if not is_inside.all():
            numbers = np.clip(address >> _SPACING, 0, len(self._sizes) - 1)
            offset = address - (numbers << _SPACING)
            is_inside = (offset >= 0) & (offset <= self._sizes[numbers] - total)
            if active is not None:
                is_inside |= ~active
            start = self._starts[numbers]
            if not is_inside.all():
                self._refuse(address, ~is_inside, total)
        flat = offset + start
        if active is not None:
            flat = np.where(active, flat, self.buffer.scratch)
        if total > 1 and (flat & (total - 1)).any():
            raise FaultError(f"an address that is no multiple of {total}")
        return flat

    def _last(self, number: int) -> tuple[int, int]:
        if not 0 <= number < len(self._sizes):
            return 0, 0
        return int(self._sizes[number]), int(self._starts[number])

    def _refuse(self, address: Array, is_outside: Array, total: int) -> None:
        where = tuple(int(i[0]) for i in is_outside.nonzero())
        number, offset = divmod(int(address[where]), 1 << _SPACING)
        size = self._last(number)[0]
        if offset >= 1 << (_SPACING - 1):  # before the start of the next tensor
            number, offset = number + 1, offset - (1 << _SPACING)
        raise FaultError(
            f"{total} bytes at {offset} of a tensor of {size} bytes (tensor {number} of the "
            f"launch, program and lane {where})"
        )

    def note(self, where: Words, programs: Array, turns: Array, *, is_store: bool) -> None:
        """Remember for `check` who accessed what.

        Turns (p, l) tell the lanes' warps and the barriers before apart. Where all lanes access one
        address they are (p, 1).
        """
        (self._stores if is_store else self._loads).append((where, programs, turns))

    def check(self) -> None:
        """No load and no store may depend on what runs first: programs, or warps of a program.

        Of several stores to a byte in a program, only the last is compared with loads.
        """
        if not self._stores:
            return
        scratch = self.buffer.scratch
        writer, turn = np.full((2, len(self.buffer.bytes)), -1, np.int32)
        for is_second in (False, True):
            for (indices, size), programs, turns in self._stores:
                for byte in range(size):
                    places = indices * size + byte
                    if not is_second:
                        writer[places] = programs
                        turn[places] = turns
                    elif ((writer[places] != programs) & (places < scratch)).any():
                        raise FaultError("two programs store to one address")
        for (indices, size), programs, turns in self._loads:
            for byte in {0, size - 1}:
                places = indices * size + byte
                found = writer[places]
                is_written = (found != -1) & (places < scratch)
                if (is_written & (found != programs)).any():
                    raise FaultError("a program loads what another stores")
                after = turn[places]
                is_near = after // NUM_WARPS == turns // NUM_WARPS
                if (is_written & is_near & (after != turns)).any():
                    raise FaultError("a warp loads what another stores, with no barrier between")


class SharedMemory:
    """The shared memory of several programs, one after another."""

    def __init__(self, num_programs: int, size: int, warps: Array) -> None:
        self.size = size
        self.stride = -(-size // 16) * 16
        self.values = Buffer(num_programs * self.stride)
        self.values.words[2][:] = _POISON
        # Bits of warps since the last barrier, and states as above.
        self.written, self.read, self.states = (Buffer(self.values.scratch) for _ in range(3))
        self._num_programs = num_programs
        bits = 1 << warps[None].astype(np.uint64)
        self.own = {n: (bits * repeated(1, n)).astype(f"u{n}") for n in (1, 2, 4, 8)}
        self._shape = (1, len(warps))

    def rows(self, buffer: Buffer) -> Array:
        """The bytes of a buffer, by program."""
        return buffer.bytes[: self._num_programs * self.stride].reshape(self._num_programs, -1)

    def locate(
        self, programs: Array, address: Array, active: Array | None, total: int
    ) -> Array | None:
        """Places (p, l) in the buffer; None if no lane is active."""
        if active is not None:
            if not active.any():
                return None
            if active.all():
                active = None
        is_inside = (address >= 0) & (address <= self.size - total)
        is_aligned = (address & (total - 1)) == 0
        if active is not None:
            is_inside, is_aligned = is_inside | ~active, is_aligned | ~active
        if not is_inside.all():
            place = int(np.broadcast_to(address, is_inside.shape)[~is_inside][0])
            raise FaultError(f"{total} bytes at {place} of {self.size} bytes of shared memory")
        if not is_aligned.all():
            raise FaultError(f"an address in shared memory that is no multiple of {total}")
        flat = programs * self.stride + address
        if active is not None:
            flat = np.where(active, flat, self.values.scratch)
        if flat.shape[1] == 1:
            flat = np.broadcast_to(flat, (len(flat), self._shape[1]))
        return flat

    def load(self, where: Words) -> Array:
        """Words (w, p, l), each read by its lane's warp."""
        size = where.size
        own = self.own[size]
        if (self.written.load(where) & ~own).any():
            raise FaultError("a warp reads what another wrote, with no barrier between")
        if (self.states.load(where) & repeated(LANDING, size)).any():
            raise FaultError("a read of what a cp.async may not have written yet")
        self._add(self.read, where, own)
        return self.values.load(where)

    def check_store(self, where: Words) -> None:
        own = self.own[where.size]
        if ((self.written.load(where) | self.read.load(where)) & ~own).any():
            raise FaultError("a warp writes what another used, with no barrier between")
        if (self.states.load(where) & repeated(0xFF - UNFENCED, where.size)).any():
            raise FaultError("a write of what a cp.async or a wgmma in flight uses")

    def store(self, where: Words, values: Array) -> None:
        self.check_store(where)
        self.values.store(where, values)
        differs = self.values.load(where) != values
        # Masked lanes share a place.
        if (differs & (where.indices * where.size < self.values.scratch)).any():
            raise FaultError("two lanes write different values to one address")
        self._add(self.written, where, self.own[where.size])
        self.states.store(where, self.states.load(where) | repeated(UNFENCED, where.size))
        self._clear_scratch()

    def _add(self, buffer: Buffer, where: Words, own: Array) -> None:
        own = np.broadcast_to(own, where.indices.shape)
        np.bitwise_or.at(buffer.words[where.size], where.indices.ravel(), own.ravel())
        self._clear_scratch()

    def _clear_scratch(self) -> None:
        for buffer in (self.written, self.read, self.states):
            buffer.bytes[buffer.scratch :] = 0

    def barrier(self, programs: Array) -> None:
        for buffer in (self.written, self.read):
            if len(programs) == self._num_programs:
                buffer.bytes[:] = 0
            else:
                self.rows(buffer)[programs[:, 0]] = 0

    def fence(self, programs: Array) -> None:
        self.rows(self.states)[programs[:, 0]] &= 0xFF - UNFENCED

    def set_landing(self, where: Words, *, is_landing: bool) -> None:
        bit = repeated(LANDING, where.size)
        old = self.states.load(where)
        self.states.store(where, old | bit if is_landing else old & ~old.dtype.type(bit))
        self._clear_scratch()

    def land(self, where: Words, values: Array) -> None:
        """The end of a cp.async, which is the write."""
        self.set_landing(where, is_landing=False)
        self.values.store(where, values)
        self._add(self.written, where, self.own[where.size])

    def start_reading(self, indices: Array, bits: Array) -> None:
        """A wgmma reads words of 8 bytes (p, g, n) for warps g (1, g, 1)."""
        where = Words(indices, 8)
        if (self.written.load(where) & ~bits).any():
            raise FaultError("wgmma reads what another warp wrote, with no barrier between")
        states = self.states.load(where)
        if (states & repeated(LANDING, 8)).any():
            raise FaultError("wgmma reads what a cp.async may not have written yet")
        if (states & repeated(UNFENCED, 8)).any():
            raise FaultError("wgmma reads what no fence.proxy.async made visible")
        flat = indices.ravel()
        np.bitwise_or.at(self.read.words[8], flat, np.broadcast_to(bits, indices.shape).ravel())
        np.add.at(self.states.words[8], flat, repeated(READING, 8))

    def end_reading(self, indices: Array) -> None:
        np.subtract.at(self.states.words[8], indices.ravel(), repeated(READING, 8))
