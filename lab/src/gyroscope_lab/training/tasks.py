"""The tasks of the layer-rotation papers (table 1 of both), as their authors ran them, and small ones for a CPU."""

from __future__ import annotations

from dataclasses import replace

from gyroscope_lab.data.augment import Augmentation
from gyroscope_lab.data.source import Source
from gyroscope_lab.errors import LabError
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task

_CIFAR_10 = Source("cifar-10", validation=0.1)
_CIFAR_100 = Source("cifar-100", validation=0.1)
_CNN1 = Task(
    "c10-cnn1",
    _CIFAR_10,
    "c10-cnn1",
    schedule=Schedule(epochs=100, batch=128, cuts=(0.8, 0.9, 0.97)),
    stop_at=1e-4,
    fails=(7, 0.2),
)
_DIGITS = Task("digits", Source("digits"), "digits-cnn")
# The schedule of the conditioning paper: the rate is cut at the start of the 80th and the 120th epoch.
_VERY_DEEP = Schedule(epochs=160, batch=128, cuts=(79 / 160, 119 / 160), factor=10.0, drop_last=True, restarts=True)
_ALIKE = Augmentation(per="batch", fill="reflect", rounding="uniform", half=True)

#: The tasks by name.
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _CNN1,
        replace(_CNN1, name="c10-cnn1-light", model="c10-cnn1-light"),
        Task(
            "c100-resnet",
            _CIFAR_100,
            "resnet-32",
            options=(("classes", 100), ("keras", True)),
            schedule=Schedule(epochs=100, batch=128, cuts=(0.7, 0.9, 0.97), factor=10.0),
            decayed="convolutions",
            tests="best",
            stop_at=1e-3,
            fails=(7, 0.1),
        ),
        Task(
            "tiny-cnn",
            Source("tiny-imagenet", validation=0.1),
            "tiny-cnn",
            options=(("classes", 200),),
            schedule=Schedule(epochs=80, batch=128, cuts=(0.875,)),
            tests="best",
            stop_at=1e-3,
            fails=(10, 0.2),
        ),
        Task(
            "c10-cnn2",
            _CIFAR_10,
            "c10-cnn2",
            schedule=Schedule(epochs=250, batch=128, cuts=(0.4, 0.68, 0.88), drop_last=True),
            augmentation=Augmentation(),
        ),
        Task(
            "c100-wrn",
            _CIFAR_100,
            "wrn-28-10",
            options=(("classes", 100),),
            schedule=Schedule(epochs=250, batch=128, cuts=(0.4, 0.68, 0.88), drop_last=True),
            augmentation=Augmentation(),
        ),
        Task(
            "c10-resnet110",
            _CIFAR_10,
            "resnet-110",
            options=(("keras", True),),
            schedule=Schedule(epochs=200, batch=128, cuts=(0.3, 0.6, 0.8), drop_last=True),
            augmentation=Augmentation(),
            decayed="convolutions",
            fails=(60, 0.2),
        ),
        Task(
            "mnist-mlp",
            Source("mnist", per_class=1000),
            "mlp-2x784",
            options=(
                ("batch_norm", True),
                ("affine", True),
                ("eps", 1e-3),
                ("momentum", 0.01),
                ("biases", True),
                ("init", "glorot_uniform"),
                ("inputs", 784),
            ),
            schedule=Schedule(epochs=100, batch=2048, cuts=(0.95,)),
            precision="float32",
        ),
        Task(
            "mnist-one-layer",
            Source("mnist", per_class=10),
            "mlp-11x784",
            options=(("biases", True), ("init", "glorot_uniform"), ("inputs", 784)),
            schedule=Schedule(epochs=4000, batch=128, cuts=()),
            precision="float32",
        ),
        Task(
            "c10-deep",
            Source("cifar-10", normalization="channel"),
            "resnet-56",
            schedule=_VERY_DEEP,
            augmentation=_ALIKE,
        ),
        Task(
            "c100-deep",
            Source("cifar-100", normalization="channel"),
            "resnet-56",
            options=(("classes", 100),),
            schedule=_VERY_DEEP,
            augmentation=_ALIKE,
        ),
        _DIGITS,
        Task(
            "digits-deep",
            _DIGITS.source,
            "resnet-20",
            options=(("channels", 1),),
            schedule=Schedule(epochs=60, batch=32, cuts=(0.5, 0.75), factor=10.0, drop_last=True, restarts=True),
        ),
        Task(
            "digits-resnet",
            _DIGITS.source,
            "resnet-20",
            options=(("channels", 1), ("keras", True)),
        ),
        Task(
            "digits-mlp",
            _DIGITS.source,
            "mlp-2x64",
            options=(
                ("batch_norm", True),
                ("affine", True),
                ("biases", True),
                ("init", "glorot_uniform"),
                ("inputs", 64),
            ),
            schedule=Schedule(epochs=100, batch=200, cuts=(0.95,)),
        ),
        Task(
            "digits-one-layer",
            replace(_DIGITS.source, per_class=10),
            "mlp-11x64",
            options=(("biases", True), ("init", "glorot_uniform"), ("inputs", 64)),
            schedule=Schedule(epochs=1000, batch=128, cuts=()),
        ),
    )
}


def task(name: str) -> Task:
    """Return the task called `name`.

    >>> task("c10-cnn1").schedule.milestones
    [80, 90, 97]
    >>> task("c10-cnn3")
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: The task must be one of c10-cnn1, c10-cnn1-light, ..., got 'c10-cnn3'.
    """
    if name not in TASKS:
        raise LabError(f"The task must be one of {', '.join(TASKS)}, got {name!r}.")
    return TASKS[name]
