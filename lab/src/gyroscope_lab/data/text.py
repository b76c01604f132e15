"""Text as a sequence of characters, to predict the next one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gyroscope_lab.data.official import choose, data_folder
from gyroscope_lab.data.split import Split
from gyroscope_lab.errors import LabError

#: The share of a text, from its beginning, used for training.
TRAIN = 0.9

_NAMES = ("tinyshakespeare.txt", "input.txt")
_WITHIN = ("", "tinyshakespeare")
# No text for learning by character is larger, and each of its characters takes eight bytes.
_LARGEST = 2**30


def read_text(path: Path | str) -> Text:
    """Return the characters of a file (UTF-8), each as its index in the sorted list of those that occur.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "text.txt")
    ...     _ = path.write_text("to be or not to be")
    ...     text = read_text(path)
    >>> text.characters, text.tokens[:5]
    (' benort', tensor([6, 4, 0, 1, 2]))
    """
    path = Path(path)
    try:
        if path.stat().st_size > _LARGEST:
            raise LabError(f"{path} has {path.stat().st_size:,} bytes; texts of at most {_LARGEST:,} can be read.")
        content = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise LabError(f"{path} is not a text in UTF-8: {error}. Is it compressed, or another file?") from error
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not content:
        raise LabError(f"{path} is empty. Fetch it again.")
    # In UTF-32 each character is one number.
    codes, tokens = np.unique(np.frombuffer(content.encode("utf-32-le"), dtype="<u4"), return_inverse=True)
    return Text(str(path), "".join(map(chr, codes)), torch.from_numpy(tokens.astype(np.int64)))


def read_shakespeare(folder: Path | str | None = None) -> Text:
    """Return tinyshakespeare: 1,115,394 characters of his plays, of 65 kinds.

    Args:
        folder: a folder with `tinyshakespeare.txt`, or `input.txt` as its publisher called it, or with a folder
            `tinyshakespeare` that contains it; by default the folder that the environment variable GYROSCOPE_DATA
            names.

    >>> read_shakespeare("no/such/folder")
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: There is no folder no/such/folder to look for tinyshakespeare in. Give one that ...
    """
    root = data_folder(folder, "tinyshakespeare")
    for within in _WITHIN:
        for name in _NAMES:
            if (root / within / name).is_file():
                return read_text(root / within / name)
    raise LabError(
        f"tinyshakespeare is not in {root}: looked there, and in its {_WITHIN[-1]}, for {' and '.join(_NAMES)}. Put it "
        "there, or name the folder that has it."
    )


def made_text(characters: int = 20_000, *, seed: int = 0) -> Text:
    """Return a made-up text, for trainings without files: sentences of 40 words, some more frequent than others.

    >>> text = made_text(1000)
    >>> len(text.tokens), text.characters
    (1000, ' .abcdefghijklmnopqrst')
    """
    generator = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnopqrst"))
    words = ["".join(generator.choice(letters, size)) for size in generator.integers(2, 8, 40)]
    frequency = 1 / np.arange(1, len(words) + 1)
    sentences: list[str] = []
    while sum(map(len, sentences)) < characters:
        chosen = generator.choice(len(words), generator.integers(3, 9), p=frequency / frequency.sum())
        sentences.append(" ".join(words[one] for one in chosen) + ". ")
    known = " ." + "".join(letters)
    tokens = torch.tensor([known.index(one) for one in "".join(sentences)[:characters]])
    return Text("made text", known, tokens)


def contexts(tokens: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return consecutive pieces of `length` tokens, and for each token the one that follows it.

    Both are [N, length]. A rest that is too short for another piece is left out.

    >>> contexts(torch.arange(8), 3)
    (tensor([[0, 1, 2],
            [3, 4, 5]]), tensor([[1, 2, 3],
            [4, 5, 6]]))
    """
    count = (len(tokens) - 1) // length
    return tokens[: count * length].reshape(count, length), tokens[1 : count * length + 1].reshape(count, length)


@dataclass(frozen=True)
class Text:
    """A text as numbers.

    Attributes:
        name: the name of the text.
        characters: the characters that occur, sorted.
        tokens: the index of each character of the text among these.

    >>> Text("made", "ab", torch.tensor([0, 1, 1, 0])).written(torch.tensor([1, 0]))
    'ba'
    """

    name: str
    characters: str
    tokens: torch.Tensor

    def written(self, tokens: torch.Tensor) -> str:
        """Return the characters of tokens.

        >>> Text("made", "hi", torch.tensor([0, 1])).written(torch.tensor([0, 1, 1]))
        'hii'
        """
        return "".join(self.characters[token] for token in tokens.flatten().tolist())

    def split(self, *, context: int = 128, validation: float = 0.0, seed: int = 0) -> Split:
        """Return a split with the first nine tenths for training, and the last tenth for testing.

        Inputs and labels are [N, context]: the label of a character is the next character.

        Args:
            context: the number of characters per piece.
            validation: the share of the training pieces to hold out, at random.
            seed: the seed of that choice.

        >>> split = Text("made", "ab", torch.tensor([0, 1] * 50)).split(context=4)
        >>> split.x_train.shape, split.y_test.shape, split.classes
        (torch.Size([22, 4]), torch.Size([2, 4]), 2)
        """
        cut = int(TRAIN * len(self.tokens))
        x, y = contexts(self.tokens[:cut], context)
        x_test, y_test = contexts(self.tokens[cut:], context)
        if not len(x_test) or not len(x):
            raise LabError(
                f"{self.name} has {len(self.tokens):,} characters; the last tenth, to test on, is too short for a "
                f"context of {context:,} and the next character. Ask for a shorter context, or give a longer text."
            )
        if not validation:
            return Split(x, y, x_test, y_test, classes=len(self.characters))
        train, val = choose(
            y[:, 0], classes=len(self.characters), validation=validation, per_class=None, seed=seed, name=self.name
        )
        return Split(x[train], y[train], x_test, y_test, x[val], y[val], classes=len(self.characters))
