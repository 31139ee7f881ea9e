"""Small changes of valid files that a reader should refuse or take, but never fail at."""

import contextlib
import gzip
import json
import random
import struct
from collections.abc import Iterator
from typing import Any

HUGE = "9" * 30
TEXTS = ("", "x", "..", "../../etc/passwd", "/dev/zero", "a\nb", "x" * 300, "${oc.env:HOME}", "\0")
LITERALS = (
    *("null", "true", "0", "-1", "1", "2", "1.5", "-0.0", "NaN", "Infinity", "-Infinity", "1e400"),
    *(
        HUGE,
        f"-{HUGE}",
        "9" * 400,
        "9" * 5000,
        str(2**31),
        str(2**53),
        str(2**60),
        str(2**62),
        str(2**63),
    ),
    *("[]", "{}", "[[]]", "[1]", '[null, "x"]', '{"a": 1}', "[" * 5000, "[" * 150 + "]" * 150),
    *map(json.dumps, TEXTS),
    '"\\ud800"',
)
_MARK = "@literal@"


def mutate_json(draw: random.Random, content: bytes) -> bytes:
    """Another value, a key less or more, at any depth; sometimes damaged bytes too."""
    values = json.loads(content)
    literals: list[str] = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        values = _changed(draw, values, literals)
    text = json.dumps(values)
    for number, literal in enumerate(literals):
        text = text.replace(f'"{_MARK}{number}"', literal)
    return mutate_bytes(draw, text.encode()) if draw.random() < 0.1 else text.encode()


def _changed(draw: random.Random, values: Any, literals: list[str]) -> Any:
    """The tree with one change, whose hostile values are marks for what JSON text cannot hold."""
    nodes = list(_nodes(values))
    holder, key = draw.choice(nodes) if nodes else (None, None)

    def hostile() -> str:
        literals.append(draw.choice(LITERALS))
        return f"{_MARK}{len(literals) - 1}"

    if holder is None or draw.random() < 0.02:
        return hostile()
    match draw.choice(("value", "value", "value", "missing", "extra", "swap", "repeat")):
        case "value":
            holder[key] = hostile()
        case "missing":
            del holder[key]
        case "extra" if isinstance(holder, dict):
            holder[draw.choice((*TEXTS, "extra", str(key) + "x"))] = hostile()
        case "swap":
            other_holder, other = draw.choice(nodes)
            with contextlib.suppress(KeyError, IndexError, TypeError):
                holder[key] = json.loads(json.dumps(other_holder[other]))
        case _:
            if isinstance(holder, list):
                holder.extend(holder[:50])
            elif isinstance(holder[key], int | float):
                holder[key] = holder[key] * draw.choice((-1, 2, 1000, 2**40))
    return values


def _nodes(values: Any) -> Iterator[tuple[Any, Any]]:
    keys: Any = values if isinstance(values, dict) else range(len(values))
    if isinstance(values, dict | list):
        for key in list(keys):
            yield values, key
            if isinstance(values[key], dict | list):
                yield from _nodes(values[key])


