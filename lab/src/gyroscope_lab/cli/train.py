"""`gyroscope train`: train one of the laboratory's tasks."""

from __future__ import annotations

import re
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from gyroscope.cli.fail import BAD_ARGUMENT, FAILED, INTERRUPTED, fail
from gyroscope.cli.printed import echo
from gyroscope.errors import GyroscopeError
from gyroscope_lab.cli.shared import Device, Parallel, Precision, at_least_one, load_laboratory, make_folder

if TYPE_CHECKING:
    from gyroscope_lab.training.archive import Archive
    from gyroscope_lab.training.result import Result
    from gyroscope_lab.training.trial import Trial

_RUNS = Path("runs/lab")
_TITLES = {"sgd": "SGD", "sgd-amom": "SGD_AMom", "adam": "Adam", "adamw": "AdamW", "rmsprop": "RMSprop", "lars": "LARS"}


class TrainCommand(TyperCommand):
    """The command with the names of the tasks in its help; they are only loaded for the help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        from gyroscope_lab.training.recipe import CONTROLS, OPTIMIZERS
        from gyroscope_lab.training.tasks import TASKS

        names = (("Tasks", TASKS), ("Optimizers", OPTIMIZERS), ("Controls", [*CONTROLS, "none"]))
        self.epilog = "\n\n".join(f"{what}: {', '.join(which)}." for what, which in names)
        super().format_help(ctx, formatter)


def train(
    task: Annotated[str, typer.Argument(metavar="TASK", help="The task; see the names below.", show_default=False)],
    optimizer: Annotated[str, typer.Option(help="The optimizer that gives the direction.")] = "sgd",
    rate: Annotated[str, typer.Option(help="The learning rate, or ρ under a control: 3^-3, 0.1, 1e-3.")] = "3^-3",
    control: Annotated[str, typer.Option(help="The control of the optimizer, or none.")] = "layca",
    alpha: Annotated[
        float, typer.Option(help="Layers that turn faster: the first (below 0), the last (above 0).")
    ] = 0.0,
    weight_decay: Annotated[float, typer.Option(help="λ of the term λw in the gradient.")] = 0.0,
    momentum: Annotated[float, typer.Option(help="Momentum of SGD, SGD_AMom and RMSprop.")] = 0.0,
    nesterov: Annotated[bool, typer.Option("--nesterov", help="Nesterov's momentum.")] = False,
    epochs: Annotated[int | None, typer.Option(help="How long.", show_default="the task's")] = None,
    batch: Annotated[int | None, typer.Option(help="Examples per step.", show_default="the task's")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the initialization and of the order of examples.")] = 0,
    every: Annotated[int | None, typer.Option(help="Steps between measurements.", show_default="an epoch")] = None,
    precision: Annotated[
        Precision | None, typer.Option(help="Precision of products.", show_default="bf16 on a GPU, float32 on a CPU")
    ] = None,
    device: Annotated[Device, typer.Option(help="Device to train on.")] = "auto",
    data: Annotated[Path, typer.Option(envvar="GYROSCOPE_DATA", help="Folder of the datasets.")] = Path("data"),
    run: Annotated[Path | None, typer.Option(help="Folder of the run.", show_default=f"a new one in {_RUNS}")] = None,
    again: Annotated[bool, typer.Option("--again", help="Train again, even if the result is known.")] = False,
    parallel: Annotated[
        Parallel | None,
        typer.Option(help="Under torchrun: each process has all weights (ddp) or a part (fsdp).", show_default="ddp"),
    ] = None,
) -> None:
    """Train one of the laboratory's tasks, and record the run.

    The same command resumes an interrupted training from its last checkpoint (at most half a minute of training is
    lost), and shows the result of a finished one. On a CPU it uses one core, and the same command gives the same
    numbers.

    For example: gyroscope train digits --control none --rate 3^-1 --weight-decay 5e-3

    On several processes: torchrun --nproc-per-node 2 -m gyroscope_lab train digits-mlp
    """
    for value, option in ((epochs, "--epochs"), (batch, "--batch"), (every, "--every")):
        at_least_one(value, option)
    _check(alpha, weight_decay, momentum, nesterov)
    try:
        load_laboratory()
        on_gpu = _on_gpu(device)
        from gyroscope_lab.training.recipe import Recipe
        from gyroscope_lab.training.tasks import task as known
        from gyroscope_lab.training.trial import Trial

        recipe = Recipe(
            named(optimizer, control, rate, alpha=alpha, weight_decay=weight_decay, momentum=momentum),
            rate=parse_rate(rate),
            optimizer=optimizer,
            control=None if control == "none" else control,
            alpha=alpha,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
        )
        chosen = known(task) if epochs is None else known(task).lasting(epochs)
        if batch is not None:
            chosen = replace(chosen, schedule=replace(chosen.schedule, batch=batch))
        exact = precision or chosen.precision or ("bf16" if on_gpu else "float32")
        trial = Trial(chosen, recipe, seed, precision=exact, every=every)
        archive = _archive(run, trial)
    except GyroscopeError as error:
        fail(str(error), code=BAD_ARGUMENT)
    from gyroscope_lab.engine.ranks import started_by_torchrun

    if started_by_torchrun():
        _on_ranks(trial, archive, on_gpu, data, parallel or "ddp", again)
    elif parallel is not None:
        command = f"torchrun --nproc-per-node 2 -m gyroscope_lab train {task} --parallel {parallel}"
        fail(f"`--parallel` needs several processes, got one. Start them with {command}", code=BAD_ARGUMENT)
    else:
        _show(trial, *_trained(trial, archive, on_gpu, data, again), archive.folder(trial))


def parse_rate(text: str) -> float:
    """Return the rate that a text denotes.

    >>> [round(parse_rate(text), 6) for text in ("3^-3", "3**-3", "0.1", "1e-3")]
    [0.037037, 0.037037, 0.1, 0.001]
    """
    power = re.fullmatch(r"([\d.]+)(?:\^|\*\*)([+-]?[\d.]+)", text.strip())
    try:
        value = float(power[1]) ** float(power[2]) if power else float(text)
    except (ValueError, OverflowError, ZeroDivisionError):
        value = float("nan")
    if not isfinite(value) or value <= 0:
        fail(f"`--rate` must be a number > 0, such as 0.1, 1e-3 or 3^-3, got {text}.", code=BAD_ARGUMENT)
    return value


def named(optimizer: str, control: str, rate: str, *, alpha: float, weight_decay: float, momentum: float) -> str:
    """Return the name of a recipe in figures and tables.

    >>> named("adam", "layca", "3^-4.3", alpha=0.6, weight_decay=0.0, momentum=0.0)
    'Adam-Layca 3^-4.3, alpha +0.6'
    >>> named("sgd", "none", "0.1", alpha=0.0, weight_decay=5e-3, momentum=0.9)
    'SGD 0.1, decay 0.005, momentum 0.9'
    """
    kinds = [_TITLES.get(kind, kind.capitalize()) for kind in (optimizer, control) if kind != "none"]
    name = "-".join(kinds[1:] if kinds[0] == "SGD" and len(kinds) > 1 else kinds)
    more = f", alpha {alpha:+g}" if alpha else ""
    more += f", decay {weight_decay:g}" if weight_decay else ""
    more += f", momentum {momentum:g}" if momentum else ""
    return f"{name} {rate.strip().replace('**', '^')}{more}"


def _check(alpha: float, weight_decay: float, momentum: float, nesterov: bool) -> None:
    if not isfinite(alpha):
        fail(f"`--alpha` must be a number, such as -0.6 or 0.6, got {alpha}.", code=BAD_ARGUMENT)
    if not 0 <= weight_decay < float("inf"):
        fail(f"`--weight-decay` must be a number ≥ 0, got {weight_decay}.", code=BAD_ARGUMENT)
    if not 0 <= momentum < 1:
        fail(f"`--momentum` must be a number ≥ 0 and < 1, got {momentum}.", code=BAD_ARGUMENT)
    if nesterov and not momentum:
        fail("`--nesterov` needs a momentum, got 0. Try --momentum 0.9.", code=BAD_ARGUMENT)


def _on_gpu(device: Device) -> bool:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        fail("`--device cuda` needs a GPU, and torch sees none. Leave it out to train on the CPU.", code=BAD_ARGUMENT)
    return device != "cpu" and torch.cuda.is_available()


def _archive(run: Path | None, trial: Trial) -> Archive:
    from gyroscope_lab.training.archive import Archive, OneFolder

    make_folder(_RUNS if run is None else run, "--run")
    return Archive(_RUNS) if run is None else OneFolder(run, trial)


def _on_ranks(trial: Trial, archive: Archive, on_gpu: bool, data: Path, parallel: Parallel, again: bool) -> None:
    """Train on the processes that torchrun started; the first prints the result."""
    from torch import distributed

    from gyroscope_lab.engine.ranks import process_group, run_on_ranks
    from gyroscope_lab.training.archive import forget
    from gyroscope_lab.training.spread import from_first

    try:
        with process_group(cuda=on_gpu) as place:
            if again:
                from_first(lambda: forget(archive, [trial]))
            known = archive.result(trial) is not None
            result = run_on_ranks(trial, archive, data, parallel=parallel, device=place)
            if distributed.get_rank() == 0:
                echo(f"On {distributed.get_world_size()} processes ({parallel}):")
                _show(trial, result, known, archive.folder(trial))
    except (GyroscopeError, OSError) as error:
        fail(str(error), code=FAILED)


def _trained(trial: Trial, archive: Archive, on_gpu: bool, data: Path, again: bool) -> tuple[Result, bool]:
    """The result, and whether it was known."""
    from gyroscope_lab.cli.lab_progress import LabProgress
    from gyroscope_lab.cli.missing_data import require_data
    from gyroscope_lab.engine.laboratory import Lab
    from gyroscope_lab.training.archive import forget

    try:
        if again:
            forget(archive, [trial])
        known = archive.result(trial) is not None
        if not known:
            require_data([trial], data, what=f"the task {trial.task.name}")
        with LabProgress() as progress:
            lab = Lab(
                archive,
                engine="population" if on_gpu else "serial",
                jobs=1,
                data=data,
                precision=trial.precision,
                **progress.hooks,
            )
            [result] = lab.run([trial])
    except KeyboardInterrupt:
        fail("Interrupted. The same command resumes from the last checkpoint, if there is one.", code=INTERRUPTED)
    except (GyroscopeError, OSError) as error:
        fail(str(error), code=FAILED)
    return result, known


def _show(trial: Trial, result: Result, known: bool, folder: Path) -> None:
    final, layers, epochs = result.final_rotation, result.layers, len(result.loss)
    turned = [(value, name) for value, name in zip(final, layers, strict=True) if isfinite(value)]
    echo(trial.title)
    accuracies = [("train", result.train_accuracy), ("test", result.test_accuracy)]
    if result.validation:
        accuracies.insert(1, ("validation", result.best_validation))
    said = ", ".join(f"{name} {100 * value:.2f} %" for name, value in accuracies)
    tested = f" (the weights of epoch {result.tested} were tested)" if result.tested != epochs else ""
    echo(f"{said}{tested}; loss {result.loss[-1]:.4g} in epoch {epochs}")
    if turned:
        (least, first), (most, last) = min(turned), max(turned)
        mean = sum(value for value, _ in turned) / len(turned)
        echo(f"Layers rotated by {least:.3f} ({first}) to {most:.3f} ({last}), {mean:.3f} on average.")
    if result.ended:
        echo(f"Training ended early: {result.ended}.")
    kept = "The result was already known; --again trains again." if known else ""
    echo(kept or f"Trained in {result.seconds:.1f} s.")
    echo(f"The run is {folder}: gyroscope show {folder}; gyroscope plot {folder}")
    if result.diverged:
        raise typer.Exit(FAILED)
