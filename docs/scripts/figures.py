"""What the documentation's figures share: two pictures side by side, for light and dark pages."""

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from longhaul.pipeline.evaluation.figures import BLUE, SKY

DOCS = Path(__file__).parent.parent
_THEMES = {"light": ("#24292f", "#d0d7de"), "dark": ("#e6edf3", "#484f58")}
_LIFTED = {BLUE: SKY}  # what is too dark on a dark page

Colours = Callable[[str], str]  # the form of a colour on the page


def save_both_themes(name: str, draw: Callable[[Axes, Axes, Colours], None]) -> None:
    """Write docs/figures/NAME-light.svg and -dark.svg, each drawn by `draw(left, right, on)`."""
    for theme, (ink, grid) in _THEMES.items():
        inked = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.titlecolor")
        style = {
            "font.size": 9, "svg.hashsalt": "longhaul", "axes.edgecolor": grid, "grid.color": grid,
            "axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 2.2,
            **dict.fromkeys(inked, ink),
        }  # fmt: skip
        lifted = _LIFTED if theme == "dark" else {}
        with plt.rc_context(style):
            figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
            draw(left, right, lambda colour, lifted=lifted: lifted.get(colour, colour))
            for axes in (left, right):
                axes.grid(True, alpha=0.6, linewidth=0.6)
                axes.set_axisbelow(True)
                axes.tick_params(length=0)
            path = DOCS / "figures" / f"{name}-{theme}.svg"
            figure.savefig(path, transparent=True, metadata={"Date": None})
            plt.close(figure)


def logarithmic_tokens(axes: Axes, ticks: list[int], labels: list[str]) -> None:
    """A logarithmic horizontal axis with these ticks alone."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels(labels)
