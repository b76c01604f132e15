"""The feedback that a layer receives, and how well it tells classes apart (appendix A.1 of the paper on speed).

The feedback of example i is g_i = ∂L_i/∂h_i, h_i the layer's output. With a_i its mean cosine distance to the feedback
of the other examples of its class, and b_i the least of its mean distances to those of another class, the silhouette

    s = (1/N) Σ_i (b_i − a_i) / max(a_i, b_i)

is 1 where classes have nothing in common, 0 where they lie on each other.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)

from gyroscope.base import write_whole
from gyroscope_lab.data.split import Split
from gyroscope_lab.errors import LabError
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.training import Training
from gyroscope_lab.training.trial import Trial


@dataclass(frozen=True)
class Course:
    """The silhouette over a training, and how that ended.

    Attributes:
        epochs: when it was measured, 0 for before training.
        silhouettes: what came out.
        result: of the training.
    """

    epochs: list[int]
    silhouettes: list[float]
    result: Result

    def write(self, path: Path) -> None:
        """Keep it in a file that is there whole or not at all."""
        content = {"epochs": self.epochs, "silhouettes": self.silhouettes, "result": self.result.as_json()}
        write_whole(path, json.dumps(content, allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> Course:
        """Read what `write` kept."""
        try:
            content = json.loads(path.read_text())
            return cls(content["epochs"], content["silhouettes"], Result.from_json(content["result"], path))
        except LabError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LabError(f"{path} cannot be read ({error}); delete it to measure again") from error


def feedback(model: nn.Sequential, place: int, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of each example's cross-entropy by the output of the module at `place`: [examples, units].

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> feedback(model, 1, torch.ones(5, 2), torch.zeros(5, dtype=torch.int64)).shape
    torch.Size([5, 3])
    """
    with torch.no_grad():
        output = model[: place + 1](x)
    output.requires_grad_(True)
    # Of the sum and not the mean, so that an example's feedback does not depend on how many there are.
    loss = F.cross_entropy(model[place + 1 :](output), y, reduction="sum")
    [gradient] = torch.autograd.grad(loss, [output])
    return gradient


def silhouette(vectors: Tensor, y: Tensor) -> float:
    """s of vectors [N, units] in classes y, by cosine distance.

    >>> vectors = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
    >>> silhouette(vectors, torch.tensor([0, 0, 1, 1])), silhouette(vectors, torch.tensor([0, 1, 0, 1]))
    (1.0, -0.5)
    """
    from sklearn.metrics import silhouette_score

    return float(silhouette_score(vectors.double().cpu().numpy(), y.cpu().numpy(), metric="cosine"))


def follow(trial: Trial, split: Split, *, every: int, samples: int, device: str = "cpu") -> Course:
    """Train, and measure the silhouette of the first layer's feedback every so many epochs, over test examples.

    A layer's output is what comes out of its ReLU: what follows it takes that, and its feedback arrives there. On a CPU
    all is done on one thread, as with every training of a laboratory.

    Args:
        trial: what is trained; its network is a perceptron with ReLUs and without batch normalization.
        split: its data.
        every: epochs from one measurement to the next.
        samples: how many test examples to look at, the first ones.
        device: what to train on.

    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.training.tasks import task
    >>> digits = task("digits-one-layer").lasting(2)
    >>> follow(Trial(digits, Recipe("SGD", 1.0, only=0)), digits.source.load(), every=1, samples=50).epochs
    [0, 1, 2]
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _follow(Training(trial, split, device=device), every, samples)
    finally:
        torch.set_num_threads(threads)


def _follow(training: Training, every: int, samples: int) -> Course:
    model = training.model
    assert isinstance(model, nn.Sequential)
    place = next(i for i, module in enumerate(model) if isinstance(module, nn.ReLU))
    x = training.split.inputs(training.split.x_test[:samples])
    y = training.split.y_test[:samples]
    epochs, found = [0], [silhouette(feedback(model, place, x, y), y)]

    def look(training: Training) -> None:
        if training.epoch % every == 0:
            epochs.append(training.epoch)
            found.append(silhouette(feedback(model, place, x, y), y))

    for _ in training.proceed(look):
        pass
    return Course(epochs, found, training.finish())
