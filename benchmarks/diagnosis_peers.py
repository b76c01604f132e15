"""What other published diagnosers say about the runs of the benchmark of faults.

    python benchmarks/diagnosis_peers.py --peer torchmortem --network mlp-4 cnn --seed 1 --out FILE.jsonl

Each peer is attached to the training loop as its own README says, with its defaults, and what it calls a warning or
worse is an alarm:

torchmortem
    `Autopsy(model, optimizer)` around the loop and `step(loss=...)` after each step. Alarms are findings of severity
    WARNING or CRITICAL; INFO is none. The kind is the category and the title without the layer's name.
torchdiag
    `summary`, `check_dead_neurons` and `verify_step` before the training, `check_gradients` after the backward pass of
    every tenth step, `check_dead_neurons` again at the end. It returns no verdict, so alarms are the lines that it
    prints under "ISSUES FOUND" or "WARNINGS".
neural-observatory
    `Observatory(model).watch()`, `step` before each forward pass, `report` at the end. Alarms are results of status
    "warning" or "critical"; "info" is none. The kind is the analyzer and the first words of its first warning.
traincheck
    `traincheck-collect` on a script that trains 10 steps, as its guide advises, with the model tracked. Invariants are
    inferred (`traincheck-infer`) from four healthy trainings of the network with other seeds, once with AdamW and once
    with clipping. Each case is traced the same way and checked (`traincheck-check`). Alarms are violated invariants.
    The kind is the relation and its own description; there is no layer. Relations between calls come last, because
    its tutorial says to ignore them at first. Faults that begin later are left out.

Where a training has several optimizers the peer is given the first one. Alarms of one kind are one alarm, with all its
layers and the first of its steps. There is no mapping of kinds: a fault counts as found if there is any alarm, and any
alarm on a healthy run is a false one. A run that the peer broke, or that it could not diagnose, has an "error", and
counts as one without an alarm. Runs on several ranks are left out. Cases that the file already holds are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from gyroscope_lab.faults.benchmark import Case, cases, prepared
from gyroscope_lab.faults.injections import Scene, train

Alarm = tuple[str, list[str], int | None]
# The most layers and alarms of a run that are written down.
_MOST = 8


def built(case: Case) -> Scene | None:
    """The scene of a case with its optimizers; None if the network has no place for the fault, or it needs ranks."""
    it, injected = prepared(case)
    if injected is None or it.ranks > 1:
        return None
    it.begin()
    torch.manual_seed(it.seed)
    return it


def merged(alarms: Iterable[tuple[str, Iterable[str], int | None]]) -> list[Alarm]:
    """Alarms, one for each kind."""
    found: dict[str, tuple[list[str], int | None]] = {}
    for kind, layers, step in alarms:
        known, first = found.setdefault(kind, ([], step))
        known += [layer for layer in layers if layer not in known]
        if step is not None and (first is None or step < first):
            found[kind] = (known, step)
    return [(kind, layers[:_MOST], step) for kind, (layers, step) in found.items()]


def torchmortem(it: Scene) -> list[Alarm]:
    from torchmortem import Autopsy, Severity

    with Autopsy(it.model, optimizer=it.optimizers[0]) as autopsy:
        train(it, each=lambda step, value: autopsy.step(loss=value.item()))
    return merged(
        (
            f"{one.category}: {re.sub(r' in [^ ]+$', '', one.title)}",
            one.affected_layers,
            int(one.step_range[0]),
        )
        for one in autopsy.get_report().findings
        if one.severity >= Severity.WARNING
    )


def torchdiag(it: Scene) -> list[Alarm]:
    import torchdiag

    said: list[tuple[str, list[str], int | None]] = []

    def told(step: int | None, check: Callable[..., Any], *args: Any) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            check(*args)
        text = out.getvalue()
        for head in ("ISSUES FOUND:", "WARNINGS:"):
            for line in text.partition(head)[2].splitlines():
                if line.startswith("  • "):
                    name, _, issue = line[4:].partition(": ")
                    known = name in named
                    kind = re.sub(r"^\d+% ", "", issue.rpartition("— ")[2]) if known else name
                    layers = [name] if known else issue.split(", ") if issue else []
                    said.append((f"{check.__name__}: {kind}", layers, step))

    named = {name for name, _ in it.model.named_parameters()} | {name for name, _ in it.model.named_modules()}
    x, y = next(it.batches)
    told(None, torchdiag.summary, it.model)
    told(0, torchdiag.check_dead_neurons, it.model, x)
    told(0, torchdiag.verify_step, it.model, it.optimizers[0], it.loss, x, y)
    it.after_backward.append(lambda step: told(step, torchdiag.check_gradients, it.model) if step % 10 == 0 else None)
    train(it)
    told(it.network.steps, torchdiag.check_dead_neurons, it.model, next(it.batches)[0])
    return merged(said)


def neural_observatory(it: Scene) -> list[Alarm]:
    from neural_observatory import Observatory

    observatory = Observatory(it.model)
    observatory.watch()
    it.before_forward.insert(0, lambda step: observatory.step(step=step, epoch=0))
    train(it)
    observatory.stop()
    report = observatory.report()
    return merged(
        (
            f"{one.analyzer_name}: {re.split(r'[:(—0-9]', (one.warnings or [''])[0])[0].strip()}",
            [one.layer_name],
            one.step or None,
        )
        for one in report.results
        if one.status.value in ("warning", "critical")
    )


# Faults that begin after the steps that TrainCheck traces.
LATE = ("scheduler per batch", "NaN gradient", "bit flip")
# Relations between calls.
ORDERS = ("FunctionLeadRelation", "FunctionCoverRelation")
# Healthy trainings that invariants are inferred from.
_REFERENCES = (("as it is", 0), ("as it is", 2), ("weight decay", 2), ("clipping at 1", 2))
# TrainCheck reads the source of a script: it follows what is assigned to `model`, and patches torch at its import.
_SCRIPT = """\
import importlib
import json
import os
from dataclasses import replace

