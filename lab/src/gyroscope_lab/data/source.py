"""Datasets by name, and the choice of their examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gyroscope_lab.data.cifar import read_cifar10, read_cifar100
from gyroscope_lab.data.digits import PER_CLASS, digits
from gyroscope_lab.data.image_cache import Progress
from gyroscope_lab.data.image_folder import read_imagenet, read_tiny_imagenet
from gyroscope_lab.data.mnist import read_mnist
from gyroscope_lab.data.official import Normalization, Official
from gyroscope_lab.data.split import Split
from gyroscope_lab.data.text import Text, made_text, read_shakespeare
from gyroscope_lab.errors import LabError
from gyroscope_lab.kinds import require_kinds

_READERS: dict[str, Callable[[Path | str | None], Official]] = {
    "mnist": read_mnist,
    "cifar-10": read_cifar10,
    "cifar-100": read_cifar100,
}
# Photographs in folders, and their default side.
_PHOTOGRAPHS: dict[str, tuple[Callable[..., Official], int]] = {
    "tiny-imagenet": (read_tiny_imagenet, 64),
    "imagenet": (read_imagenet, 224),
}

# Texts, by their name.
_TEXTS: dict[str, Callable[[Path | str | None], Text]] = {
    "made-text": lambda folder: made_text(),
    "shakespeare": read_shakespeare,
}

#: The names of the datasets.
NAMES = ("digits", *_READERS, *_PHOTOGRAPHS, *_TEXTS)


@dataclass(frozen=True)
class Source:
    """A dataset and a choice of its examples; equal sources load equal examples, independent of the random state.

    The test set is always the whole published one, with two exceptions. For a text it is the last tenth. For
    scikit-learn's digits, which need no files, the training set is 20 examples per class, or `per_class`, held-out ones
    included, and the test set is all others.

    Attributes:
        name: the name of the dataset.
        validation: the share of all training examples to hold out, at random; 0.1 in the papers on rotation.
        normalization: "scalar" for one mean and one standard deviation of all training pixels, before any are held out
            or left out; "channel" for one of each per channel; "none" for pixels from 0 to 1.
        per_class: the number of training examples per class, chosen at random among those not held out; None for all.
        seed: the seed of both choices.
        side: the side of the images of Tiny ImageNet and ImageNet; None for the usual 64 and 224 pixels.
        context: the number of characters of a text that a network sees at a time. The examples of a text are pieces of
            that length, and it has no classes to choose from and no pixels to normalize.
        characters: the number of characters of a text to use, from its beginning; None for all.

    >>> split = Source("digits").load()
    >>> split.x_train.shape, split.classes
    (torch.Size([200, 1, 8, 8]), 10)
    >>> Source("minst")
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: The dataset must be one of digits, mnist, cifar-10, ..., got 'minst'.
    """

    name: str
    validation: float = 0.0
    normalization: Normalization = "scalar"
    per_class: int | None = None
    seed: int = 0
    side: int | None = None
    context: int = 128
    characters: int | None = None

    def __post_init__(self) -> None:
        require_kinds(self)
        if self.name not in NAMES:
            raise LabError(f"The dataset must be one of {', '.join(NAMES)}, got {self.name!r}.")
        if not 0 <= self.validation < 1:
            raise LabError(f"`validation` must be a share ≥ 0 and < 1, got {self.validation}.")
        if self.per_class is not None and self.per_class < 1:
            raise LabError(f"`per_class` must be a whole number ≥ 1, or None for all, got {self.per_class}.")
        if not 0 <= self.seed < 2**63:
            raise LabError(f"`seed` must be a whole number from 0 to 2⁶³ − 1, got {self.seed}.")
        if self.side is not None and (self.name not in _PHOTOGRAPHS or self.side < 1):
            names = ", ".join(_PHOTOGRAPHS)
            raise LabError(
                f"`side` must be a whole number ≥ 1 for {names}, and None for others, got {self.side} for {self.name}."
            )
        if self.context < 1:
            raise LabError(f"`context` must be a whole number of characters ≥ 1, got {self.context}.")
        if self.characters is not None and (self.characters < 1 or not self.is_text):
            said = "a whole number ≥ 1 for a text, and None for others"
            raise LabError(f"`characters` must be {said}, got {self.characters} for {self.name}.")
        if self.is_text and self.per_class is not None:
            raise LabError(f"`per_class` must be None for a text, which has no classes, got {self.per_class}.")

    @property
    def is_text(self) -> bool:
        """True if its examples are pieces of a text, where the label of a character is the next character."""
        return self.name in _TEXTS

    def load(self, folder: Path | str | None = None, *, on_progress: Progress | None = None) -> Split:
        """Return the examples, read from the published files; nothing is downloaded.

        Photographs are decoded the first time, on all cores, and kept; see `gyroscope_lab.data.image_cache`.

        Args:
            folder: the folder of the files; by default the folder that the environment variable GYROSCOPE_DATA names.
            on_progress: called with the numbers of decoded photographs and of all, if any have to be decoded.

        >>> split = Source("digits", validation=0.1).load()
        >>> len(split.x_train), len(split.x_val)
        (180, 20)
        """
        if self.name == "digits":
            return self._digits()
        if self.is_text:
            text = _TEXTS[self.name](folder)
            if self.characters is not None:
                text = replace(text, tokens=text.tokens[: self.characters])
            return text.split(context=self.context, validation=self.validation, seed=self.seed)
        return self._read(folder, on_progress).split(
            validation=self.validation,
            normalization=self.normalization,
            per_class=self.per_class,
            seed=self.seed,
        )

    def _read(self, folder: Path | str | None, on_progress: Progress | None) -> Official:
        if self.name in _PHOTOGRAPHS:
            read, side = _PHOTOGRAPHS[self.name]
            return read(folder, side=self.side or side, on_progress=on_progress)
        return _READERS[self.name](folder)

    def _digits(self) -> Split:
        per_class = PER_CLASS if self.per_class is None else self.per_class
        return digits(per_class=per_class, seed=self.seed, validation=self.validation, normalization=self.normalization)
