"""What the diagnosis says about published bug reports, and about the same trainings with the bug fixed.

    python benchmarks/diagnosis_published.py --out results/diagnosis/published.jsonl

One line of JSON per training; lines that are there already are kept, and what is missing is trained. Then a table: in
how many seeds the first alarm is one that answers the report, in how many fixed twins there is any alarm. See
`gyroscope_lab.faults.published`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from gyroscope_lab.faults.published import REPORTS, to_json, verdict


def table(told: list[dict[str, Any]]) -> str:
    """Verdicts as Markdown, one row per report."""
    lines = [
        "| report | found, with the loss | by default | alarms | accuracy | twins with an alarm | accuracy of twins |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for name, report in REPORTS.items():
        mine = [one for one in told if one["report"] == name]
        bad, good = ([one for one in mine if one["faulty"] is faulty] for faulty in (True, False))
        if not bad or not good:
            continue

        def found(key: str, bad: list[dict[str, Any]] = bad, accepted: frozenset[str] = report.accepted) -> str:
            return f"{sum(bool(one[key]) and one[key][0][0] in accepted for one in bad)} of {len(bad)}"

        kinds = ", ".join(sorted({kind for one in bad for kind, _, _ in one["alarms"]}))
        alarmed = sum(bool(one["alarms"]) for one in good)
        right = [sum(one["accuracy"] for one in some) / len(some) for some in (bad, good)]
        lines.append(
            f"| {name}: {report.wrong} | {found('alarms')} | {found('alarms_default')} | {kinds} | {right[0]:.2f} "
            f"| {alarmed} of {len(good)} | {right[1]:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--report", nargs="+", choices=REPORTS, default=list(REPORTS), metavar="NAME")
    parser.add_argument("--seed", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    told = [json.loads(line) for line in args.out.read_text("utf-8").splitlines()] if args.out.exists() else []
    there = {(one["report"], one["faulty"], one["seed"]) for one in told}
    with args.out.open("a", encoding="utf-8") as out:
        for seed in args.seed:
            for name in args.report:
                for faulty in (True, False):
                    if (name, faulty, seed) not in there:
                        line = to_json(verdict(name, seed, faulty=faulty))
                        out.write(line)
                        out.flush()
                        told.append(json.loads(line))
    print(table(told))


if __name__ == "__main__":
    main()
