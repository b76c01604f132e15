import pytest
import torch

from gyroscope_lab.data import Source
from gyroscope_lab.data.text import contexts, made_text, read_shakespeare, read_text
from gyroscope_lab.errors import LabError

PLAY = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n" * 9


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tinyshakespeare.txt").write_text(PLAY)
    return tmp_path


@pytest.mark.parametrize("text", [PLAY, "a", "naïve — Ω 𝄞\r\n𝄞 Ω", "zyxzyx"], ids=["play", "one", "far", "order"])
def test_each_character_is_its_place_among_the_sorted_ones(tmp_path, text):
    path = tmp_path / "text"
    path.write_bytes(text.encode())
    read = read_text(path)
    vocabulary = sorted(set(text))
    assert list(read.characters) == vocabulary
    assert read.tokens.dtype == torch.int64
    assert read.tokens.tolist() == [vocabulary.index(character) for character in text]
    assert read.written(read.tokens) == text


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("count", [1, 2, 9, 10, 17])
def test_pieces_follow_one_another_and_each_character_is_labeled_with_the_next(count, length):
    tokens = torch.randint(0, 5, (count,), generator=torch.Generator().manual_seed(0))
    x, y = contexts(tokens, length)
    pieces = []
    for start in range(0, count, length):
        if start + length < count:
            pieces.append(tokens.tolist()[start : start + length + 1])
    assert x.tolist() == [piece[:-1] for piece in pieces]
    assert y.tolist() == [piece[1:] for piece in pieces]
    assert x.shape == y.shape == (len(pieces), length)


def test_the_first_nine_tenths_are_trained_on_and_the_last_is_tested_on(folder):
    split = Source("shakespeare", context=8).load(folder)
    text = read_shakespeare(folder)
    cut = len(PLAY) * 9 // 10
    assert text.written(split.x_train) == PLAY[: len(split.x_train) * 8]
    assert cut - 8 <= len(split.x_train) * 8 < cut
    assert text.written(split.x_test) == PLAY[cut : cut + len(split.x_test) * 8]
    assert text.written(split.y_test[-1]) == PLAY[cut:][(len(split.x_test) - 1) * 8 + 1 :][:8]
    assert split.classes == len(set(PLAY))
    assert split.x_val is None
    assert split.inputs(split.x_test) is split.x_test


@pytest.mark.parametrize("seed", [0, 1])
def test_pieces_are_held_out_of_those_to_train_on(folder, seed):
    whole = Source("shakespeare", context=8).load(folder)
    split = Source("shakespeare", context=8, validation=0.1, seed=seed).load(folder)
    order = torch.randperm(len(whole.x_train), generator=torch.Generator().manual_seed(seed))
    count = round(0.1 * len(order))
    for part, expected in (("val", sorted(order[:count].tolist())), ("train", sorted(order[count:].tolist()))):
        assert torch.equal(getattr(split, f"x_{part}"), whole.x_train[expected])
        assert torch.equal(getattr(split, f"y_{part}"), whole.y_train[expected])
    assert torch.equal(split.x_test, whole.x_test)
    assert torch.equal(split.y_test, whole.y_test)


def test_a_context_is_128_characters_if_none_is_asked_for(folder):
    (folder / "tinyshakespeare.txt").write_text(PLAY * 2)
    assert Source("shakespeare").load(folder).y_train.shape[1] == 128


@pytest.mark.parametrize("place", ["tinyshakespeare.txt", "input.txt", "tinyshakespeare/input.txt"])
def test_the_file_is_found_under_both_names(tmp_path, place):
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("to be")
    assert read_shakespeare(tmp_path).characters == " beot"


def test_an_empty_folder_is_told_what_was_looked_for_and_where(tmp_path):
    says = rf"not in {tmp_path}: looked there, and in its tinyshakespeare, for tinyshakespeare\.txt and input\.txt"
    with pytest.raises(LabError, match=says):
        Source("shakespeare").load(tmp_path)


@pytest.mark.parametrize("length", [80, 89])
def test_a_text_too_short_for_a_context_is_refused(tmp_path, length):
    (tmp_path / "input.txt").write_text("x" * length)
    with pytest.raises(LabError, match=f"has {length} characters; the last tenth, to test on, is too short"):
        Source("shakespeare", context=9).load(tmp_path)


def test_a_text_just_long_enough_is_split(tmp_path):
    (tmp_path / "input.txt").write_text("x" * 91)
    split = Source("shakespeare", context=9).load(tmp_path)
    assert (len(split.x_train), len(split.x_test)) == (8, 1)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "is empty"), (b"\x1f\x8b\x08\0", "is not a text in UTF-8: .* Is it compressed, or another file")],
    ids=["empty", "gz"],
)
def test_a_file_of_something_else_is_refused(tmp_path, content, says):
    (tmp_path / "input.txt").write_bytes(content)
    with pytest.raises(LabError, match=rf"input\.txt {says}"):
        read_shakespeare(tmp_path)


def test_a_file_that_is_not_there_or_far_too_large_is_refused(tmp_path):
    with pytest.raises(LabError, match="none cannot be read: No such file or directory"):
        read_text(tmp_path / "none")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**30 + 1)
    with pytest.raises(LabError, match="large has 1,073,741,825 bytes; texts of at most 1,073,741,824 can be read"):
        read_text(tmp_path / "large")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"context": 0}, "`context` must be a whole number of characters ≥ 1, got 0"),
        ({"per_class": 3}, "`per_class` must be None for a text, which has no classes, got 3"),
        (
            {"side": 3},
            "and None for others, got 3 for shakespeare",
        ),
    ],
    ids=["context", "classes", "side"],
)
def test_what_a_text_has_not_is_refused(wrong, says):
    with pytest.raises(LabError, match=says):
        Source("shakespeare", **wrong)


def test_a_part_of_a_text_is_its_beginning(folder):
    part = Source("shakespeare", context=4, characters=100).load(folder)
    whole = read_shakespeare(folder)
    assert whole.written(part.x_train) == PLAY[: part.x_train.numel()]
    assert part.x_train.numel() + part.x_test.numel() <= 100
    assert part.classes == len(set(PLAY))


@pytest.mark.parametrize("wrong", [0, -3])
def test_a_part_without_characters_is_refused(wrong):
    with pytest.raises(LabError, match=f"`characters` must be a whole number ≥ 1 for a text, .*got {wrong} for shak"):
        Source("shakespeare", characters=wrong)


def test_images_have_no_characters():
    with pytest.raises(LabError, match=r"`characters` must be .*None for others, got 9 for digits"):
        Source("digits", characters=9)


def test_the_made_text_needs_no_files_is_always_the_same_and_can_be_learned_from():
    split = Source("made-text", context=16).load()
    assert torch.equal(split.x_train, Source("made-text", context=16).load().x_train)
    assert split.classes == 22
    text = made_text()
    assert set(text.written(text.tokens)) == set(text.characters)
    # Some characters follow others more often: less than the entropy of single characters remains.
    pairs = torch.zeros(22, 22).index_put_((text.tokens[:-1], text.tokens[1:]), torch.ones(()), accumulate=True)
    joint, alone = pairs / pairs.sum(), pairs.sum(0) / pairs.sum()
    given = -(joint * (joint / joint.sum(1, keepdim=True)).log().nan_to_num(neginf=0.0)).sum()
    assert given < 0.8 * -(alone * alone.log()).sum()
