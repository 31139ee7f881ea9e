"""Draw docs/figures/context-*.svg, the README's figure: `python docs/scripts/context_figure.py`.

Left, what a sequence of T tokens leaves in memory, counted by the variants themselves. Right, times
that kernels/power/README.md reports of `longhaul bench kernels`, read from its table.
"""

import re
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from longhaul.modules.attention import build_attention
from longhaul.pipeline.planning.sizes import state_bytes

_DOCS = Path(__file__).parent.parent
_CONTEXTS = [2**n for n in range(8, 21)]
_LAYERS, _WIDTH, _HEADS = 12, 768, 12  # GPT-2's 124M shape
_KINDS = {  # labels, and colours of Okabe and Ito's palette
    "softmax": ("softmax, keys and values", "#D55E00"),
    "conformal_sympow": ("conformal_sympow, degree 2", "#0072B2"),
    "zeros": ("zeros", "#009E73"),
    "retention": ("retention", "#CC79A7"),
}
_THEMES = {"light": ("#24292f", "#d0d7de"), "dark": ("#e6edf3", "#484f58")}
_LIFTED = {"#0072B2": "#56B4E9"}  # what is too dark on a dark page


def bytes_of(kind: str, T: int) -> int:
    """Bytes that T tokens of one sequence leave behind in the 124M model, without padding."""
    with torch.device("meta"):
        layer = build_attention(kind, _WIDTH, _HEADS)
    return state_bytes([layer] * _LAYERS, T)


def measured_milliseconds() -> list[tuple[int, int, int]]:
    """Tokens, SDPA and the chunked form, forward and backward."""
    text = (_DOCS.parent / "kernels/power/README.md").read_text()
    rows = re.findall(r"^\| ([\d,]+) \| forward \+ backward \| ([\d,]+) \| ([\d,]+) ", text, re.M)
    if not rows:
        raise ValueError("kernels/power/README.md: found no times of the chunked form beside SDPA")
    return [tuple(int(cell.replace(",", "")) for cell in row) for row in rows]  # type: ignore[misc]


def draw(theme: str) -> None:
    ink, grid = _THEMES[theme]
    style = {
        "font.size": 9, "svg.hashsalt": "longhaul", "axes.edgecolor": grid, "grid.color": grid,
        "axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 2.2,
        **dict.fromkeys(
            ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.titlecolor"), ink
        ),
    }  # fmt: skip
    with plt.rc_context(style):
        figure, (memory, time) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
        _draw_memory(memory, theme)
        _draw_time(time, theme)
        for axes in (memory, time):
            axes.grid(True, alpha=0.6, linewidth=0.6)
            axes.set_axisbelow(True)
            axes.tick_params(length=0)
        path = _DOCS / "figures" / f"context-{theme}.svg"
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)


def _draw_memory(axes: Axes, theme: str) -> None:
    for kind, (label, colour) in _KINDS.items():
        colour = _on(theme, colour)
        sizes = [bytes_of(kind, T) for T in _CONTEXTS]
        axes.plot(_CONTEXTS, sizes, color=colour)
        if sizes[0] == sizes[-1]:
            axes.text(_CONTEXTS[-1], sizes[-1] * 1.18, label, color=colour, ha="right", va="bottom")
        else:
            axes.text(2**14.4, bytes_of(kind, 2**15) * 1.6, label, color=colour, ha="right")
    _logarithmic(axes, [2**10, 2**14, 2**17, 2**20], ["1K", "16K", "128K", "1M"])
    axes.set_ylim(4e5, 1.2e11)
    axes.yaxis.set_major_locator(FixedLocator([1e6, 1e7, 1e8, 1e9, 1e10]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticklabels(["1 MB", "10 MB", "100 MB", "1 GB", "10 GB"])
    axes.set_xlabel("tokens read")
    axes.set_title("Memory of one sequence, 124M parameters, bf16", fontsize=9.5, loc="left")


def _draw_time(axes: Axes, theme: str) -> None:
    rows = measured_milliseconds()
    tokens = [row[0] for row in rows]
    for column, label, colour, at in (
        (1, "softmax, PyTorch's fused kernel", "#D55E00", (0.86, 0.90)),
        (2, "power attention, degree 2, gated", "#0072B2", (0.98, 0.30)),
    ):
        colour = _on(theme, colour)
        seconds = [row[column] / 1000 for row in rows]
        axes.plot(tokens, seconds, color=colour, marker="o", markersize=5)
        axes.text(*at, label, color=colour, ha="right", va="top", transform=axes.transAxes)
    _logarithmic(axes, tokens, [f"{T // 1024}K" for T in tokens])
    axes.set_ylim(0.08, 60)
    axes.yaxis.set_major_locator(FixedLocator([0.1, 1, 10]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticklabels(["0.1 s", "1 s", "10 s"])
    axes.set_xlabel("tokens")
    axes.set_title("Forward + backward, one op on two CPU cores", fontsize=9.5, loc="left")


def _logarithmic(axes: Axes, ticks: list[int], labels: list[str]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels(labels)


def _on(theme: str, colour: str) -> str:
    return _LIFTED.get(colour, colour) if theme == "dark" else colour


if __name__ == "__main__":
    for name in _THEMES:
        draw(name)
