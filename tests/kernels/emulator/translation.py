"""Translate a block of PTX into a Python function on numpy arrays, one statement per instruction.

A register is an array (programs, lanes); each of the two is 1 where all have the same value. The
lanes are those of all warps of a program. A register has no type: the same bits are seen as floats
or as integers, which is a view of the array.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import arithmetic
import numpy as np
from assembly import Assembly, Block, Instruction, parts

# PTX's types, as numpy's. Predicates are Booleans, "?".
_TYPES = {"b": "u", "u": "u", "s": "i", "f": "f"}
_INFIX = {"add": "+", "sub": "-", "mul": "*"}
_LOGIC = {"and": "&", "or": "|", "xor": "^"}
_COMPARISONS = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
}  # fmt: skip
_FLOATS = {
    "ex2": "np.exp2({0})", "lg2": "np.log2({0})", "sqrt": "np.sqrt({0})", "rcp": "1 / {0}",
    "rsqrt": "1 / np.sqrt({0})", "neg": "-{0}", "abs": "np.abs({0})", "div": "{0} / {1}",
    "min": "np.fmin({0}, {1})", "max": "np.fmax({0}, {1})",
}  # fmt: skip
_SMALL_FLOATS = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "fma": "fma({0}, {1}, {2})",
    "neg": "-{0}", "abs": "np.abs({0})", "min": "np.fmin({0}, {1})", "max": "np.fmax({0}, {1})",
}  # fmt: skip
# Instructions without operands, and the machine's method for each; none where nothing happens.
_WITHOUT_OPERANDS = {
    ("cp", "async", "commit_group"): "commit_copies",
    ("fence", "proxy", "async"): "fence",
    ("wgmma", "fence"): "",
    ("wgmma", "commit_group"): "commit_products",
    ("bar", "warp", "sync"): "",
}


def numpy_type(ptx: str) -> str:
    """For example "u4" for "b32"."""
    if ptx == "pred":
        return "?"
    if ptx[0] not in _TYPES or not ptx[1:].isdigit():
        raise ValueError(f"type {ptx}: not known to the emulator")
    return f"{_TYPES[ptx[0]]}{int(ptx[1:]) // 8}"


def _type_of(register: str) -> str:
    """Of a register as a whole, by its class: %p, %rs, %r or %rd."""
    return {"p": "?", "rs": "u2", "r": "u4", "rd": "u8"}[register.rstrip("0123456789")]


class Translation:
    """The functions of a kernel: each takes machine and context, and returns the next block."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self._constants: dict[str, Any] = {"np": np} | {
            name: value for name, value in vars(arithmetic).items() if not name.startswith("__")
        }
        source = [self._function(i, block) for i, block in enumerate(assembly.blocks)]
        code: CodeType = compile("\n".join(source), f"<{assembly.name}>", "exec")
        exec(code, self._constants)
        self.functions: list[Callable[[Any, Any], int]] = [
            self._constants[f"block_{i}"] for i in range(len(assembly.blocks))
        ]

    def constant(self, bits: int, kind: str) -> str:
        """The name of an array (1, 1)."""
        bits &= (1 << 8 * max(1, int(kind[1:] or 1))) - 1
        name = f"k{bits:x}_{kind}" if kind != "?" else f"k{min(bits, 1)}_p"
        if name not in self._constants:
            if kind == "?":
                value = np.array([[bits != 0]])
            else:
                size = int(kind[1:])
                value = np.array([[bits]], f"u{size}").view(kind)
            self._constants[name] = value
        return name

    def _function(self, i: int, block: Block) -> str:
        body = _Body(self, block)
        for one in block.instructions:
            try:
                body.translate(one)
            except (KeyError, ValueError, IndexError) as error:
                line = self.assembly.lines[one.line - 1].strip()
                raise ValueError(f"PTX, line {one.line}, {line!r}: {error}") from error
        body.finish(i)
        return "\n    ".join([f"def block_{i}(m, c):", "R = c.registers", *body.lines])


