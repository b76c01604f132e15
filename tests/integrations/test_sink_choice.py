"""Which layers, quantities and steps are mirrored, under which names, whatever the tool."""

import logging
import sys

import numpy as np
import pytest
from sink_runs import LAYERS, NAN, QUANTITIES, record, rotation, rows

from gyroscope.errors import LayerError, MissingExtraError, MonitorError
from gyroscope.integrations import Mirror, MLflow, TensorBoard, Trackio, Wandb
from gyroscope.integrations.mirror import Names, imported, one_part
from gyroscope.store import Event, LayerInfo, Rows, Scalars, load


class Kept(Mirror):
    """Keeps what a tool would be given."""

    def begin(self, meta):
        self.got, self.events, self.ended = [], [], None

    def numbers(self, step, values):
        self.got.append((step, values))

    def event(self, event):
        self.events.append(event)

    def end(self, run, step, picture):
        self.ended = (step, picture)

    def steps(self, tag):
        return [step for step, values in self.got if tag in values]


def opened(of=LAYERS, **options):
    sink = Kept(**options)
    sink.open(of, QUANTITIES, {})
    return sink


def test_a_series_is_one_number_a_layer_and_step(tmp_path):
    sink = Kept(every=1)
    record(tmp_path / "run", sink)
    assert sink.steps("rotation/conv1.weight") == [0, 1, 2, 3, 4]
    values = {tag: value for _, row in sink.got for tag, value in row.items()}
    assert values["rotation/critic.weight"] == rotation(4, 2)


def test_what_is_not_known_is_not_mirrored(tmp_path):
    sink = Kept(every=1)
    record(tmp_path / "run", sink)
    assert sink.steps("rate_per_step/conv1.weight") == [1, 2, 3, 4]
    assert sink.steps("loss") == [4]
    assert not sink.steps("gap")


def test_one_unknown_layer_does_not_hide_the_others():
    sink = opened(quantities=["rotation"])
    sink.write(Rows(0, np.array([3]), {"rotation": np.array([[NAN, 0.5]], np.float32)}))
    assert sink.got == [(3, {"rotation/blocks_1_attn.weight": 0.5})]


def test_infinity_is_mirrored_as_it_tells_of_divergence():
    sink = opened()
    sink.write(Scalars(1, {"loss": float("inf")}))
    assert sink.got == [(1, {"loss": float("inf")})]


def test_a_few_quantities_are_mirrored_unless_all_are_asked_for(tmp_path):
    few, everything = Kept(), Kept(quantities=None)
    record(tmp_path / "few", few)
    record(tmp_path / "all", everything)
    assert not few.steps("alignment/conv1.weight")
    assert everything.steps("alignment/conv1.weight") == [0, 1, 2, 3, 4]


def test_layers_are_chosen_by_patterns():
    sink = opened(layers=["conv*", "critic*"], quantities=["rotation"])
    for part in (0, 1):
        sink.write(rows(3, 4, part))
    found = {tag: value for _, row in sink.got for tag, value in row.items()}
    assert found == {"rotation/conv1.weight": rotation(3, 0), "rotation/critic.weight": rotation(3, 2)}


def test_a_pattern_that_matches_no_layer_is_refused_with_close_names():
    with pytest.raises(LayerError, match=r"got 'conv2\.weight'. Close names are conv1\.weight"):
        opened(layers="conv2.weight")


def test_mirrored_steps_are_every_so_many_apart_and_the_last_one(tmp_path):
    sink = Kept(every=4)
    record(tmp_path / "run", sink, last=11)
    assert sink.steps("rotation/conv1.weight") == [0, 4, 8, 10]
    assert sink.steps("rotation/critic.weight") == [0, 4, 8, 10]


def test_thinning_goes_by_distance_where_a_monitor_measures_at_other_steps():
    sink = opened(every=4, quantities=["rotation"])
    for step in (0, 3, 6, 9, 12, 15):
        sink.write(rows(step, step + 1))
    assert sink.steps("rotation/conv1.weight") == [0, 6, 12]


def test_a_quantity_that_is_sampled_between_mirrored_steps_is_not_lost():
    sink = opened(every=4, quantities=None)
    for step in range(12):
        sampled = ("alignment",) if step in (5, 10) else ()
        sink.write(rows(step, step + 1, quantities=("rotation", *sampled)))
    assert sink.steps("rotation/conv1.weight") == [0, 4, 8]
    assert sink.steps("alignment/conv1.weight") == [5, 10]


def test_a_large_network_is_thinned_to_a_hundred_numbers_a_step():
    layers = [LayerInfo(f"layer{i}.weight", "conv", (1,)) for i in range(1202)]
    sink = opened(of=layers)
    names = ("rotation", "rate_per_step", "weight_norm")
    for step in range(100):
        sink.write(Rows(0, np.array([step]), {name: np.zeros((1, 1202), np.float32) for name in names}))
    assert sum(len(row) for _, row in sink.got) == 3 * 3 * 1202
    assert sink.steps("rotation/layer0.weight") == [0, 37, 74]


