"""The progress shown while trials run, by a clock that the tests control."""

from io import StringIO

import pytest
from rich.console import Console

from gyroscope_lab.cli.lab_progress import LabProgress, Running, Whole
from gyroscope_lab.engine.run_one import Note
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.trial import Trial

TRIALS = [Trial(task("digits").lasting(10), Recipe("SGD", 0.1), seed) for seed in range(3)]
RESULT = Result(1.0, 0.925, loss=[2.0, 0.125], layers=["a", "b"], rotation=[[0, 0], [0.25, 0.5]], seconds=2.5)


def note(trial, epoch, loss=0.5):
    name = f"digits: {trial.recipe.name}, seed {trial.seed}"
    return Note(trial.key, name, epoch, 10, loss=loss, accuracy=0.75, rotation=0.125)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def shown(progress):
    """The current content of the terminal."""
    screen = Console(file=StringIO(), width=progress.console.width)
    screen.print(progress._progress.get_renderable())
    return [line.split() for line in screen.file.getvalue().splitlines()]


@pytest.fixture
def terminal():
    return Console(file=StringIO(), force_terminal=True, width=90)


def test_elsewhere_than_in_a_terminal_there_is_a_line_a_trial_and_nothing_else():
    file = StringIO()
    with LabProgress(Console(file=file, width=20)) as progress:
        progress.on_begin(TRIALS)
        for trial in TRIALS[:2]:
            progress.on_note(note(trial, 1))
            progress.on_done(trial, RESULT)
    numbers = "train 100.0 %, test 92.5 %, loss 0.125, mean rotation 0.375, 2.5 s"
    assert file.getvalue() == f"1/3 digits: SGD, seed 0: {numbers}\n2/3 digits: SGD, seed 1: {numbers}\n"


def test_a_training_that_ended_early_says_why():
    file = StringIO()
    early = Result.from_json({**RESULT.as_json(), "ended": "diverged: the loss is nan"})
    with LabProgress(Console(file=file)) as progress:
        progress.on_begin(TRIALS)
        progress.on_done(TRIALS[0], early)
    assert file.getvalue().endswith("s; diverged: the loss is nan\n")


def test_a_terminal_shows_each_training_under_way_with_its_numbers_and_time_left(terminal):
    clock = Clock()
    with LabProgress(terminal, clock=clock) as progress:
        progress.on_begin(TRIALS)
        assert shown(progress) == [
            ["0", "of", "3", "trainings", "epoch", "loss", "acc", "%", "rotation", "–:––", "left"]
        ]
        clock.now += 30  # until a first epoch is over, which takes long
        progress.on_note(note(TRIALS[0], 1))
        assert shown(progress)[0][-2:] == ["–:––", "left"]
        clock.now += 10
        progress.on_note(note(TRIALS[0], 3, loss=0.25))
        # Two epochs took 10 s, so that it took 25 s to start. Seven epochs are left of this training, 27 of all.
        whole, first = shown(progress)
        assert whole == ["0", "of", "3", "trainings", "epoch", "loss", "acc", "%", "rotation", "2:15", "left"]
        assert first == ["digits:", "SGD,", "seed", "0", "3/10", "0.25", "75.0", "0.125", "0:35", "left"]
        progress.on_done(TRIALS[0], RESULT)
        [whole] = shown(progress)
        # Ten epochs of 30 took 15 s.
        assert whole[:4] + whole[-2:] == ["1", "of", "3", "trainings", "0:30", "left"]


def test_while_nothing_is_trained_a_line_says_who_is_at_work(terminal):
    with LabProgress(terminal, clock=Clock(), study="rotation/fig1") as progress:
        assert shown(progress) == [["rotation/fig1:", "at", "work"]]
        progress.on_begin(TRIALS[:1])
        assert [row[:2] for row in shown(progress)] == [["0", "of"]]
        progress.on_done(TRIALS[0], RESULT)
        assert [row[:2] for row in shown(progress)] == [["rotation/fig1:", "at"], ["1", "of"]]


