"""Compiled blocks: one graph a kind, with the same losses and gradients."""

import json
from pathlib import Path
from typing import Any

import pytest

from longhaul.modules.attention import registered_variants

COMPILED = Path(__file__).parent / "compiled_blocks.py"


@pytest.mark.parametrize(
    ("backend", "kinds"),
    [
        ("aot_eager", registered_variants()),
        pytest.param("inductor", ("conformal_sympow",), marks=pytest.mark.soak),
    ],
)
def test_compiled_blocks_are_one_graph_that_makes_the_same_update(
    backend: str, kinds: tuple[str, ...], fork: Any, tmp_path: Path
) -> None:
    code = f"import runpy; runpy.run_path({str(COMPILED)!r}, run_name='__main__')"
    process = fork(code, tmp_path, backend, *kinds)
    out, error = process.communicate()
    assert process.returncode == 0, error
    for kind, line in zip(kinds, out.splitlines(), strict=True):
        found = json.loads(line)
        assert found["loss"] < 1e-5, kind
        assert found["gradient"] < 1e-5, kind
        assert found["gradients"] > 10, kind
        # One for all blocks: nothing in them ends a graph, our own ops included.
        assert (found["graphs"], found["breaks"]) == (1, 0), kind
        assert bool(found["compiled"]) == (backend == "inductor"), kind
