import re
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

import gyroscope
import gyroscope.cli.show as module
from figures.made import example_run, run_of, written
from gyroscope.cli.layer_table import BLOCKS, Kept, sparklines
from gyroscope.cli.show import show
from gyroscope.diagnosis.standing_out import in_words
from gyroscope.store import Event, LayerInfo, QuantityInfo, Rows, Run, Writer

NAN = np.nan
app = typer.Typer(rich_markup_mode="markdown")
app.command()(show)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return written(tmp_path_factory.mktemp("runs") / "small", example_run(steps=21))


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    run = example_run(layers=1202, steps=5, quantities=["rotation"])
    return written(tmp_path_factory.mktemp("runs") / "deep", run)


def rows(output):
    return [re.split(r"\s{2,}", line.strip()) for line in output.splitlines() if ".weight " in line]


def test_a_row_holds_a_layers_name_kind_shape_and_last_values(small):
    result = run(small.path)
    assert result.exit_code == 0, result.output
    for layer, cells in enumerate(rows(result.stdout)):
        assert cells[:3] == [small.layers[layer], "conv", "4×4×3×3"]
        last = {name: float(small.series(name)[-1, layer]) for name in small.quantities}
        assert cells[3] == f"{last['rotation']:.3f}"
        assert [float(cell) for cell in cells[4:8]] == pytest.approx(
            [last["rate_per_step"], last["weight_norm"], last["update_ratio"], last["effective_lr"]], rel=0.05
        )
        assert set(cells[8]) <= set(BLOCKS)
    assert len(rows(result.stdout)) == 3


def test_frozen_layers_are_marked(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 40), nn.Linear(40, 3))
    model[:2].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None, activations=False):
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
    shown = run(tmp_path / "run").stdout
    turned = gyroscope.load(tmp_path / "run").series("rotation")[-1, 2]
    assert [cells[3] for cells in rows(shown) if len(cells) > 6] == ["frozen", "frozen", f"{turned:.3f}"]
    assert f"At step 5 2.weight has rotated by {turned:.3g}." in shown


def test_the_header_names_the_run_its_steps_state_and_last_scalars(small):
    first, second = run(small.path).stdout.splitlines()[:2]
    assert first == "small: 3 layers, steps 0 to 20, 21 measured, ended"
    assert second == "loss 0.04213, test_accuracy 0.9"


def test_the_last_events_are_shown_and_the_others_counted(tmp_path):
    with Writer(tmp_path / "run", [LayerInfo("a", "linear", (2, 2))], {}) as writer:
        for step in range(5):
            writer.put(Event(step, "note", f"thing {step}"))
    output = run(tmp_path / "run").stdout
    assert "5 events; the last ones (gyroscope events lists all):" in output
    assert "step 4 note: thing 4" in output
    assert "thing 1" not in output


def test_of_many_layers_the_first_and_last_are_shown_and_how_to_see_all(deep):
    output = run(deep.path).stdout
    names = [cells[0] for cells in rows(output)]
    assert names == [*deep.layers[:12], *deep.layers[-12:]]
    assert "… 1,178 more" in output
    assert "Showing 24 of 1,202 layers; --layers all shows all." in output


@pytest.mark.parametrize(("asked", "count"), [("all", 1202), ("5", 5), ("2000", 1202), ("block60?.conv1.*", 2)])
def test_layers_are_chosen_by_number_or_pattern(deep, asked, count):
    assert len(rows(run(deep.path, "--layers", asked).stdout)) == count


def test_another_quantity_has_a_column_and_a_sparkline(small):
    output = run(small.path, "--quantity", "gradient_norm").stdout
    assert "gradient_norm over the steps" in output
    for layer, cells in enumerate(rows(output)):
        assert float(cells[8]) == pytest.approx(small.series("gradient_norm")[-1, layer], rel=0.01)


