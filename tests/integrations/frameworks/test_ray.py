"""Reports and resumed runs, with Ray Tune and Ray Train themselves, on one local instance."""

import os
import sys
from tempfile import TemporaryDirectory

import pytest
import ray
import torch
from ray import cloudpickle, tune
from ray import train as ray_train

import gyroscope
from gyroscope.errors import MonitorError
from gyroscope.integrations.ray import FindingStopper, _layers, report, watch

STEPS = 10


@pytest.fixture(scope="module", autouse=True)
def instance():
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


def parts(lr):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def epoch(model, optimizer):
    for _ in range(STEPS):
        loss = model(torch.ones(16, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def tuned(config):
    """Train three epochs; the first worker of a healthy trial dies after the second, and another one resumes it."""
    model, optimizer = parts(config["lr"])
    begun = 0
    if (checkpoint := tune.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/state.pt")
        model.load_state_dict(saved["model"])
        begun = saved["epoch"]
    with watch(model, optimizer, budget=None) as monitor:
        for one in range(begun, 3):
            loss = epoch(model, optimizer)
            folder = f"{config['scratch']}/{tune.get_context().get_trial_name()}-{one}"
            os.makedirs(folder)
            torch.save({"model": model.state_dict(), "epoch": one + 1}, f"{folder}/state.pt")
            report(monitor, {"loss": loss}, tune.Checkpoint.from_directory(folder))
            if one == 1 and begun == 0:
                raise RuntimeError("the machine is gone")


def test_trials_of_tune_report_their_layers_and_resume_their_runs(tmp_path):
    tuner = tune.Tuner(
        tuned,
        param_space={"scratch": str(tmp_path / "scratch"), "lr": tune.grid_search([0.1, 1e30])},
        run_config=tune.RunConfig(
            name="search", storage_path=str(tmp_path), stop=FindingStopper(), verbose=0,
            failure_config=tune.FailureConfig(max_failures=1),
        ),
    )  # fmt: skip
    results = {one.config["lr"]: one for one in tuner.fit()}
    good, bad = results[0.1].metrics, results[1e30].metrics
    assert (good["gyroscope/serious"], good["gyroscope/finding"]) == (0, "")
    assert bad["gyroscope/serious"] == 1
    assert bad["gyroscope/finding"].startswith("serious: The weights")
    assert bad["training_iteration"] == 1  # it was stopped
    # One training in one go, measured from the same weights.
    model, optimizer = parts(0.1)
    with gyroscope.watch(model, optimizer, tmp_path / "whole", budget=None):
        for _ in range(3):
            epoch(model, optimizer)
    with gyroscope.load(good["gyroscope/run"]) as run, gyroscope.load(tmp_path / "whole") as whole:
        assert run.path.is_relative_to(tmp_path / "search")
        assert len(run.attempts) == 2
        assert run.steps.tolist() == whole.steps.tolist() == list(range(3 * STEPS + 1))
        rotation = whole.series("rotation")
        assert run.series("rotation") == pytest.approx(rotation, rel=1e-5)
    assert good["gyroscope/rotation_min"] == pytest.approx(rotation[-1].min(), rel=1e-5)
    assert good["gyroscope/rotation_mean"] == pytest.approx(rotation[-1].mean(), rel=1e-5)
    assert good["gyroscope/rotation_max"] == pytest.approx(rotation[-1].max(), rel=1e-5)


def trained(config):
    model, optimizer = parts(0.1)
    with watch(model, optimizer, budget=None) as monitor, TemporaryDirectory() as folder:
        # Ray Train keeps the metrics of reports that have a checkpoint.
        report(monitor, {"loss": epoch(model, optimizer)}, ray_train.Checkpoint.from_directory(folder))


def test_a_worker_of_train_reports_its_layers(tmp_path):
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        trained, run_config=ray_train.RunConfig(name="training", storage_path=str(tmp_path)),
        scaling_config=ray_train.ScalingConfig(num_workers=1),
    )  # fmt: skip
    metrics = trainer.fit().metrics
    with gyroscope.load(tmp_path / "training" / "gyroscope") as run:
        assert metrics["gyroscope/run"] == str(run.path)
        assert metrics["gyroscope/rotation_mean"] == pytest.approx(run.series("rotation")[-1].mean())
        assert run.meta["ray"] == {"experiment": "training"}


def test_a_report_before_the_first_step_of_a_resumed_run_has_its_layers(tmp_path):
    """Of a worker that goes back to an earlier checkpoint and validates first."""
    model, optimizer = parts(0.1)
    begun = {name: value.clone() for name, value in model.state_dict().items()}
    with watch(model, optimizer, tmp_path / "run", budget=None) as monitor:
        epoch(model, optimizer)
        metrics = _layers(monitor)
    model.load_state_dict(begun)
    with watch(model, optimizer, tmp_path / "run", budget=None) as monitor:
        monitor.log(accuracy=0.1)
        assert metrics["gyroscope/rotation_mean"] > 0
        assert _layers(monitor) == metrics


def test_elsewhere_a_folder_is_needed_and_nothing_can_be_reported(tmp_path):
    model, optimizer = parts(0.1)
    with pytest.raises(MonitorError, match="`folder` must be given outside of the workers"):
        watch(model, optimizer)
    with (
        watch(model, optimizer, tmp_path / "run") as monitor,
        pytest.raises(MonitorError, match="must be called in a worker"),
    ):
        report(monitor)
