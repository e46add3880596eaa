"""Drawings of measurements by matplotlib, in one look, with the same bytes whenever they are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def pyplot(salt: str) -> Any:
    """Return matplotlib's module, set up for SVG files without a display; ``salt``: makes the ids in the files."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": salt, "svg.fonttype": "none", "font.size": 8, "axes.titlesize": 9})
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, file: Path) -> None:
    """Write a figure without its date, and close it."""
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None, facecolor="white", dpi=150)
    import matplotlib.pyplot as plt

    plt.close(figure)


def tidy(axis: Any, /, **grid: Any) -> None:
    """Leave out the frame above and on the right, and draw a light grid."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25, **grid)