from gyroscope_lab.faults.benchmark import Case, prepared
from gyroscope_lab.faults.injections import train

importlib.import_module("torch._dynamo")  # before tracing: its import is 13,000 records
import torch
from traincheck.instrumentor.control import start_step

torch.set_num_threads(1)
it, _ = prepared(Case(**json.loads(os.environ["CASE"])))
it.network = replace(it.network, steps=10)
model = it.model
it.model = model
made = it.build(model)
it.optimizers = made if isinstance(made, list) else [made]
for act in it.after_build:
    act()
torch.manual_seed(it.seed)


def stepped(batches):
    for batch in batches:
        start_step()
        yield batch


it.batches = stepped(it.batches)
train(it)
"""


def traincheck(case: Case, folder: Path) -> list[Alarm]:
    (folder / "script.py").write_text(_SCRIPT)

    def call(tool: str, *args: str | Path, case: Case | None = None) -> None:
        told = {} if case is None else {"CASE": json.dumps(asdict(case))}
        command = [Path(sys.executable).with_name(f"traincheck-{tool}"), *args]
        done = subprocess.run(command, cwd=folder, env={**os.environ, **told}, capture_output=True, text=True)
        if done.returncode or "exited with error" in done.stdout:
            raise RuntimeError(f"traincheck-{tool}: {(done.stdout + done.stderr)[-300:]}")

    def traced(case: Case, name: str) -> Path:
        call("collect", "--pyscript", "script.py", "--models-to-track", "model", "--output-dir", name, case=case)
        return folder / name

    invariants = folder / f"{case.network}.json"
    if not invariants.exists():
        healthy = [
            traced(Case(case.network, seed, variant=name), f"{case.network} {name} {seed}")
            for name, seed in _REFERENCES
        ]
        call("infer", "-f", *healthy, "-o", invariants)
    name = f"{case.network} {case.fault or case.variant}"
    call("check", "-f", traced(case, name), "-i", invariants, "-o", f"{name} checked", "--no-html-report")
    (found,) = (folder / f"{name} checked").glob("*/violations_summary.json")
    violations = json.loads(found.read_text())["violations"]
    violations.sort(key=lambda one: one["relation_type"] in ORDERS)
    return merged((f"{one['relation_type']}: {one['display_name']}", [], one["first_step"]) for one in violations)


PEERS: dict[str, Callable[[Scene], list[Alarm]]] = {
    "torchmortem": torchmortem,
    "torchdiag": torchdiag,
    "neural-observatory": neural_observatory,
}


def without_places(text: str) -> str:
    """A message without absolute paths."""
    return re.sub(r"(/[\w.+-]+){2,}", lambda found: found[0].rsplit("/", 1)[1], text)[:400]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peer", required=True, choices=[*PEERS, "traincheck"])
    parser.add_argument("--network", nargs="+", default=["mlp-4", "cnn"])
    parser.add_argument("--seed", nargs="+", type=int, default=[1])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", help="names of faults and healthy variants, where not all are wanted")
    parser.add_argument("--folder", type=Path, help="where to keep the traces and invariants of TrainCheck")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    told = [json.loads(line) for line in args.out.read_text("utf-8").splitlines()] if args.out.exists() else []
    there = [Case(**one["case"]) for one in told]
    with args.out.open("a", encoding="utf-8") as out, tempfile.TemporaryDirectory() as place:
        for case in cases(networks=args.network, seeds=args.seed):
            if case in there or (args.only and (case.fault or case.variant) not in args.only):
                continue
            it = built(case)
            if it is None or (args.peer == "traincheck" and case.fault in LATE):
                continue
            alarms: list[Alarm] = []
            error = None
            try:
                alarms = (
                    traincheck(case, args.folder or Path(place)) if args.peer == "traincheck" else PEERS[args.peer](it)
                )
            except Exception as failed:
                error = without_places(f"{type(failed).__name__}: {failed}")
            line = {"peer": args.peer, "version": version(args.peer), "case": asdict(case)}
            line |= {"alarms": alarms if args.peer == "traincheck" else alarms[: 2 * _MOST], "error": error}
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
            out.flush()
            told.append(line)
    for kind in ("faulty", "healthy"):
        found = [bool(one["alarms"]) for one in told if (one["case"]["fault"] is None) == (kind == "healthy")]
        print(f"{kind} runs with an alarm: {sum(found) / max(1, len(found)):.2f} ({sum(found)} of {len(found)})")
    print(f"runs with an error: {sum(one['error'] is not None for one in told)}")


if __name__ == "__main__":
    main()
