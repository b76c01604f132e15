"""Two ranks on a CPU: a divided training equals that of one process."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import two_ranks
from gyroscope.cli import app
from gyroscope_lab.engine import ranks
from gyroscope_lab.engine.run_one import run_one
from gyroscope_lab.errors import LabError
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.trial import Trial
from lab.lab_ranks import CLAIMS, assert_same, rank


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    return two_ranks.outcome(rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("claim", [claim.__name__ for claim in CLAIMS])
def test_two_ranks_agree_that(claim: str, outcome: tuple[list[str], str]) -> None:
    two_ranks.assert_held(claim, CLAIMS, outcome)


ONE_LAYER = ["digits-one-layer", "--epochs", "2", "--rate", "0.03"]
TRIAL = Trial(task("digits-one-layer").lasting(2), Recipe("Layca", 0.03, control="layca"))


def trained(archive: Path) -> None:
    """Check that the archive holds the training of `ONE_LAYER`, and that it equals that of one process."""
    result = Archive(archive).result(TRIAL)
    assert result is not None
    assert_same(result, run_one(TRIAL, Archive(archive.with_name("alone"))))


def test_the_command_trains_on_the_processes_that_torchrun_starts(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    asked = ["-m", "gyroscope_lab", "train", *ONE_LAYER, "--parallel", "fsdp", "--device", "cpu"]
    found = subprocess.run([*torchrun, *asked], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    first, second, third, *_, last = found.stdout.splitlines()  # of the first rank alone
    assert (first, second) == ("On 2 processes (fsdp):", "digits-one-layer: Layca 0.03, seed 0")
    assert third.startswith("train ")
    assert last.startswith("The run is runs/lab/digits-one-layer/")
    trained(tmp_path / "runs" / "lab")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of torchrun for a single process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port), ("WORLD_SIZE", 1), ("RANK", 0)):
        monkeypatch.setenv(name, str(value))


@pytest.mark.usefixtures("alone")
def test_a_group_of_one_trains_too(tmp_path: Path) -> None:
    with ranks.process_group() as device:
        ranks.run_on_ranks(TRIAL, Archive(tmp_path / "archive"), device=device)
    assert not torch.distributed.is_initialized()
    trained(tmp_path / "archive")


@pytest.mark.usefixtures("alone")
def test_again_trains_anew_on_ranks_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "started_by_torchrun", lambda: True)
    monkeypatch.chdir(tmp_path)
    for more, says in (([], "Trained in"), ([], "already known"), (["--again"], "Trained in")):
        app(["train", *ONE_LAYER, "--device", "cpu", *more], standalone_mode=False)
        assert says in capsys.readouterr().out


def test_a_group_that_torchrun_did_not_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(LabError, match="Start with torchrun --nproc-per-node 2"), ranks.process_group():
        pass


def test_a_process_without_a_gpu_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(torch.cuda.device_count()))
    with (
        pytest.raises(LabError, match=r"has no GPU of its own: torch sees \d+\. Start at most that many"),
        ranks.process_group(cuda=True),
    ):
        pass


def test_torchrun_is_known_by_what_it_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert ranks.started_by_torchrun()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not ranks.started_by_torchrun()
