"""A `GrowingRun` shows at any time what a `Run` that is opened then shows."""

import shutil

import numpy as np
import pytest
from runs_for_tests import LAYERS, QUANTITIES, rows, write, writer

from gyroscope.errors import StoreError
from gyroscope.store import Event, LayerInfo, QuantityInfo, Rows, Run, Scalars
from gyroscope.store import growing as module
from gyroscope.store.growing import GrowingRun

pytestmark = pytest.mark.usefixtures("journal")


def shown(run):
    """All that a run shows."""
    return {
        "layers": run.layers,
        "steps": run.steps.tolist(),
        "meta": run.meta,
        "attempts": len(run.attempts),
        "events": [(event.step, event.text) for event in run.events],
        "scalars": {name: (one.steps.tolist(), str(one.values.tolist())) for name, one in run.scalars.items()},
        "where": {name: run.where(name).tolist() for name in run.quantities},
        "series": {name: str(run.series(name).tolist()) for name in run.quantities},
        "some": {name: str(run.series(name, steps=[3, 1, 999]).tolist()) for name in run.quantities},
        "window": {name: str(run.series(name, steps=run.steps[2:]).tolist()) for name in run.quantities},
    }


@pytest.fixture
def follows(tmp_path, monkeypatch):
    """Compare the two after every flush, with values that are kept."""
    monkeypatch.setattr(module, "_FEW", 1)
    opened = []

    def compare(path=tmp_path / "run"):
        if not opened:
            opened.append(GrowingRun(path))
        opened[0].refresh()
        with Run(path) as fresh:
            assert shown(opened[0]) == shown(fresh)

    yield compare
    opened[0].close()


def test_rows_scalars_and_events_that_are_added_are_shown(tmp_path, follows):
    with writer(tmp_path / "run") as w:
        for step in range(6):
            w.put(rows(step))
            w.put(Scalars(step, {"loss": 1.0 / (step + 1)}))
            if step == 3:
                w.put(Event(step, "note", "half"))
                w.put(Scalars(step, {"accuracy": 0.5}))
                w.put(rows(step, rate=np.full((1, 3), np.nan)))
            w.flush()
            follows()
    follows()


def test_a_number_that_is_logged_late_or_again_is_shown(tmp_path, follows):
    with writer(tmp_path / "run") as w:
        for step, value in ((5, 1.0), (6, 2.0), (6, 3.0), (2, 4.0), (7, np.nan)):
            w.put(Scalars(step, {"loss": value}))
            w.put(rows(step))
            w.flush()
            if value != 3.0:  # logged again for the last step: seen with the next number
                follows()


def test_the_second_part_of_a_step_replaces_what_is_unknown(tmp_path, follows):
    layers = [LayerInfo("a", "linear", (2, 2)), LayerInfo("b", "linear", (2, 2), 1)]
    with writer(tmp_path / "run", layers=layers) as w:
        for step in range(4):
            for part in (0, 1):
                w.put(Rows(part, np.array([step]), {"rotation": np.array([[step + part]], dtype=np.float32)}))
                w.flush()
                follows()


def test_a_resumed_run_shows_its_new_history(tmp_path, follows):
    write(tmp_path / "run", rows(0, 1, 2, 3, 4), Scalars(4, {"loss": 1.0}))
    follows()
    with writer(tmp_path / "run", step=2, meta={"more": 1}) as w:
        follows()
        w.put(rows(3, 4, scale=2.0))
        w.put(Scalars(3, {"loss": 2.0}))
        w.flush()
        follows()
    follows()


def test_a_quantity_that_is_registered_later_is_shown(tmp_path, follows):
    with writer(tmp_path / "run") as w:
        w.put(rows(0, 1))
        w.flush()
        follows()
        w.add_quantities({"late": QuantityInfo("late", "1", "a number")})
        w.put(rows(1, late=np.ones((1, 3), dtype=np.float32)))
        w.flush()
        follows()


@pytest.mark.parametrize("in_place", [False, True])
def test_another_run_in_its_place_is_shown(tmp_path, follows, in_place):
    write(tmp_path / "run", rows(0, 1, 2))
    follows()
    write(tmp_path / "other", rows(*range(9), layers=2), layers=LAYERS[:2])
    if in_place:
        shutil.copyfile(tmp_path / "other" / "run.sqlite", tmp_path / "run" / "run.sqlite")
    else:
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "other").rename(tmp_path / "run")
    follows()


def test_values_beyond_the_limit_are_read_again(tmp_path, follows, monkeypatch):
    monkeypatch.setattr(module, "_KEPT", 100)
    write(tmp_path / "run", rows(*range(5)), rows(*range(5), rate=np.ones((5, 3), dtype=np.float32)))
    follows()
    with GrowingRun(tmp_path / "run") as run:
        for name in QUANTITIES:
            run.series(name)
        assert list(run._kept) == ["rate"]
        run.forget_values()
        assert run.series("rate").shape == (5, 3)


def test_only_what_was_added_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_FEW", 1)
    with writer(tmp_path / "run") as w, GrowingRun(tmp_path / "run") as run:
        w.put(rows(*range(100)))
        w.flush()
        run.refresh()
        run.series("rotation")
        asked = []
        base = Run.series

        def series(self, name, *, steps=None):
            asked.append(steps.tolist())
            return base(self, name, steps=steps)

        monkeypatch.setattr(Run, "series", series)
        w.put(rows(100, 101))
        w.flush()
        run.refresh()
        assert run.series("rotation")[-1].tolist() == [101, 102, 103]
        assert asked == [[100, 101]]


def test_a_run_that_is_gone_is_reported(tmp_path):
    write(tmp_path / "run", rows(0))
    run = GrowingRun(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(StoreError, match="There is no run"):
        run.refresh()
    run.close()
