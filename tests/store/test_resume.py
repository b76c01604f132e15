import numpy as np
import pytest
from runs_for_tests import LAYERS, rows, write

from gyroscope.errors import StoreError
from gyroscope.store import Event, LayerInfo, Scalars, load


def test_a_resumed_run_continues_its_curves(tmp_path):
    write(tmp_path / "run", rows(0, 1, 2))
    run = load(write(tmp_path / "run", rows(3, 4), step=2))
    np.testing.assert_array_equal(run.series("rotation")[:, 0], [0, 1, 2, 3, 4])
    assert [(a.number, a.start_step) for a in run.attempts] == [(1, 0), (2, 2)]


def test_a_resumed_run_supersedes_what_came_after_its_starting_point(tmp_path):
    write(tmp_path / "run", rows(0, 5, 10, 15), Scalars(5, {"loss": 1.0}), Scalars(10, {"loss": 2.0}))
    write(tmp_path / "run", Event(12, "note", "led nowhere"), rows(11, scale=-1.0), step=10)
    run = load(write(tmp_path / "run", rows(6, scale=2.0), Scalars(6, {"loss": 3.0}), step=5))
    np.testing.assert_array_equal(run.steps, [0, 5, 6])
    np.testing.assert_array_equal(run.series("rotation")[:, 0], [0, 5, 12])
    assert run.scalars["loss"].steps.tolist() == [5, 6]
    assert run.scalars["loss"].values.tolist() == [1.0, 3.0]
    assert run.events == []


def test_at_the_starting_point_the_later_attempt_wins(tmp_path):
    write(tmp_path / "run", rows(0, 5))
    run = load(write(tmp_path / "run", rows(5, scale=2.0), step=5))
    np.testing.assert_array_equal(run.series("rotation")[:, 0], [0, 10])


def test_a_later_attempt_that_does_not_know_hides_what_an_earlier_one_knew(tmp_path):
    write(tmp_path / "run", rows(5))
    run = load(write(tmp_path / "run", rows(5, rotation=np.full((1, 3), np.nan)), step=5))
    assert len(run.where("rotation")) == 0
    assert np.isnan(run.series("rotation")).all()


def test_meta_of_a_resumed_run_is_added(tmp_path):
    write(tmp_path / "run", meta={"lr": 0.1, "seed": 1})
    assert load(write(tmp_path / "run", meta={"lr": 0.2})).meta == {"lr": 0.2, "seed": 1}


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        (LAYERS[:2], "a run of 3 layers, got 2"),
        ([LAYERS[0], LayerInfo("conv2.weight", "conv", (9, 8, 3, 3)), LAYERS[2]], r"its layer 1 is 'conv2.weight' \("),
        ([*LAYERS[:2], LayerInfo("head", "linear", (10, 16))], "got 'head' "),
        ([*LAYERS[:2], LayerInfo("head.weight", "linear", (10, 16), part=1)], "part 1"),
    ],
)
def test_other_layers_are_refused_and_nothing_is_changed(tmp_path, layers, says):
    path = write(tmp_path / "run", rows(0, 1), meta={"lr": 0.1})
    before = (path / "run.sqlite").read_bytes()
    with pytest.raises(StoreError, match=says):
        write(path, layers=layers, meta={"lr": 0.2})
    assert (path / "run.sqlite").read_bytes() == before
    write(path, rows(2), step=1)