class _Body:
    """The statements of one function."""

    def __init__(self, kernel: Translation, block: Block) -> None:
        self.kernel = kernel
        self.block = block
        self.lines: list[str] = []
        # Each register's views in Python variables, by type. The first is what was written.
        self.views: dict[str, dict[str, str]] = {}
        self.written: dict[str, int] = {}  # how often, which names the variable
        self.ending = ""

    # -- operands and results ------------------------------------------------------------------

    def operand(self, text: str, kind: str) -> str:
        """A Python expression for an operand, as an array of a numpy type."""
        if text.startswith("%"):
            name = text[1:]
            special = {"tid.x": "m.threads", "ctaid.x": "c.place[0]", "ctaid.y": "c.place[1]",
                       "ctaid.z": "c.place[2]"}  # fmt: skip
            if name in special:
                return special[name]
            if "." in name:
                raise ValueError(f"register %{name}: not known to the emulator")
            return self._view(name, kind)
        if text == "global_smem":
            return self.kernel.constant(0, kind)
        if text[:2] in ("0f", "0F", "0d", "0D"):  # the bits of a float
            return self.kernel.constant(int(text[2:], 16), kind)
        return self.kernel.constant(int(text.rstrip("U"), 0), kind)

    def _view(self, name: str, kind: str) -> str:
        views = self.views.setdefault(name, {})
        if kind in views:
            return views[kind]
        whole = _type_of(name)
        if not views:
            # Not yet seen in this block.
            variable = f"{name}_{whole.replace('?', 'p')}"
            # A value of another type may be stored, for which a view costs little.
            seen = f"R[{name!r}]" if whole == "?" else f"R[{name!r}].view({whole})"
            self.lines.append(f"{variable} = {seen}")
            views[whole] = variable
            return self._view(name, kind)
        first = next(iter(views.values()))
        if kind == "?" or whole == "?":
            raise ValueError(f"%{name}: a predicate used as a number, or the reverse")
        variable = f"{first.split('_')[0]}_{kind}"
        if kind[1:] == whole[1:]:
            self.lines.append(f"{variable} = {first}.view({kind})")
        else:
            # Narrower than the register, whose lower bits count; or wider, filled with zeros.
            narrow = f"{self._view(name, whole)}.astype(u{kind[1:]})"
            self.lines.append(f"{variable} = {narrow}.view({kind})")
        views[kind] = variable
        return variable

    def result(self, text: str, kind: str, value: str, one: Instruction | None = None) -> None:
        """Assign an expression of a numpy type to a register, where the predicate holds."""
        name = text.split("|")[0].strip().removeprefix("%")
        if name == "_":
            return
        whole = _type_of(name)
        if kind != whole and kind[1:] != whole[1:]:  # narrower
            value = f"({value}).astype({kind[0]}{whole[1:]})"
            kind = kind[0] + whole[1:]
        if one is not None and one.predicate is not None:
            value = f"np.where({self.condition(one)}, {value}, {self.operand('%' + name, kind)})"
        count = self.written[name] = self.written.get(name, 0) + 1
        variable = f"{name}v{count}_{kind.replace('?', 'p')}"
        self.lines.append(f"{variable} = {value}")
        self.views[name] = {kind: variable}

    def condition(self, one: Instruction) -> str:
        if one.predicate is None:
            return "None"
        value = self._view(one.predicate, "?")
        return f"~{value}" if one.is_negated else value

    def address(self, text: str) -> str:
        base, *offset = (x.strip() for x in text.strip("[] ").split("+"))
        start = self.operand(base, "i8") if not base.startswith("%r") or base[2] == "d" else ""
        start = start or f"{self.operand(base, 'u4')}.astype(i8)"
        steps = sum(int(x, 0) for x in offset)
        return f"{start} + {steps}" if steps else start

    # -- instructions --------------------------------------------------------------------------

    def translate(self, one: Instruction) -> None:
        op = one.opcode
        for words, method in _WITHOUT_OPERANDS.items():
            if op[: len(words)] == words:
                if method:
                    self.lines.append(f"m.{method}(c)")
                return
        special = getattr(self, f"_{op[0]}", None)
        if special is not None:
            special(one)
        elif op[-1] in ("bf16", "bf16x2", "f16", "f16x2"):
            self._small_floats(one)
        elif op[-1] in ("f32", "f64"):
            self._float(one)
        else:
            self._integer(one)

    def _values(self, one: Instruction, kind: str) -> list[str]:
        return [self.operand(x, kind) for x in one.operands[1:]]

    def _float(self, one: Instruction) -> None:
        kind = numpy_type(one.opcode[-1])
        a = self._values(one, kind)
        if one.opcode[0] in _INFIX:
            value = f"{a[0]} {_INFIX[one.opcode[0]]} {a[1]}"
        elif one.opcode[0] in ("fma", "mad"):
            value = f"fma({', '.join(a)})" if kind == "f4" else f"{a[0]} * {a[1]} + {a[2]}"
        else:
            value = _FLOATS[one.opcode[0]].format(*a)
        self.result(one.operands[0], kind, value, one)

    def _small_floats(self, one: Instruction) -> None:
        kind, _, is_pair = one.opcode[-1].partition("x")
        whole = "u4" if is_pair else "u2"
        a = [f"from_{kind}({x})" for x in self._values(one, whole)]
        if is_pair:
            a = [f"from_{kind}_pair({x})" for x in self._values(one, whole)]
        value = _SMALL_FLOATS[one.opcode[0]].format(*a)
        self.result(one.operands[0], whole, f"to_{kind}{'_pair' * bool(is_pair)}({value})", one)

    def _integer(self, one: Instruction) -> None:
        op = one.opcode
        kind = numpy_type(op[-1])
        whole = "?" if kind == "?" else f"u{kind[1:]}"
        if op[0] in _LOGIC or op[0] == "not":
            a = self._values(one, whole)
            value = f"~{a[0]}" if op[0] == "not" else f"{a[0]} {_LOGIC[op[0]]} {a[1]}"
            self.result(one.operands[0], whole, value, one)
        elif op[:2] in (("mul", "wide"), ("mad", "wide")):
            double = f"{kind[0]}{2 * int(kind[1:])}"
            a = [f"{self.operand(x, kind)}.astype({double})" for x in one.operands[1:3]]
            value = " * ".join(a)
            if op[0] == "mad":
                value += f" + {self.operand(one.operands[3], double)}"
            self.result(one.operands[0], double, value, one)
        elif op[:2] == ("mul", "hi"):
            a = self._values(one, kind)
            self.result(one.operands[0], kind, f"upper_product({a[0]}, {a[1]})", one)
        elif op[0] in _INFIX and op[1] != "hi":
            a = self._values(one, whole)
            self.result(one.operands[0], whole, f"{a[0]} {_INFIX[op[0]]} {a[1]}", one)
        elif op[:2] == ("mad", "lo"):
            a = self._values(one, whole)
            self.result(one.operands[0], whole, f"{a[0]} * {a[1]} + {a[2]}", one)
        elif op[0] in ("min", "max"):
            a = self._values(one, kind)
            self.result(one.operands[0], kind, f"np.{op[0]}imum({a[0]}, {a[1]})", one)
        elif op[0] in ("neg", "abs"):
            sign = "-" if op[0] == "neg" else "np.abs"
            self.result(one.operands[0], kind, f"{sign}({self._values(one, kind)[0]})", one)
        elif op[0] in ("div", "rem"):
            a = self._values(one, kind)
            self.result(one.operands[0], kind, f"{op[0]}({a[0]}, {a[1]})", one)
        else:
            raise ValueError("not known to the emulator")

    def _setp(self, one: Instruction) -> None:
        kind = numpy_type(one.opcode[-1])
        a, b = self._values(one, kind)[:2]
        comparison = one.opcode[1]
        if comparison in ("num", "nan"):
            value = f"({a} == {a}) & ({b} == {b})"
            value = value if comparison == "num" else f"~({value})"
        elif kind[0] == "f" and comparison.endswith("u"):  # true of NaN
            inverse = {"eq": "!=", "ne": "==", "lt": ">=", "le": ">", "gt": "<=", "ge": "<"}
            value = f"~({a} {inverse[comparison[:-1]]} {b})"
            if comparison in ("equ", "neu"):
                value = f"({a} {_COMPARISONS[comparison[:-1]]} {b}) | ({a} != {a}) | ({b} != {b})"
        elif kind[0] == "f" and comparison == "ne":
            value = f"({a} < {b}) | ({a} > {b})"
        else:
            value = f"{a} {_COMPARISONS[comparison]} {b}"
        self.result(one.operands[0], "?", value, one)

    def _selp(self, one: Instruction) -> None:
        kind = numpy_type(one.opcode[-1])
        a, b = (self.operand(x, kind) for x in one.operands[1:3])
        which = self.operand(one.operands[3], "?")
        self.result(one.operands[0], kind, f"np.where({which}, {a}, {b})", one)

    def _mov(self, one: Instruction) -> None:
        kind = numpy_type(one.opcode[-1])
        to, start = one.operands
        if start.startswith("{"):
            pieces = parts(start)
            narrow = f"u{int(kind[1:]) // len(pieces)}"
            values = ", ".join(self.operand(x, narrow) for x in pieces)
            self.result(to, kind, f"joined(({values}), {kind})", one)
        elif to.startswith("{"):
            pieces = parts(to)
            size = int(kind[1:]) // len(pieces)
            value = self.operand(start, kind)
            for i, piece in enumerate(pieces):
                shifted = f"({value} >> {8 * size * i})" if i else value
                self.result(piece, f"u{size}", f"{shifted}.astype(u{size})", one)
        else:
            self.result(to, kind, self.operand(start, kind), one)

    def _cvt(self, one: Instruction) -> None:
        to, start = one.opcode[-2:]
        if to in ("bf16x2", "f16x2"):
            high, low = (self.operand(x, "f4") for x in one.operands[1:])
            name = f"to_{to.removesuffix('x2')}"
            self.result(one.operands[0], "u4", f"joined(({name}({low}), {name}({high})), u4)", one)
            return
        if start in ("bf16", "f16"):
            value = f"from_{start}({self.operand(one.operands[1], 'u2')})"
            from_kind = "f4"
        else:
            from_kind = numpy_type(start)
            value = self.operand(one.operands[1], from_kind)
        if to in ("bf16", "f16") and from_kind != "f4":
            value = f"{value}.astype(f4)"
        if to == "tf32":
            self.result(one.operands[0], "f4", f"to_tf32({value})", one)
        elif to in ("bf16", "f16"):
            self.result(one.operands[0], "u2", f"to_{to}({value})", one)
        else:
            kind = numpy_type(to)
            if from_kind[0] == "f" and kind[0] != "f":
                raise ValueError("floats as integers: not known to the emulator")
            self.result(one.operands[0], kind, f"{value}.astype({kind})", one)

    def _shift(self, one: Instruction, sign: str) -> None:
        kind = numpy_type(one.opcode[-1])
        value, amount = self.operand(one.operands[1], kind), one.operands[2]
        if amount.startswith("%"):
            shifted = f"shifted_{sign}({value}, {self.operand(amount, 'u4')})"
        else:
            bits = 8 * int(kind[1:])
            arrow = "<<" if sign == "left" else ">>"
            count = int(amount, 0)
            if count >= bits:
                raise ValueError("a shift by all bits: not known to the emulator")
            shifted = f"{value} {arrow} {count}"
        self.result(one.operands[0], kind, shifted, one)

    def _shl(self, one: Instruction) -> None:
        self._shift(one, "left")

    def _shr(self, one: Instruction) -> None:
        self._shift(one, "right")

    def _bfe(self, one: Instruction) -> None:
        kind = numpy_type(one.opcode[-1])
        position, length = (int(x, 0) for x in one.operands[2:])
        bits = 8 * int(kind[1:])
        value = self.operand(one.operands[1], kind)
        left = bits - min(bits, position + length)
        length = min(length, bits - position)
        self.result(one.operands[0], kind, f"({value} << {left}) >> {bits - length}", one)

    def _prmt(self, one: Instruction) -> None:
        a, b, selector = self._values(one, "u4")
        self.result(one.operands[0], "u4", f"permuted_bytes({a}, {b}, {selector})", one)

    def _shfl(self, one: Instruction) -> None:
        value = self.operand(one.operands[1], "u4")
        by = self.operand(one.operands[2], "u4")
        self.result(one.operands[0], "u4", f"m.shuffled({value}, {one.opcode[2]!r}, {by})", one)

    def _redux(self, one: Instruction) -> None:
        kind = numpy_type(one.opcode[-1])
        value = self.operand(one.operands[1], kind)
        self.result(one.operands[0], kind, f"m.reduced({value}, {one.opcode[2]!r})", one)

    # -- memory --------------------------------------------------------------------------------

    def _memory(self, one: Instruction) -> tuple[str, int, int]:
        """Kind and size of an element, and their number."""
        kind = numpy_type(one.opcode[-1])
        vectors = [x for x in one.opcode if x in ("v2", "v4", "v8")]
        return kind, int(kind[1:]), int(vectors[0][1:]) if vectors else 1

    def _ld(self, one: Instruction) -> None:
        kind, size, count = self._memory(one)
        if one.opcode[1] == "param":
            name = one.operands[1].strip("[]")
            whole = _type_of(one.operands[0].strip("{}% "))
            kind = kind.replace("f", "u")
            extended = f"{kind[0]}{whole[1:]}"
            value = f"m.parameters[{name!r}].astype({kind}).astype({extended})"
            self.result(one.operands[0], extended, value, one)
            return
        method = "load_global" if one.opcode[1] == "global" else "load_shared"
        where = self.address(one.operands[1])
        call = f"m.{method}(c, {one.line}, {where}, {self.condition(one)}, {size}, {count})"
        self.lines.append(f"loaded = {call}")
        for i, register in enumerate(parts(one.operands[0])):
            self.result(register, f"u{size}", f"loaded[{i}]", one)

    def _st(self, one: Instruction) -> None:
        _, size, _ = self._memory(one)
        method = "store_global" if one.opcode[1] == "global" else "store_shared"
        values = ", ".join(self.operand(x, f"u{size}") for x in parts(one.operands[1]))
        where = self.address(one.operands[0])
        self.lines.append(
            f"m.{method}(c, {one.line}, {where}, {self.condition(one)}, {size}, ({values},))"
        )

    def _cp(self, one: Instruction) -> None:
        if one.opcode[2] == "wait_group":
            self.lines.append(f"m.wait_copies(c, {int(one.operands[0], 0)})")
            return
        to, start = (self.address(x) for x in one.operands[:2])
        kept = self.operand(one.operands[3], "u4") if len(one.operands) > 3 else "None"
        size = int(one.operands[2], 0)
        self.lines.append(
            f"m.copy(c, {one.line}, {to}, {start}, {self.condition(one)}, {size}, {kept})"
        )

    def _ldmatrix(self, one: Instruction) -> None:
        pieces = parts(one.operands[0])
        where = self.address(one.operands[1])
        is_turned = "trans" in one.opcode
        self.lines.append(
            f"loaded = m.load_matrices(c, {one.line}, {where}, {len(pieces)}, {is_turned})"
        )
        for i, register in enumerate(pieces):
            self.result(register, "u4", f"loaded[{i}]", one)

    def _stmatrix(self, one: Instruction) -> None:
        values = ", ".join(self.operand(x, "u4") for x in parts(one.operands[1]))
        where = self.address(one.operands[0])
        is_turned = "trans" in one.opcode
        self.lines.append(f"m.store_matrices(c, {one.line}, {where}, ({values},), {is_turned})")

    # -- matrix products -----------------------------------------------------------------------

    def _mma(self, one: Instruction) -> None:
        kind = one.opcode[-2]
        if one.opcode[-1] != "f32" or kind not in ("bf16", "f16", "tf32"):
            raise ValueError("not known to the emulator")
        a, b = (", ".join(self.operand(x, "u4") for x in parts(y)) for y in one.operands[1:3])
        start = ", ".join(self.operand(x, "f4") for x in parts(one.operands[3]))
        self.lines.append(f"total = m.small_product({kind!r}, ({a}), ({b}), ({start}))")
        for i, register in enumerate(parts(one.operands[0])):
            self.result(register, "f4", f"total[{i}]", one)

    def _wgmma(self, one: Instruction) -> None:
        if one.opcode[1] == "wait_group":
            self.ending = f"m.wait_products(c, {int(one.operands[0], 0)})"
            return
        kind = one.opcode[-1]
        sums = parts(one.operands[0])
        names = tuple(x.removeprefix("%") for x in sums)
        start = ", ".join(self.operand(x, "f4") for x in sums)
        a, b = one.operands[1:3]
        if a.startswith("{"):
            left = f"({', '.join(self.operand(x, 'u4') for x in parts(a))})"
        else:
            left = self.operand(a, "u8")
        right, keep = self.operand(b, "u8"), self.operand(one.operands[3], "?")
        signs, turns = one.operands[4:6], [bool(int(x)) for x in one.operands[6:]]
        if any(int(x) != 1 for x in signs):
            raise ValueError("a negated operand: not known to the emulator")
        turns = [False] * (2 - len(turns)) + turns  # operands in registers cannot be turned
        self.lines.append(
            f"m.product(c, {one.line}, {kind!r}, {names!r}, ({start}), {left}, {right}, {keep}, "
            f"{turns[0]}, {turns[1]})"
        )
        for register in sums:
            self.result(register, "f4", "IN_FLIGHT")

    # -- the end of a block --------------------------------------------------------------------

    def _bar(self, one: Instruction) -> None:
        if one.operands[0] != "0":
            raise ValueError("a barrier of some warps: not known to the emulator")
        self.lines.append("m.barrier(c)")

    def _bra(self, one: Instruction) -> None:
        if one.predicate is not None:
            self.ending = f"m.branch(c, {one.line}, {self.condition(one)}, *{{successors}})"

    def _ret(self, one: Instruction) -> None:
        self._bra(one)

    def finish(self, i: int) -> None:
        """Keep the registers that later blocks need, forget the others, and go on."""
        block = self.block
        for name in sorted(block.live_out):
            if name in self.written:
                self.lines.append(f"R[{name!r}] = {next(iter(self.views[name].values()))}")
        if dead := sorted(block.live_in - block.live_out):
            self.lines.append(f"for name in {tuple(dead)!r}: R.pop(name, None)")
        if self.ending.startswith("m.branch"):
            self.lines.append(f"return {self.ending.format(successors=block.successors)}")
            return
        if self.ending:
            self.lines.append(self.ending)
        self.lines.append(f"return {block.successors[0]}")
