import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from longhaul.datamodules.manifest import Dropped
from longhaul.datamodules.preparation import packing as packing_module
from longhaul.datamodules.preparation.documents import Document
from longhaul.datamodules.preparation.packing import PackedUnits, Packing, best_fit
from longhaul.datamodules.preparation.unit_files import UnitForm, unit_sizes, write_unit
from longhaul.datamodules.shards import Tokens

BLOCK = 64
EOT = 60_000
FORM = UnitForm("uint16", EOT, 0.0)

Texts = dict[str, list[int]]


def write_units(folder: Path, texts: Texts, count: int) -> list[Path]:
    """The texts in so many unit files; every third one is for validation."""
    documents = []
    for number, (name, tokens) in enumerate(texts.items()):

        def pieces(tokens: list[int] = tokens) -> Iterator[Tokens]:
            for start in range(0, len(tokens), 50):
                yield np.array(tokens[start : start + 50], np.uint16)

        documents.append(Document(name, pieces, number % 3 == 0))
    paths = []
    for number in range(count):
        paths.append(folder / f"{number}.unit")
        write_unit(paths[-1], documents[number::count], FORM)
    return paths


def random_texts(count: int, longest: int) -> Texts:
    draw = random.Random(longest)
    return {f"file#{n}": [n] * draw.randint(0, draw.randint(1, longest)) for n in range(count)}


@pytest.fixture
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_module, "WINDOW_TOKENS", 500)


@pytest.mark.usefixtures("small_window")
@pytest.mark.parametrize("longest", [5, 40, 400])
@pytest.mark.parametrize("kind", ["concat", "best-fit"])
def test_every_token_of_every_text_is_in_one_place(tmp_path: Path, kind, longest: int) -> None:
    texts = random_texts(300, longest)
    units = write_units(tmp_path, texts, 4)
    for is_validation in (False, True):
        packed = PackedUnits(units, is_validation, Packing(BLOCK, kind))
        found: dict[str, dict[int, int]] = {}
        blocks = 0
        for block, _ in packed.blocks(None):
            blocks += 1
            assert block.tokens.size == BLOCK == block.ends[-1]
            for start, stop, (name, first) in zip(
                [0, *block.ends[:-1]], block.ends, block.texts, strict=True
            ):
                for place in range(start, stop):
                    # No place twice: a text has each of its tokens once.
                    assert first + place - start not in found.setdefault(name, {})
                    found[name][first + place - start] = int(block.tokens[place])
        mine = {
            name: [*tokens, EOT]
            for number, (name, tokens) in enumerate(texts.items())
            if tokens and (number % 3 == 0) == is_validation
        }
        total = sum(map(len, mine.values()))
        assert (packed.tokens, packed.dropped_tokens) == (total, total % BLOCK)
        assert blocks == total // BLOCK
        assert sum(map(len, found.values())) == blocks * BLOCK
        for name, places in found.items():
            assert all(mine[name][place] == token for place, token in places.items())
        assert packed.empty_texts == sum(
            not tokens and (number % 3 == 0) == is_validation
            for number, tokens in enumerate(texts.values())
        )


@pytest.mark.usefixtures("small_window")
@pytest.mark.parametrize("kind", ["concat", "best-fit"])
def test_packing_goes_on_after_any_block(tmp_path: Path, kind) -> None:
    units = write_units(tmp_path, random_texts(200, 100), 3)
    packed = PackedUnits(units, False, Packing(BLOCK, kind))
    whole = [(block.tokens.tolist(), block.texts, at) for block, at in packed.blocks(None)]
    assert len(whole) > 30
    for number in range(0, len(whole), 7):
        cursor = json.loads(json.dumps(whole[number][2]))
        rest = packed.blocks(cursor)
        assert [(block.tokens.tolist(), block.texts, at) for block, at in rest] == whole[
            number + 1 :
        ]


