"""The line of progress: tqdm's own, with what the monitor has recorded."""

import io
import re
import sys

import numpy as np
import pytest
import torch

import gyroscope
from gyroscope.errors import MissingExtraError, MonitorError
from gyroscope.monitor import progress
from gyroscope.store import Event, LayerInfo, QuantityInfo, Rows, Scalars, Writer
from gyroscope.store.writer import Latest


@pytest.fixture
def training():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model, optimizer, monitor=None):
    loss = model(torch.ones(16, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if monitor is not None:
        monitor.log(loss=loss)
    return loss.item()


def drawn(file):
    """The lines as they were drawn, one over the other."""
    return [line for line in re.split(r"[\r\n]+", file.getvalue()) if line.strip()]


def test_the_line_shows_the_step_the_loss_the_mean_rotation_and_the_findings(tmp_path, training):
    file = io.StringIO()
    with gyroscope.watch(*training, tmp_path / "run", diagnose=False) as monitor:
        line = monitor.progress(range(20), file=file, desc="epoch 1", ncols=200)
        assert len(line) == 20
        seen = []
        for i in line:
            seen.append(i)
            loss = step(*training, monitor)
            if i == 10:
                monitor._chronicle.event("finding", "serious: made up")
            monitor.flush()  # so that the last drawing knows of the last step
    assert seen == list(range(20))
    with gyroscope.load(tmp_path / "run") as run:
        rotation = run.series("rotation")[-1].mean()
    assert drawn(file)[-1].startswith("epoch 1: 100%")
    assert drawn(file)[-1].rstrip("]").endswith(f"step 20, loss {loss:.3g}, rotation {rotation:.3g}, 1 finding")


def test_it_is_drawn_a_few_times_per_second_at_most(tmp_path, training, monkeypatch):
    asked = []
    monkeypatch.setattr(progress, "_state", lambda monitor: str(asked.append(None)))
    with gyroscope.watch(*training, tmp_path / "run") as monitor:
        line = monitor.progress(range(1000), file=io.StringIO())
        now = line.start_t = line.last_print_t = 0.0
        line._time = lambda: now
        for _ in line:
            now += 0.01  # ten seconds in all
    assert 10 <= len(asked) <= 43


def test_options_are_those_of_tqdm_and_its_own_text_stays(tmp_path, training):
    file = io.StringIO()
    with gyroscope.watch(*training, tmp_path / "run") as monitor:
        line = monitor.progress([1, 2], file=file, leave=True, unit="batch")
        line.set_postfix_str("mine")
        for _ in line:
            step(*training, monitor)
        monitor.flush()
    assert drawn(file)[-1].rstrip("]").endswith(", mine")
    assert "batch" in drawn(file)[-1]


def test_leaving_the_loop_leaves_a_finished_line_and_changes_no_training(tmp_path, training):
    model, optimizer = training
    before = [p.detach().clone() for p in model.parameters()]
    with gyroscope.watch(model, optimizer, tmp_path / "run") as monitor:
        for i in monitor.progress(range(100), file=io.StringIO()):
            step(model, optimizer)
            if i == 3:
                break
    watched = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p, value in zip(model.parameters(), before, strict=True):
            p.copy_(value)
    for _ in range(4):
        step(model, optimizer)
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), watched, strict=True))


def test_a_monitor_that_has_stopped_says_so(tmp_path, training):
    file = io.StringIO()
    with gyroscope.watch(*training, tmp_path / "run") as monitor:
        monitor.error = RuntimeError("made up")
        for _ in monitor.progress([1], file=file):
            pass
    assert "recording has stopped" in drawn(file)[-1]


def test_ranks_that_do_not_record_show_no_line(tmp_path, training, monkeypatch):
    monkeypatch.setattr(gyroscope.monitor.resume, "rank", lambda: 1)
    file = io.StringIO()
    with gyroscope.watch(*training, tmp_path / "run") as monitor:
        assert list(monitor.progress([1, 2], file=file)) == [1, 2]
    assert file.getvalue() == ""


def test_what_cannot_be_looped_over_is_refused(tmp_path, training):
    said = r"`iterable` must be something to loop over, got a int. Try your data loader"
    with gyroscope.watch(*training, tmp_path / "run") as monitor, pytest.raises(MonitorError, match=said):
        monitor.progress(3)


def test_without_tqdm_the_extra_is_named(tmp_path, training, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "tqdm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    said = r"needs tqdm.*pip install 'gyroscope\[progress\]'"
    with gyroscope.watch(*training, tmp_path / "run") as monitor, pytest.raises(MissingExtraError, match=said):
        monitor.progress([1])


def test_a_resumed_run_counts_the_findings_it_still_shows(tmp_path, training):
    path, about = tmp_path / "run", {"rotation": QuantityInfo("rotation", "1", "")}
    layers = [LayerInfo(name, "linear", (2, 2), part) for part, name in enumerate("ab")]
    with Writer(path, layers, about) as writer:
        assert writer.latest == Latest()
        for at in (5, 20):
            writer.put(Event(at, "finding", "serious: made up"))
        writer.put(Scalars(20, {"loss": 1.0}))
        writer.flush()
        assert (writer.latest.scalars, writer.latest.events) == ({"loss": 1.0}, {"finding": 2})
    with Writer(path, layers, about, step=10) as writer:
        assert progress.said(writer.latest) == ["1 finding"]
        writer.put(Rows(0, np.array([11, 12]), {"rotation": np.array([[0.1], [0.2]])}))
        writer.put(Rows(1, np.array([11]), {"rotation": np.array([[0.6]])}))
        writer.put(Event(12, "finding", "warning: made up"))
        writer.flush()
        assert progress.said(writer.latest) == ["rotation 0.4", "2 findings"]


def test_what_was_not_committed_is_not_shown(tmp_path):
    with Writer(tmp_path / "run", [LayerInfo("a", "linear", (2, 2))], {}, tick=600) as writer:
        writer.put(Scalars(1, {"loss": 1.0}))
        assert writer.latest.scalars == {}
        writer.flush()
        assert writer.latest.scalars == {"loss": 1.0}


def test_what_is_shown_is_in_host_memory(tmp_path, training):
    with gyroscope.watch(*training, tmp_path / "run") as monitor:
        for _ in monitor.progress(range(3), file=io.StringIO()):
            step(*training, monitor)
        monitor.flush()
        latest = monitor._chronicle.recorder.writer.latest
    assert {type(value) for value in latest.rows.values()} == {np.ndarray}
    assert {type(value) for value in latest.scalars.values()} == {float}


def test_a_data_loader_is_begun_once(tmp_path, training):
    class Loader:
        begun = 0

        def __len__(self):
            return 3

        def __iter__(self):
            self.begun += 1
            return iter(range(3))

    loader = Loader()
    with gyroscope.watch(*training, tmp_path / "run") as monitor:
        line = monitor.progress(loader, file=io.StringIO())
        assert loader.begun == 0
        assert list(line) == [0, 1, 2]
    assert loader.begun == 1
