"""What a type checker must know of the public names, some of which are functions in files of the same name.

`make types` reads this by itself, since together with all of src it would not notice; nothing runs it.
"""

from pathlib import Path
from typing import assert_type

from torch import nn, optim

import gyroscope
from gyroscope.conditioning import Spectrum
from gyroscope.control import KFAC
from gyroscope.diagnosis import Explanation, stalled
from gyroscope.theory import Invariance


def use(model: nn.Module, optimizer: optim.Optimizer, run: gyroscope.Run) -> None:
    assert_type(gyroscope.watch(model, optimizer, "run"), gyroscope.Monitor)
    assert_type(gyroscope.explain(run), Explanation)
    assert_type(gyroscope.invariance(model, nn.CrossEntropyLoss(), None), Invariance)
    assert_type(gyroscope.condition(model, nn.CrossEntropyLoss(), None), gyroscope.Conditioning)
    assert_type(gyroscope.last_norm(model).features, int)
    assert_type(gyroscope.layers(model), list[gyroscope.Layer])
    assert_type(gyroscope.Layca(optimizer, model), gyroscope.Layca)
    assert_type(gyroscope.report(run, "report.html"), Path)
    assert_type(gyroscope.steer(model, "sgd", rate=0.1), gyroscope.control.Steered)
    assert_type(gyroscope.figures.save.__name__, str)
    names = (Spectrum, KFAC, stalled)  # once loaded, these rooms do not hide the functions above
    assert names