def test_a_wide_terminal_has_bars(terminal):
    terminal.width = 120
    with LabProgress(terminal, clock=Clock()) as progress:
        progress.on_begin(TRIALS)
        progress.on_note(note(TRIALS[0], 5))
        [_, first] = shown(progress)
    assert set(first[4]) <= set("━╸╺")


def test_the_bars_are_gone_in_the_end(terminal):
    with LabProgress(terminal) as progress:
        progress.on_begin(TRIALS)
        progress.on_note(note(TRIALS[0], 5))
    assert terminal.file.getvalue().endswith("\x1b[2K")


def test_what_runs_next_is_counted_anew(terminal):
    with LabProgress(terminal, clock=Clock()) as progress:
        progress.on_begin(TRIALS)
        progress.on_note(note(TRIALS[0], 5))  # and then it failed
        progress.on_begin(TRIALS[1:2])
        [whole] = shown(progress)
    assert whole[:4] == ["0", "of", "1", "training"]


def test_a_note_that_comes_late_is_not_shown(terminal):
    with LabProgress(terminal) as progress:
        progress.on_begin(TRIALS)
        progress.on_done(TRIALS[0], RESULT)
        progress.on_note(note(TRIALS[0], 10))
        assert len(shown(progress)) == 1


def test_what_was_done_before_a_resume_says_nothing_about_the_speed():
    whole = Whole(began=0.0)
    whole.add("resumed", weight=10.0, epochs=10)
    whole.add("new", weight=10.0, epochs=10)
    whole.note("resumed", 9, now=2.0)  # eight epochs were there: here are 12 to do
    assert whole.left(2.0) is None
    whole.note("resumed", 10, now=4.0)  # two of them took 4 s
    assert whole.left(4.0) == pytest.approx(20.0)
    whole.finish("resumed")
    assert whole.left(4.0) == pytest.approx(20.0)


def test_how_long_it_took_to_start_is_known_as_soon_as_a_training_tells():
    whole = Whole(began=0.0)
    for name in ("resumed", "new"):
        whole.add(name, weight=10.0, epochs=10)
    whole.note("resumed", 10, now=61.0)  # its last epoch, which began at 60
    whole.finish("resumed")
    for epoch in range(1, 6):
        whole.note("new", epoch, now=61.0 + epoch)
    assert whole.left(66.0) == pytest.approx(5.0, rel=0.2)


def test_trainings_of_one_epoch_are_timed_with_their_start():
    whole = Whole(began=0.0)
    for name in "abcd":
        whole.add(name, weight=1.0, epochs=1)
    for name in "abc":
        assert whole.left(9.0) is None
        whole.note(name, 1, now=9.0)
        whole.finish(name)
    assert whole.left(9.0) == pytest.approx(3.0)


def test_notes_that_come_in_a_bunch_tell_nothing_of_the_speed():
    whole = Whole(began=0.0)
    whole.add("a", weight=10.0, epochs=100)
    for epoch in range(1, 11):
        whole.note("a", epoch, now=5.0)
    assert whole.left(5.0) is None
    whole.note("a", 14, now=7.0)  # half a second each: the first began at 4.5, or before
    assert whole.left(7.0) is not None


def test_trainings_count_for_the_time_they_are_expected_to_take():
    whole = Whole(began=0.0)
    whole.add("short", weight=1.0, epochs=10)
    whole.add("long", weight=99.0, epochs=10)
    whole.finish("short")
    assert whole.share == pytest.approx(0.01)


def test_a_training_tells_its_time_from_the_second_note_on():
    running = Running(weight=1.0, epochs=4)
    running.noted(1, now=50.0)
    assert running.left(now=50.0) is None
    running.noted(2, now=53.0)
    assert running.left(now=53.0) == 6.0


def test_a_loss_that_is_no_number_can_be_shown(terminal):
    with LabProgress(terminal) as progress:
        progress.on_begin(TRIALS)
        progress.on_note(note(TRIALS[0], 1, loss=float("nan")))
        assert "nan" in shown(progress)[1]
