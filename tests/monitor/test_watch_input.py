"""What `watch` and a monitor cannot work with is refused in words, before anything has been changed."""

from __future__ import annotations

import math
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import nn
from watched import inputs, mlp, train

import gyroscope
from gyroscope.errors import GyroscopeError, LayerError, MonitorError, StoreError
from gyroscope.monitor.track import Track
from gyroscope.monitor.watch import folder_of


def untouched(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return not (hooked or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


WEIGHTS = {name: w for name, w in mlp().state_dict().items() if name.endswith("weight")}
BAD = [
    ({"every": 0}, "`every` must be a whole number ≥ 1, got 0. Try 1."),
    ({"every": -3}, "`every` must be a whole number ≥ 1, got -3"),
    ({"every": 1.5}, "`every` must be a whole number ≥ 1, got 1.5"),
    ({"every": True}, "`every` must be a whole number ≥ 1, got True"),
    ({"every": "1"}, "`every` must be a whole number ≥ 1, got '1'"),
    ({"every": None}, "`every` must be a whole number ≥ 1, got None"),
    ({"every": math.nan}, "`every` must be a whole number ≥ 1, got nan"),
    ({"budget": 0}, "`budget` must be a share of the time > 0 or None, got 0. Try 0.01."),
    ({"budget": -0.1}, "`budget` must be a share of the time > 0 or None, got -0.1"),
    ({"budget": math.nan}, "`budget` must be a share of the time > 0 or None, got nan"),
    ({"budget": math.inf}, "`budget` must be a share of the time > 0 or None, got inf"),
    ({"budget": "1%"}, "`budget` must be a share of the time > 0 or None, got '1%'"),
    ({"budget": 10**400}, "`budget` must be a share of the time > 0 or None, got 1000"),
    ({"budget": True}, "`budget` must be a share of the time > 0 or None, got True"),
    ({"detail_every": 0}, "`detail_every` must be a whole number ≥ 1, got 0"),
    ({"detail_every": None}, "`detail_every` must be a whole number ≥ 1, got None"),
    ({"threshold": math.inf}, "`threshold` must be a finite number, got inf. Try 0.0."),
    ({"threshold": "0"}, "`threshold` must be a finite number, got '0'"),
    ({"threshold": None}, "`threshold` must be a finite number, got None"),
    ({"step": -1}, "`step` must be a whole number ≥ 0, got -1."),
    ({"step": 2.0}, "`step` must be a whole number ≥ 0, got 2.0"),
    ({"step": False}, "`step` must be a whole number ≥ 0, got False"),
    ({"layers": []}, "an empty list"),
    ({"layers": [1, 2]}, "gyroscope.layers(model)"),
    ({"layers": ["0.weight", 2]}, "gyroscope.layers(model)"),
    ({"layers": "none.such"}, "none.such"),
    ({"layers": ["0*", "none.such"]}, "none.such"),
    ({"quantities": []}, "`quantities` must name at least one quantity, got none"),
    ({"quantities": ["rotatoin"]}, "Did you mean 'rotation'?"),
    ({"quantities": "none such"}, "got 'none such'. Register your own with `quantity`."),
    ({"quantities": [3]}, "`quantities` must be a list of names, got [3]"),
    (
        {"reference": 3},
        "`reference` must be a model, a state dict, the path of a checkpoint, or the folder of a run, got a int",
    ),
    ({"reference": {}}, "`reference` must have the weight '0.weight', got "),
    ({"reference": {"0.weight": "words"}}, "`reference` must hold tensors, got a str for '0.weight'"),
    ({"reference": nn.Linear(6, 40)}, "`reference` must have the weight '0.weight', got "),
    ({"reference": "no/such/file.pt"}, "There is no file"),
    ({"reference": "initial"}, 'a reference.pt; "pretrained" for the weights as they are now.'),
    (
        {"reference": {f"{i}.weight": torch.zeros(2, 2) for i in (0, 2, 4)}},
        "'0.weight' of shape (40, 6), as the model has, got (2, 2)",
    ),
    ({"reference_dtype": "float8"}, "`reference_dtype` must be one of 'auto', 'float32', 'bfloat16', got 'float8'"),
    (
        {"reference": {**WEIGHTS, "2.weight": WEIGHTS["2.weight"].to("meta")}},
        "got '2.weight', which is on the meta",
    ),
    (
        {"reference": {**WEIGHTS, "2.weight": WEIGHTS["2.weight"].to_sparse()}},
        "which is torch.float32, torch.sparse_coo",
    ),
    ({"reference": {**WEIGHTS, "0.weight": WEIGHTS["0.weight"] * 1j}}, "which is torch.complex64"),
    ({"reference": {**WEIGHTS, "0.weight": WEIGHTS["0.weight"].char()}}, "which is torch.int8"),
    ({"reference": {**WEIGHTS, "0.weight": WEIGHTS["0.weight"].to(torch.float8_e4m3fn)}}, "which is torch.float8"),
    ({"reference": "x" * 300}, "There is no file"),
    ({"reference_dtype": np.ones(2)}, "`reference_dtype` must be one of 'auto', 'float32', 'bfloat16', got array"),
    (
        {"reference_dtype": torch.float32},
        "`reference_dtype` must be one of 'auto', 'float32', 'bfloat16', got torch.float32",
    ),
    ({"reference_device": "cuda:0"}, "`reference_device` must be one of 'auto', 'device', 'cpu', got 'cuda:0'"),
    ({"loss": 0.3}, "returns the loss, got a float"),
    ({"loss": torch.tensor(0.3)}, "returns the loss, got a Tensor"),
    ({"loss": "cross entropy"}, "returns the loss, got a str"),
    ({"loss": nn.MSELoss}, "returns the loss, got the class MSELoss"),
    ({"meta": {"a": object()}}, "`meta` must be a dict that JSON can hold, got "),
    ({"meta": {"a": {1, 2}}}, "`meta` must be a dict that JSON can hold, got "),
    ({"meta": [1, 2]}, "`meta` must be a dict that JSON can hold, got "),
    ({"meta": 3}, "`meta` must be a dict that JSON can hold, got "),
    ({"meta": torch.ones(2)}, "`meta` must be a dict that JSON can hold, got "),
    ({"meta": {"\ud83d": 1}}, "the key '\\ud83d' is not valid Unicode"),
    ({"layers": torch.tensor(1.0)}, "gyroscope.layers(model)"),
    ({"quantities": torch.tensor(1.0)}, "`quantities` must be a list of names, got tensor"),
    ({"sinks": torch.tensor(1.0)}, "`sinks` must have the methods open, write and close, got tensor"),
]


@pytest.mark.parametrize(("options", "said"), BAD, ids=lambda value: str(value).split(" at 0x")[0][:40])
def test_bad_options_are_refused_before_anything_is_changed(tmp_path, options, said):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises((MonitorError, LayerError), match=re.escape(said)):
        gyroscope.watch(model, optimizer, tmp_path / "run", **options)
    assert untouched(model, optimizer)
    assert not list(tmp_path.iterdir())


def bad_pairs():
    model, other = mlp(), mlp()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    norm = nn.LayerNorm(4)
    quantized = nn.Module()
    return {
        "no model": ("a model", sgd, "`model` must be a torch.nn.Module, got str"),
        "in the wrong order": (
            sgd,
            model,
            "`optimizer` must be a torch.optim.Optimizer or a list of them, got a Sequential",
        ),
        "no optimizer": (model, None, "or a list of them, got a NoneType"),
        "no optimizers": (model, [], "must name at least one optimizer, got an empty list"),
        "parameters": (model, list(model.parameters()), "or a list of them, got a Parameter"),
        "twice": (model, [sgd, sgd], "got the same one twice"),
        "of another model": (
            model,
            torch.optim.SGD(other.parameters(), 0.1),
            "must step layers of the model, got one that steps none",
        ),
        "one of another model": (model, [sgd, torch.optim.Adam(other.parameters())], "got Adam, which steps none"),
        "only biases": (
            model,
            torch.optim.SGD([model[0].bias], 0.1),
            "must step layers of the model, got one that steps none",
        ),
        "no layers": (norm, torch.optim.SGD(norm.parameters(), 0.1), "no layers"),
        "nothing at all": (quantized, sgd, "no layers"),
    }


@pytest.mark.parametrize("case", bad_pairs())
def test_models_and_optimizers_that_do_not_belong_together_are_refused(tmp_path, case):
    model, optimizer, said = bad_pairs()[case]
    with pytest.raises((MonitorError, LayerError), match=re.escape(said)):
        gyroscope.watch(model, optimizer, tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_the_optimizer_inside_a_controller_is_refused(tmp_path):
    model = mlp()
    controller = gyroscope.Layca(torch.optim.SGD(model.parameters(), 0.1), model)
    with pytest.raises(MonitorError, match=r"got a SGD inside a Layca: .* Watch the Layca"):
        gyroscope.watch(model, controller.inner, tmp_path / "run")
    assert untouched(model, controller.inner)
    assert not list(tmp_path.iterdir())


def test_options_that_are_tensors_are_kept_as_numbers(tmp_path):
    model = mlp()
    rates = {"lr": torch.tensor(0.25), "betas": (torch.tensor(0.5), torch.tensor(0.75))}
    groups = [{"params": [p]} for p in model.parameters()]
    gyroscope.watch(model, torch.optim.Adam(groups, **rates), tmp_path / "run").close()
    with gyroscope.load(tmp_path / "run") as run:
        about = run.meta["optimizers"][0]
    assert (about["lr"], about["betas"]) == (0.25, [0.5, 0.75])
    assert "differ" not in about


def test_layers_without_values_or_of_whole_numbers_are_refused(tmp_path):
    model = nn.Linear(3, 2, device="meta")
    with pytest.raises(MonitorError, match="meta device"):
        gyroscope.watch(model, torch.optim.SGD(model.parameters(), 0.1), tmp_path / "run")
    model = nn.Linear(3, 2, dtype=torch.complex64)
    with pytest.raises(GyroscopeError, match="complex64"):
        gyroscope.watch(model, torch.optim.SGD(model.parameters(), 0.1), tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_a_layer_whose_name_no_file_can_hold_is_refused(tmp_path):
    model = nn.Sequential()
    model.add_module("\ud83d", nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(MonitorError, match=r"must have names that a file can hold, got '\\ud83d\.weight'\. Rename"):
        gyroscope.watch(model, optimizer, tmp_path / "run")
    assert untouched(model, optimizer)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["\ud83d", "a\0b", "x" * 300])
def test_a_folder_that_no_disk_can_name_is_refused(tmp_path, name):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises((MonitorError, StoreError)):
        gyroscope.watch(model, optimizer, tmp_path / name)
    assert untouched(model, optimizer)
    assert not list(tmp_path.iterdir())


def test_layers_that_are_listed_twice_are_refused(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = gyroscope.layers(model)
    with pytest.raises(MonitorError, match="each layer once, got one of them twice"):
        gyroscope.watch(model, optimizer, tmp_path / "run", layers=[found[0], found[0]])
    assert untouched(model, optimizer)


def test_a_folder_of_other_things_or_of_another_model_is_refused(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("precious")
    with pytest.raises(StoreError, match="full"):
        gyroscope.watch(model, optimizer, tmp_path / "full")
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["thesis.tex"]
    other = nn.Sequential(nn.Linear(6, 41), nn.Linear(41, 3))
    gyroscope.watch(other, torch.optim.SGD(other.parameters(), 0.1), tmp_path / "run").close()
    with pytest.raises(MonitorError, match=re.escape("'0.weight' of shape (41, 6)")):
        gyroscope.watch(model, optimizer, tmp_path / "run")
    assert untouched(model, optimizer)


LOGGED = ["words", None, [1.0], (1.0, 2.0), {"a": 1}, 1j, torch.ones(2), torch.ones(0), torch.tensor(1j), object()]


@pytest.mark.parametrize("value", LOGGED, ids=lambda value: str(value).split(" at 0x")[0])
def test_log_refuses_what_is_no_number_and_goes_on(tmp_path, value):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gyroscope.watch(model, optimizer, tmp_path / "run") as monitor:
        with pytest.raises(MonitorError, match="`loss` must be a number or a tensor of one element, got a"):
            monitor.log(loss=value)
        with pytest.raises(MonitorError, match="`loss` must be a number or a tensor of one element, got a"):
            monitor.log(accuracy=0.5, loss=value)
        train(model, optimizer, inputs(1))
    assert monitor.error is None
    with gyroscope.load(monitor.path) as run:
        assert not run.scalars
        assert run.steps.tolist() == [0, 1]


@pytest.mark.parametrize("name", ["", 3, None, "\ud83d"])
def test_log_refuses_names_that_are_no_words(tmp_path, name):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gyroscope.watch(model, optimizer, tmp_path / "run")
    with monitor, pytest.raises(MonitorError, match="names that are text"):
        monitor.log({name: 1.0})


def test_a_note_that_is_no_text_is_spelled_out(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gyroscope.watch(model, optimizer, tmp_path / "run")
    monitor.note("saved caf\udce9.pt")
    monitor.flush()
    with suppress(OSError), monitor:
        raise OSError("caf\udce9.pt is full")
    assert monitor.error is None
    with gyroscope.load(monitor.path) as run:
        said = [event.text for event in run.events]
    assert "saved caf\\udce9.pt" in said
    assert any("caf\\udce9.pt is full" in text for text in said)


@pytest.mark.parametrize("timeout", ["x", -1, math.nan, math.inf, 10**400, 1j, [5], np.ones(2), torch.ones(2)], ids=str)
def test_flush_refuses_what_is_no_time(tmp_path, timeout):
    model = mlp()
    with gyroscope.watch(model, torch.optim.SGD(model.parameters(), 0.1), tmp_path / "run") as monitor:
        with pytest.raises(MonitorError, match=r"`timeout` must be a number of seconds ≥ 0 or None, got "):
            monitor.flush(timeout)
        monitor.flush(np.float32(30))


def test_log_takes_numbers_of_every_kind(tmp_path):
    model = mlp()
    kinds = {
        "int": 2, "float": 2.0, "bool": True, "float32": np.float32(2), "int64": np.int64(2), "array": np.array(2.0),
        "tensor": torch.tensor(2.0), "with gradient": torch.tensor(2.0, requires_grad=True),
        "half": torch.tensor(2.0).half(), "one element": torch.tensor([[2.0]]),
        "whole": torch.tensor(2), "nan": math.nan, "inf": math.inf,
    }  # fmt: skip
    with gyroscope.watch(model, torch.optim.SGD(model.parameters(), 0.1), tmp_path / "run") as monitor:
        monitor.log(kinds)
        monitor.log(kinds, loss=0.5)
    assert monitor.error is None
    with gyroscope.load(monitor.path) as run:
        values = {name: scalar.values[-1] for name, scalar in run.scalars.items()}
    assert values.pop("bool") == 1.0
    assert math.isnan(values.pop("nan"))
    assert math.isinf(values.pop("inf"))
    assert values.pop("loss") == 0.5
    assert set(values.values()) == {2.0}


def test_a_value_is_logged_as_it_is_now_and_not_as_it_becomes(tmp_path):
    model = mlp()
    value = torch.ones(())
    with gyroscope.watch(model, torch.optim.SGD(model.parameters(), 0.1), tmp_path / "run") as monitor:
        monitor.log(loss=value)
        value.add_(1)
    with gyroscope.load(monitor.path) as run:
        assert run.scalars["loss"].values.tolist() == [1.0]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "5"])
def test_sample_and_every_refuse_what_is_no_count(tmp_path, value):
    model = mlp()
    with gyroscope.watch(model, torch.optim.SGD(model.parameters(), 0.1), tmp_path / "run", every=3) as monitor:
        with pytest.raises(MonitorError, match="`next_steps` must be a whole number ≥ 1, got"):
            monitor.sample(value)
        with pytest.raises(MonitorError, match="`every` must be a whole number ≥ 1, got"):
            monitor.every = value
        assert monitor.every == monitor.interval == 3


@pytest.mark.parametrize("state", [None, {}, [], {"layers": ["0.weight"]}, "state"])
def test_a_state_that_is_none_is_refused(tmp_path, state):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gyroscope.watch(model, optimizer, tmp_path / "run")
    with monitor, pytest.raises(MonitorError, match=r"Pass what state_dict\(\) returned"):
        monitor.load_state_dict(state)


@pytest.mark.parametrize(
    "damage",
    [
        {"steps": ["x"]},
        {"steps": [-5]},
        {"steps": 5},
        {"layers": 5},
        {"shapes": 5},
        {"shapes": [5, 5, 5]},
        {"shapes": []},
        {"shapes": [np.ones((3, 2))] * 3},
        {"layers": [np.ones((3, 2))] * 3},
        {"version": np.ones(2)},
        {"version": 2},
        {"reference": 5},
        {"squares": 5},
        {"squares": {name: [1.0] for name in ("0.weight", "2.weight", "4.weight")}},
        {"reference": dict.fromkeys(("0.weight", "2.weight", "4.weight"), torch.ones(3, device="meta"))},
        {"reference": {name: w.to("meta") for name, w in WEIGHTS.items()}},
        {"reference": {name: w.to_sparse() for name, w in WEIGHTS.items()}},
    ],
)
def test_a_damaged_state_is_refused_and_the_reference_stays(tmp_path, damage):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gyroscope.watch(model, optimizer, tmp_path / "run") as monitor:
        before = monitor.state_dict()
        other = {**before, "reference": {name: t + 1 for name, t in before["reference"].items()}}
        with pytest.raises(MonitorError):
            monitor.load_state_dict({**other, **damage})
        after = monitor.state_dict()
        assert after["steps"] == before["steps"]
        assert all(torch.equal(t, after["reference"][name]) for name, t in before["reference"].items())


def test_the_default_call_makes_a_folder_under_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    one, two = gyroscope.watch(model, optimizer), gyroscope.watch(model, optimizer)
    train(model, optimizer, inputs(2))
    one.close()
    two.close()
    assert one.path != two.path
    assert {path.parent.name for path in (one.path, two.path)} == {"runs"}
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == sorted([one.path.name, two.path.name])
    assert [len(run.steps) for run in gyroscope.runs()] == [3, 3]


def test_wrapped_optimizers_are_unwrapped(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    class Wrapper:
        def __init__(self) -> None:
            self.optimizer = optimizer

    with gyroscope.watch(model, Wrapper(), tmp_path / "run") as monitor:
        train(model, optimizer, inputs(2))
    assert monitor.steps == 2


def test_layers_are_chosen_by_patterns_or_by_themselves(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    chosen = gyroscope.layers(model)[1:]
    for name, layers, found in [
        ("a", "0*", ("0.weight",)),
        ("b", ["0*", "4*"], ("0.weight", "4.weight")),
        ("c", chosen, ("2.weight", "4.weight")),
        ("d", (name for name in ["2.weight"]), ("2.weight",)),
    ]:
        with gyroscope.watch(model, optimizer, tmp_path / name, layers=layers) as monitor:
            assert monitor.layers == found


def test_jobs_that_start_in_the_same_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(import_module("gyroscope.monitor.watch"), "strftime", lambda _: "now")
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: folder_of(None, shared=False), range(40)))
    assert len({path.name for path in paths}) == 40
    assert all(path.is_dir() for path in paths)


def test_a_watch_that_fails_leaves_no_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = mlp()
    monkeypatch.setattr(Track, "measure", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gyroscope.watch(model, torch.optim.SGD(model.parameters(), 0.1))
    assert list((tmp_path / "runs").iterdir()) == []


def test_default_folders_that_cannot_be_made_are_refused_in_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("in the way")
    model = mlp()
    with pytest.raises(StoreError, match="cannot be written"):
        gyroscope.watch(model, torch.optim.SGD(model.parameters(), 0.1))


def test_a_relative_folder_is_that_of_the_call_when_the_job_changes_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gyroscope.watch(model, optimizer, "runs/first", budget=None)
    (tmp_path / "elsewhere" / "runs" / "first").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    train(model, optimizer, inputs(2))
    assert monitor.run.steps.tolist() == [0, 1, 2]
    monitor.close()
    assert monitor.path == tmp_path / "runs" / "first"
    assert (tmp_path / "runs" / "first" / "reference.pt").is_file()
    assert not list((tmp_path / "elsewhere" / "runs" / "first").iterdir())
    monkeypatch.chdir(tmp_path)
    with gyroscope.watch(model, optimizer, "runs/first", budget=None):
        train(model, optimizer, inputs(1))
    with gyroscope.load("runs/first") as run:
        assert [attempt.start_step for attempt in run.attempts] == [0, 2]


@pytest.mark.parametrize("key", ["model", "torch", "optimizers", "every", "budget", "reference_file"])
def test_meta_cannot_replace_what_a_run_remembers_itself(tmp_path, key):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(MonitorError, match=rf"got '{key}'\. Try 'my_{key}'"):
        gyroscope.watch(model, optimizer, tmp_path / "run", meta={"task": "mine", key: "mine"})
    assert not (tmp_path / "run").exists()
    assert untouched(model, optimizer)
