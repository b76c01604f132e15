"""Saving figures to files."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gyroscope.base.accepted import real
from gyroscope.base.whole_file import whole_file
from gyroscope.errors import FigureError
from gyroscope.figures.run_data import flag

#: Formats that figures can be saved in.
FORMATS = ("png", "svg", "pdf")

# Pixels per inch; more would exceed any image format.
_MOST = 10_000

# The same figure gives the same file: no dates, no random ids. Fonts in a PDF that journals accept.
_SETTINGS: dict[Any, Any] = {"svg.hashsalt": "gyroscope", "pdf.fonttype": 42}
_NO_DATE: dict[str, dict[str, Any]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}


def save(
    figure: Figure | Axes,
    path: Path | str,
    *,
    dpi: float | Literal["figure"] | None = 200,
    palette: bool = False,
) -> list[Path]:
    """Write `figure` (or the figure that axes belong to) and return the paths written.

    A path that ends in .png, .svg or .pdf is one file; without such an ending, a PNG and an SVG are written under that
    name. Folders are created as needed. `dpi` is the number of pixels per inch; "figure" takes the figure's own, None
    matplotlib's default. `palette` reduces an opaque PNG to 256 colors: the file becomes about a third as large, and no
    pixel changes by more than about 8 % of full brightness.

    >>> import tempfile
    >>> from gyroscope.figures import rotation_curves
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ax = rotation_curves([[0.0], [0.4]])
    ...     [path.name for path in save(ax, f"{folder}/curves") + save(ax, f"{folder}/print.pdf")]
    ['curves.png', 'curves.svg', 'print.pdf']
    """
    whole = figure.get_figure() if isinstance(figure, Axes) else figure
    if not isinstance(whole, Figure):
        raise FigureError(f"`figure` must be a matplotlib figure or axes, got a {type(figure).__name__}.")
    written, reduce = paths(path), flag(palette, "palette")
    pixels: Any = dpi if dpi is None or (isinstance(dpi, str) and dpi == "figure") else real(dpi)
    if isinstance(pixels, float) and not 0 < pixels <= _MOST:
        raise FigureError(
            f"`dpi` must be a number > 0 and ≤ {_MOST:,}, or 'figure' for the figure's own, got {dpi!r:.80}. Try 200."
        )
    engine = whole.get_layout_engine()
    try:
        for file in written:
            _write(whole, file, dpi=pixels, reduce=reduce)
            whole.set_layout_engine("none")  # the next format has the same layout, which takes as long as drawing
    finally:
        whole.set_layout_engine(engine if engine is not None else "none")
    return written


def _write(figure: Figure, file: Path, *, dpi: Any, reduce: bool) -> None:
    form = file.suffix[1:].lower()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(_SETTINGS):
            figure.savefig(file, dpi=dpi, format=form, metadata=_NO_DATE[form])
        if reduce and form == "png":
            to_palette(file)
    except OSError as error:
        raise FigureError(f"{file} cannot be written: {error.strerror or error}.") from error
    except (TypeError, ValueError) as error:  # a title or a label with an incomplete formula or a lone surrogate
        said = str(error).strip().splitlines()
        raise FigureError(f"The figure cannot be drawn: {said[-1] if said else error!r}") from error


def to_palette(path: Path) -> None:
    """Rewrite an opaque PNG in place with a palette of 256 colors."""
    # matplotlib depends on Pillow, but loads it only for images.
    from PIL import Image

    with Image.open(path) as drawn:
        if drawn.mode == "P" or drawn.convert("RGBA").getchannel("A").getextrema() != (255, 255):
            return
        dpi = drawn.info.get("dpi")
        # The largest error of a pixel is about 20 of 255 with this method, and 70 with median cut. Colors are improved
        # until fewer than 1 % of the pixels change; continuing until none does takes up to ten times as long.
        changing = max(1, drawn.width * drawn.height // 100)
        few = drawn.convert("RGB").quantize(
            256, method=Image.Quantize.MAXCOVERAGE, kmeans=changing, dither=Image.Dither.NONE
        )
    with whole_file(path) as new:
        few.save(new, format="PNG", optimize=True, **({"dpi": dpi} if dpi else {}))


def paths(path: Path | str, argument: str = "path") -> list[Path]:
    """Return the files that a figure saved to `path` is written to; errors call it `argument`.

    >>> [str(file) for file in paths("rate0.1")]
    ['rate0.1.png', 'rate0.1.svg']
    """
    if not isinstance(path, str | PathLike) or "\0" in str(path) or not Path(path).name:
        raise FigureError(f"`{argument}` must be the path of a file, got {path!r:.80}. Try 'rates.png'.")
    path = Path(path)
    ending = path.suffix[1:].lower()
    if ending in FORMATS:
        return [path]
    # "rates.v1" and "lr0.1" are names with a dot; "rates.jpg" and "rates.pgn" ask for a format.
    if ending.isalpha():
        accepted = ", ".join(f".{form}" for form in FORMATS)
        raise FigureError(
            f"`{argument}` must end in {accepted}, or have no ending for both .png and .svg, got {path}, which ends in "
            f"{path.suffix}."
        )
    return [Path(f"{path}.png"), Path(f"{path}.svg")]
