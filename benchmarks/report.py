"""The tables of the pages in docs/, from the raw results: see `pages`.

python benchmarks/report.py          # rewrite the tables in the pages
python benchmarks/report.py --check  # fail if a page says anything else
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from math import sqrt
from pathlib import Path
from typing import Any

import claims

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
SETS = {"gpt2-124m": "GPT-2 124M", "resnet-50": "ResNet-50", "resnet-1202": "ResNet-1202"}


def load(name: str) -> dict[str, Any]:
    return dict(json.loads((HERE / "results" / f"{name}.json").read_text()))


def environment(result: dict[str, Any]) -> str:
    e = result["environment"]
    where = e.get("gpu") or f"{e['cpu']}, {e['threads']} thread{'s' * (e['threads'] != 1)}"
    copied = f"; copy bandwidth {result['copy_bandwidth'] / 1e9:.0f} GB/s" if "copy_bandwidth" in result else ""
    return f"{where}; torch {e['torch']}{copied}. `{result['command']}`"


def times(result: dict[str, Any], mode: str) -> list[str]:
    sets = result["sets"]
    labels = list(next(iter(sets.values()))[mode])
    rows = ["| milliseconds per step | " + " | ".join(SETS[s] for s in sets) + " |", "|---" * (len(sets) + 1) + "|"]
    for label in labels:
        cells = [_cell(one[mode][label]) for one in sets.values()]
        rows.append(f"| {label} | " + " | ".join(cells) + " |")
    return rows


def _cell(v: dict[str, float]) -> str:
    digits = 3 if v["median_ms"] < 20 else 1
    return f"{v['median_ms']:.{digits}f} [{v['low_ms']:.{digits}f}, {v['high_ms']:.{digits}f}]"


def targets() -> list[str]:
    """Targets of steering, and what was measured."""
    gpu, cpu = load("step_cost_cuda"), load("step_cost_cpu")
    r, c = gpu["ratios"], cpu["ratios"]
    base = "fused sgd-momentum"
    graph = gpu["sets"]["resnet-1202"]["graph"]["layca sgd"]["median_ms"]
    eager = gpu["sets"]["resnet-1202"]["eager"]["torch sgd-momentum fused"]["median_ms"]
    rows = []

    def row(what: str, aim: float, got: float, *, least: bool = False) -> None:
        met = got >= aim if least else got <= aim
        sign = "≥" if least else "≤"
        rows.append(f"| {what} | {sign} {aim:g} | {got:.2f} | {'yes' if met else 'no'} |")

    for name, aim in (("gpt2-124m", 0.95), ("resnet-50", 0.75), ("resnet-1202", 0.15)):
        row(f"H200, eager, {SETS[name]}: Layca(SGD) / {base}", aim, r[name][f"eager: layca sgd / {base}"])
    row(f"H200, ResNet-1202: Layca(SGD) in a CUDA graph / eager {base}", 0.05, graph / eager)
    share = "graph: layca sgd, five passes, share of copy bandwidth"
    row("H200, GPT-2: five passes over memory, share of copy bandwidth", 0.85, r["gpt2-124m"][share], least=True)
    for name in SETS:
        row(f"H200, eager, {SETS[name]}: Layca(SGD-momentum) / the same fused", 1.15,
            r[name][f"eager: layca sgd-momentum / {base}"])  # fmt: skip
    for name in SETS:
        row(f"H200, eager, {SETS[name]}: Layca(Adam) / the same fused", 1.15, r[name]["eager: layca adam / fused adam"])
    for name in SETS:
        row(f"H200, graph, {SETS[name]}: general path over SGD-momentum, extra copies of the parameters", 2.5,
            r[name]["graph: general path over sgd-momentum, copies of the parameters"])  # fmt: skip
    row("H200, eager, ResNet-1202: general path over SGD-momentum, extra copies of the parameters", 20,
        r["resnet-1202"]["eager: general path over sgd-momentum, copies of the parameters"])  # fmt: skip
    row("H200, ResNet-1202: host microseconds per layer", 0.5, r["resnet-1202"]["host microseconds a layer, layca sgd"])
    for name in SETS:
        for said, label in (("Layca(SGD)", "layca sgd"), ("Layca(SGD), compiled", "layca sgd native")):
            row(f"CPU, two cores, {SETS[name]}: {said} / {base}", 1.4, c[name][f"eager: {label} / {base}"])
    for name in SETS:
        for said, label in (("SGD-momentum", "sgd-momentum"), ("Adam", "adam"), ("AdamW", "adamw")):
            row(f"CPU, two cores, {SETS[name]}: Layca({said}), compiled / the same fused", 1.4,
                c[name][f"eager: layca {label} native / fused {label}"])  # fmt: skip
    return ["| | target | measured | met |", "|---|---|---|---|", *rows]


def summary() -> list[str]:
    """The page in one table: the smallest and the largest number of each kind."""
    gpu, cpu = load("step_cost_cuda")["ratios"], load("step_cost_cpu")["ratios"]
    watched, small = load("monitor_cost_cuda")["tasks"], load("monitor_budget_cpu")["tasks"]
    longer = load("monitor_cost_cuda_40_rounds")["tasks"]  # in monitor_cost_cuda, blocks are shorter than intervals
    rows = ["| what | where | cost |", "|---|---|---|"]

    def row(what: str, where: str, numbers: Iterable[float], unit: str, digits: int = 1) -> None:
        some = sorted(numbers)
        ends = dict.fromkeys(f"{one:.{digits}f}" for one in (some[0], some[-1]))
        rows.append(f"| {what} | {where} | {' to '.join(ends)} {unit} |")

    adam = "eager: layca adam / fused adam"
    row("a step of Layca(Adam)", "H200", (one[adam] for one in gpu.values()), "× torch's fused Adam")
    row("a step of Layca(Adam)", "CPU, two cores", (one[adam] for one in cpu.values()), "× torch's fused Adam")
    compiled = "eager: layca adam native / fused adam"
    row(
        "a step of Layca(Adam), compiled",
        "CPU, two cores",
        (one[compiled] for one in cpu.values()),
        "× torch's fused Adam",
    )
    for said, name, tasks in (("measuring every step", "every step", watched), ("by default", "default", longer)):
        more = (100 * one["contenders"][name]["over_bare"] for one in tasks.values())
        row(f"`watch`, {said}", "H200", more, "% of a training step")
    default = [100 * one["default"]["wall"]["over_bare"] for one in small.values()]
    row("`watch`, by default", "CPU, one thread", default, "% of a training step")
    for device, name in (("H200", "conditioning_cost_cuda_ours"), ("CPU, two cores", "conditioning_cost_cpu_ours")):
        found = load(name)["networks"].values()
        row("`condition`", device, (one["contenders"]["condition"]["gradients"] for one in found), "gradients")
    return rows


def host_time() -> list[str]:
    """Microseconds of the host per layer and per watched step, without launches, before and after."""
    before, now = load("host_time_before_cpu"), load("host_time_cpu")
    e, sets = now["environment"], now["sets"]

    def cell(v: dict[str, dict[str, float]], layers: int, digits: int) -> str:
        return " / ".join(f"{1e3 * v[kind]['median_ms'] / layers:.{digits}f}" for kind in ("warm", "cold"))

    heads = [f"{SETS[s]}, {when}" for s in sets for when in ("before", "now")]
    rows = [f"{e['cpu']}, one thread; torch {e['torch']}. `{now['command']}`", ""]
    rows += ["| µs per layer, warm / cold | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for label in next(iter(sets.values()))["steps"]:
        found = [(one["sets"][s]["steps"][label], one["sets"][s]["layers"]) for s in sets for one in (before, now)]
        rows.append(f"| {label} | " + " | ".join(cell(v, n, 2) for v, n in found) + " |")
    watched = now["watch"]
    rows += ["", f"| µs per step of {watched['layers']} layers, warm / cold | before | now |", "|---|---|---|"]
    for label in watched["steps"]:
        cells = (cell(one["watch"]["steps"][label], 1, 0) for one in (before, now))
        rows.append(f"| {label} | " + " | ".join(cells) + " |")
    return rows


NETWORKS = {
    "resnet50": "ResNet-50, batch 128, bf16",
    "resnet50-64": "eager ResNet-50, batch 64, bf16",
    "gpt2": "GPT-2 124M, 64×1024 tokens, bf16",
    "resnet110": "ResNet-110, batch 128, bf16",
    "mlp": "MLP, 1.2 M parameters, batch 128",
    "cnn": "CNN, 0.6 M parameters, batch 64",
    "small_layers": "65 linear layers of 32 × 32, batch 128",
}
MEASURING_AIMS = {"resnet50": 0.01, "resnet50-64": 0.02, "gpt2": 0.01, "resnet110": 0.05, "cnn": 0.05, "mlp": 0.25}
HOST_AIM = 0.4  # milliseconds


def measuring_targets() -> list[str]:
    """Targets of the monitor and the run store, and what was measured."""
    rows = []

    def row(what: str, aim: str, got: str, met: bool) -> None:
        rows.append(f"| {what} | {aim} | {got} | {'yes' if met else 'no'} |")

    for where, name, label in (
        ("H200", "monitor_cost_cuda", "every step"),
        ("CPU, two cores", "monitor_native_cpu", "every step"),
        ("CPU, two cores, compiled", "monitor_native_cpu", "every step native"),
    ):
        for task, found in load(name)["tasks"].items():
            aim, got = MEASURING_AIMS[task], found["contenders"][label]["over_bare"]
            row(f"{where}, {NETWORKS[task]}: every step", f"≤ {100 * aim:.0f} %", f"{100 * got:+.2f} %", got <= aim)
    gpu = load("monitor_cost_cuda")
    if "resnet50-64" not in gpu["tasks"]:
        rows.append(f"| H200, {NETWORKS['resnet50-64']}: every step | ≤ 2 % | not measured | |")
    if "host" not in gpu:
        rows.append(f"| H200, host time of a measured step, 112 layers | ≤ {HOST_AIM:g} ms | not measured | |")
    for network, found in gpu.get("host", {}).items():
        warm, cold = (found["added_ms"][kind] for kind in ("warm", "cold"))
        what = network if network.endswith("layers") else f"{network} ({found['tensors']} tensors)"
        row(f"H200, host time of a measured step, {what}, warm / cold", f"≤ {HOST_AIM:g} ms",
            f"{warm:.2f} / {cold:.2f} ms", max(warm, cold) <= HOST_AIM)  # fmt: skip
    for task, found in load("monitor_budget_cpu")["tasks"].items():
        for one, aim in (("default", 0.01), ("every 4 steps", None)):
            wall, cpu, own = (found[one][key] for key in ("wall", "cpu", "own_account"))
            said = f"{one} (every {own['interval']} steps)" if aim else one
            got = [f"{100 * x['over_bare']:+.2f} ± {100 * x['standard_error']:.2f} %" for x in (wall, cpu)]
            row(
                f"CPU, one thread, {NETWORKS[task]}: {said}; own account {100 * own['share']:.2f} %",
                f"≤ {100 * aim:.0f} %" if aim else "equal to its own account, within a quarter or two standard errors",
                f"{got[0]}; processor {got[1]}",
                wall["over_bare"] <= aim
                if aim
                else abs(wall["over_bare"] - own["share"]) <= max(own["share"] / 4, 2 * wall["standard_error"]),
            )
    waits = [found["never_waits"] for found in load("monitor_cost_cuda")["tasks"].values()]
    row("H200: steps without a host synchronization", "all", f"{sum(waits)} of {len(waits)} networks", all(waits))
    store = load("run_store_cpu")
    paced, size = store["wal"]["paced"], store["size"]
    what = f"{size['layers']:,} layers × {size['steps']:,} steps × {size['quantities']} quantities"
    row(f"run store, {what}: megabytes", "< 300", f"{paced['bytes'] / 1e6:.0f}", paced["bytes"] < 300e6)
    slowest = max(paced["load_seconds_from_disk"].values())
    row("slowest series, loaded from disk: seconds", "< 1", f"{slowest:.2f}", slowest < 1)
    for journal, said in (("wal", ""), ("rollback", ", with a rollback journal")):
        kept_up = store[journal]["paced"]["kept_up"]
        row(f"writes keep up with steps of 5 ms{said}", "yes", "yes" if kept_up else "no", kept_up)
        # The benchmark ends where a run does not open, lacks a step or does not resume.
        kills = store[journal]["torture"]["kills"]
        row(f"kills (SIGKILL) after which a run opens, is complete and resumes{said}", "200", f"{kills}", kills >= 200)
    return ["| | target | measured | met |", "|---|---|---|---|", *rows]


def measuring(name: str) -> list[str]:
    """Milliseconds per training step, bare and with every tool."""
    result = load(name)
    tasks = result["tasks"]
    rows = [environment(result), ""]
    rows += [
        "| milliseconds per step | " + " | ".join(NETWORKS[t] for t in tasks) + " |",
        "|---" * (len(tasks) + 1) + "|",
    ]
    labels = list(dict.fromkeys(label for found in tasks.values() for label in found["contenders"]))
    labels.remove("default")  # blocks are too few or too short: see `measuring_default` and monitor_budget_cpu
    for label in labels:
        cells = []
        for found in tasks.values():
            v = found["contenders"].get(label)
            over = "" if label == "bare" or v is None else f" ({100 * v['over_bare']:+.1f} %)"
            cells.append("did not run" if v is None else _cell(v) + over)
        rows.append(f"| {label} | " + " | ".join(cells) + " |")
    return rows


def measuring_default() -> list[str]:
    """What watching by default adds in blocks that are longer than the measuring interval."""
    result = load("monitor_cost_cuda_40_rounds")
    tasks = result["tasks"]
    found = [one["contenders"]["default"] for one in tasks.values()]
    over = [[100 * (after / before - 1) for before, after in v["blocks"]] for v in found]
    columns = {
        "measured every": [f"{n} steps" if (n := v["own_account"]["interval"]) > 1 else "step" for v in found],
        "steps per block": [str(v["block"]) for v in found],
        "added time: median of the blocks [least, most]": [
            f"{100 * v['over_bare']:+.1f} % [{min(its):+.1f}, {max(its):+.1f}]"
            for v, its in zip(found, over, strict=True)
        ],
    }
    return [
        environment(result),
        "",
        f"| by default | {' | '.join(NETWORKS[t] for t in tasks)} |",
        "|---" * (len(tasks) + 1) + "|",
        *(f"| {label} | {' | '.join(cells)} |" for label, cells in columns.items()),
    ]


CONDITIONED = {
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "resnet110": "ResNet-110",
    "transformer": "transformer",
}
CONDITIONERS = {
    "condition, λmax": "`condition`, `p=()`: λmax alone",
    "condition": "`condition`",
    "condition, patches": "`condition`, `patches=True`",
    "curvlinops": "curvlinops K-FAC, eigvalsh",
    "nngeometry": "nngeometry K-FAC, eigvalsh",
}


def conditioning(name: str) -> list[str]:
    """Gradients that the conditioning of all layers takes, in time and in memory, and how far libraries agree."""
    result = load(name)
    found = result["networks"]
    heads = [f"{CONDITIONED[n]}, {one['batch']}" for n, one in found.items()]

    def table(title: str, cells: dict[str, list[str]]) -> list[str]:
        rows = [f"| {label} | " + " | ".join(row) + " |" for label, row in cells.items()]
        return [f"| {title} | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|", *rows]

    def each(contender: str, part: str, cell: Callable[[dict[str, float]], str]) -> list[str]:
        none = ["not measured" if contender in one["contenders"] else "did not run" for one in found.values()]
        given = [one[part].get(contender) for one in found.values()]
        return [otherwise if v is None else cell(v) for v, otherwise in zip(given, none, strict=True)]

    tried = {c for one in found.values() for c in (*one["contenders"], *one["missing"])}
    shown = {c: label for c, label in CONDITIONERS.items() if c in tried}
    units = {"one gradient, milliseconds": each("gradient", "contenders", _cell)}
    times = {
        label: each(c, "contenders", lambda v: f"{v['gradients']:.2f} [{v['low']:.2f}, {v['high']:.2f}]")
        for c, label in shown.items()
    }
    held = {"one gradient, MiB": each("gradient", "memory", lambda v: f"{v['peak_above'] / 2**20:.0f}")}
    held |= {label: each(c, "memory", lambda v: f"{v['gradients']:.2f}") for c, label in shown.items()}
    compared = [(peer, far["largest"]) for one in found.values() for peer, far in one["agreement"].items()]
    agreed = [f"{p} {max(far for q, far in compared if q == p):.0e}" for p in dict.fromkeys(p for p, _ in compared)]
    below = f"Largest disagreement of any eigenvalue, in units of λmax: {', '.join(agreed) or 'none was compared'}."
    rows = [environment(result), "", *table("in gradients", units | times)]
    return [*rows, "", *table("peak memory, in gradients", held), "", below]


def conditioning_floor() -> list[str]:
    """Operations of the covariances of all layers, relative to those of a gradient."""
    result = load("conditioning_floor")
    rows = ["| sizes of | " + " | ".join(CONDITIONED[n] for n in result["cuda"]) + " |"]
    rows.append("|---" * (len(result["cuda"]) + 1) + "|")
    for device, name in (("cuda", "the H200 table"), ("cpu", "the CPU table")):
        rows.append(f"| {name} | " + " | ".join(f"{one['covariances']:.2f}" for one in result[device].values()) + " |")
    return [*rows, "", f"`{result['command']}`"]


def population() -> list[str]:
    """Seconds per training, by network, how its steps are run, and how many share the GPU."""
    names = {"c10-cnn1": "C10-CNN1, 100 epochs", "c100-resnet": "C100-resnet, 100 epochs",
             "c10-deep": "ResNet-56, 160 epochs", "c10-resnet110": "ResNet-110, 200 epochs"}  # fmt: skip
    result = load("population_cuda")
    e, tasks = result["environment"], [name for name in names if name in result]
    sizes = sorted({one["trials"] for task in tasks for one in result[task].values()})
    head = "| seconds per run, trainings at once: | " + " | ".join(map(str, sizes)) + " |"
    rows = [f"{e['gpu']}; torch {e['torch']}. `{result['command']}`", "", head, "|---" * (len(sizes) + 1) + "|"]
    for task in tasks:
        for way in dict.fromkeys(name.split(", ")[0] for name in result[task]):
            cells = [result[task].get(f"{way}, {size}") for size in sizes]
            shown = ("" if c is None else f"{c['seconds_per_run']:.1f}" for c in cells)
            rows.append(f"| {names[task]}: {way} | " + " | ".join(shown) + " |")
    return rows


def narrow() -> list[str]:
    """Microseconds of convolutions of few channels, by cuDNN and by the laboratory's kernels."""
    result = load("narrow_cuda")
    e = result["environment"]
    passes = ("forward", "input gradient", "weight gradient")
    rows = [f"{e['gpu']}; torch {e['torch']}; batches of {result['images']}. `{result['command']}`", ""]
    rows += ["| µs by cuDNN / here | " + " | ".join(passes) + " |", "|---" * 4 + "|"]
    for shape, found in result.items():
        if shape.partition(" ")[0].isdigit():
            pairs = (found.get(one) for one in passes)
            cells = ("" if a is None else f"{a['cudnn']['us']:.1f} / {a['narrow']['us']:.1f}" for a in pairs)
            rows.append(f"| {shape} | " + " | ".join(cells) + " |")
    return rows


