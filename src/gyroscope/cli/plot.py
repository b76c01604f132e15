"""`gyroscope plot`: draw a run to a file."""

from __future__ import annotations

from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from gyroscope.cli import options
from gyroscope.cli.fail import BAD_ARGUMENT, fail, reported
from gyroscope.cli.options import Target, check_logged, is_run, out_option
from gyroscope.cli.printed import echo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: Figures, by the names of their functions in `gyroscope.figures`.
Name = Literal[
    "dashboard", "rotation_curves", "rotation_heatmap", "rates", "norms", "effective_rates", "moment_percentiles",
    "neurons", "conditioning_over_time", "scalars", "curves", "compare",
]  # fmt: skip
Format = Literal["png", "svg", "pdf"]

_WITHOUT_LAYERS = ("scalars",)
_OF_ANY_QUANTITY = ("curves", "rotation_heatmap", "conditioning_over_time")


def plot(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Folder of a run, as given to gyroscope.watch. For compare: several, or a folder of runs.",
            show_default=False,
            autocompletion=options.run_paths,
        ),
    ],
    figure: Annotated[Name, typer.Option(metavar="NAME", help="Figure to draw, by its name above.")] = "dashboard",
    out: Annotated[
        Target | None,
        out_option("File to write", "RUN_FIGURE.png, in this folder"),
    ] = None,
    format: Annotated[
        Format | None, typer.Option(help="File format.", show_default="by the ending of --out, or png")
    ] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Draw only layers whose name matches, such as 'layer1.*'; may be repeated.",
            autocompletion=options.layers,
        ),
    ] = None,
    quantity: Annotated[
        str | None,
        typer.Option(
            help="Quantity for curves, rotation_heatmap and conditioning_over_time, such as gradient_norm.",
            show_default="rotation, or six quantities of conditioning",
            autocompletion=options.quantities,
        ),
    ] = None,
    accuracy: Annotated[
        str | None,
        typer.Option(
            help="Logged number that compare draws against rotation.",
            show_default="test_accuracy",
            autocompletion=options.scalars,
        ),
    ] = None,
) -> None:
    """Draw the measurements of a run, and print the name of the file.

    Start with the **dashboard**: everything on one page. Then, one at a time:

    * **rotation_curves**: how far each layer has turned from its initialization
    * **rotation_heatmap**: the same as one picture, for hundreds of layers; also for other quantities
    * **rates**: how fast each layer turns
    * **norms**: norms of each layer's weights
    * **effective_rates**: effective learning rate of each layer, measured and predicted
    * **moment_percentiles**: second moments that Adam-like optimizers divide by
    * **neurons**: neurons that are never or always active
    * **conditioning_over_time**: how steep the loss is in each layer, and how hard that layer is to train
    * **scalars**: losses and accuracies
    * **curves**: any quantity, one line per layer
    * **compare**: final rotation against accuracy, one point per run

    For example: gyroscope plot runs/first --figure rotation_curves --out first.pdf
    """
    if quantity is not None and figure not in _OF_ANY_QUANTITY:
        names = f"{', '.join(_OF_ANY_QUANTITY[:-1])} or {_OF_ANY_QUANTITY[-1]}"
        fail(f"`--quantity` must be used with --figure {names}, got {figure}.", code=BAD_ARGUMENT)
    if accuracy is not None and figure != "compare":
        fail(f"`--accuracy` must be used with --figure compare, got {figure}.", code=BAD_ARGUMENT)
    if layers and figure in _WITHOUT_LAYERS:
        fail(
            f"`--layers` cannot be used with --figure {figure}, which shows the whole network. Leave it out.",
            code=BAD_ARGUMENT,
        )
    if figure != "compare" and len(runs) > 1:
        fail(
            f"`RUN` must be one run for {figure}, got {len(runs)}. Try --figure compare, which shows several.",
            code=BAD_ARGUMENT,
        )
    file = _file(out, format, default=_default(runs[0], figure))
    with reported(writes=file):
        drawn = _draw(runs, figure, layers or None, quantity, accuracy or "test_accuracy")
        from gyroscope.figures import save

        [written] = save(drawn, file)
    echo(f"Wrote {written}")


def _default(run: Path, figure: Name) -> str:
    name = run.absolute()
    return figure if figure == "compare" else f"{(name.parent if isfile(name) else name).name}_{figure}"


def _file(out: Target | None, format: Format | None, *, default: str) -> Path:
    endings = [f".{known}" for known in get_args(Format)]
    if out is None or out.folder:
        return (out.path if out else Path()) / f"{default}.{format or 'png'}"
    ending = out.path.suffix.lower()
    if ending in endings:
        if format is not None and ending != f".{format}":
            fail(f"`--out` and `--format` must agree, got {out} and {format}. Leave one out.", code=BAD_ARGUMENT)
        return out.path
    if ending[1:].isalpha():
        fail(f"`--out` must end in {', '.join(endings)}, got {out}.", code=BAD_ARGUMENT)
    return Path(f"{out}.{format or 'png'}")


def _draw(
    paths: list[Path], figure: Name, layers: list[str] | None, quantity: str | None, accuracy: str
) -> Figure | Axes:
    from gyroscope import figures, store
    from gyroscope.store.labels import literal

    draw: Any = getattr(figures, figure)
    some = {} if figure in _WITHOUT_LAYERS else {"layers": layers}
    if figure == "compare":
        found = [run for path in paths for run in ([store.load(path)] if is_run(path) else store.runs(path))]
        check_logged(found, accuracy)
        return draw(found, accuracy=accuracy, **some)  # type: ignore[no-any-return]
    if figure in _OF_ANY_QUANTITY and (quantity or figure != "conditioning_over_time"):
        some["quantity"] = quantity or "rotation"  # type: ignore[assignment]
    with store.load(paths[0]) as run:
        title = {} if figure == "dashboard" else {"title": literal(run.name)}
        return draw(run, **title, **some)  # type: ignore[no-any-return]
