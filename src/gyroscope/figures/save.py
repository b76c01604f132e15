"""Figures on disk."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure


def save(figure: Figure, stem: Path | str) -> list[Path]:
    """Write `figure` as `stem`.png and `stem`.svg and return both paths.

    >>> import tempfile
    >>> from gyroscope.figures import rotation_curves
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ax = rotation_curves([[0.0], [0.4]])
    ...     [path.name for path in save(ax.get_figure(), f"{folder}/curves")]
    ['curves.png', 'curves.svg']
    """
    png, svg = Path(f"{stem}.png"), Path(f"{stem}.svg")
    figure.savefig(png, dpi=200)
    figure.savefig(svg)
    return [png, svg]
