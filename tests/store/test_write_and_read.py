import numpy as np
import pytest
import torch
from runs_for_tests import LAYERS, QUANTITIES, rows, write, writer

from gyroscope.errors import StoreError
from gyroscope.store import Event, LayerInfo, QuantityInfo, Rows, Scalars, load
from gyroscope.store.example import write_example


def test_what_is_written_is_read(tmp_path):
    rotation = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    rotation[2, 1], rotation[3, 0] = np.nan, np.inf
    path = write(
        tmp_path / "run",
        Rows(0, np.array([0, 1, 5, 7]), {"rotation": rotation}),
        Scalars(5, {"loss": 0.25, "accuracy": 0.5}),
        Scalars(7, {"loss": float("nan")}),
        Event(5, "note", "lower α\nnow", time=3.0),
        meta={"lr": 0.1, "tags": ["a", None], "α": {"b": True}},
    )
    run = load(path)
    assert run.name == "run"
    assert run.path == path
    assert run.layer_table == tuple(LAYERS)
    assert run.layers == ("conv1.weight", "conv2.weight", "head.weight")
    assert run.quantities == {"rotation": QUANTITIES["rotation"]}
    assert run.meta == {"lr": 0.1, "tags": ["a", None], "α": {"b": True}}
    np.testing.assert_array_equal(run.steps, [0, 1, 5, 7])
    assert (run.steps.dtype, run.series("rotation").dtype) == (np.int64, np.float32)
    np.testing.assert_array_equal(run.series("rotation"), rotation)
    np.testing.assert_array_equal(run.scalars["loss"].steps, [5, 7])
    np.testing.assert_array_equal(run.scalars["loss"].values, [0.25, np.nan])
    np.testing.assert_array_equal(run.scalars["accuracy"].values, [0.5])
    assert run.events == [Event(5, "note", "lower α\nnow", time=3.0)]


def test_series_are_aligned_with_all_steps_and_nan_where_not_measured(tmp_path):
    unknown = np.full((1, 3), np.nan, dtype=np.float32)
    path = write(tmp_path / "run", rows(0, 1, 2), rows(1, rate=np.ones((1, 3))), rows(2, rate=unknown))
    run = load(path)
    np.testing.assert_array_equal(run.series("rate"), [[np.nan] * 3, [1] * 3, [np.nan] * 3])
    np.testing.assert_array_equal(run.where("rate"), [1])
    np.testing.assert_array_equal(run.where("rotation"), [0, 1, 2])


def test_a_step_at_which_nothing_is_known_is_still_a_step(tmp_path):
    run = load(write(tmp_path / "run", rows(0, 3, rotation=np.full((2, 3), np.nan))))
    np.testing.assert_array_equal(run.steps, [0, 3])
    assert len(run.where("rotation")) == 0


def test_some_steps_can_be_asked_for_in_any_order(tmp_path):
    run = load(write(tmp_path / "run", rows(*range(10))))
    np.testing.assert_array_equal(run.series("rotation", steps=[7, 2, 99, 2])[:, 0], [7, 2, np.nan, 2])
    assert run.series("rotation", steps=[]).shape == (0, 3)


@pytest.mark.parametrize("dtype", [object, np.uint64, np.int8, np.float32])
def test_steps_can_be_in_arrays_of_any_whole_numbers(tmp_path, dtype):
    run = load(write(tmp_path / "run", rows(*range(10))))
    steps = np.array([7, 2], dtype=dtype)
    np.testing.assert_array_equal(run.series("rotation", steps=steps)[:, 0], [7, 2])


@pytest.mark.parametrize(
    "steps",
    [[0.5], ["a"], [True, False], slice(0, 2), [2**70], [2**2000], [None], np.array([1, True], dtype=object), [2**63]],
)
def test_steps_that_are_no_whole_numbers_are_refused_rather_than_read_as_others(tmp_path, steps):
    run = load(write(tmp_path / "run", rows(0, 1)))
    with pytest.raises(StoreError, match="whole numbers"):
        run.series("rotation", steps=steps)


@pytest.mark.parametrize("name", [3, None, ["rotation"]])
def test_a_series_without_a_name_is_refused(tmp_path, name):
    run = load(write(tmp_path / "run", rows(0, 1)))
    with pytest.raises(StoreError, match="no series"):
        run.series(name)
    with pytest.raises(StoreError, match="no series"):
        run.where(name)


