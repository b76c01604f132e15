"""The benchmark: train every network with every fault and every healthy variant, and diagnose each run."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gyroscope
from gyroscope.diagnosis import course_of, findings, ordered
from gyroscope.errors import MonitorError
from gyroscope_lab.errors import LabError
from gyroscope_lab.faults.healthy import HEALTHY
from gyroscope_lab.faults.injections import FAULTS, Injected, Scene, accuracy, scene, train
from gyroscope_lab.faults.networks import NETWORKS


@dataclass(frozen=True)
class Case:
    """One training of the benchmark.

    Attributes:
        network: the name of the network.
        seed: the seed of weights and batches.
        fault: the name of the fault; None for a healthy run.
        variant: the name of the healthy variant; None for a run with a fault.
    """

    network: str
    seed: int
    fault: str | None = None
    variant: str | None = None

    @property
    def is_held_out(self) -> bool:
        """True if no threshold was set by looking at it: all but the first seed of the first six networks."""
        return NETWORKS[self.network].held_out or self.seed > 0


#: Kind, layers and step of each alarm, the first one first.
Alarms = tuple[tuple[str, tuple[str, ...], int | None], ...]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    Attributes:
        case: the training.
        accuracy: the share of right answers on examples that were not trained on.
        layers, since: where the fault is and when it began.
        alarms: the alarms from a run with its loss.
        alarms_default: the same, without the loss.
        notes: the kinds of the notes.
        refused: the error of `watch`, if it refused the objects.
    """

    case: Case
    accuracy: float
    layers: tuple[str, ...]
    since: int | None
    alarms: Alarms
    alarms_default: Alarms
    notes: tuple[str, ...]
    refused: str | None = None


#: The seed of the subset: all networks, faults and variants, none of which a threshold has seen with it.
SUBSET = (1,)


def cases(
    *,
    networks: Sequence[str] | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    faults: Sequence[str] | None = None,
    variants: Sequence[str] | None = None,
) -> Iterator[Case]:
    """Yield the cases of the benchmark."""
    for network in NETWORKS if networks is None else networks:
        for seed in seeds:
            for fault in FAULTS if faults is None else faults:
                yield Case(network, seed, fault=fault)
            for variant in HEALTHY if variants is None else variants:
                yield Case(network, seed, variant=variant)


def evaluate(case: Case, folder: Path | None = None) -> Outcome | None:
    """Train a case and diagnose its run; None if the network has no place for the fault or the variant.

    Args:
        case: the training.
        folder: where to keep the run; by default it is not kept.
    """
    torch.set_num_threads(1)
    it, injected = prepared(case)
    if injected is None:
        return None
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(place) / "run" if folder is None else folder
        try:
            right = _trained(it, path) if it.ranks == 1 else _trained_on_ranks(case, it.ranks, path)
        except MonitorError as error:
            alarm = (("replaced", tuple(it.names), None),)
            return Outcome(case, 0.0, injected.layers, injected.since, alarm, alarm, (), str(error))
        return Outcome(case, right, injected.layers, injected.since, *diagnosed(path))


def diagnosed(path: Path) -> tuple[Alarms, Alarms, tuple[str, ...]]:
    """Diagnose a run; return its alarms with its loss and without, and the kinds of its notes."""
    with gyroscope.load(path) as run:
        course = course_of(run)
    found = ordered(findings(course))
    silent = ordered(findings(replace(course, loss=np.empty(0), loss_steps=np.empty(0, dtype=np.int64))))
    with_loss, without = (
        tuple((one.kind, one.layers[:5], one.since) for one in each if one.is_alarm) for each in (found, silent)
    )
    return with_loss, without, tuple(one.kind for one in found if not one.is_alarm)


def prepared(case: Case) -> tuple[Scene, Injected | None]:
    """Return the scene of a case, and what was put into it; None if the network has no place for it."""
    it = scene(NETWORKS[case.network], case.seed)
    if case.fault is not None:
        return it, FAULTS[case.fault].inject(it)
    fits = case.variant is None or HEALTHY[case.variant].prepare(it)
    return it, Injected() if fits else None


def _trained(it: Scene, path: Path) -> float:
    """Train a scene under `watch`, and return its accuracy."""
    it.begin()
    torch.manual_seed(it.seed)
    with gyroscope.watch(it.model, it.optimizers, path) as monitor:
        train(it, each=lambda step, value: monitor.log(loss=value))
    return accuracy(it)


def _trained_on_ranks(case: Case, ranks: int, path: Path) -> float:
    with tempfile.TemporaryDirectory() as meeting:
        torch.multiprocessing.spawn(_rank, args=(case, ranks, meeting, path), nprocs=ranks)  # type: ignore[attr-defined, no-untyped-call]
        return float((Path(meeting) / "accuracy").read_text())


def _rank(rank: int, case: Case, ranks: int, meeting: str, path: Path) -> None:
    """Train a case on one of several data-parallel ranks, each on batches of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}/group", rank=rank, world_size=ranks)
    try:
        it, _ = prepared(case)
        wrapped = DistributedDataParallel(it.model)
        it.batches = it.network.batches(case.seed + 1000 * rank)
        if it.forward is not None:
            it.forward = wrapped
        right = _trained(it, path)
        if rank == 0:
            (Path(meeting) / "accuracy").write_text(str(right))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_all(chosen: Sequence[Case], *, jobs: int = 2, done: Callable[[Outcome], None] | None = None) -> list[Outcome]:
    """Evaluate cases in `jobs` processes; `done` is called with each outcome as it comes."""
    found: list[Outcome] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for future in as_completed([pool.submit(evaluate, case) for case in chosen]):
            outcome = future.result()
            if outcome is not None:
                found.append(outcome)
                if done is not None:
                    done(outcome)
    return found


def to_json(outcomes: Sequence[Outcome]) -> str:
    """Return outcomes as JSON, one per line."""
    return "\n".join(json.dumps(asdict(one), ensure_ascii=False) for one in outcomes) + "\n"


def read(path: Path) -> list[Outcome]:
    """Return the outcomes that a file of verdicts holds, one per line."""
    try:
        return [_outcome(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LabError(f"{path} is not a file of verdicts: {error}.") from error


def _outcome(told: Mapping[str, Any]) -> Outcome:
    def alarms(found: Iterable[Any]) -> Alarms:
        return tuple((kind, tuple(layers), since) for kind, layers, since in found)

    return Outcome(
        Case(**told["case"]), told["accuracy"], tuple(told["layers"]), told["since"], alarms(told["alarms"]),
        alarms(told["alarms_default"]), tuple(told["notes"]), told.get("refused"),
    )  # fmt: skip


def continued(
    path: Path, chosen: Iterable[Case], *, jobs: int = 2, on_begin: Callable[[int, int], None] = lambda new, known: None
) -> list[Outcome]:
    """Return the outcomes in a file of verdicts, after adding those of the chosen cases that it does not hold.

    Args:
        path: the file, one verdict per line; it need not exist.
        chosen: the cases.
        jobs: processes that train side by side.
        on_begin: called with the number of cases to train and of those that are known.
    """
    known = read(path) if path.exists() else []
    there = {one.case for one in known}
    wanted = [one for one in chosen if one not in there]
    on_begin(len(wanted), len(known))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:

        def keep(outcome: Outcome) -> None:
            file.write(to_json([outcome]))
            file.flush()

        return known + run_all(wanted, jobs=jobs, done=keep)
