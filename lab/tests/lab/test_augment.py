from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyroscope_lab.data.augment import Augmentation, augment
from gyroscope_lab.errors import LabError

PAPERS = {
    "rotation": Augmentation(),
    "conditioning": Augmentation(per="batch", fill="reflect", rounding="uniform", half=True),
}


def literal(x, moves, fill):
    """Mirror, pad, crop: one image after another."""
    taken = []
    for image, (dy, dx, flip) in zip(x, moves, strict=True):
        mirrored = image[:, :, ::-1] if flip else image
        far = max(abs(int(dy)), abs(int(dx)))
        mode = "constant" if fill == "zero" else fill
        padded = np.pad(mirrored, [(0, 0), (far, far), (far, far)], mode=mode)
        height, width = image.shape[1:]
        taken.append(padded[:, far + dy : far + dy + height, far + dx : far + dx + width])
    return np.stack(taken)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@settings(deadline=None, max_examples=150)
@given(
    shape=st.tuples(*[st.integers(1, 5)] * 2, *[st.integers(1, 9)] * 2),
    moves=st.data(),
    fill=st.sampled_from(["symmetric", "reflect", "zero"]),
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.float64, torch.int64]),
    channels_last=st.booleans(),
)
def test_it_is_mirroring_padding_and_cropping(shape, moves, fill, dtype, channels_last):
    drawn = moves.draw(
        st.lists(
            st.tuples(st.integers(-20, 20), st.integers(-20, 20), st.integers(0, 1)),
            min_size=shape[0],
            max_size=shape[0],
        )
    )
    x = torch.randint(0, 256, shape, generator=generator()).to(dtype)
    given = x.to(memory_format=torch.channels_last) if channels_last else x
    found = augment(given, torch.tensor(drawn, dtype=torch.int8), fill=fill)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.numpy(), literal(x.numpy(), np.array(drawn), fill))


@pytest.mark.parametrize("fill", ["symmetric", "reflect", "zero"])
def test_half_precision_is_taken_bit_for_bit(fill):
    x = torch.randn(6, 3, 5, 7, generator=generator())
    moves = Augmentation(shift=3).draw(6, 6, generator())
    for dtype in (torch.float16, torch.bfloat16):
        expected = literal(x.to(dtype).float().numpy(), moves.numpy(), fill)
        np.testing.assert_array_equal(augment(x.to(dtype), moves, fill=fill).float().numpy(), expected)


def test_no_shift_and_no_flip_leave_the_images_as_they_are_and_the_input_alone():
    x = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8, generator=generator())
    before = x.clone()
    y = augment(x, Augmentation(shift=0, flip=False).draw(4, 2, generator()), fill="symmetric")
    assert torch.equal(y, x)
    y.zero_()
    assert torch.equal(x, before)


def test_no_images_give_no_images():
    assert augment(torch.zeros(0, 3, 8, 8), torch.zeros(0, 3, dtype=torch.int8), fill="reflect").shape == (0, 3, 8, 8)


@settings(deadline=None)
@given(
    count=st.integers(0, 60),
    batch=st.integers(1, 20),
    shift=st.integers(0, 127),
    flip=st.booleans(),
    per=st.sampled_from(["image", "batch"]),
    rounding=st.sampled_from(["uniform", "nearest"]),
)
def test_what_is_drawn_lies_within_the_shift(count, batch, shift, flip, per, rounding):
    moves = Augmentation(shift=shift, flip=flip, per=per, rounding=rounding).draw(count, batch, generator())
    assert (moves.shape, moves.dtype, moves.device.type) == ((count, 3), torch.int8, "cpu")
    assert all(abs(move) <= shift for move in moves[:, :2].flatten().tolist())
    assert set(moves[:, 2].tolist()) <= ({0, 1} if flip else {0})


@settings(deadline=None)
@given(count=st.integers(1, 60), batch=st.integers(1, 20))
def test_one_offset_a_batch_is_one_offset_a_batch_the_last_one_too(count, batch):
    moves = Augmentation(shift=100, per="batch").draw(count, batch, generator())[:, :2]
    batches = moves.split(batch)
    assert all((part == part[0]).all() for part in batches)
    if len(batches) > 3:
        assert len({tuple(part[0].tolist()) for part in batches}) > 1


