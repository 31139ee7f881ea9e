"""Draw the documentation's figures, docs/figures/*.svg: `python docs/scripts/figures.py`.

context: the README's. Left, what a sequence of T tokens leaves in memory, counted by the variants
themselves. Right, times that kernels/power/README.md reports of `longhaul bench kernels`, read from
its table.

reproduction: from docs/reproduction/runs.csv. Left, figure 1 of the conformal-sympow paper: the gap
to softmax in training loss after equal numbers of sequences. Right, what figure 2 is about: the
loss at positions within the training context and beyond it, of models trained at 512 tokens. Bars
are standard errors over seeds.
"""

import re
from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator
from reproduction import CONTEXTS, KINDS, Row, stored

from longhaul.modules.attention import build_attention
from longhaul.pipeline.evaluation.figures import BLUE, KIND_COLOURS, SKY, standard_error
from longhaul.pipeline.planning.sizes import state_bytes

_DOCS = Path(__file__).parent.parent
_THEMES = {"light": ("#24292f", "#d0d7de"), "dark": ("#e6edf3", "#484f58")}
_LIFTED = {BLUE: SKY}  # what is too dark on a dark page

_READ = [2**n for n in range(8, 21)]
_LAYERS, _WIDTH, _HEADS = 12, 768, 12  # GPT-2's 124M shape
_STATES = {
    "softmax": "softmax, keys and values",
    "conformal_sympow": "conformal_sympow, degree 2",
    "zeros": "zeros",
    "retention": "retention",
}
_TRAINED = 512

Colours = dict[str, str]
"""The colour of each kind on a page."""


def save(name: str, *draw: Callable[[Axes, Colours], None]) -> None:
    """Write docs/figures/NAME-light.svg and -dark.svg, two pictures side by side."""
    for theme, (ink, grid) in _THEMES.items():
        inked = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.titlecolor")
        style = {
            "font.size": 9, "svg.hashsalt": "longhaul", "axes.edgecolor": grid, "grid.color": grid,
            "axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 2.2,
            **dict.fromkeys(inked, ink),
        }  # fmt: skip
        lifted = _LIFTED if theme == "dark" else {}
        colours = {kind: lifted.get(colour, colour) for kind, colour in KIND_COLOURS.items()}
        with plt.rc_context(style):
            figure, pictures = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
            for axes, draw_one in zip(pictures, draw, strict=True):
                draw_one(axes, colours)
            for axes in pictures:
                axes.grid(True, alpha=0.6, linewidth=0.6)
                axes.set_axisbelow(True)
                axes.tick_params(length=0)
            path = _DOCS / "figures" / f"{name}-{theme}.svg"
            figure.savefig(path, transparent=True, metadata={"Date": None})
            plt.close(figure)