def test_layers_of_several_parts_come_back_in_forward_order(tmp_path):
    layers = [LayerInfo(name, "linear", (2, 2), part) for name, part in zip("abcd", (0, 1, 0, 1), strict=True)]
    path = write(
        tmp_path / "gan",
        Rows(0, np.array([1]), {"rotation": np.array([[1.0, 3.0]])}),
        Rows(1, np.array([1, 2]), {"rotation": np.array([[2.0, 4.0], [5.0, 6.0]])}),
        layers=layers,
    )
    run = load(path)
    np.testing.assert_array_equal(run.series("rotation"), [[1, 2, 3, 4], [np.nan, 5, np.nan, 6]])
    np.testing.assert_array_equal(run.where("rotation"), [1, 2])


@pytest.mark.parametrize("value", [0.0, -0.0, 0.1, np.inf, 1e-42])
def test_a_row_of_equal_numbers_comes_back_bit_for_bit(tmp_path, value):
    given = np.full((1, 3), value, dtype=np.float32)
    run = load(write(tmp_path / "run", rows(1, rotation=given)))
    assert run.series("rotation").tobytes() == given.tobytes()


def test_rewriting_a_step_replaces_it(tmp_path):
    path = write(tmp_path / "run", rows(1), rows(1, scale=2.0), Scalars(1, {"loss": 1.0}), Scalars(1, {"loss": 2.0}))
    run = load(path)
    np.testing.assert_array_equal(run.series("rotation"), [[2, 4, 6]])
    assert run.scalars["loss"].values.tolist() == [2.0]


def test_an_unknown_series_is_refused_with_the_names_that_are_close(tmp_path):
    run = load(write(tmp_path / "run", rows(1)))
    with pytest.raises(StoreError, match=r"no series 'rotations'. Close names are 'rotation'"):
        run.series("rotations")
    with pytest.raises(StoreError, match="no series yet"):
        load(write(tmp_path / "empty")).where("rotation")


def test_the_series_of_one_layer_are_found_by_its_name(tmp_path):
    run = load(write(tmp_path / "run", rows(0, 1), rows(2, rate=[[0.1, 0.2, 0.3]])))
    layer = run["conv2.weight"]
    np.testing.assert_array_equal(layer["rotation"], run.series("rotation")[:, 1])
    assert {name: values.shape for name, values in dict(layer).items()} == {"rotation": (3,), "rate": (3,)}
    assert "rotation" in layer
    assert repr(layer) == "LayerSeries('conv2.weight': rotation, rate)"


def test_an_unknown_layer_is_refused_with_the_names_that_are_close(tmp_path):
    run = load(write(tmp_path / "run", rows(0)))
    with pytest.raises(StoreError, match=r"no layer 'conv3\.weight'. Close names are 'conv2\.weight', 'conv1"):
        run["conv3.weight"]
    with pytest.raises(StoreError, match=r"no layer 0. Close names are 'conv1"):
        run[0]
    assert "conv3.weight" not in run


def test_ipython_completes_the_names_of_layers_and_of_what_is_known_of_them(tmp_path):
    run = load(write(tmp_path / "run", rows(0)))
    assert run._ipython_key_completions_() == ["conv1.weight", "conv2.weight", "head.weight"]
    assert run["head.weight"]._ipython_key_completions_() == ["rotation"]


def test_quantities_can_be_registered_later(tmp_path):
    with writer(tmp_path / "run") as w:
        w.put(rows(0))
        w.add_quantities({"nu": QuantityInfo("nu", "1", "‖m‖² + 1")})
        w.put(rows(1, nu=np.ones((1, 3))))
    assert load(w.path).quantities["nu"].meaning == "‖m‖² + 1"
    np.testing.assert_array_equal(load(w.path).where("nu"), [1])


def test_an_empty_run_opens(tmp_path):
    run = load(write(tmp_path / "run"))
    assert len(run.steps) == 0
    assert run.scalars == run.quantities == run.meta == {}
    assert run.events == []
    assert repr(run) == "Run('run': 3 layers, 0 steps)"


def test_a_closed_run_is_one_file_and_its_lock(tmp_path):
    path = write(tmp_path / "run", rows(1))
    with load(path) as run:
        run.series("rotation")
    assert sorted(file.name for file in path.iterdir()) == ["run.lock", "run.sqlite"]


@pytest.mark.parametrize("path", ["half a \ud83d", "a \0 byte"])
def test_paths_that_no_file_can_have_are_refused(path):
    with pytest.raises(StoreError, match="must be a valid path, got"):
        load(path)


def test_steps_and_names_without_values_are_refused(tmp_path):
    write_example(tmp_path / "run").close()
    with load(tmp_path / "run") as run:
        with pytest.raises(StoreError, match="`steps` must be some of the run's steps"):
            run.series("rotation", steps=torch.empty(2, device="meta"))
        with pytest.raises(StoreError, match="`quantity` must be one name or several"):
            run.to_csv(tmp_path / "a.csv", np.array(5))