def test_learning_rates_are_those_of_the_last_step_taken_and_the_step_is_said(tmp_path):
    closing = {"update_ratio": [[NAN], [0.2], [0.3], [NAN]], "effective_lr": [[0.4], [0.4], [0.07], [0.0]]}
    made = run_of(steps=[0, 1, 295, 300], rotation=[[0], [0.1], [0.2], [0.3]], **closing)
    written(tmp_path / "closed", made).close()
    output = run(tmp_path / "closed").stdout
    assert rows(output)[0][3:6] == ["0.300", "0.3", "0.07"]
    assert "‖Δw‖/‖w‖ and η/‖w‖² were last measured at step 295." in output
    assert "At step 300 layer0.weight has rotated by 0.3." in output


def test_a_learning_rate_of_zero_that_a_step_was_taken_with_is_shown(tmp_path):
    made = run_of(rotation=[[0], [0.1]], update_ratio=[[NAN], [0.0]], effective_lr=[[0.4], [0.0]])
    written(tmp_path / "zero", made).close()
    output = run(tmp_path / "zero").stdout
    assert rows(output)[0][3:6] == ["0.100", "0", "0"]
    assert "last measured" not in output


def test_a_narrow_terminal_keeps_names_and_rotation_and_says_what_is_missing(small, monkeypatch):
    monkeypatch.setattr(module, "_UNBOUNDED", 70)
    output = run(small.path).stdout
    assert all(len(line) <= 70 for line in output.splitlines())
    assert [cells[0] for cells in rows(output)] == list(small.layers)
    assert "…" not in output
    assert "A wider terminal also shows" in output


@pytest.mark.parametrize("width", [60, 90, 120, 150])
def test_long_names_lose_their_beginning_and_numbers_nothing(tmp_path, monkeypatch, width):
    names = tuple(f"base_model.model.model.language_model.layers.{i}.self_attn.q_proj.lora_A.weight" for i in range(3))
    example = replace(run_of(rotation=[[0.0] * 3, [0.25] * 3]), layers=names)
    monkeypatch.setattr(module, "_UNBOUNDED", width)
    output = run(written(tmp_path / "run", example).path).stdout
    assert all(len(line) <= width for line in output.splitlines())
    for name, cells in zip(names, rows(output), strict=True):
        assert cells[0] == name if width >= 120 else cells[0][0] == "…"
        assert name.endswith(cells[0].removeprefix("…"))
        assert "0.250" in cells


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--quantity", "rotatoin"], 2, "`--quantity` must be one of rotation, "),
        (["--layers", "0"], 2, "`--layers` must be a number ≥ 1, all, or a pattern, got 0"),
        (["--layers", "zz*"], 2, "`--layers` must match at least one of the 3 layers, got zz*. One of them is block"),
    ],
)
def test_what_cannot_be_shown_is_one_line(small, arguments, code, says):
    result = run(small.path, *arguments)
    assert result.exit_code == code
    assert result.stderr.startswith(f"gyroscope: {says}")
    assert len(result.stderr.splitlines()) == 1


def test_a_run_that_is_not_there_exits_with_one(tmp_path):
    result = run(tmp_path / "nowhere")
    assert result.exit_code == 1
    assert "no run at" in result.stderr
    assert "Traceback" not in result.output


def test_a_run_without_rotation_or_without_anything_is_shown_all_the_same(tmp_path):
    written(tmp_path / "custom", run_of(custom=np.ones((2, 3)))).close()
    assert "Rotation was not measured; the run holds custom." in run(tmp_path / "custom").stdout
    Writer(tmp_path / "empty", [LayerInfo("a", "linear", (2, 2))], {}).close()
    assert "Nothing has been measured yet." in run(tmp_path / "empty").stdout


def test_following_shows_what_is_written_and_ends_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SECONDS", 0.01)
    info = {"rotation": QuantityInfo("rotation", "1", "…")}
    writer = Writer(tmp_path / "live", [LayerInfo("a.weight", "linear", (2, 2))], info)

    def write():
        time.sleep(0.2)
        writer.put(Rows(0, np.array([7]), {"rotation": np.array([[0.625]], dtype=np.float32)}))
        writer.close()

    thread = threading.Thread(target=write)
    thread.start()
    result = run(tmp_path / "live", "--follow")
    thread.join()
    assert result.exit_code == 0, result.output
    assert "0.625" in result.stdout
    assert "steps 7 to 7, 1 measured, ended" in result.stdout


