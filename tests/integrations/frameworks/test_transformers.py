"""Trainings by the installed transformers' Trainer: what is recorded is what happened, and training stays the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters
from trainers import Copying, Failing, Steered, language_model, same, sentences, trainer, weights
from transformers import TrainerCallback

import gyroscope
from gyroscope import Layca
from gyroscope.control.torch_contract import bare
from gyroscope.errors import MonitorError
from gyroscope.integrations.transformers import GyroscopeCallback
from monitor.watched import check

ALL: dict[str, Any] = {"budget": None}  # every step is measured


def steered(model: torch.nn.Module) -> Layca:
    inner = torch.optim.AdamW(model.parameters(), lr=3**-4.3, weight_decay=0.0)
    return Layca(inner, model, others_lr=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "lr_scheduler_type": "cosine"},
        {"bf16": True},
        {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 3},
    ],
    ids=["accumulation and clipping", "bf16", "torch_compile"],
)
def test_the_numbers_are_those_of_the_oracle_and_training_stays_the_same(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    watching, copying = GyroscopeCallback(tmp_path / "run", detail_every=2, **ALL), Copying()
    torch._dynamo.reset()
    counters.clear()
    watched = trainer(tmp_path / "watched", watching, copying, **options)
    watched.train()
    after, compiled = torch.rand(3), counters["stats"]["unique_graphs"]
    assert watching.monitor.error is None
    check(tmp_path / "run", copying.copies, range(options.get("max_steps", 6) + 1), rtol=1e-5)
    torch._dynamo.reset()
    counters.clear()
    alone = trainer(tmp_path / "alone", **options)
    alone.train()
    assert compiled == counters["stats"]["unique_graphs"]
    assert (compiled > 0) == ("torch_compile" in options)
    assert all(map(torch.equal, weights(watched.model), weights(alone.model)))
    assert torch.equal(after, torch.rand(3))
    if "max_grad_norm" in options:  # the optimizer sees the clipped gradient, the Trainer logs the norm before
        total = np.sqrt((watching.run.series("gradient_norm")[1:] ** 2).sum(axis=1))
        assert (total <= 0.1 + 1e-6).all()
        assert (watching.run.scalars["grad_norm"].values > 0.1).all()


def test_the_run_holds_what_the_trainer_logs_and_its_arguments(tmp_path: Path) -> None:
    watching = GyroscopeCallback(**ALL)
    training = trainer(tmp_path, watching, eval_dataset=sentences(8), eval_strategy="steps", eval_steps=3)
    with pytest.raises(MonitorError, match=r"Call `trainer.train\(\)` first"):
        _ = watching.run
    training.train()
    assert watching.monitor.path == tmp_path / "gyroscope"
    run = watching.run
    assert run.state == "ended"
    for name in ("loss", "grad_norm", "learning_rate", "eval_loss", "train_loss"):
        logged = {entry["step"]: entry[name] for entry in training.state.log_history if name in entry}
        assert dict(zip(run.scalars[name].steps.tolist(), run.scalars[name].values.tolist(), strict=True)) == logged
    assert run.scalars["eval_loss"].steps.tolist() == [3, 6]
    assert run.meta["training_arguments"]["learning_rate"] == 0.01
    assert "hub" not in json.dumps(run.meta).lower() or "<HUB_TOKEN>" in json.dumps(run.meta)
    training.evaluate()  # what is logged between trainings belongs to none
    assert watching.run.scalars["eval_loss"].steps.tolist() == [3, 6]


def test_evaluation_between_steps_leaves_the_measurements_as_they_are(tmp_path: Path) -> None:
    runs = []
    for name, options in {"with": {"eval_strategy": "steps", "eval_steps": 1}, "without": {}}.items():
        watching = GyroscopeCallback(tmp_path / name, detail_every=1, **ALL)
        trainer(tmp_path / "out", watching, eval_dataset=sentences(8), max_steps=3, **options).train()
        runs.append(watching.run)
    assert same(*runs, ("rotation", "activation_mean", "input_rms", "gradient_norm"))


def test_findings_go_into_the_log_of_the_trainer_and_to_on_finding(tmp_path: Path) -> None:
    model, told = language_model(), []
    model.transformer.h[0].mlp.c_fc.weight.requires_grad_(False)
    watching = GyroscopeCallback(tmp_path / "run", on_finding=told.append, **ALL)
    training = trainer(tmp_path / "out", watching, model=model, max_steps=12)
    training.train()
    assert [finding.kind for finding in told] == ["frozen"]
    found = [entry for entry in training.state.log_history if "gyroscope" in entry]
    assert [entry["gyroscope"] for entry in found] == [f"serious: {told[0].sentence}"]
    assert "train_runtime" in training.state.log_history[-1]  # what reads the last entry finds the Trainer's own


@pytest.mark.parametrize("steers", [False, True], ids=["adamw", "layca"])
def test_a_resumed_training_continues_its_curves_from_the_same_reference(tmp_path: Path, steers: bool) -> None:
    def begin(seed: int, folder: Path, watching: GyroscopeCallback) -> Any:
        model = language_model(seed)
        chosen = {"optimizers": (steered(model), None)} if steers else {}
        return trainer(folder, watching, model=model, save_strategy="steps", save_steps=3, **chosen)

    straight, first, second = (GyroscopeCallback(tmp_path / name, **ALL) for name in ("straight", "run", "run"))
    begin(0, tmp_path / "out", straight).train()
    begin(0, tmp_path / "out", first).train()
    again = begin(7, tmp_path / "out", second)  # from other weights, which the checkpoint replaces
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert [(one.start_step, one.ended is not None) for one in second.run.attempts] == [(0, True), (3, True)]
    assert same(straight.run, second.run, ("rotation", "weight_norm", "gradient_norm", "lr", "rate"))
    assert second.run.scalars["loss"].steps.tolist() == [1, 2, 3, 4, 5, 6]


def test_a_checkpoint_at_a_step_that_was_not_measured_is_resumed_at_it(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 3}
    trainer(tmp_path, GyroscopeCallback(every=4, **ALL), **options).train()
    watching = GyroscopeCallback(every=4, **ALL)
    trainer(tmp_path, watching, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert watching.run.steps.tolist() == [0, 4, 6]
    assert [event.text.split(";")[0] for event in watching.run.events if event.kind == "resume"] == [
        "resumed at step 3"
    ]


def test_a_restored_callback_keeps_its_options_and_says_what_is_lost(tmp_path: Path, caplog: Any) -> None:
    options = {"save_strategy": "steps", "save_steps": 3, "restore_callback_states_from_checkpoint": True}
    given = {"layers": ["*attn*"], "on_finding": lambda _: None, **ALL}
    trainer(tmp_path, GyroscopeCallback(tmp_path / "run", **given), **options).train()
    again = trainer(tmp_path, GyroscopeCallback(tmp_path / "other"), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    (restored,) = (one for one in again.callback_handler.callbacks if isinstance(one, GyroscopeCallback))
    assert restored.monitor.path == tmp_path / "run"
    assert all("attn" in name for name in restored.run.layers)
    assert "without on_finding" in caplog.text
    assert not (tmp_path / "other").exists()


def test_a_run_that_is_gone_begins_at_the_step_of_the_checkpoint_with_a_warning(tmp_path: Path, caplog: Any) -> None:
    options = {"save_strategy": "steps", "save_steps": 3}
    trainer(tmp_path, GyroscopeCallback(**ALL), **options).train()
    shutil.rmtree(tmp_path / "gyroscope")
    watching = GyroscopeCallback(**ALL)
    trainer(tmp_path, watching, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert "rotation is measured from the weights of the checkpoint" in caplog.text
    assert watching.run.steps.tolist() == [4, 5, 6]


def test_a_checkpoint_without_the_callback_can_be_resumed_and_saved_with_it(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 3}
    trainer(tmp_path, **options).train()
    watching = GyroscopeCallback(**ALL)
    trainer(tmp_path, watching, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert watching.run.steps.tolist() == [4, 5, 6]
    saved = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["GyroscopeCallback"]["attributes"]["_saved"]["step"] == 6


def test_a_folder_that_another_training_has_used_since_the_checkpoint_is_refused(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 3}
    trainer(tmp_path / "one", GyroscopeCallback(tmp_path / "run", **ALL), **options).train()
    trainer(tmp_path / "two", GyroscopeCallback(tmp_path / "run", **ALL), model=language_model(5)).train()
    again = trainer(tmp_path / "one", GyroscopeCallback(tmp_path / "run", **ALL), **options)
    with pytest.raises(MonitorError, match="must hold the run of this checkpoint"):
        again.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-3"))
    reference = tmp_path / "run" / "reference.pt"
    watching = GyroscopeCallback(tmp_path / "run", reference=reference, **ALL)
    trainer(tmp_path / "one", watching, **options).train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-3"))
    assert watching.run.series("rotation", steps=[6]).min() > 0


def test_the_last_step_is_that_of_training_not_of_the_best_model(tmp_path: Path) -> None:
    watching, copying = GyroscopeCallback(tmp_path / "run", every=4, **ALL), Copying()
    training = trainer(
        tmp_path / "out", watching, copying, eval_dataset=sentences(8), eval_strategy="steps", eval_steps=2,
        save_strategy="steps", save_steps=2, load_best_model_at_end=True, metric_for_best_model="loss",
        greater_is_better=True,
    )  # fmt: skip
    training.train()
    assert training.state.best_global_step < 6
    assert watching.run.steps.tolist() == [0, 4, 6]
    # The rate that is recorded with a last step that was not due is that of the optimizer at the end.
    rates = ("lr", "effective_lr")
    check(tmp_path / "run", copying.copies, [0, 4, 6], whole=[False, True, False], leave_out=rates, rtol=1e-5)


def test_several_trainings_of_one_trainer_are_one_run(tmp_path: Path) -> None:
    watching = GyroscopeCallback(tmp_path / "run", **ALL)
    training = trainer(tmp_path / "out", watching, max_steps=3)
    training.train()
    training.evaluate(sentences(8))
    training.train()
    assert watching.run.steps.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert (np.diff(watching.run.series("weight_norm"), axis=0) != 0).any(axis=1).all()


def test_a_training_that_raised_leaves_a_run_that_can_be_read_and_gone_on_with(tmp_path: Path) -> None:
    def failing() -> Any:
        watching = GyroscopeCallback(tmp_path / "run", **ALL)
        return watching, trainer(tmp_path / "out", watching, Failing(3), save_strategy="steps", save_steps=2)

    first, training = failing()
    with pytest.raises(RuntimeError, match="on fire"):
        training.train()
    assert first.run.steps.tolist() == [0, 1, 2, 3]
    # The Trainer does not say so, and its training is still open. A new one in the same process takes over.
    second, training = failing()
    training.callback_handler.pop_callback(Failing)
    training.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    run = second.run
    assert run.steps.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert [one.ended is not None for one in run.attempts] == [False, True]
    assert [event.text for event in run.all_events if event.kind == "stop"] == [
        "stopped by RuntimeError: the training did not come to its end"
    ]


def test_a_trainer_whose_training_raised_trains_again(tmp_path: Path) -> None:
    watching, failing = GyroscopeCallback(tmp_path / "run", **ALL), Failing(2)
    training = trainer(tmp_path / "out", watching, failing, max_steps=3)
    with pytest.raises(RuntimeError, match="on fire"):
        training.train()
    failing.step = 0
    training.train()
    assert watching.run.state == "ended"
    assert watching.run.steps.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("same_one", [True, False])
def test_a_callback_that_is_attached_twice_is_refused(tmp_path: Path, same_one: bool) -> None:
    one = GyroscopeCallback(tmp_path / "run")
    training = trainer(tmp_path / "out", one, one if same_one else GyroscopeCallback(tmp_path / "other"))
    before = weights(training.model)
    with pytest.raises(MonitorError, match="must hold one GyroscopeCallback"):
        training.train()
    assert all(map(torch.equal, before, weights(training.model)))
    assert not bare(training.optimizer)._optimizer_step_pre_hooks
    training.remove_callback(GyroscopeCallback)
    training.train()
    assert not all(map(torch.equal, before, weights(training.model)))


def test_a_model_that_is_changed_between_trainings_is_refused(tmp_path: Path) -> None:
    watching = GyroscopeCallback(tmp_path / "run", **ALL)
    trainer(tmp_path / "out", watching, max_steps=2).train()
    before = gyroscope.load(tmp_path / "run").steps.tolist()
    changed = trainer(tmp_path / "out", watching, model=language_model(blocks=3), max_steps=2)
    untouched = weights(changed.model)
    with pytest.raises(MonitorError, match="another model"):
        changed.train()
    assert all(map(torch.equal, untouched, weights(changed.model)))
    assert gyroscope.load(tmp_path / "run").steps.tolist() == before


def test_every_trial_of_a_search_has_a_run_of_its_own(tmp_path: Path) -> None:
    def made(trial: Any) -> Any:
        return language_model(blocks=1 if trial is None else 1 + trial.number)

    training = trainer(
        tmp_path,
        GyroscopeCallback(**ALL),
        model_init=made,
        max_steps=2,
        eval_dataset=sentences(8),
        eval_strategy="epoch",
    )
    training.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-2)},
        compute_objective=lambda metrics: metrics["eval_loss"], n_trials=2, backend="optuna",
    )  # fmt: skip
    assert [(run.name, len(run.layers)) for run in gyroscope.runs(tmp_path / "gyroscope")] == [
        ("trial-1", 7), ("trial-2", 11)
    ]  # fmt: skip


def test_the_rate_of_layca_follows_the_schedule_of_the_trainer(tmp_path: Path) -> None:
    model, watching = language_model(), GyroscopeCallback(tmp_path / "run", **ALL)
    options = {"lr_scheduler_type": "cosine", "warmup_steps": 2}
    training = trainer(tmp_path / "out", watching, model=model, optimizers=(steered(model), None), **options)
    training.train()
    run = watching.run
    rho = 3**-4.3 * np.array([0, 1 / 2, *(0.5 * (1 + np.cos(np.pi * np.arange(4) / 4)))])
    np.testing.assert_allclose(run.series("lr")[1:], np.repeat(rho[:, None], len(run.layers), 1), rtol=1e-6)
    np.testing.assert_allclose(run.series("rate")[1:], np.arctan(run.series("lr")[1:]), rtol=1e-4, atol=1e-7)


def test_layca_can_be_named_where_the_trainer_makes_the_optimizer(tmp_path: Path) -> None:
    watching = GyroscopeCallback(tmp_path / "run", **ALL)
    chosen = (Steered, {"rate": 3**-4.3})
    training = trainer(tmp_path / "out", watching, optimizer_cls_and_kwargs=chosen, lr_scheduler_type="constant")
    training.train()
    np.testing.assert_allclose(watching.run.series("rate")[1:], np.arctan(3**-4.3), rtol=1e-4)


def test_options_are_checked_before_training(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="evry"):
        GyroscopeCallback(evry=10)
    with pytest.raises(MonitorError, match=r"`run` must be the path of a folder, got 5"):
        GyroscopeCallback(5)  # type: ignore[arg-type]
    training = trainer(tmp_path, GyroscopeCallback(every=0))
    before = weights(training.model)
    with pytest.raises(MonitorError, match="`every` must be"):
        training.train()
    assert all(map(torch.equal, before, weights(training.model)))


def test_it_is_a_callback_as_the_trainer_defines_them() -> None:
    assert isinstance(GyroscopeCallback(), TrainerCallback)
    json.dumps(GyroscopeCallback("runs/first", every=10).state())
