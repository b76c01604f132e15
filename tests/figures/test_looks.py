import pytest

from gyroscope.figures.drawing import own_axes
from gyroscope.figures.log_axis import log_ticks, plain, power
from gyroscope.figures.looks import frame, short_names, spread, stride
from gyroscope.store.labels import look_of


def test_a_right_angle_is_marked_where_the_axis_goes_beyond_it():
    ax = own_axes()
    frame(ax, look_of("rotation"), [0.0, 1.4])
    assert [line.get_ydata() for line in ax.lines] == [[1, 1]]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.02, 0.7, ["0.02", "0.05", "0.1", "0.2", "0.5"]),
        (1e-6, 1e-2, ["$10^{-6}$", "$10^{-5}$", "$10^{-4}$", "$10^{-3}$", "$10^{-2}$"]),
        (0.9, 2e4, ["1", "10", "100", "1,000", "10,000"]),
    ],
)
def test_logarithmic_axes_have_round_numbers_written_one_way(low, high, ticks):
    ax = own_axes()
    ax.set_yscale("log")
    ax.set_ylim(low, high)
    log_ticks(ax.yaxis, low, high)
    ax.figure.canvas.draw()
    inside = zip(ax.get_yticks(), ax.get_yticklabels(), strict=True)
    assert [label.get_text() for tick, label in inside if low <= tick <= high] == ticks


def test_numbers_in_full_and_as_powers():
    assert [plain(value) for value in (0.002, 1, 5000)] == ["0.002", "1", "5,000"]
    assert power(5e-7) == r"$5{\times}10^{-7}$"


def test_no_names_are_short():
    assert short_names([]) == []


def test_names_that_differ_in_the_middle_alone_stay_apart():
    blocks = [f"transformer.encoder.layers.{i}.attention.projection.weight" for i in range(3)]
    assert short_names(blocks) == ["…0…", "…1…", "…2…"]
    assert len(set(short_names([*blocks, "transformer.head.weight"]))) == 4
    assert len(set(short_names([*blocks, "head.weight"], longest=18))) == 4
    mixed = [f"transformer.encoder.layers.{i}.{part}.projection" for i in range(2) for part in ("key", "value")]
    assert short_names(mixed, longest=20) == ["…0.key…", "…0.value…", "…1.key…", "…1.value…"]


def test_names_lose_what_they_share_and_then_their_first_parts():
    assert short_names(["a.weight", "b.weight"]) == ["a", "b"]
    assert short_names(["a.weight", "b.weight_ih"]) == ["a.weight", "b.weight_ih"]
    assert short_names(["transformer.encoder.layer.10.attention.query"], longest=20) == ["…10.attention.query"]
    assert short_names(["a" * 15 + "b" * 15], longest=20) == ["a" * 10 + "…" + "b" * 9]


def test_layers_of_a_transformer_keep_their_number_and_their_own_name():
    parts = ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight")
    blocks = [f"encoder.layers.{i}.{part}" for i in (0, 11) for part in parts]
    own = ("…in_proj_weight", "…out_proj", ".linear1")
    assert short_names(["emb.weight", *blocks, "head.weight"]) == [
        "emb.weight", *(f"…{i}{name}" for i in (0, 11) for name in own), "head.weight"
    ]  # fmt: skip


def test_labels_are_thinned_evenly():
    assert stride(34, 12) == list(range(0, 34, 3))
    assert stride(3, 12) == [0, 1, 2]
    assert spread(1202, 3) == [0, 600, 1201]
