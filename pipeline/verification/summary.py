"""What `longhaul verify` prints: a line for each check, and a table of all."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from longhaul.pipeline.terminal.table import print_table
from longhaul.pipeline.verification.record import Record

_STATUSES = ("passed", "failed", "crashed", "timed out", "unavailable", "skipped", "left")
_WIDEST_FAULT = 300  # characters


def print_line(record: Record, key: str, total: int) -> None:
    """How a check ended. `total` is how many run on this machine."""
    one = record.results[key]
    line = f"{record.num_run} of {total}: {one['status']}, {one['seconds']:g} s, {key}"
    print("; ".join([line, *map(_short, one["faults"][:1])]), flush=True)


def print_summary(record: Record, keys: Sequence[str]) -> None:
    """Counts by part, what is wrong, what was skipped and why, times, targets."""
    results = {key: record.results.get(key, {"status": "left"}) for key in keys}
    print()
    counts = Counter(map(_status, results.values()))
    found = ", ".join(f"{counts[status]} {status}" for status in _STATUSES if counts[status])
    print(f"{len(results)} checks: {found}")
    _print_counts(results)
    for key, one in results.items():
        if one["status"] in ("failed", "crashed", "timed out", "unavailable"):
            for fault in one.get("faults", [])[:3]:
                print(f"{one['status']}: {key}: {_short(fault)}")
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for key, one in results.items():
        if one["status"] == "skipped":
            reasons[one["reason"]].append(key)
    for reason, skipped in reasons.items():
        print(f"skipped, {reason}: {len(skipped)} checks, such as {skipped[0]}")
    known = (one for one in record.targets if one["value"] is not None)
    for rows in (time_rows(results), target_rows(known)):
        if len(rows) > 1:
            print()
            print_table(rows)
    print(f"\nresults: {record.path}")


def _print_counts(results: dict[str, Any]) -> None:
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for key, one in results.items():
        counts[key.partition(":")[0]][_status(one)] += 1
    rows = [["", *_STATUSES]]
    rows += [[part, *(str(found[one]) for one in _STATUSES)] for part, found in counts.items()]
    print_table(rows)


def _status(one: dict[str, Any]) -> str:
    return "left" if one["status"] == "begun" else str(one["status"])


def time_rows(results: dict[str, Any]) -> list[list[str]]:
    """A table's rows: what has been timed, eager and as CUDA graphs, and its memory."""
    rows = [["milliseconds", "forward", "forward + backward", "as graphs", "TFLOP/s", "peak MB"]]
    for key, one in results.items():
        found = one.get("result") or {}
        both = found.get("forward_backward_ms", found.get("ms"))
        if not key.startswith("timings: ") or both is None:
            continue
        graphs = ("forward_ms_graph", "forward_backward_ms_graph", "ms_graph")
        peak = found.get("peak_bytes")
        rows.append(
            [
                key.removeprefix("timings: "),
                _number(found.get("forward_ms")),
                _number(both),
                " / ".join(_number(found[name]) for name in graphs if name in found),
                _number(found.get("forward_backward_tflops", found.get("tflops"))),
                _number(None if peak is None else peak / 1e6),
            ]
        )
    return rows


def target_rows(targets: Iterable[dict[str, Any]]) -> list[list[str]]:
    """A table's rows: each target, what was found, and the verdict."""
    verdicts = {None: "not measured", True: "met", False: "missed"}
    return [
        ["target of speed", "found", "wanted", "verdict"],
        *(
            [one["name"], _number(one["value"]), _number(one["target"]), verdicts[one["met"]]]
            for one in targets
        ),
    ]


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.4g}"


def _short(fault: str) -> str:
    line = " ".join(fault.split())
    return line if len(line) <= _WIDEST_FAULT else f"{line[:_WIDEST_FAULT]} ..."