def test_following_is_ended_by_an_interrupt(small, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.time, "sleep", interrupt)
    monkeypatch.setattr("gyroscope.store.Run.state", "running")
    result = run(small.path, "--follow")
    assert result.exit_code == 0
    assert len(rows(result.stdout)) == 3


def test_sparklines_share_one_scale_and_show_gaps():
    rising, flat, gap = sparklines([0, 1, 2, 3], [[0, 0, np.nan], [1, 0, np.nan], [2, 0, 4], [8, 0, np.nan]])
    assert rising == "▁▂▃█"
    assert flat == "▁▁▁▁"
    assert gap == "  ▅▅"


def test_sparklines_place_uneven_steps_and_are_logarithmic_on_request():
    assert sparklines([0, 1, 2, 100], [[0], [0], [8], [8]], width=4) == ["▃▃▃█"]
    decades = 10.0 ** -np.arange(8)[:, None]
    assert sparklines(np.arange(8), decades, log=True) == ["█▇▆▅▄▃▂▁"]
    assert sparklines(np.arange(8), decades) == ["█▁▁▁▁▁▁▁"]


def say(tmp_path, **quantities):
    run = run_of(scalars={"loss": [1.0]}, **quantities)
    return in_words(written(tmp_path / "said", run))


@pytest.mark.parametrize(
    ("quantities", "sentence"),
    [
        ({"rotation": [[0, 0], [0.5, 0.6]]}, "rotate similarly: the most rotated layer has 1.2 times"),
        ({"rotation": [[0, 0], [0.1, 0.6]]}, "rotate unequally: the most rotated layer has 6 times"),
        ({"rotation": [[0, 0], [0, 1e-9]]}, "At step 1 no layer has rotated."),
        (
            {"rotation": [[0, 0], [0.1, 0.1]], "gradient_norm": [[1, 1], [0, 0]]},
            "All 2 layers have no gradient: they do not learn.",
        ),
        ({"rotation": [[0, 0], [0, 0.6]]}, "layer0.weight is still where it started."),
        ({"rotation": [[0, 0], [np.nan, 0.6]]}, "at step 1"),
        (
            {"rotation": [[0, 0, 0], [0.1, 0.1, 0.2]], "gradient_norm": [[1, 1, 1], [0, 0, 1]]},
            "2 layers (layer0.weight, layer1.weight) have no gradient: they do not learn.",
        ),
        (
            {"rotation": [[0, 0], [0.1, 0.1]], "dying": [[0.6, 0.1], [np.nan, np.nan]]},
            "layer0.weight has more than half of its neurons never active, as of step 0.",
        ),
        (
            {"rotation": [[0] * 5, [0, 0, 0, 0, 0.5]]},
            "4 layers (layer0.weight, layer1.weight, … layer3.weight) are still where they started.",
        ),
    ],
)
def test_what_stands_out_is_said_in_words(tmp_path, quantities, sentence):
    assert sentence.lower() in say(tmp_path, **quantities).lower()


def test_the_least_and_the_most_rotated_layer_are_named(tmp_path):
    said = say(tmp_path, rotation=[[0, 0, 0], [0.2, 0.4, 0.3]])
    assert said.startswith(
        "At step 1 the layers have rotated by 0.2 (layer0.weight) to 0.4 (layer1.weight), 0.3 on average."
    )


def test_a_layer_that_is_never_known_is_said_to_be(tmp_path):
    said = say(tmp_path, rotation=[[np.nan, 0], [np.nan, 0.6]])
    assert "layer0.weight has no rotation: it is zero or not finite." in said


def test_a_layer_that_was_zero_at_first_is_not_said_to_be_zero_now(tmp_path):
    said = say(tmp_path, rotation=[[np.nan, 0, np.nan], [np.nan, 0.6, np.nan]], weight_norm=[[0, 1, 0], [3, 1, 0]])
    assert "layer0.weight has no rotation: it is measured against weights that are zero." in said
    assert "layer2.weight has no rotation: it is zero or not finite." in said