def logarithmic_tokens(axes: Axes, ticks: list[int], labels: list[str]) -> None:
    """A logarithmic horizontal axis with these ticks alone."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels(labels)


def bytes_of(kind: str, T: int) -> int:
    """Bytes that T tokens of one sequence leave behind in the 124M model, without padding."""
    with torch.device("meta"):
        layer = build_attention(kind, _WIDTH, _HEADS)
    return state_bytes([layer] * _LAYERS, T)


def draw_memory(axes: Axes, colours: Colours) -> None:
    for kind, label in _STATES.items():
        colour = colours[kind]
        sizes = [bytes_of(kind, T) for T in _READ]
        axes.plot(_READ, sizes, color=colour)
        if sizes[0] == sizes[-1]:
            axes.text(_READ[-1], sizes[-1] * 1.18, label, color=colour, ha="right", va="bottom")
        else:
            axes.text(2**14.4, bytes_of(kind, 2**15) * 1.6, label, color=colour, ha="right")
    axes.set_yscale("log")
    logarithmic_tokens(axes, [2**10, 2**14, 2**17, 2**20], ["1K", "16K", "128K", "1M"])
    axes.set_ylim(4e5, 1.2e11)
    axes.yaxis.set_major_locator(FixedLocator([1e6, 1e7, 1e8, 1e9, 1e10]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticklabels(["1 MB", "10 MB", "100 MB", "1 GB", "10 GB"])
    axes.set_xlabel("tokens read")
    axes.set_title("Memory of one sequence, 124M parameters, bf16", fontsize=9.5, loc="left")


def measured_milliseconds() -> list[list[int]]:
    """Tokens, SDPA and the chunked form, forward and backward."""
    text = (_DOCS.parent / "kernels/power/README.md").read_text()
    rows = re.findall(r"^\| ([\d,]+) \| forward \+ backward \| ([\d,]+) \| ([\d,]+) ", text, re.M)
    if not rows:
        raise ValueError("kernels/power/README.md: found no times of the chunked form beside SDPA")
    return [[int(cell.replace(",", "")) for cell in row] for row in rows]


def draw_time(axes: Axes, colours: Colours) -> None:
    rows = measured_milliseconds()
    tokens = [row[0] for row in rows]
    for column, label, kind, at in (
        (1, "softmax, PyTorch's fused kernel", "softmax", (0.76, 0.90)),
        (2, "power attention, degree 2, gated", "conformal_sympow", (0.98, 0.30)),
    ):
        seconds = [row[column] / 1000 for row in rows]
        axes.plot(tokens, seconds, color=colours[kind], marker="o", markersize=5)
        axes.text(*at, label, color=colours[kind], ha="right", va="top", transform=axes.transAxes)
    axes.set_yscale("log")
    logarithmic_tokens(axes, tokens, [f"{T // 1024}K" for T in tokens])
    axes.set_ylim(0.08, 90)
    axes.yaxis.set_major_locator(FixedLocator([0.1, 1, 10]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticklabels(["0.1 s", "1 s", "10 s"])
    axes.set_xlabel("tokens")
    axes.set_title("Forward + backward, one op on two CPU cores", fontsize=9.5, loc="left")


def rows_of(kind: str, context: int) -> dict[int, Row]:
    """The runs with the published gate, by seed."""
    return {
        row.seed: row
        for row in stored().values()
        if (row.kind, row.context) == (kind, context) and row.gate_init != "long_memory"
    }


def draw_gaps(axes: Axes, colours: Colours) -> None:
    axes.plot(CONTEXTS, [0] * len(CONTEXTS), color=colours["softmax"])
    axes.text(2300, 0, "softmax", color=colours["softmax"], va="center")
    softmax = [rows_of("softmax", context) for context in CONTEXTS]
    for kind in KINDS[1:]:
        gaps = [
            [row.sequences - theirs[seed].sequences for seed, row in rows_of(kind, context).items()]
            for context, theirs in zip(CONTEXTS, softmax, strict=True)
        ]
        _draw_means(axes, CONTEXTS, gaps, colours[kind])
        axes.text(2300, fmean(gaps[-1]), kind, color=colours[kind], va="center")
    axes.set_xlim(110, 12_000)  # The kinds' names stand on the right.
    logarithmic_tokens(axes, [*CONTEXTS], [f"{T:,}" for T in CONTEXTS])
    axes.set_xlabel("training context, tokens")
    axes.set_title("Gap to softmax, nats a byte, equal sequences", fontsize=9.5, loc="left")


def draw_positions(axes: Axes, colours: Colours) -> None:
    for kind in KINDS:
        rows = [row for row in rows_of(kind, _TRAINED).values() if isfinite(row.beyond)]
        beyond = [row.beyond for row in rows]
        _draw_means(axes, [0, 1], [[row.within for row in rows], beyond], colours[kind])
        # Their losses are near.
        above = {"sympow_gated": 0.05, "conformal_sympow": -0.05}.get(kind, 0)
        axes.text(1.06, fmean(beyond) + above, kind, color=colours[kind], va="center")
    axes.set_xlim(-0.2, 2.1)
    axes.set_xticks([0, 1], ["256 to 512", "4,096 to 8,192"])
    axes.set_xlabel("position")
    axes.set_title(f"Loss at a position, trained at {_TRAINED}", fontsize=9.5, loc="left")


def _draw_means(
    axes: Axes, x: Sequence[int], values: Sequence[Sequence[float]], colour: str
) -> None:
    """Means of the seeds' values, and their standard errors."""
    means, errors = ([f(of_x) for of_x in values] for f in (fmean, standard_error))
    axes.errorbar(x, means, errors, color=colour, marker="o", markersize=5, capsize=3)


if __name__ == "__main__":
    save("context", draw_memory, draw_time)
    save("reproduction", draw_gaps, draw_positions)
