"""The pruner and the monitor of trials, with Optuna itself."""

import json

import optuna
import pytest
import torch

import gyroscope
from gyroscope.errors import MonitorError
from gyroscope.integrations import optuna as integration
from gyroscope.integrations.optuna import FINDINGS, ROTATION, RUN, GyroscopePruner, watch

optuna.logging.set_verbosity(optuna.logging.WARNING)
X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
Y = X[:, :2].sum(1, keepdim=True)


def train(trial, folder, *, lr, steps=40, stop=True, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with watch(trial, model, optimizer, folder, budget=None, **options) as monitor:
        for step in range(steps):
            loss = (model(X) - Y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 9:
                monitor.flush()
                trial.report(loss.item(), step)
                if stop and trial.should_prune():
                    raise optuna.TrialPruned
    return loss.item()


def search(folder, rates, *, storage=None, pruner=None, **options):
    study = optuna.create_study(pruner=pruner or GyroscopePruner(), storage=storage)
    for rate in rates:
        study.enqueue_trial({"lr": rate})
    study.optimize(
        lambda trial: train(trial, folder, lr=trial.suggest_float("lr", 1e-6, 1e31), **options), n_trials=len(rates)
    )
    return study


def states(study):
    return [trial.state.name for trial in study.trials]


def test_a_trial_that_breaks_or_lags_is_stopped_and_the_others_are_not(tmp_path):
    study = search(tmp_path, [0.1, 1e30, 1e-4, 0.05])
    assert states(study) == ["COMPLETE", "PRUNED", "PRUNED", "COMPLETE"]
    assert [one["kind"] for one in study.trials[1].user_attrs[FINDINGS]] == ["not_finite"]
    assert FINDINGS not in study.trials[2].user_attrs  # it lags: nothing is broken


def test_a_trial_that_turns_little_and_is_better_goes_on(tmp_path):
    study = optuna.create_study(pruner=GyroscopePruner(lag=0.9))

    def objective(trial):
        # The first trial rotates far and reports a large value; the second the other way round.
        first = trial.number == 0
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if first else 1e-4)
        with watch(trial, model, optimizer, tmp_path, budget=None) as monitor:
            for _ in range(20):
                loss = (model(X) - Y).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            monitor.flush()
            trial.report(1.0 if first else 0.5, 19)
            if trial.should_prune():
                raise optuna.TrialPruned
        return 1.0 if first else 0.5

    study.optimize(objective, n_trials=2)
    assert states(study) == ["COMPLETE", "COMPLETE"]
    first, second = (trial.user_attrs[ROTATION][-1][1] for trial in study.trials)
    assert second < 0.9 * first


def test_the_attributes_are_those_of_the_run(tmp_path):
    trial = search(tmp_path, [0.1]).trials[0]
    with gyroscope.load(trial.user_attrs[RUN]) as run:
        assert run.path == tmp_path / "trial-0"
        assert run.meta["params"] == {"lr": 0.1}
        curve = trial.user_attrs[ROTATION]
        assert curve[0] == [0, 0.0] or curve[0] == (0, 0.0)
        rotation = run.series("rotation", steps=[step for step, _ in curve]).mean(1)
        assert [value for _, value in curve] == pytest.approx(rotation.tolist(), rel=1e-5)
        assert curve[-1][0] > 30


def test_attributes_survive_a_storage_on_disk_and_a_threaded_search(tmp_path):
    storage = f"sqlite:///{tmp_path}/study.db"
    study = search(tmp_path, [0.1, 1e30], storage=storage)
    again = optuna.load_study(study_name=study.study_name, storage=storage)
    assert states(again) == ["COMPLETE", "PRUNED"]
    assert json.dumps(again.trials[0].user_attrs[ROTATION])


@pytest.mark.parametrize(
    ("pruner", "expected"),
    [
        (GyroscopePruner(mute="not_finite", lag=0.0), ["COMPLETE", "COMPLETE", "COMPLETE"]),
        (GyroscopePruner(lag=0.0), ["COMPLETE", "PRUNED", "COMPLETE"]),
        (GyroscopePruner(optuna.pruners.ThresholdPruner(upper=0.0)), ["PRUNED", "PRUNED", "PRUNED"]),
        (GyroscopePruner(after=0.99), ["COMPLETE", "PRUNED", "PRUNED"]),
    ],
    ids=["muted", "no lag", "inner", "late"],
)
def test_options_say_what_stops_a_trial(tmp_path, pruner, expected):
    def objective(trial):
        loss = train(trial, tmp_path, lr=trial.suggest_float("lr", 1e-6, 1e31))
        return loss if loss < 1e9 else 1e9  # Optuna fails trials that return NaN

    study = optuna.create_study(pruner=pruner)
    for rate in (0.1, 1e30, 1e-4):
        study.enqueue_trial({"lr": rate})
    study.optimize(objective, n_trials=3)
    assert states(study) == expected


def test_trials_that_are_not_watched_are_left_to_the_inner_pruner():
    study = optuna.create_study(pruner=GyroscopePruner())

    def objective(trial):
        trial.report(1.0, 0)
        assert not trial.should_prune()
        return 1.0

    study.optimize(objective, n_trials=2)
    assert states(study) == ["COMPLETE", "COMPLETE"]


def test_findings_are_passed_on(tmp_path):
    heard = []
    search(tmp_path, [1e30], on_finding=heard.append)
    assert [one.kind for one in heard] == ["not_finite"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: GyroscopePruner("median"), "`inner` must be one of optuna.pruners, or None, got 'median'."),
        (lambda: GyroscopePruner(lag=1.5), "`lag` must be a number ≥ 0 and < 1, got 1.5. Try 0.3."),
        (lambda: GyroscopePruner(after=float("nan")), "`after` must be a number ≥ 0 and < 1, got nan. Try 0.3."),
        (lambda: GyroscopePruner(mute="no_such"), "`mute` must name kinds of finding"),
        (lambda: watch(3, None, None), "`trial` must be the trial that Optuna passes to the objective, got 3."),
    ],
)
def test_bad_arguments_are_rejected(make, says):
    with pytest.raises(MonitorError) as error:
        make()
    assert str(error.value).startswith(says)


def test_a_rejected_watch_leaves_the_trial_as_it_was(tmp_path):
    trial = optuna.create_study().ask()
    with pytest.raises(MonitorError):
        watch(trial, torch.nn.Linear(2, 2), "no optimizer", tmp_path)
    assert integration.RUN not in trial.user_attrs
