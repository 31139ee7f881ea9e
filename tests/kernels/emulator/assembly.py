"""PTX text as basic blocks of instructions, with the registers that each block needs and leaves.

Source: PTX ISA. Only what Triton writes is understood; anything else raises ValueError.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

_REGISTER = re.compile(r"%(?:p|rs|rd|r)\d+")
# Instructions whose first operand is no destination.
_WITHOUT_RESULT = {"bar", "bra", "cp", "fence", "ret", "st", "stmatrix"}


@dataclass(frozen=True)
class Instruction:
    """One statement: `@!%p1 opcode.of.words operand, {operand, operand}, [address];`"""

    line: int  # in the text
    predicate: str | None  # a register, without %
    is_negated: bool
    opcode: tuple[str, ...]
    operands: tuple[str, ...]

    @property
    def name(self) -> str:
        return ".".join(self.opcode)

    @property
    def has_result(self) -> bool:
        is_product = self.opcode[:2] == ("wgmma", "mma_async")
        return is_product or self.opcode[0] not in _WITHOUT_RESULT | {"wgmma"}

    @cached_property
    def writes(self) -> tuple[str, ...]:
        return registers(self.operands[0]) if self.has_result else ()

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Registers, with those that a predicated or an accumulating instruction may keep."""
        keeps = self.predicate is not None or self.opcode[0] == "wgmma"
        read = [
            name for x in self.operands[self.has_result and not keeps :] for name in registers(x)
        ]
        return (*read, self.predicate) if self.predicate is not None else tuple(read)


@dataclass
class Block:
    """Instructions that run one after another. Only the last may jump."""

    instructions: list[Instruction] = field(default_factory=list)
    successors: tuple[int, ...] = ()  # the first where a jump leads to
    live_in: frozenset[str] = frozenset()
    live_out: frozenset[str] = frozenset()

    def needs(self) -> set[str]:
        """Registers that it reads before it writes them."""
        needed: set[str] = set()
        for one in reversed(self.instructions):
            needed -= set(one.writes)
            needed |= set(one.reads)
        return needed


@dataclass(frozen=True)
class Assembly:
    """A kernel. The number of blocks is the block after the end."""

    name: str
    num_threads: int
    parameters: tuple[tuple[str, str], ...]  # (type, name)
    blocks: tuple[Block, ...]
    lines: tuple[str, ...]


def registers(operand: str) -> tuple[str, ...]:
    """The registers of an operand, without %."""
    return tuple(name[1:] for name in _REGISTER.findall(operand))


def parts(operand: str) -> list[str]:
    """The operands in braces, or the operand itself."""
    return [part.strip() for part in operand.strip("{} ").split(",")]


def _instruction(line: int, text: str) -> Instruction:
    found = re.match(r"(?:@(!?)%(p\d+)\s+)?([\w.:]+)\s*(.*)$", text, re.DOTALL)
    if found is None:
        raise ValueError(f"PTX, line {line}: found {text!r}, wanted an instruction")
    negation, predicate, opcode, rest = found.groups()
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)
    words = tuple(opcode.replace("::", ".").split("."))
    return Instruction(line, predicate, negation == "!", words, tuple(x.strip() for x in operands))


def parse(text: str) -> Assembly:
    """The only kernel of a text."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if ".entry" in line)
    body = next(i for i, line in enumerate(lines) if i > start and line.startswith("{"))
    head = "\n".join(lines[start:body])
    entry = re.search(r"\.entry\s+(\w+)", head)
    threads = re.search(r"\.reqntid\s+(\d+)", head)
    if entry is None or threads is None:
        raise ValueError("PTX: found no .entry with .reqntid, wanted a kernel of Triton's")
    parameters = re.findall(r"\.param\s+\.(\w+)[^,\n]*?\s(\w+_param_\d+)", head)

    statements: list[Instruction | str] = []  # a string is a label
    pending = ""
    for number, line in enumerate(lines[body + 1 :], start=body + 2):
        code = line.split("//")[0].strip()
        if code == "}":
            break
        if not pending and (code.startswith(".") or not code):
            continue
        if label := re.fullmatch(r"(\$\w+):", code):
            statements.append(label.group(1))
            continue
        pending = f"{pending} {code}".strip()
        if pending.endswith(";"):
            statements += [_instruction(number, x.strip()) for x in pending.split(";") if x.strip()]
            pending = ""
    blocks = _blocks(statements)
    return Assembly(entry.group(1), int(threads.group(1)), tuple(parameters), blocks, tuple(lines))


def _blocks(statements: list[Instruction | str]) -> tuple[Block, ...]:
    targets = {
        one.operands[0]
        for one in statements
        if isinstance(one, Instruction) and one.opcode[0] == "bra"
    }
    blocks = [Block()]
    places: dict[str, int] = {}
    for one in statements:
        if isinstance(one, str):
            if one in targets:
                if blocks[-1].instructions:
                    blocks.append(Block())
                places[one] = len(blocks) - 1
            continue
        blocks[-1].instructions.append(one)
        # Results of wgmma come into being where they are waited for: between two blocks.
        if one.opcode[0] in ("bra", "ret") or one.opcode[:2] == ("wgmma", "wait_group"):
            blocks.append(Block())
    for i, block in enumerate(blocks):
        last = block.instructions[-1] if block.instructions else None
        if last is not None and last.opcode[0] in ("bra", "ret"):
            jump = places[last.operands[0]] if last.opcode[0] == "bra" else len(blocks)
            block.successors = (jump,) if last.predicate is None else (jump, i + 1)
        else:
            block.successors = (i + 1,)
    _find_live_registers(blocks)
    return tuple(blocks)


def _find_live_registers(blocks: list[Block]) -> None:
    needs = [block.needs() for block in blocks]
    writes = [{name for one in block.instructions for name in one.writes} for block in blocks]
    is_changed = True
    while is_changed:
        is_changed = False
        for i in reversed(range(len(blocks))):
            after = [blocks[j].live_in for j in blocks[i].successors if j < len(blocks)]
            blocks[i].live_out = frozenset().union(*after)
            live_in = frozenset(needs[i] | (blocks[i].live_out - writes[i]))
            is_changed |= live_in != blocks[i].live_in
            blocks[i].live_in = live_in