def test_a_curve_that_is_not_known_is_not_drawn_where_the_others_are_zero():
    assert sparklines([0, 1], [[0.0, NAN], [0.0, NAN]], width=2) == ["▁▁", "  "]
    assert sparklines([0, 1], [[NAN], [NAN]], width=2) == ["  "]


def test_a_page_reads_every_series_once(small, monkeypatch):
    asked, real = [], Run.series

    def series(self, name, *, steps=None):
        asked.extend([name] if steps is None else [])
        return real(self, name, steps=steps)

    monkeypatch.setattr(Run, "series", series)
    assert run(small.path).exit_code == 0
    assert "rotation" in asked
    assert len(asked) == len(set(asked))


def test_what_is_kept_is_not_changed_by_those_who_ask_and_forgotten_on_refreshing(small):
    with Kept(small.path) as kept:
        kept.series("rotation")[:] = 7
        np.testing.assert_array_equal(kept.series("rotation"), small.series("rotation"))
        np.testing.assert_array_equal(kept.series("rate", steps=small.steps), small.series("rate"))
        np.testing.assert_array_equal(kept.series("rate", steps=[3, 99]), small.series("rate", steps=[3, 99]))
        kept.refresh()
        assert not kept._kept


def test_only_a_layer_that_does_not_move_is_where_it_started(tmp_path):
    rate = [[NAN] * 4, [0.021, 1e-7, NAN, 0.1]]
    said = say(tmp_path, rotation=[[0] * 4, [2e-4, 2e-4, 2e-4, 0.02]], rate_per_step=rate)
    assert (
        "layer1.weight is still where it started. 2 layers (layer0.weight, layer2.weight) have hardly rotated." in said
    )


def test_early_on_no_layer_is_called_still(tmp_path):
    assert "still" not in say(tmp_path, rotation=[[0, 0], [1e-5, 2e-5]])


def diverged(norm, rotation, loss, **quantities):
    return run_of(scalars={"loss": loss}, weight_norm=norm, rotation=rotation, **quantities)


def test_weights_that_are_not_finite_are_said_first_and_what_follows_is_of_the_step_before(tmp_path):
    norm, rotation = [[1, 1], [2, 3], [NAN, NAN], [NAN, NAN]], [[0, 0], [0.5, 0.6], [NAN, NAN], [NAN, NAN]]
    with written(tmp_path / "nan", diverged(norm, rotation, [1, 2, NAN, NAN])) as made:
        said = in_words(made)
    assert said.startswith(
        "From step 2 on, the weights of all 2 layers are not finite; the loss is not finite either. The rest is about "
        "step 1. "
        "At step 1 the layers have rotated by 0.5 (layer0.weight) to 0.6 (layer1.weight), "
    )
    table = rows(run(tmp_path / "nan").stdout)
    assert [cells[3:5] for cells in table] == [["nan", "nan"]] * 2
    assert [cells[5] for cells in table] == ["▁▇", "▁█"]  # which ends where the layers were lost


def test_layers_that_are_lost_one_after_another_have_a_step_each(tmp_path):
    norm, rotation = [[1, 1], [2, 3], [NAN, 4], [NAN, NAN]], [[0, 0], [0.5, 0.6], [NAN, 0], [NAN, NAN]]
    said = in_words(written(tmp_path / "run", diverged(norm, rotation, [1, 2, 3, NAN])))
    assert said.startswith(
        "From step 2 on, the weights of layer0.weight are not finite, and from step 3 on those of all 2 layers; the "
        "loss is not finite from step 3 on. The rest is about step 1. At step 1 the layers have rotated by 0.5"
    )


