"""The model card of a run that someone else has sent."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from longhaul.configs import load_run_config
from longhaul.pipeline.checkpoints.training_state import SavedProgress, TrainingState
from longhaul.pipeline.exporting.card import write_card
from longhaul.pipeline.runs.folder import RunFolder

HOSTILE = "a`b|c <b>\n# [d](e) \x1b[2J&lt; __f__ g_h"
SHOWN = r"a\`b\|c \<b\>\\n\# \[d\](e) \\x1b\[2J\&lt; \_\_f\_\_ g_h"


def test_what_a_run_folder_says_is_shown_as_text(tmp_path: Path) -> None:
    overrides = ["model.norm=rms", "model.kv_heads=1", "model.qk_norm=head"]
    config = dataclasses.replace(load_run_config("run/demo.yaml", overrides), name="a`b <b>")
    corpus: Any = SimpleNamespace(
        tokenizer_name=HOSTILE,
        tokenizer_sha256=HOSTILE,
        num_tokens=1,
        num_blocks=1,
        origin={"a": HOSTILE},
        bos_id=0,
    )
    run = tmp_path / "run"
    results = run / "evaluation" / "step-1-`x|" / "results.json"
    results.parent.mkdir(parents=True)
    results.write_text(json.dumps({HOSTILE: 1.5}))
    (run / "environment.json").write_text("{}")
    write_card(
        tmp_path,
        RunFolder(run),
        config,
        run / "checkpoints" / "step-1",
        TrainingState(SavedProgress(1, 1, 1, [], 0, []), ""),
        corpus,
        1,
        brings_code=True,
        adds_bos=True,
    )
    card = (tmp_path / "README.md").read_text()
    assert "\n# a\\`b \\<b\\>\n" in card
    assert f"| tokenizer | {SHOWN}, sha256 {SHOWN} |" in card
    assert rf"| step-1-\`x\| | {SHOWN} | 1.5 |" in card
    assert "| qk_norm | head |\n" in card
    assert "| kv_heads | 1 |\n" in card
    assert "| norm | rms |\n" in card
    assert "| norm_eps |" not in card
    assert "<b" not in card.replace(r"\<b", "")
    assert "\x1b" not in card
