"""Write the table of GPU measurements into kernels/power/README.md, from results/*.json.

    python docs/scripts/measurements.py

`longhaul verify` writes the JSON files. tests/test_docs.py fails when files and table differ.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from longhaul.pipeline.verification.summary import target_rows, time_rows

_CHECKOUT = Path(__file__).parent.parent.parent
PAGE = _CHECKOUT / "kernels/power/README.md"
RESULTS = _CHECKOUT / "results"
_BEGIN, _END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"


def page(text: str, results: Path = RESULTS) -> str:
    """The page with its tables written anew."""
    before, rest = text.split(_BEGIN)
    _, after = rest.split(_END)
    return "".join([before, _BEGIN, measurements(results), _END, after])


def measurements(results: Path) -> str:
    """The tables of all files of machines with a GPU."""
    files = [(file, json.loads(file.read_text())) for file in sorted(results.glob("*.json"))]
    parts = [_of_file(file.name, one) for file, one in files if one["machine"]["device"] == "cuda"]
    return "\n".join(parts)


def _of_file(name: str, content: dict[str, Any]) -> str:
    machine, results = content["machine"], content["results"]
    versions = ", ".join(f"{key} {value}" for key, value in machine["versions"].items())
    began = content["pieces"][0]["began"][:10]
    lines = [
        f"**{machine['devices']} x {machine['name']}**, driver {machine['driver']}, {versions}; "
        f"{began}, commit `{machine['commit'] or 'unknown'}`, `results/{name}`.",
        "",
        *_counts(results),
        "",
        *_errors(results),
        "",
        *_markdown(time_rows(results)),
        "",
        *_markdown(target_rows(content["targets"])),
    ]
    return "\n".join(lines) + "\n"


def _counts(results: dict[str, Any]) -> list[str]:
    counts: defaultdict[str, int] = defaultdict(int)
    for one in results.values():
        counts[one["status"]] += 1
    wrong = [
        key
        for key, one in results.items()
        if one["status"] not in ("passed", "skipped", "unavailable")
    ]
    text = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
    return [f"Checks: {text}.", *(f"- {results[key]['status']}: {key}" for key in wrong)]


def _errors(results: dict[str, Any]) -> list[str]:
    """The largest errors of outputs and gradients, relative norms, by dtype and form."""
    worst: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for one in results.values():
        found = one.get("result") or {}
        # Cases of the delta rule and of rotations have no content.
        if "forms" not in found or found["case"].get("content") != "normal":
            continue
        for form, record in found["forms"].items():
            row = worst[found["case"]["dtype"], form]
            for name, tensor in record["tensors"].items():
                row[name] = max(row.get(name, 0.0), tensor["norm_error"] or 0.0)
    names = ("out", "dq", "dk", "dv", "dlog_g")
    rows = [["largest error, relative norm", *names]]
    for (dtype, form), row in sorted(worst.items()):
        cells = (f"{row[name]:.1e}" if name in row else "" for name in names)
        rows.append([f"{dtype}, {form}", *cells])
    return _markdown(rows)


def _markdown(rows: list[list[str]]) -> list[str]:
    """A table whose first row is its head; nothing without others."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|---|" + "---:|" * (len(rows[0]) - 1), *lines[1:]] if lines[1:] else []


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