@pytest.mark.parametrize("kind", ["concat", "best-fit"])
@pytest.mark.parametrize(
    ("options", "kept", "dropped"),
    [
        ({"long": "crop"}, [10, BLOCK - 1, BLOCK, BLOCK], {"crop": (2, 0 + 36)}),
        ({"long": "drop"}, [10, BLOCK - 1], {"drop": (2, BLOCK + 100)}),
        ({"min_tokens": 11}, [BLOCK - 1, BLOCK, 100], {"min_tokens": (1, 10)}),
        ({"max_tokens": 64}, [10, BLOCK - 1, BLOCK], {"max_tokens": (1, 100)}),
        (
            {"max_tokens": 64, "long": "drop"},
            [10, BLOCK - 1],
            {"max_tokens": (1, 100), "drop": (1, 64)},
        ),
    ],
    ids=str,
)
def test_what_is_left_out_is_counted_by_reason(
    tmp_path: Path, kind, options: dict, kept: list[int], dropped: dict
) -> None:
    lengths = [10, BLOCK - 1, BLOCK, 100]
    texts = {"": []}  # the first is for validation
    for number, length in enumerate(lengths):
        texts[f"a{number}"] = [number + 1] * length
        texts[f"skip{number}"] = []
        texts[f"skip{number}b"] = []
    units = write_units(tmp_path, dict(list(texts.items())[1:]), 1)
    packed = PackedUnits(units, True, Packing(BLOCK, kind, **options))
    assert packed.dropped == {
        reason: Dropped(documents=documents, tokens=tokens)
        for reason, (documents, tokens) in dropped.items()
    }
    is_cropped = options.get("long") == "crop"
    assert packed.tokens == sum(
        length if is_cropped and length >= BLOCK else length + 1 for length in kept
    )
    counts = np.bincount(np.concatenate([block.tokens for block, _ in packed.blocks(None)]))
    assert counts.sum() == packed.tokens // BLOCK * BLOCK
    # Nothing of a text that is dropped, and no more of one than is kept.
    for number, length in enumerate(lengths, start=1):
        here = counts[number] if number < counts.size else 0
        assert here <= (min(length, max(kept)) if length >= min(kept) else 0)


def test_best_fit_takes_the_row_with_the_least_room() -> None:
    # By hand: 7 and 6 open rows; 3 fits both, and the first exactly; 2 and 2 fill the second.
    assert best_fit([2, 7, 3, 6, 2, 9], 10) == [[5], [1, 2], [3, 0, 4]]


@pytest.mark.parametrize("longest", [6, 70])
def test_best_fit_is_what_a_search_of_all_rows_finds(longest: int) -> None:
    draw = random.Random(longest)
    lengths = [draw.randint(1, longest) for _ in range(300)]
    rows: list[list[int]] = []
    rooms: list[int] = []
    for index in sorted(range(300), key=lambda one: (-lengths[one], one)):
        fitting = [(room, row) for row, room in enumerate(rooms) if room >= lengths[index]]
        if not fitting:
            rows.append([])
            rooms.append(70)
        row = min(fitting)[1] if fitting else len(rows) - 1
        rows[row].append(index)
        rooms[row] -= lengths[index]
    assert best_fit(lengths, 70) == rows


def test_few_texts_are_cut_by_best_fit(tmp_path: Path) -> None:
    units = write_units(tmp_path, random_texts(2000, 60), 2)

    def cuts(kind) -> int:
        packed = PackedUnits(units, False, Packing(BLOCK, kind))
        return sum(first > 0 for block, _ in packed.blocks(None) for _, first in block.texts)

    assert cuts("best-fit") * 20 < cuts("concat")


@pytest.mark.parametrize("damage", ["cut", "grown", "ends"])
def test_a_damaged_unit_file_is_named(tmp_path: Path, damage: str) -> None:
    (path,) = write_units(tmp_path, random_texts(20, 40), 1)
    content = bytearray(path.read_bytes())
    sizes = unit_sizes(path)
    if damage == "cut":
        content = content[:-1]
    elif damage == "grown":
        content = b"\0" + content
    else:
        at = -(-sizes.tokens * 2 // 8) * 8
        content[at : at + 8] = b"\xff" * 8
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"0.unit: found .*; remove the file$"):
        PackedUnits([path], False, Packing(BLOCK))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_tokens": 0}, "^--doc-tokens: found 0, wanted 1 or more"),
        ({"min_tokens": -1}, "^--min-tokens: found -1, wanted 0 or more"),
        ({"min_tokens": 5, "max_tokens": 4}, "^--max-tokens: found 4, wanted 5 or more"),
    ],
)
def test_a_length_that_takes_nothing_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Packing(8), **options)
