"""The residual networks of section 5 of the conditioning paper, by architecture and depth, and their training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.task import Task

#: The architectures in the order of tables 1 and 2, and the names of their models.
ARCHITECTURES: dict[str, str] = {
    "ResNet": "resnet",
    "PreResNet": "preresnet",
    "PreResNet_v1": "preresnet-v1",
    "ResNet_LastBN": "resnet-lastbn",
}
#: The paper's depths, and those that a CPU has time for.
DEPTHS: dict[str, tuple[int, ...]] = {"smoke": (8, 14), "small": (20, 56), "full": (56, 110, 230, 1202)}
#: The recipe of all of them: SGD at 0.1 with Nesterov's momentum, and a decay of all parameters.
SGD = Recipe("SGD", rate=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)


@dataclass(frozen=True, order=True)
class Network:
    """An architecture at a depth.

    >>> Network("ResNet_LastBN", 1202).model, str(Network("ResNet_LastBN", 1202))
    ('resnet-lastbn-1202', 'ResNet_LastBN, 1202 layers')
    """

    architecture: str
    depth: int

    @property
    def model(self) -> str:
        """Its name in `gyroscope_lab.models`."""
        return f"{ARCHITECTURES[self.architecture]}-{self.depth}"

    def __str__(self) -> str:
        return f"{self.architecture}, {self.depth} layers"


def networks(architectures: Sequence[str], depths: Sequence[int]) -> list[Network]:
    """Return all of them, the shallow ones, which take the least time, first.

    >>> [one.model for one in networks(["ResNet", "PreResNet"], [56, 110])]
    ['resnet-56', 'preresnet-56', 'resnet-110', 'preresnet-110']
    """
    return [Network(architecture, depth) for depth in depths for architecture in architectures]


def network_of(task: Task) -> Network:
    """Return the network that a task of `of_network` trains.

    >>> from gyroscope_lab.training.tasks import task
    >>> network_of(replace(task("c10-deep"), model="preresnet-v1-110"))
    Network(architecture='PreResNet_v1', depth=110)
    """
    name, _, depth = task.model.rpartition("-")
    return Network(next(title for title, model in ARCHITECTURES.items() if model == name), int(depth))


def of_network(lab: Lab, name: str, network: Network) -> Task:
    """Return the task called `name`, or its stand-in, with another network.

    >>> from gyroscope_lab.training.archive import Archive
    >>> task = of_network(Lab(Archive("runs"), "full"), "c10-deep", Network("ResNet", 1202))
    >>> task.name, task.model
    ('c10-resnet-1202', 'resnet-1202')
    """
    [task] = lab.tasks([name])
    return replace(task, name=task.name.removesuffix("deep") + network.model, model=network.model)