def test_of_a_layer_that_is_lost_alone_nothing_more_is_said(tmp_path):
    norm, rotation = [[1, 1, 1], [NAN, 3, 3]], [[0, 0, 0], [NAN, 0.6, 0.4]]
    gradient = [[0, 1, 1], [NAN, 1, 1]]
    said = in_words(written(tmp_path / "run", diverged(norm, rotation, [1, 1], gradient_norm=gradient)))
    assert said.startswith(
        "From step 1 on, the weights of layer0.weight are not finite. At step 1 the other layers have rotated by 0.4 "
    )
    assert said.count("layer0") == 1


def test_a_loss_that_is_not_finite_is_said_without_its_weights(tmp_path):
    said = in_words(written(tmp_path / "run", diverged([[1], [1]], [[0], [0.1]], [NAN, 1, NAN, NAN])))
    assert said == "From step 2 on, the loss is not finite. At step 1 layer0.weight has rotated by 0.1."


def test_norms_that_have_blown_up_are_said_to_and_no_rotation_of_theirs(tmp_path):
    said = in_words(written(tmp_path / "run", diverged([[1, 2, 2], [1e21, 2, 3]], [[0] * 3, [0, 0.6, 0.4]], [1, 9])))
    assert said.startswith(
        "layer0.weight has blown up: its norm is 1e+21 times the first one. At step 1 the other layers have rotated by"
    )
    assert "started" not in said
    said = in_words(written(tmp_path / "all", diverged([[1, 2], [1e9, 2e8]], [[0, 0], [0, 0]], [1, 9])))
    assert said == "All 2 layers have blown up: the norm of layer0.weight is 1e+09 times the first one."


def test_rows_of_another_optimizers_steps_do_not_make_a_layer_lost(tmp_path):
    norm, rotation = [[1, 1], [1, NAN]], [[0, 0], [0.5, NAN]]
    said = in_words(written(tmp_path / "run", diverged(norm, rotation, [1, 1], lr=[[0.1, 0.1], [0.1, NAN]])))
    assert "finite" not in said


def test_help_explains_the_columns():
    text = run("--help").stdout
    for word in ("rotation", "‖Δw‖/‖w‖", "η/‖w‖²", "N|all|PATTERN", "--follow", "For example: gyroscope show"):
        assert word in text


def test_logits_are_not_called_neurons(tmp_path):
    names = ("hidden", "head")
    about = {name: QuantityInfo(name, "1", "") for name in ("rotation", "dying")}
    with Writer(tmp_path / "run", [LayerInfo(name, "linear", (4, 4)) for name in names], about) as writer:
        writer.put(Rows(0, np.array([0, 1, 2]), {"rotation": np.array([[0.0, 0.0], [0.1, 0.1], [0.2, 0.2]])}))
        writer.put(Rows(0, np.array([1]), {"dying": np.array([[0.2, 1.0]])}))
    with Run(tmp_path / "run") as read:
        assert "active" not in in_words(read)


def test_a_share_of_neurons_that_was_measured_earlier_is_said_to_be_of_that_step(tmp_path):
    names = ("hidden", "head")
    about = {name: QuantityInfo(name, "1", "") for name in ("rotation", "dying")}
    with Writer(tmp_path / "run", [LayerInfo(name, "linear", (4, 4)) for name in names], about) as writer:
        writer.put(Rows(0, np.array([0, 1, 2]), {"rotation": np.array([[0.0, 0.0], [0.1, 0.1], [0.2, 0.2]])}))
        writer.put(Rows(0, np.array([1]), {"dying": np.array([[0.9, 0.0]])}))
    with Run(tmp_path / "run") as read:
        assert "hidden has more than half of its neurons never active, as of step 1." in in_words(read)


@pytest.mark.parametrize("layers", ["²", "9" * 5000])
def test_odd_numbers_of_layers_are_no_traceback(small, layers):
    said = run(small, "--layers", layers)
    assert isinstance(said.exception, SystemExit | None)


def test_the_alarms_of_the_diagnosis_are_part_of_what_is_shown(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    model[2].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None):
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
    (alarm,) = gyroscope.diagnose(tmp_path / "run").alarms
    with gyroscope.load(tmp_path / "run") as run:
        assert alarm.sentence in in_words(run)
