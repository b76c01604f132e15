"""How long it takes until a run is shown: processes from their start to their end, beside an import of torch.

python benchmarks/start_up.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from gyroscope.store.example import write_example
from timing import Step, environment, interleaved, write


def process(*arguments: str, folder: str) -> Step:
    def run() -> None:
        subprocess.run([sys.executable, *arguments], cwd=folder, stdout=subprocess.DEVNULL, check=True)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "start_up_cpu.json")
    given = parser.parse_args()
    cpu = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        write_example(Path(folder, "first")).close()
        contenders = {
            "python -c pass": ["-c", "pass"],
            "import numpy": ["-c", "import numpy"],
            "import torch": ["-c", "import torch"],
            "import gyroscope": ["-c", "import gyroscope"],
            "gyroscope.load(run)": ["-c", "import gyroscope; gyroscope.load('first').series('rotation')"],
            "gyroscope.watch": ["-c", "import gyroscope; gyroscope.watch"],
            "gyroscope --help": ["-m", "gyroscope", "--help"],
            "gyroscope show": ["-m", "gyroscope", "show", "first"],
            "gyroscope explain": ["-m", "gyroscope", "explain", "first"],
            "gyroscope export": ["-m", "gyroscope", "export", "first"],
            "gyroscope plot": ["-m", "gyroscope", "plot", "first"],
            "gyroscope compare": ["-m", "gyroscope", "compare", "first"],
            "gyroscope reproduce list": ["-m", "gyroscope", "reproduce", "list"],
        }
        steps = {name: process(*arguments, folder=folder) for name, arguments in contenders.items()}
        found = interleaved(steps, cpu, rounds=given.rounds, warmup=1, seconds=600.0)
    command = f"python benchmarks/start_up.py --rounds {given.rounds}"
    write(given.out, {"command": command, "environment": environment(cpu), "milliseconds": found})


if __name__ == "__main__":
    main()
