"""Draw docs/figures/reproduction-*.svg from runs.csv: `python docs/scripts/reproduction_figure.py`.

Left, figure 1 of the conformal-sympow paper: the gap to softmax in training loss after equal
numbers of sequences. Right, what figure 2 is about: the loss at positions within the training
context and beyond it, of models trained at 512 tokens. Bars are standard errors over seeds.
"""

from math import isfinite
from statistics import fmean

from figures import Colours, logarithmic_tokens, save_both_themes
from matplotlib.axes import Axes
from reproduction import Row, stored

from longhaul.pipeline.evaluation.figures import KIND_COLOURS, standard_error

_CONTEXTS, _TRAINED = (128, 512, 2048), 512
_KINDS = ("softmax", "sympow", "sympow_gated", "conformal_sympow")


def rows_of(kind: str, context: int) -> dict[int, Row]:
    """The runs with the published gate, by seed."""
    found = stored().values()
    return {
        row.seed: row
        for row in found
        if (row.kind, row.context) == (kind, context) and row.gate_init != "long_memory"
    }


def draw(gaps: Axes, positions: Axes, on: Colours) -> None:
    gaps.plot(_CONTEXTS, [0] * len(_CONTEXTS), color=on(KIND_COLOURS["softmax"]))
    gaps.text(2300, 0, "softmax", color=on(KIND_COLOURS["softmax"]), va="center")
    for kind in _KINDS:
        colour = KIND_COLOURS[kind]
        if kind != "softmax":
            _draw_gaps(gaps, kind, on(colour))
        _draw_positions(positions, kind, on(colour))
    gaps.set_xlim(110, 12_000)  # The kinds' names stand on the right.
    logarithmic_tokens(gaps, list(_CONTEXTS), [f"{T:,}" for T in _CONTEXTS])
    gaps.set_xlabel("training context, tokens")
    gaps.set_title("Gap to softmax, nats a byte, equal sequences", fontsize=9.5, loc="left")
    positions.set_xlim(-0.2, 2.1)
    positions.set_xticks([0, 1], ["256 to 512", "4,096 to 8,192"])
    positions.set_xlabel("position")
    positions.set_title(f"Loss at a position, trained at {_TRAINED}", fontsize=9.5, loc="left")


def _draw_gaps(axes: Axes, kind: str, colour: str) -> None:
    means, errors = [], []
    for context in _CONTEXTS:
        ours, softmax = rows_of(kind, context), rows_of("softmax", context)
        gaps = [row.sequences - softmax[seed].sequences for seed, row in ours.items()]
        means.append(fmean(gaps))
        errors.append(standard_error(gaps))
    axes.errorbar(_CONTEXTS, means, errors, color=colour, marker="o", markersize=5, capsize=3)
    axes.text(2300, means[-1], kind, color=colour, va="center")


def _draw_positions(axes: Axes, kind: str, colour: str) -> None:
    rows = [row for row in rows_of(kind, _TRAINED).values() if isfinite(row.beyond)]
    columns = [[row.within for row in rows], [row.beyond for row in rows]]
    means, errors = ([f(column) for column in columns] for f in (fmean, standard_error))
    axes.errorbar([0, 1], means, errors, color=colour, marker="o", markersize=5, capsize=3)
    above = {"sympow_gated": 0.05, "conformal_sympow": -0.05}.get(kind, 0)  # Their losses are near.
    axes.text(1.06, means[1] + above, kind, color=colour, va="center")


if __name__ == "__main__":
    save_both_themes("reproduction", draw)