def very_deep() -> list[str]:
    """Milliseconds per step of very deep networks, by how it is run, and what watching them adds."""
    result = load("very_deep_cuda")
    e = result["environment"]
    depths = sorted((name for name in result if name.startswith("resnet-")), key=lambda name: int(name[7:]))
    ways = result[depths[0]]["ways"]
    head = f"| milliseconds per step of {result['batch']} images | " + " | ".join(
        d.replace("resnet", "ResNet") for d in depths
    )
    rows = [f"{e['gpu']}; torch {e['torch']}. `{result['command']}`", "", head + " |", "|---" * (len(depths) + 1) + "|"]
    for way in ways:
        cells = []
        for depth in depths:
            one = result[depth]["ways"][way]
            more = f" ({100 * one['more']:+.1f} %)" if "more" in one else ""
            cells.append(f"{one['median_ms']:.2f}{more}")
        rows.append(f"| {way} | " + " | ".join(cells) + " |")
    for kind in ("kept", "recomputed"):
        cells = [f"{result[depth]['memory_gib'][kind]:.2f}" for depth in depths]
        rows.append(f"| GiB of a step, activations {kind} | " + " | ".join(cells) + " |")
    return [*rows, "", f"({result['note']})"] if "note" in result else rows


def preconditioners() -> list[str]:
    """Gradients that a preconditioned training step takes, the gradient itself included."""
    rows: list[str] = []
    for name in ("preconditioners_cuda", "preconditioners_cpu"):
        if not (HERE / "results" / f"{name}.json").exists():
            continue
        result = load(name)
        found = {n: one for n, one in result.items() if n not in ("environment", "command")}
        heads = [f"{n}, {'×'.join(map(str, one['shape']))}" for n, one in found.items()]
        rows += ["", environment(result), ""]
        rows += ["| gradients per step | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
        columns = [one["contenders"] for one in found.values()]
        rows.append("| gradient, milliseconds | " + " | ".join(_cell(one["gradient"]) for one in columns) + " |")
        for label in columns[0]:
            if label == "gradient, captured":
                cells = [_cell(one[label]) for one in columns]
                rows.append("| gradient, captured in a CUDA graph, milliseconds | " + " | ".join(cells) + " |")
            elif label != "gradient":
                cells = [
                    f"{v['gradients']:.2f} [{v['low']:.2f}, {v['high']:.2f}]" for v in (one[label] for one in columns)
                ]
                said = label.replace("captured", "captured, in captured gradients")
                rows.append(
                    f"| {said.replace('an inverse a step', 'an inverse per step')} | " + " | ".join(cells) + " |"
                )
    return rows[1:]


RESULTS = HERE.parent / "results"
#: Accuracies of networks that guess are lower, for ten classes and for a hundred.
GUESSING = 12


def trained(task: str) -> list[str]:
    """Every configuration of a task that is kept and was as long as the paper's, next to the paper's test accuracy.

    The paper has one number for an adaptive method under Layca. It is compared with the rate of the authors' code only.
    Its numbers are of one training each, and are compared with the interval of a further training, by Student's t.
    """
    from gyroscope_lab.papers.chance import limit
    from gyroscope_lab.papers.rotation.paper import told
    from gyroscope_lab.papers.rotation.recipes import adaptive_layca
    from gyroscope_lab.training.result import Result
    from gyroscope_lab.training.tasks import TASKS

    rows = [
        "| | test % here | paper | difference | train % | epochs | mean rotation |",
        "|---|---|---|---|---|---|---|",
    ]
    found = [json.loads(path.read_text()) for path in sorted((RESULTS / "runs" / task).glob("*/result.json"))]
    whole = [one for one in found if one["trial"]["task"]["schedule"]["epochs"] == TASKS[task].schedule.epochs]
    method, _, _ = (published := adaptive_layca(TASKS[task]).name).partition(" ")
    near = count = failed = 0
    apart: dict[str, bool] = {}
    by_recipe: dict[str, list[Result]] = {}
    for one in sorted(whole, key=lambda one: _order(one["trial"]["recipe"])):
        by_recipe.setdefault(one["trial"]["recipe"]["name"], []).append(Result.from_json(one["result"]))
    for name, results in by_recipe.items():
        tests = [100 * result.test_accuracy for result in results]
        test, paper = statistics.mean(tests), told(task, name)
        spread = statistics.stdev(tests) if len(tests) > 1 else None
        if name != published and name.partition(" ")[0] == method:
            paper = None
        beside = ["", ""] if paper is None else [f"{paper:.2f}", f"{test - paper:+.2f}"]
        if paper is not None:
            close = abs(test - paper) <= 1
            count, near, failed = count + 1, near + close, failed + (close and max(test, paper) < GUESSING)
            if spread is not None:
                apart[name] = abs(test - paper) > limit(len(tests) - 1) * spread * sqrt(1 + 1 / len(tests))
        turned = statistics.mean(sum(result.final_rotation) / len(result.layers) for result in results)
        printed = f"{test:.2f}" if spread is None else f"{test:.2f} ± {spread:.2f} ({len(tests)})"
        learned = f"{100 * statistics.mean(result.learned for result in results):.2f}"
        lengths = [len(result.loss) for result in results]
        epochs = claims.span(sorted(lengths))
        rows.append("| " + " | ".join([name, printed, *beside, learned, epochs, f"{turned:.2f}"]) + " |")
    below = f"{near} of {count} test accuracies are within one point of the paper's. {failed} of these are at rates"
    below = f"{below} at which training fails, here and in the paper."
    if not apart:
        return [*rows, "", below]
    beyond = [name for name, is_apart in apart.items() if is_apart]
    named = "" if not beyond else f": {'; '.join(beyond)}"
    compared = (
        f"For {len(beyond)} of the {len(apart)} with several seeds, the paper's number is outside the interval in "
        f"which 95 % of further trainings would be{named}. Chance alone would put one in twenty there."
    )
    return [*rows, "", f"{below} {compared}"]


def _order(recipe: dict[str, Any]) -> tuple[bool, bool, str, float, float]:
    plain = recipe["optimizer"] == "sgd"
    return (recipe["control"] != "layca", not plain, recipe["name"].split()[0], recipe["alpha"], recipe["rate"])


def demo() -> list[str]:
    """The demo's table, with the rotations of all layers."""
    result = load("demo_cpu")
    rows = ["| | train % | test % | rotation of each layer, first to last |", "|---|---|---|---|"]
    for c in result["configurations"]:
        rotations = " ".join(f"{r:.2f}" for r in c["final_rotation"])
        test = f"{100 * c['test_accuracy']:.1f} ± {100 * c['test_std']:.1f}"
        rows.append(f"| {c['recipe']['name']} | {100 * c['train_accuracy']:.1f} | {test} | {rotations} |")
    below = f"Mean of {len(result['seeds'])} seeds; rank correlation of mean rotation with test accuracy "
    return [*rows, "", f"{below}{result['rank_correlation']:+.2f}."]


def start_up() -> list[str]:
    """Processes from their start to their end, relative to an import of torch."""
    result = load("start_up_cpu")
    found = result["milliseconds"]
    base = found["import torch"]["median_ms"]
    rows = ["| | milliseconds | relative to importing torch |", "|---|---|---|"]
    for name, v in found.items():
        times = f"{v['median_ms']:.0f} [{v['low_ms']:.0f}, {v['high_ms']:.0f}]"
        rows.append(f"| {name} | {times} | {v['median_ms'] / base:.2f} |")
    return [environment(result), "", *rows]


def growth(device: str) -> list[str]:
    """Milliseconds of a step by layers and by parameters, and runs on disk by their steps."""
    result = load(f"growth_{device}")
    rows = [environment(result), ""]
    labels = list(result["layers"][0]["times"])
    rows += [f"| layers | parameters | {' | '.join(labels)} |", "|---" * (len(labels) + 2) + "|"]
    for one in [*result["layers"], *result["parameters"]]:
        cells = (f"{one['times'][label]['median_ms']:.3g}" for label in labels)
        rows.append(f"| {one['layers']:,} | {one['parameters']:,} | {' | '.join(cells)} |")
    if "runs" in result:
        rows += ["", "| steps of a run | seconds to write | MB | seconds to load one series |", "|---|---|---|---|"]
    for one in result.get("runs", ()):
        written, size, loaded = one["write_seconds"], one["bytes"] / 1e6, one["load_seconds"]
        rows.append(f"| {one['steps']:,} | {written:.2f} | {size:.1f} | {loaded:.2f} |")
    return rows


def steering_width() -> list[str]:
    """Best test losses by inner optimizer and width, with lower learning rates for more of what is stepped plainly."""
    result = load("steering_width_cuda")
    roles = ("head", "embeddings", "other")
    found = {
        (one["inner"], one["width"], *(round(one[role] * one["width"], 3) for role in roles)): one["best_test_loss"]
        for one in result["trainings"]
        if one["tied"] and one["rate"] == 0.028
    }
    columns = (
        "all at 0.01",
        "head at 1/n",
        "head and embeddings at 1/n",
        "all at 1/n",
        "all at 1.28/n (default)",
        "all at 0.64/n",
    )
    rows = [
        environment(result), "",
        f"| inner | n | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|",
    ]  # fmt: skip
    for inner, width in sorted({key[:2] for key in found}):
        high = round(0.01 * width, 3)
        settings = [(high,) * 3, (1, high, high), (1, 1, high), (1, 1, 1), (1.28,) * 3, (0.64,) * 3]
        told = (found.get((inner, width, *its)) for its in settings)
        rows.append(f"| {inner} | {width} | {' | '.join('' if v is None else f'{v:.3f}' for v in told)} |")
    return rows


def steering_rates() -> list[str]:
    """Losses over AdamW by width, size of the initial weights and ρ; means where there are seeds."""
    result = load("steering_rates_cpu")
    found: dict[tuple[int, float], dict[float, list[float]]] = {}
    for one in result["trainings"]:
        if one["inner"] == "adamw" and one["steps"] == 300:
            found.setdefault((one["width"], one["scale"]), {}).setdefault(one["rate"], []).append(one["loss"])
    columns = sorted({rate for losses in found.values() for rate in losses}, reverse=True)
    rows = [
        environment(result), "",
        f"| width | initial standard deviation | {' | '.join(f'ρ = {rate:g}' for rate in columns)} |",
        "|---" * (len(columns) + 2) + "|",
    ]  # fmt: skip
    for (width, scale), losses in sorted(found.items()):
        best = min(statistics.mean(values) for values in losses.values())
        told = []
        for rate in columns:
            loss = statistics.mean(losses[rate]) if rate in losses else None
            told.append("" if loss is None else f"**{loss:.3f}**" if loss == best else f"{loss:.3f}")
        rows.append(f"| {width} | {0.02 * scale:.3g} | {' | '.join(told)} |")
    return rows


def steering_regimes() -> list[str]:
    """Best and last test losses of few steps, and of many epochs, by what was chosen; means where there are seeds."""
    result = load("steering_regimes_cpu")
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for one in result["trainings"]:
        found.setdefault((_steered(one), one["regime"]), []).append((one["best"], one["last"]))
    e = result["environment"]
    rows = [
        f"{e['cpu']}; torch {e['torch']}. `{result['command']}`", "",
        "| | 400 steps | 76 epochs: best | last | seeds |", "|---" * 5 + "|",
    ]  # fmt: skip
    for said in dict.fromkeys(said for said, _ in found):
        short, repeated = found.get((said, "short"), []), found.get((said, "repeated"), [])
        if short and repeated:
            columns = ([best for best, _ in short], *zip(*repeated, strict=True))
            told = (f"{statistics.mean(values):.3f}" for values in columns)
            rows.append(f"| {said} | {' | '.join(told)} | {len(repeated)} |")
    return rows


def _steered(one: dict[str, Any]) -> str:
    """The choices of a training of benchmarks/steering_regimes.py, in words."""
    if one["decay"] is not None:
        return f"AdamW {one['rate']:g}, decay {one['decay']:g}, warm-up"
    tables = {"plain, plain": "", "turn, plain": ", head turns", "turn, turn": ", head and embeddings turn"}
    said = f"ρ = {one['rate']:g}, norms {one['norms']}" + tables[f"{one['heads']}, {one['embeddings']}"]
    return said + ("" if one["scale"] == 1 else f", initial weights × {one['scale']:g}")


def steering_large() -> list[str]:
    """The same choices on the larger GPT of beyond/no-tuning, over both inner optimizers, and what is kept of it."""
    from gyroscope_lab.training.result import Result

    result = load("steering_regimes_cuda")
    found: dict[str, list[list[float]]] = {}
    runs = RESULTS / "runs"
    kept = {
        "AdamW 0.003, decay 1, warm-up: the best of ten": "/adamw-0.003-decay-1-seed",
        "Muon, ρ = 0.028, norms learned": "-earlier/steer-muon-0.028-seed",
        "AdamW, ρ = 0.028, norms learned": "-earlier/steer-adamw-0.028-seed",
        "without tuning: Muon": "/muon-seed",
        "without tuning: Schedule-Free AdamW": "/schedule-free-adamw-seed",
        "without tuning: NadamW": "/nadamw-seed",
    }
    for said, start in kept.items():
        for path in sorted(runs.glob(f"shakespeare-gpt-small{start}-*/result.json")):
            losses = Result.from_json(json.loads(path.read_text())["result"]).test_losses
            found.setdefault(said, []).append([min(losses), losses[-1]])
    for one in result["trainings"]:
        inner = {"muon": "Muon", "adamw": "AdamW"}[one["inner"]]
        found.setdefault(f"{inner}, {_steered(one)}", []).append([one["best"], one["last"]])
    e = result["environment"]
    rows = [
        f"{e['gpu']}; torch {e['torch']}. `{result['command']}`",
        "",
        "| | best | last | seeds |",
        "|---|---|---|---|",
    ]
    for said, values in sorted(found.items(), key=lambda item: (not item[0].startswith("AdamW 0"), item[0].casefold())):
        best, last = (statistics.mean(column) for column in zip(*values, strict=True))
        rows.append(f"| {said} | {best:.3f} | {last:.3f} | {len(values)} |")
    return rows


def reporting() -> list[str]:
    """Seconds, memory and bytes of reports."""
    result = load("page_report_cpu")
    e, size = result["environment"], result["size"]
    rows = [
        f"{e['cpu']}, one core. `{result['command']}`", "",
        f"| {size['layers']:,} layers × {size['steps']:,} steps | processor seconds | peak memory, MB | file, MB |",
        "|---|---|---|---|",
    ]  # fmt: skip
    for name, one in result["reports"].items():
        cells = (f"{one['cpu_seconds']:.1f}", f"{one['peak_bytes'] / 1e6:.0f}", f"{one['file_bytes'] / 1e6:.1f}")
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    demo, own = result["demo_bytes"] / 1e3, result["bundle_bytes"] / 1e3
    below = f"The demo's page has {demo:.0f} kB, with ten runs of seven layers; {own:.0f} kB of any page are its own "
    return [*rows, "", f"{below}scripts and styles."]


def pages() -> dict[str, dict[str, list[str]]]:
    gpu, cpu = load("step_cost_cuda"), load("step_cost_cpu")
    conditioned = {
        "conditioning h200": "conditioning_cost_cuda",
        "conditioning h200 ours": "conditioning_cost_cuda_ours",
        "conditioning cpu": "conditioning_cost_cpu",
        "conditioning cpu ours": "conditioning_cost_cpu_ours",
    }
    measured = {table: name for table, name in conditioned.items() if (HERE / "results" / f"{name}.json").exists()}
    claimed = claims.tables()
    return {
        "performance.md": {
            "summary": summary(),
            "measuring h200": measuring("monitor_cost_cuda"),
            "measuring h200 default": measuring_default(),
            "measuring cpu": measuring("monitor_cost_cpu"),
        },
        "measurements.md": {
            "targets": targets(),
            "h200 eager": [environment(gpu), "", *times(gpu, "eager")],
            "h200 graph": times(gpu, "graph"),
            "cpu": [environment(cpu), "", *times(cpu, "eager")],
            "host time": host_time(),
            "measuring targets": measuring_targets(),
            **{table: conditioning(name) for table, name in measured.items()},
            "conditioning floor": conditioning_floor(),
            "growth": growth("cpu"),
            "growth h200": growth("cuda"),
            "start up": start_up(),
            "population": population(),
            "narrow": narrow(),
            "very deep": very_deep(),
            "preconditioners": preconditioners(),
        },
        "control.md": {
            "steering width": steering_width(),
            "steering rates": steering_rates(),
            "steering regimes": steering_regimes(),
            "steering large": steering_large(),
        },
        "report.md": {"report": reporting()},
        "claims.md": {name: table for name, table in claimed.items() if name != "summary"},
        "results.md": {
            "summary": claimed["summary"],
            "c10-cnn1": trained("c10-cnn1"),
            "c100-resnet": trained("c100-resnet"),
            "demo": demo(),
        },
    }


def render(page: str, tables: dict[str, list[str]]) -> str:
    for name, lines in tables.items():
        block = f"<!-- {name} -->\n" + "\n".join(lines) + f"\n<!-- end {name} -->"
        page, found = re.subn(
            f"<!-- {name} -->.*?<!-- end {name} -->", lambda _, block=block: block, page, flags=re.DOTALL
        )
        assert found == 1, f"there is no place for the table {name!r}"
    return page


if __name__ == "__main__":
    for name, tables in pages().items():
        page = (DOCS / name).read_text()
        if "--check" not in sys.argv[1:]:
            (DOCS / name).write_text(render(page, tables))
        elif render(page, tables) != page:
            sys.exit(f"{name} is not what benchmarks/results and results say; run this without --check")