def mutate_bytes(draw: random.Random, content: bytes) -> bytes:
    """Flipped, missing, repeated, inserted bytes; another end."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(changed) + 1)
        length = draw.choice((1, 2, 8, 64))
        match draw.choice(("flip", "flip", "cut", "remove", "insert", "zero", "large", "end")):
            case "flip" if changed:
                changed[at % len(changed)] ^= 1 << draw.randrange(8)
            case "cut":
                del changed[at:]
            case "remove":
                del changed[at : at + length]
            case "insert":
                changed[at:at] = draw.randbytes(length)
            case "zero":
                changed[at : at + length] = bytes(length)
            case "large":
                changed[at : at + 8] = struct.pack("<Q", draw.choice((2**62, 2**64 - 1, 2**31)))
            case _:
                changed += draw.choice((b"\0", b"\n", b"{", b"\xff" * 600))
    return bytes(changed)


def mutate_start(draw: random.Random, content: bytes) -> bytes:
    """As above, within the headers at the beginning."""
    place = min(len(content), 700)
    return mutate_bytes(draw, content[:place]) + content[place:]


def mutate_tar(draw: random.Random, content: bytes) -> bytes:
    """As above, with the checksum of the tar header that it should have."""
    changed = bytearray(mutate_start(draw, content))
    if draw.random() < 0.7 and len(changed) > 512:
        changed[148:156] = b" " * 8
        changed[148:156] = b"%06o\0 " % sum(changed[:512])
    return bytes(changed)


def mutate_lines(draw: random.Random, content: bytes) -> bytes:
    """One line of JSON lines, or the bytes of all."""
    lines = content.splitlines(keepends=True)
    if draw.random() < 0.3:
        return mutate_bytes(draw, content)
    place = draw.randrange(len(lines))
    lines[place] = mutate_json(draw, lines[place]) + b"\n"
    return b"".join(lines)


def mutate_table(draw: random.Random, content: bytes) -> bytes:
    """Another cell, a row or a column too much or missing."""
    if draw.random() < 0.2:
        return mutate_bytes(draw, content)
    rows = [line.split(",") for line in content.decode().splitlines()]
    place = draw.randrange(len(rows))
    cell = draw.randrange(len(rows[0]))
    match draw.choice(("cell", "cell", "longer", "shorter", "empty", "column")):
        case "cell":
            rows[place][cell] = draw.choice((*TEXTS, *LITERALS, "=1+1", '"', "nan", "inf"))
        case "longer":
            rows[place].append("1")
        case "shorter":
            rows[place].pop()
        case "empty":
            rows = rows[: draw.choice((0, 1))]
        case _:
            for row in rows:
                del row[cell]
    return "\n".join(map(",".join, rows)).encode("utf-8", "surrogatepass")


def mutate_yaml(draw: random.Random, content: bytes) -> bytes:
    """Another value, key or indentation in one line; aliases, tags."""
    lines = content.decode().splitlines()
    place = draw.randrange(len(lines))
    key, _, value = lines[place].partition(":")
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
        for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    )
    others = (*LITERALS, ".inf", ".nan", "1:30", "2026-13-45", "2026-01-01", "!!binary x", "? a")
    match draw.choice(("value", "value", "value", "key", "missing", "indent", "bytes", "rare")):
        case "value":
            lines[place] = f"{key}: {draw.choice(others)}"
        case "key":
            lines[place] = f"{draw.choice(('x', '3', '? []', '<<', 'null'))}:{value}"
        case "missing":
            del lines[place]
        case "indent":
            lines[place] = f"  {lines[place]}"
        case "bytes":
            return mutate_bytes(draw, content)
        case _:
            rare = ("!!python/object/apply:os.getcwd []", "${oc.env:PATH}", "&x [*x]", "[" * 3000)
            lines = [*bomb.splitlines(), *lines] if draw.random() < 0.3 else lines
            lines.append(f"extra: {draw.choice(rare)}")
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def mutate_header(draw: random.Random, content: bytes) -> bytes:
    """The JSON header of a safetensors file, or its bytes; the texts in its metadata too."""
    if draw.random() < 0.3:
        return mutate_start(draw, content)
    (size,) = struct.unpack("<Q", content[:8])
    header, rest = content[8 : 8 + size], content[8 + size :]
    values = json.loads(header)
    metadata = values.get("__metadata__", {})
    inner = [key for key, text in metadata.items() if text.startswith("{")]
    if inner and draw.random() < 0.4:
        key = draw.choice(inner)
        changed = mutate_json(draw, metadata[key].encode())
        metadata[key] = changed.decode(errors="replace")
        header = json.dumps(values).encode()
    else:
        header = mutate_json(draw, header)
    length = draw.choice((len(header),) * 8 + (0, 2**62, len(header) - 1))
    return struct.pack("<Q", length) + header + rest


def mutate_gzip(draw: random.Random, content: bytes) -> bytes:
    if draw.random() < 0.5:
        return mutate_bytes(draw, content)
    return gzip.compress(mutate_lines(draw, gzip.decompress(content)), 1)
