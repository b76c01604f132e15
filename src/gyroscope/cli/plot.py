"""`gyroscope plot`: draw a run into a file."""

from __future__ import annotations

from enum import StrEnum
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gyroscope.cli import options
from gyroscope.cli.fail import BAD_ARGUMENT, FAILED, INTERRUPTED, fail
from gyroscope.cli.options import Target, is_run, out_option
from gyroscope.cli.printed import echo
from gyroscope.errors import GyroscopeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Name(StrEnum):
    """The figures, by the names of their functions in `gyroscope.figures`."""

    dashboard = "dashboard"
    rotation_curves = "rotation_curves"
    rotation_heatmap = "rotation_heatmap"
    rates = "rates"
    norms = "norms"
    effective_rates = "effective_rates"
    moment_percentiles = "moment_percentiles"
    neurons = "neurons"
    conditioning_over_time = "conditioning_over_time"
    scalars = "scalars"
    curves = "curves"
    compare = "compare"


class Format(StrEnum):
    """The kinds of files."""

    png = "png"
    svg = "svg"
    pdf = "pdf"


_WITHOUT_LAYERS = (Name.scalars,)
_OF_ANY_QUANTITY = (Name.curves, Name.rotation_heatmap, Name.conditioning_over_time)


def plot(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="The folder of a run, as it was given to gyroscope.watch. Several, or a folder of runs, for compare.",
            show_default=False,
            autocompletion=options.run_paths,
        ),
    ],
    figure: Annotated[Name, typer.Option(metavar="NAME", help="What to draw, by its name above.")] = Name.dashboard,
    out: Annotated[
        Target | None,
        out_option("File to write", "RUN_FIGURE.png, in this folder"),
    ] = None,
    format: Annotated[
        Format | None, typer.Option(help="Kind of file.", show_default="by the ending of --out, or png")
    ] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Only layers whose name matches, such as 'layer1.*'; may be repeated.",
            autocompletion=options.layers,
        ),
    ] = None,
    quantity: Annotated[
        str | None,
        typer.Option(
            help="What curves, rotation_heatmap and conditioning_over_time show, such as gradient_norm.",
            show_default="rotation, or six of conditioning",
            autocompletion=options.quantities,
        ),
    ] = None,
    accuracy: Annotated[
        str | None,
        typer.Option(
            help="The logged number that compare puts against rotation.",
            show_default="test_accuracy",
            autocompletion=options.scalars,
        ),
    ] = None,
) -> None:
    """Draw what a run has measured, and say which file it is in.

    Start with the **dashboard**: everything on one page. Then, one at a time:

    * **rotation_curves**: how far each layer has turned away from where it started
    * **rotation_heatmap**: the same as one picture, for hundreds of layers; other quantities too
    * **rates**: how fast each layer turns
    * **norms**: how long each layer's weights are
    * **effective_rates**: the learning rate that each layer feels, measured and predicted
    * **moment_percentiles**: what Adam-like optimizers divide by
    * **neurons**: neurons that are never or always active
    * **conditioning_over_time**: how steep the loss is in each layer, and how hard to train that layer is
    * **scalars**: losses and accuracies
    * **curves**: any quantity, one line a layer
    * **compare**: final rotation against accuracy, one point a run

    For example: gyroscope plot runs/first --figure rotation_curves --out first.pdf
    """
    if quantity is not None and figure not in _OF_ANY_QUANTITY:
        names = f"{', '.join(known.value for known in _OF_ANY_QUANTITY[:-1])} or {_OF_ANY_QUANTITY[-1].value}"
        fail(f"--quantity is for --figure {names}, not {figure.value}", code=BAD_ARGUMENT)
    if accuracy is not None and figure is not Name.compare:
        fail(f"--accuracy is for --figure {Name.compare.value}, not {figure.value}", code=BAD_ARGUMENT)
    if layers and figure in _WITHOUT_LAYERS:
        fail(f"{figure.value} shows the whole network; leave --layers out", code=BAD_ARGUMENT)
    if figure is not Name.compare and len(runs) > 1:
        fail(f"{figure.value} shows one run and {len(runs)} were given; compare shows several", code=BAD_ARGUMENT)
    file = _file(out, format, default=_default(runs[0], figure))
    try:
        drawn = _draw(runs, figure, layers or None, quantity, accuracy or "test_accuracy")
        from gyroscope.figures import save

        [written] = save(drawn, file)
    except KeyboardInterrupt:
        fail("interrupted", code=INTERRUPTED)
    except GyroscopeError as error:
        fail(str(error), code=FAILED)
    except OSError as error:
        fail(f"{file} cannot be written: {error.strerror or error}", code=FAILED)
    echo(f"Wrote {written}")


def _default(run: Path, figure: Name) -> str:
    name = run.absolute()
    return figure.value if figure is Name.compare else f"{(name.parent if isfile(name) else name).name}_{figure.value}"


def _file(out: Target | None, format: Format | None, *, default: str) -> Path:
    endings = [f".{known.value}" for known in Format]
    if out is None or out.folder:
        return (out.path if out else Path()) / f"{default}.{(format or Format.png).value}"
    ending = out.path.suffix.lower()
    if ending in endings:
        if format is not None and ending != f".{format.value}":
            fail(f"--out {out} and --format {format.value} disagree; leave one out", code=BAD_ARGUMENT)
        return out.path
    if ending[1:].isalpha():
        fail(f"--out {out} ends in {out.path.suffix}; figures are written as {', '.join(endings)}", code=BAD_ARGUMENT)
    return Path(f"{out}.{(format or Format.png).value}")


def _draw(
    paths: list[Path], figure: Name, layers: list[str] | None, quantity: str | None, accuracy: str
) -> Figure | Axes:
    from gyroscope import figures, store
    from gyroscope.figures.looks import literal

    draw: Any = getattr(figures, figure.value)
    some = {} if figure in _WITHOUT_LAYERS else {"layers": layers}
    if figure is Name.compare:
        found = [run for path in paths for run in ([store.load(path)] if is_run(path) else store.runs(path))]
        return draw(found, accuracy=accuracy, **some)  # type: ignore[no-any-return]
    if figure in _OF_ANY_QUANTITY and (quantity or figure is not Name.conditioning_over_time):
        some["quantity"] = quantity or "rotation"  # type: ignore[assignment]
    with store.load(paths[0]) as run:
        title = {} if figure is Name.dashboard else {"title": literal(run.name)}
        return draw(run, **title, **some)  # type: ignore[no-any-return]
