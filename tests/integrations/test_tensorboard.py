"""What TensorBoard reads from the files that its sink writes."""

import io

import numpy as np
import pytest
from matplotlib.image import imread
from sink_runs import LAYERS, QUANTITIES, record, rotation, rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from gyroscope.integrations import TensorBoard


@pytest.fixture
def board(tmp_path):
    record(tmp_path / "run", TensorBoard(tmp_path / "board", every=1))
    return read(tmp_path / "board")


def read(folder):
    board = EventAccumulator(str(folder), size_guidance={"images": 0, "tensors": 0, "scalars": 0})
    board.Reload()
    return board


def text(board, tag):
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in board.Tensors(tag)]


def test_series_come_back_as_they_were_measured(board):
    events = board.Scalars("rotation/conv1.weight")
    assert [event.step for event in events] == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(np.float32([e.value for e in events]), [rotation(s, 0) for s in range(5)])


def test_the_names_of_layers_are_kept(board):
    series = {tag for tag in board.Tags()["scalars"] if tag.startswith("rotation/")}
    assert series == {f"rotation/{layer.name}" for layer in LAYERS}


def test_values_that_are_not_known_are_not_written(board):
    assert [event.step for event in board.Scalars("rate_per_step/conv1.weight")] == [1, 2, 3, 4]
    assert "gap" not in board.Tags()["scalars"]


def test_scalars_are_written_under_their_own_names(board):
    assert [(event.step, event.value) for event in board.Scalars("loss")] == [(4, 0.5)]
    assert [(event.step, event.value) for event in board.Scalars("train/accuracy")] == [(4, 0.75)]


def test_events_and_what_the_run_is_are_written_as_text(board):
    assert text(board, "gyroscope/note/text_summary") == [(2, "the rate was lowered")]
    ((step, meta),) = text(board, "gyroscope/meta/text_summary")
    assert (step, '"model": "small"' in meta) == (0, True)


def test_the_heatmap_is_an_image_at_the_last_step(board):
    (image,) = board.Images("gyroscope/rotation")
    assert image.step == 4
    pixels = imread(io.BytesIO(image.encoded_image_string))
    assert pixels.shape[:2] == (image.height, image.width)
    assert pixels.std() > 0.05


def test_a_resumed_run_replaces_what_came_after_its_start(tmp_path):
    record(tmp_path / "run", TensorBoard(tmp_path / "board", every=1), last=6)
    record(tmp_path / "run", TensorBoard(tmp_path / "board", every=1), first=3, last=8)
    steps = [event.step for event in read(tmp_path / "board").Scalars("rotation/conv1.weight")]
    assert steps == list(range(8))


def test_a_writer_of_yours_is_used_and_stays_open(tmp_path):
    with SummaryWriter(str(tmp_path / "mine")) as writer:
        record(tmp_path / "run", TensorBoard(writer=writer, every=1))
        writer.add_scalar("mine", 3.0, 9)
    board = read(tmp_path / "mine")
    assert [event.step for event in board.Scalars("rotation/critic.weight")] == [0, 1, 2, 3, 4]
    assert [event.step for event in board.Scalars("mine")] == [9]
    assert len(list((tmp_path / "mine").iterdir())) == 1


def test_a_writer_of_yours_that_you_closed_is_opened_again_by_itself(tmp_path):
    writer = SummaryWriter(str(tmp_path / "mine"))
    writer.close()
    record(tmp_path / "run", TensorBoard(writer=writer, every=1))
    writer.close()
    assert [event.step for event in read(tmp_path / "mine").Scalars("loss")] == [4]


def test_anything_with_the_methods_of_a_summary_writer_will_do():
    class Other:
        def __init__(self):
            self.got = []

        def add_scalar(self, tag, value, step):
            self.got.append((tag, step))

    other = Other()
    sink = TensorBoard(writer=other, quantities=["rotation"])
    sink.open(LAYERS, QUANTITIES, {})
    sink.write(rows(1, 2, part=1))
    assert other.got == [("rotation/critic.weight", 1)]


def test_a_run_that_recorded_nothing_leaves_no_files(tmp_path):
    sink = TensorBoard(tmp_path / "board")
    sink.open(LAYERS, QUANTITIES, {})
    sink.end(None, 0, None)
    assert not (tmp_path / "board").exists()
