"""`gyroscope sample` asks a running job for detail."""

import time

import torch
from typer.testing import CliRunner

import gyroscope
from gyroscope.cli import app

runner = CliRunner()


def a_run(folder):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gyroscope.watch(model, optimizer, folder, every=1000, budget=None, detail_every=10**6)

    def step():
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()

    return monitor, step


def test_a_running_job_measures_the_next_steps(tmp_path):
    monitor, step = a_run(tmp_path / "run")
    step()
    result = runner.invoke(app, ["sample", str(tmp_path / "run"), "--steps", "3"])
    assert result.exit_code == 0, result.output
    deadline = time.monotonic() + 30
    while not monitor._recorder.asked and time.monotonic() < deadline:
        time.sleep(0.05)
    for _ in range(6):
        step()
    with monitor.run as run:
        assert run.steps.tolist() == [0, 3, 4, 5]
        assert run.where("dying").tolist() == [3, 4, 5]
    monitor.close()


def test_a_run_that_has_ended_is_not_asked(tmp_path):
    monitor, step = a_run(tmp_path / "run")
    step()
    monitor.close()
    result = runner.invoke(app, ["sample", str(tmp_path / "run")])
    assert result.exit_code == 1
    assert "not running" in result.output
    assert not (tmp_path / "run" / "sample").exists()


def test_the_number_of_steps_must_be_positive(tmp_path):
    result = runner.invoke(app, ["sample", str(tmp_path), "--steps", "0"])
    assert result.exit_code == 2
    assert "`--steps` must be a whole number ≥ 1, got 0" in result.output
