"""Models by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import signature
from numbers import Integral, Real
from typing import Any

from torch import nn

from gyroscope_lab.errors import LabError
from gyroscope_lab.models.convolutional import c10_cnn1, c10_cnn1_light, c10_cnn2, digits_cnn, tiny_cnn, vgg
from gyroscope_lab.models.gpt import gpt
from gyroscope_lab.models.imagenet_resnet import imagenet_resnet, imagenet_resnet_lastbn
from gyroscope_lab.models.lstm import lstm
from gyroscope_lab.models.mlp import mlp
from gyroscope_lab.models.resnet import preresnet, preresnet_v1, resnet, resnet_lastbn, wrn
from gyroscope_lab.models.vit import vit

#: name -> (builder, description in one line); {fields} of a name are whole numbers, passed to the builder
MODELS: dict[str, tuple[Callable[..., nn.Module], str]] = {
    "digits-cnn": (digits_cnn, "6 convolutions and a linear classifier for 8×8 gray images, 72,208 weights"),
    "mlp-{depth}x{width}": (mlp, "linear layers and ReLUs, for 12×12 gray images unless said; batch_norm=True"),
    "c10-cnn1": (c10_cnn1, "24 convolutions in 4 stages and a linear classifier, 4,307,296 weights"),
    "c10-cnn1-light": (c10_cnn1_light, "12 convolutions in 4 stages and a linear classifier, 490,160 weights"),
    "c10-cnn2": (c10_cnn2, "13 convolutions in 5 stages and 2 linear layers, 14,977,728 weights"),
    "tiny-cnn": (tiny_cnn, "10 convolutions in 5 stages and a linear classifier, 4,812,640 weights with 200 classes"),
    "vgg-{depth}": (vgg, "a ResNet without its shortcuts; batch_norm=True"),
    "resnet-{depth}": (resnet, "residual network of 6n + 2 layers; keras=True for the rotation papers' variant"),
    "resnet-lastbn-{depth}": (resnet_lastbn, "ResNet with batch normalization before its classifier"),
    "preresnet-{depth}": (preresnet, "residual network of 6n + 2 layers with pre-activation"),
    "preresnet-v1-{depth}": (preresnet_v1, "PreResNet without the last batch normalization"),
    "imagenet-resnet-{depth}": (imagenet_resnet, "residual network of 18, 34, 50, 101 or 152 layers for ImageNet"),
    "imagenet-resnet-lastbn-{depth}": (
        imagenet_resnet_lastbn,
        "the same with batch normalization before its classifier",
    ),
    "wrn-{depth}-{width}": (wrn, "wide residual network of 6n + 4 convolutions; 28-10 has 36,461,232 weights"),
    "gpt-small": (gpt, "decoder-only transformer for characters: 4 blocks of width 128 and 4 heads, unless said"),
    "vit-small": (vit, "vision transformer: 6 blocks of width 192 and 3 heads on patches of 4×4, unless said"),
    "lstm-small": (lstm, "recurrent language model for characters: 2 LSTM layers of 128 units, unless said"),
}

# By declared type: the accepted types, NumPy's numbers included, and their description.
_KINDS: dict[str, tuple[type, str]] = {
    "bool": (bool, "True or False"),
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
}


def make(name: str, *, seed: int, **options: Any) -> nn.Module:
    """Return a freshly initialized model; equal seeds give equal weights, bit for bit.

    Args:
        name: one of `MODELS`, with numbers for the fields in braces.
        seed: the seed of the weights.
        options: further arguments of the builder of that model.

    >>> model = make("digits-cnn", seed=0)
    >>> sum(p.numel() for p in model.parameters())
    72208
    >>> sum(p.numel() for p in make("mlp-8x24", seed=0, batch_norm=True).parameters())
    7152
    """
    builder, fields = _find(name)
    accepted = list(defaults(name))
    unknown = [option for option in options if option not in accepted]
    if unknown:
        said = f"Its options are {', '.join(accepted)}." if accepted else "It has none."
        raise LabError(f"The model {name!r} has no option {', '.join(unknown)}. {said}")
    _require_kinds(name, builder, {"seed": seed} | options)
    return builder(int(seed), **fields, **options)


def defaults(name: str) -> dict[str, Any]:
    """Return the options of a model with their defaults.

    >>> defaults("digits-cnn"), defaults("resnet-20")["classes"]
    ({}, 10)
    """
    builder, fields = _find(name)
    parameters = list(signature(builder).parameters.items())[1:]
    return {option: parameter.default for option, parameter in parameters if option not in fields}


def _require_kinds(name: str, builder: Callable[..., nn.Module], given: dict[str, Any]) -> None:
    """Reject arguments of another type than declared: "no" would be true, and 1.5 classes fail in torch."""
    for argument, value in given.items():
        kind = str(signature(builder).parameters[argument].annotation)
        accepted, described = _KINDS.get(kind, (object, ""))
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind != "bool" and kind in _KINDS):
            raise LabError(f"`{argument}` of {name} must be {described}, got {value!r}.")
    if not 0 <= given["seed"] < 2**32:  # torch ignores the other bits
        raise LabError(f"`seed` of {name} must be a whole number from 0 to 2³² − 1, got {given['seed']}.")


def _find(name: str) -> tuple[Callable[..., nn.Module], dict[str, int]]:
    for known, (builder, _) in MODELS.items():
        match = re.fullmatch(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[1-9][0-9]*)", re.escape(known)), name)
        if match is not None:
            return builder, {field: int(value) for field, value in match.groupdict().items()}
    raise LabError(f"The model must be one of {', '.join(MODELS)}, got {name!r}.")
