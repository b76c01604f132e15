import numpy as np
import pytest
from matplotlib.text import Text
from scipy.stats import spearmanr

from figures.made import run_of, written
from gyroscope.errors import FigureError, StoreError
from gyroscope.figures import compare


def runs(accuracies=(0.7, 0.9, 0.8, 0.95), rotations=(0.2, 0.5, 0.6, 0.9)):
    return [
        run_of(f"run {i}", rotation=[[0, 0], [0.5 * r, 1.5 * r]], scalars={"test_accuracy": [0.1, a], "loss": [3, 2]})
        for i, (a, r) in enumerate(zip(accuracies, rotations, strict=True))
    ]


def points(ax):
    return ax.collections[1].get_offsets()


def test_a_point_is_mean_final_rotation_against_last_accuracy():
    np.testing.assert_allclose(points(compare(runs())), [[0.2, 70], [0.5, 90], [0.6, 80], [0.9, 95]], rtol=1e-6)


def test_the_line_through_a_point_spans_its_layers():
    spans = [segment[:, 0].tolist() for segment in compare(runs()).collections[0].get_segments()]
    np.testing.assert_allclose(spans, [[0.1, 0.3], [0.25, 0.75], [0.3, 0.9], [0.45, 1.35]], rtol=1e-6)


def test_the_rank_correlation_is_spearmans():
    ax = compare(runs(), title="digits")
    expected = spearmanr([0.2, 0.5, 0.6, 0.9], [0.7, 0.9, 0.8, 0.95]).statistic
    assert ax.get_title(loc="right") == f"Spearman's ρ = {expected:+.2f}, 4 runs"
    assert ax.get_title(loc="left") == "digits"


@pytest.mark.parametrize("accuracies", [(0.7, 0.9), (0.5, 0.5, 0.5)])
def test_no_correlation_is_claimed_of_two_runs_or_of_equal_ones(accuracies):
    assert compare(runs(accuracies, range(1, len(accuracies) + 1))).get_title(loc="right") == ""


def test_other_scalars_can_be_compared_and_are_not_made_percentages():
    ax = compare(runs(), accuracy="loss")
    assert points(ax)[:, 1].tolist() == [2, 2, 2, 2]
    assert ax.get_ylabel() == "loss"


def test_points_carry_the_names_of_their_runs_where_there_is_room():
    assert [text.get_text() for text in compare(runs()).texts] == ["run 0", "run 1", "run 2", "run 3"]
    assert len(compare(runs() * 5).texts) == 0


def test_points_carry_labels_that_are_given():
    assert [text.get_text() for text in compare(runs(), labels=list("abcd")).texts] == list("abcd")


@pytest.mark.parametrize("labels", ["abcd", ["a"], [1, 2, 3, 4], 5], ids=str)
def test_labels_that_are_not_one_text_per_run_are_refused(labels):
    with pytest.raises(FigureError, match="`labels` must be a list of 4 texts, one per run"):
        compare(runs(), labels=labels)


def test_stored_runs_of_the_same_name_are_told_apart_by_their_folders(tmp_path):
    stored = [written(tmp_path / parent / "seed-0", run) for parent, run in zip("ab", runs(), strict=False)]
    assert [text.get_text() for text in compare(stored).texts] == ["a/seed-0", "b/seed-0"]


def test_names_of_runs_at_the_same_place_do_not_cover_each_other():
    ax = compare(runs([0.8] * 5, [0.5] * 5))
    ax.figure.canvas.draw()
    boxes = [Text.get_window_extent(text) for text in ax.texts]  # without the lines that lead to points
    for i, box in enumerate(boxes):
        for other in boxes[:i]:
            across = min(box.x1, other.x1) - max(box.x0, other.x0)
            up = min(box.y1, other.y1) - max(box.y0, other.y0)
            assert min(across, up) < 1  # pixel


def test_runs_are_found_in_a_folder(tmp_path):
    for run in runs():
        written(tmp_path / "sweep" / run.name, run).close()
    np.testing.assert_allclose(sorted(points(compare(tmp_path))[:, 1]), [70, 80, 90, 95])
    paths = [tmp_path / "sweep" / "run 0", str(tmp_path / "sweep" / "run 1")]
    assert len(points(compare(paths))) == 2


def test_layers_that_are_not_known_at_the_end_count_with_their_last_value():
    run = run_of(rotation=[[0.2, 0.4], [np.nan, 0.6]], scalars={"test_accuracy": [0.5]})
    np.testing.assert_allclose(points(compare([run])), [[0.4, 50]], rtol=1e-6)


def test_a_run_without_the_scalar_is_named():
    with pytest.raises(FigureError, match="'run 0' has no scalar 'top5'; its scalars are: test_accuracy, loss"):
        compare(runs(), accuracy="top5")


def test_no_runs_are_refused(tmp_path):
    with pytest.raises(FigureError, match="must be at least one run"):
        compare([])
    with pytest.raises(FigureError, match="which contains none"):
        compare(tmp_path)
    with pytest.raises(StoreError, match="There is no folder"):
        compare(tmp_path / "nowhere")
    with pytest.raises(FigureError, match="must be several runs"):
        compare(runs()[0])
