"""The parameter sets that steps are timed on: the weights of three networks, as shapes."""

from __future__ import annotations

Shape = tuple[int, ...]


def gpt2() -> list[Shape]:
    """GPT-2 124M: two embeddings and twelve blocks of four matrices; the head is tied to the first embedding."""
    d = 768
    block = [(d, 3 * d), (d, d), (d, 4 * d), (4 * d, d)]
    return [(50257, d), (1024, d), *(shape for _ in range(12) for shape in block)]


def resnet50() -> list[Shape]:
    """ResNet-50 for ImageNet: 53 convolutions and the classifier."""
    shapes: list[Shape] = [(64, 3, 7, 7)]
    width = 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(planes, width, 1, 1), (planes, planes, 3, 3), (4 * planes, planes, 1, 1)]
            if block == 0:
                shapes.append((4 * planes, width, 1, 1))
            width = 4 * planes
    return [*shapes, (1000, 2048)]


def resnet1202() -> list[Shape]:
    """ResNet-1202 for CIFAR with identity shortcuts: 1,201 convolutions and the classifier."""
    shapes: list[Shape] = [(16, 3, 3, 3)]
    width = 16
    for planes in (16, 32, 64):
        for _ in range(200):
            shapes += [(planes, width, 3, 3), (planes, planes, 3, 3)]
            width = planes
    return [*shapes, (10, 64)]


SETS = {"gpt2-124m": gpt2, "resnet-50": resnet50, "resnet-1202": resnet1202}