def test_different_layers_keep_different_names_that_do_not_depend_on_when_they_are_asked_for():
    names = Names(one_part)
    given = ["a/b", "a:b", "a_b", "a_b_2", "é", "ü", "." * 2, 300 * "x" + "1", 300 * "x" + "2"]
    safe = [names(name) for name in given]
    assert len(set(safe)) == len(given)
    assert [names(name) for name in reversed(given)] == safe[::-1]


def test_the_heatmap_is_drawn_at_the_end(tmp_path):
    sink = Kept()
    record(tmp_path / "run", sink)
    step, picture = sink.ended
    assert step == 4
    assert picture.ndim == 3
    assert picture.dtype == np.uint8
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 10


def test_without_matplotlib_the_heatmap_is_left_out_with_a_line_in_the_log(tmp_path, monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, "gyroscope.figures", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    sink = Kept()
    with caplog.at_level(logging.INFO, "gyroscope"):
        record(tmp_path / "run", sink)
    assert sink.ended == (4, None)
    assert "The rotation heatmap is left out" in caplog.text


def test_a_run_without_rotation_ends_without_a_heatmap(tmp_path, caplog):
    sink = opened()
    sink.write(rows(0, 2, quantities=("weight_norm",)))
    record(tmp_path / "run", Kept())
    with load(tmp_path / "run") as run, caplog.at_level(logging.INFO, "gyroscope"):
        without = type("Without", (), {"quantities": {}, "layers": run.layers, "steps": run.steps, "events": []})()
        sink.close(without)
    assert sink.ended == (1, None)


def test_a_quantity_that_was_never_recorded_is_told(tmp_path, caplog):
    record(tmp_path / "run", Kept(quantities=["rotation", "rotaton"]))
    assert "Kept: not mirrored because never recorded: rotaton" in caplog.text


def test_events_reach_the_tool(tmp_path):
    sink = Kept()
    record(tmp_path / "run", sink)
    assert ("note", "the rate was lowered", 2) in [(e.kind, e.text, e.step) for e in sink.events]


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2"])
def test_a_distance_that_is_no_number_of_steps_is_refused(every):
    with pytest.raises(MonitorError, match="`every` must be a whole number of steps"):
        Kept(every=every)


@pytest.mark.parametrize("name", ["quantities", "layers"])
@pytest.mark.parametrize("given", [5, [5], object()], ids=["number", "list of numbers", "object"])
def test_what_are_no_names_is_refused(name, given):
    with pytest.raises(MonitorError, match=f"`{name}` must be a list of names, got "):
        Kept(**{name: given})


def test_one_quantity_as_a_string_is_refused():
    with pytest.raises(MonitorError, match=r"\['rotation'\]"):
        Kept(quantities="rotation")


@pytest.mark.parametrize(
    ("make", "module", "extra"),
    [
        (lambda: TensorBoard("board"), "torch.utils.tensorboard", "tensorboard"),
        (lambda: Wandb("project"), "wandb", "wandb"),
        (lambda: MLflow("experiment"), "mlflow", "mlflow"),
        (lambda: Trackio("project"), "trackio", "trackio"),
    ],
)
def test_a_tool_that_is_not_installed_is_told_when_its_sink_is_made(make, module, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'gyroscope\[{extra}\]'"):
        make()


def test_a_folder_with_the_name_of_a_tool_is_not_taken_for_it(tmp_path, monkeypatch):
    (tmp_path / "leftover_runs").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtraError, match="leftover_runs is a folder, not the package"):
        imported("leftover_runs", sink="Leftover", extra="leftover")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Wandb("project", run=object()),
        lambda: MLflow("experiment", run="0123"),
        lambda: Trackio("project", run=object()),
        lambda: Trackio(),
        lambda: Trackio(run=object(), name="mine"),
    ],
)
def test_a_run_and_what_to_make_one_of_are_not_both_accepted(make):
    with pytest.raises(MonitorError, match=r"got both|must be left out"):
        make()


class _Tool:
    """Stands in for a tool's module and its objects: it keeps the calls that are made of it."""

    __spec__ = None

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def called(*arguments, **options):
            self.calls.append((name, arguments, options))
            return self

        return called


def test_a_finding_becomes_an_alert_or_a_tag(monkeypatch):
    wandb, client = _Tool(), _Tool()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    sink = Wandb(run=wandb)
    sink.open(LAYERS, QUANTITIES, {})
    sink.write(Event(7, "finding", "serious: No layer gets a gradient."))
    sink.write(Event(8, "note", "a note"))
    told = {"title": "Gyroscope, step 7", "text": "serious: No layer gets a gradient.", "level": "ERROR"}
    assert [options for name, _, options in wandb.calls if name == "alert"] == [told]
    mlflow = _Tool()
    mlflow.entities, mlflow.MlflowClient = _Tool(), lambda **_: client
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    sink = MLflow(run="run-1")
    sink.open(LAYERS, QUANTITIES, {})
    sink.write(Event(7, "finding", "warning: The loss is at chance."))
    assert ("set_tag", ("run-1", "gyroscope.finding.1", "7: warning: The loss is at chance."), {}) in client.calls
