"""Draw docs/figures/context-*.svg, the README's figure: `python docs/scripts/context_figure.py`.

Left, what a sequence of T tokens leaves in memory, counted by the variants themselves. Right, times
that kernels/power/README.md reports of `longhaul bench kernels`, read from its table.
"""

import re

import torch
from figures import DOCS, Colours, logarithmic_tokens, save_both_themes
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from longhaul.modules.attention import build_attention
from longhaul.pipeline.evaluation.figures import KIND_COLOURS
from longhaul.pipeline.planning.sizes import state_bytes

_CONTEXTS = [2**n for n in range(8, 21)]
_LAYERS, _WIDTH, _HEADS = 12, 768, 12  # GPT-2's 124M shape
_KINDS = {
    "softmax": "softmax, keys and values",
    "conformal_sympow": "conformal_sympow, degree 2",
    "zeros": "zeros",
    "retention": "retention",
}


def bytes_of(kind: str, T: int) -> int:
    """Bytes that T tokens of one sequence leave behind in the 124M model, without padding."""
    with torch.device("meta"):
        layer = build_attention(kind, _WIDTH, _HEADS)
    return state_bytes([layer] * _LAYERS, T)


def measured_milliseconds() -> list[tuple[int, int, int]]:
    """Tokens, SDPA and the chunked form, forward and backward."""
    text = (DOCS.parent / "kernels/power/README.md").read_text()
    rows = re.findall(r"^\| ([\d,]+) \| forward \+ backward \| ([\d,]+) \| ([\d,]+) ", text, re.M)
    if not rows:
        raise ValueError("kernels/power/README.md: found no times of the chunked form beside SDPA")
    return [tuple(int(cell.replace(",", "")) for cell in row) for row in rows]  # type: ignore[misc]


def draw(memory: Axes, time: Axes, on: Colours) -> None:
    _draw_memory(memory, on)
    _draw_time(time, on)


def _draw_memory(axes: Axes, on: Colours) -> None:
    for kind, label in _KINDS.items():
        colour = on(KIND_COLOURS[kind])
        sizes = [bytes_of(kind, T) for T in _CONTEXTS]
        axes.plot(_CONTEXTS, sizes, color=colour)
        if sizes[0] == sizes[-1]:
            axes.text(_CONTEXTS[-1], sizes[-1] * 1.18, label, color=colour, ha="right", va="bottom")
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


def _draw_time(axes: Axes, on: Colours) -> None:
    rows = measured_milliseconds()
    tokens = [row[0] for row in rows]
    for column, label, kind, at in (
        (1, "softmax, PyTorch's fused kernel", "softmax", (0.76, 0.90)),
        (2, "power attention, degree 2, gated", "conformal_sympow", (0.98, 0.30)),
    ):
        colour = on(KIND_COLOURS[kind])
        seconds = [row[column] / 1000 for row in rows]
        axes.plot(tokens, seconds, color=colour, marker="o", markersize=5)
        axes.text(*at, label, color=colour, ha="right", va="top", transform=axes.transAxes)
    axes.set_yscale("log")
    logarithmic_tokens(axes, tokens, [f"{T // 1024}K" for T in tokens])
    axes.set_ylim(0.08, 90)
    axes.yaxis.set_major_locator(FixedLocator([0.1, 1, 10]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticklabels(["0.1 s", "1 s", "10 s"])
    axes.set_xlabel("tokens")
    axes.set_title("Forward + backward, one op on two CPU cores", fontsize=9.5, loc="left")


if __name__ == "__main__":
    save_both_themes("context", draw)