@settings(deadline=None)
@given(count=st.integers(1, 60), batch=st.integers(1, 20))
def test_exactly_half_of_each_batch_is_mirrored(count, batch):
    flips = Augmentation(half=True).draw(count, batch, generator())[:, 2]
    assert [int(part.sum()) for part in flips.split(batch)] == [len(part) // 2 for part in flips.split(batch)]


def test_which_half_is_mirrored_is_random():
    flips = Augmentation(half=True).draw(40_000, 8, generator())[:, 2].reshape(-1, 8).double()
    # 5,000 batches: a standard deviation of 0.007 a place, and of two places both mirrored with probability 3/14.
    assert (flips.mean(0) - 0.5).abs().max() < 0.04
    together = flips.T @ flips / len(flips)
    assert (together - torch.eye(8) * together - 3 / 14 * (1 - torch.eye(8))).abs().max() < 0.04


@pytest.mark.parametrize(
    ("rounding", "weights"),
    [("nearest", [1, 2, 2, 2, 2, 2, 2, 2, 1]), ("uniform", [1] * 9)],
)
def test_offsets_are_as_likely_as_the_rounding_says(rounding, weights):
    moves = Augmentation(rounding=rounding).draw(64_000, 128, generator())
    expected = 64_000 * np.array(weights) / sum(weights)
    for column in (0, 1):
        counts = Counter(moves[:, column].tolist())
        assert set(counts) == set(range(-4, 5))
        found = np.array([counts[offset] for offset in range(-4, 5)])
        # χ² with 8 degrees of freedom exceeds 26.1 once in a thousand draws; this draw is fixed.
        assert ((found - expected) ** 2 / expected).sum() < 26.1


def test_flips_are_even_and_independent_of_the_offsets():
    moves = Augmentation().draw(64_000, 128, generator()).double()
    assert abs(moves[:, 2].mean() - 0.5) < 0.01
    assert torch.corrcoef(moves.T).fill_diagonal_(0).abs().max() < 0.02


@pytest.mark.parametrize("paper", PAPERS)
def test_a_restored_generator_draws_the_same_epoch_again(paper):
    drawing = generator(7)
    first = PAPERS[paper].draw(500, 128, drawing)
    state = drawing.get_state()
    second = PAPERS[paper].draw(500, 128, drawing)
    restored = torch.Generator()
    restored.set_state(state)
    assert torch.equal(PAPERS[paper].draw(500, 128, restored), second)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("paper", PAPERS)
def test_drawing_leaves_the_global_random_state_alone(paper):
    before = torch.get_rng_state()
    PAPERS[paper].draw(500, 128, generator())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_step_that_augments_compiles_into_one_graph():
    x = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8, generator=generator())
    moves = Augmentation().draw(4, 4, generator())
    compiled = torch.compile(lambda x, moves: augment(x, moves, fill="reflect"), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, moves), augment(x, moves, fill="reflect"))


@pytest.mark.gpu
@pytest.mark.parametrize("fill", ["symmetric", "reflect"])
def test_a_cuda_graph_of_it_takes_new_images_and_moves(fill):
    x = torch.randint(0, 256, (2, 16, 3, 32, 32), dtype=torch.uint8, generator=generator())
    moves = torch.stack([Augmentation().draw(16, 16, generator(seed)) for seed in (0, 1)])
    images, drawn = x[0].cuda(), moves[0].cuda()
    augment(images, drawn, fill=fill)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        taken = augment(images, drawn, fill=fill)
    images.copy_(x[1])
    drawn.copy_(moves[1])
    graph.replay()
    np.testing.assert_array_equal(taken.cpu().numpy(), literal(x[1].numpy(), moves[1].numpy(), fill))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"shift": -1}, "`shift` must be a whole number of pixels from 0 to 127, got -1"),
        ({"shift": 128}, "`shift` must be a whole number of pixels from 0 to 127, got 128"),
        ({"shift": 2.5}, r"`shift` must be a whole number of pixels from 0 to 127, got 2\.5"),
        ({"shift": True}, "`shift` must be a whole number of pixels from 0 to 127, got True"),
        ({"per": "epoch"}, "`per` must be 'image' or 'batch', got 'epoch'"),
        ({"fill": "zeros"}, "`fill` must be 'reflect' or 'symmetric' or 'zero', got 'zeros'"),
        ({"rounding": "floor"}, "`rounding` must be 'uniform' or 'nearest', got 'floor'"),
        ({"flip": False, "half": True}, "`half` must be False with flip=False: no image is mirrored"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(options, says):
    with pytest.raises(LabError, match=says):
        Augmentation(**options)


@pytest.mark.parametrize(("count", "batch"), [(-1, 4), (4, 0), (4, -2)])
def test_numbers_of_examples_that_make_no_sense_are_refused(count, batch):
    with pytest.raises(LabError, match=f"`count` must be ≥ 0 and `batch` ≥ 1, got {count} and {batch}"):
        Augmentation().draw(count, batch, generator())


@pytest.mark.parametrize(
    ("x", "moves", "says"),
    [
        (
            torch.zeros(2, 8, 8),
            torch.zeros(2, 3, dtype=torch.int8),
            r"`x` must be images \[N, C, H, W\] and `moves` w.*nd \[2, 3\] of torch\.int8",
        ),
        (torch.zeros(2, 1, 8, 8), torch.zeros(3, 3, dtype=torch.int8), r"and \[3, 3\] of torch.int8"),
        (torch.zeros(2, 1, 8, 8), torch.zeros(2, 2, dtype=torch.int8), r"and \[2, 2\] of torch.int8"),
        (torch.zeros(2, 1, 8, 8), torch.zeros(2, 3), r"and \[2, 3\] of torch.float32"),
        (
            torch.zeros(2, 1, 8, 8),
            torch.zeros(2, 3, dtype=torch.int8, device="meta"),
            "`moves` must be on the device of the images, cpu, got meta",
        ),
    ],
    ids=["one image", "too many", "no flip", "floats", "elsewhere"],
)
def test_what_is_not_images_and_moves_is_refused(x, moves, says):
    with pytest.raises(LabError, match=says):
        augment(x, moves, fill="reflect")


def test_an_unknown_fill_is_refused_where_it_is_used():
    with pytest.raises(LabError, match="`fill` must be 'reflect' or 'symmetric' or 'zero', got 'wrap'"):
        augment(torch.zeros(1, 1, 2, 2), torch.zeros(1, 3, dtype=torch.int8), fill="wrap")
