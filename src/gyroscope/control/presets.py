"""The defaults of `gyroscope.steer`, one row per name, with the evidence for each number next to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from gyroscope.base.accepted import real
from gyroscope.errors import ControlError

Norms = Literal["learned", "held"]


@dataclass(frozen=True)
class Preset:
    """The defaults of `steer` under one name.

    Attributes:
        inner: the class of the inner optimizer, in `torch.optim`.
        rate: ρ.
        options: options of the inner optimizer.
        project: whether operation 1 is performed; without it, this is Hyperball.
        others_lr: the learning rate of parameters that are stepped plainly, by AdamW, in networks whose head has up to
            `HEAD_INPUTS` inputs.
        norms: "learned" or "held".
        falls: the power of n/`HEAD_INPUTS` by which ρ is lower, if the head has n > `HEAD_INPUTS` inputs.
    """

    inner: str
    rate: float
    options: Mapping[str, Any] = field(default_factory=dict)
    project: bool = True
    others_lr: float = 1e-2
    norms: Norms = "learned"
    falls: float = 0.0


# Evidence: benchmarks/results/steering_cpu.json, made by benchmarks/steering.py on one thread of a CPU. `gpt` is a
# character GPT (3 blocks, width 64, tied head, 500 steps, validation loss; AdamW's best of five settings is 2.285),
# `longer` the same for 1,500 steps (AdamW's best of five 1.959), `digits` a small CNN (test accuracy of three seeds;
# SGD with tuned decay 95.4 %). Small cases of one seed each, where not said: they chose these numbers, and so cannot
# confirm them. "The pilot" is a GPT of 6 blocks and width 384 on the same text, 625 to 6,000 steps, whose raw results
# are not here: a hypothesis.
#
# others_lr 0.01    gpt: 2.192, 2.286 at 0.003, 2.189 at 0.03, 2.212 at 0.1. digits over AdamW: 93.6 %, and 94.2 % at
#                   0.003.
# HEAD_INPUTS       GPTs of 4 blocks after 600 steps (benchmarks/results/steering_width_cuda.json). At width 512 over
#                   AdamW: 2.476 at 0.01; 2.441 with the head alone at 1/512, 1.922 with embeddings too, 1.857 with all;
#                   2.078 with all at 1.28/512, 1.808 at 0.64/512. Over Muon 1.66 to 1.69 throughout. 128 keeps 0.01 for
#                   all networks on which it was chosen.
# β₂ 0.95           gpt: 2.192, and at 0.999 2.204 for matrices and 2.207 for all else. β₁ = 0.9 is AdamW's own.
# operation 1       gpt: 2.192, and 2.194 without it.
# heads plain       gpt, norms held: 2.302, and 2.537 with a head that turns, whose norm limits the logits: at 0.003 it
#                   has 2.789, and 2.304 with a learnable factor on the logits. Norms learned: 2.192 and 2.210; longer:
#                   1.886 and 1.905. In the pilot, with norms held, turning the tied head was better.
# embeddings plain  gpt: 2.192, and 2.350 with embeddings (here the positions) that turn. A batch moves few rows of a
#                   large table, which would take the whole turn.
# norms learned     gpt: 2.192, and 2.302 held; seeds 1 and 2: 2.231 and 2.230, and 2.295 and 2.297 held. longer: 1.886,
#                   and 2.070 held. digits over SGD: 96.0 and 95.8 %.
#
# Three seeds of six small problems are in results/beyond/no-tuning. There "sgd" was better than "adamw" on two of three
# networks of convolutions, and "muon" on all three others, so `steer` takes those by default. On digits, a vision
# transformer whose patches are embedded plainly has 86.5 % over Muon, and 73.9 % over AdamW with all matrices turning.
PRESETS: dict[str, Preset] = {
    # The rate: gpt 2.284 at 0.014, 2.192 at 0.028, 2.202 at 0.056, 2.220 at 0.1, 2.365 at 0.2. The pilot's best was
    # 0.028. On digits it is 2.4 points below the SGD preset, and so is 0.0085, the same rotation by the momentum law.
    # ρ falls with the width: the best ρ of GPTs of 2 blocks after 300 steps is 0.024, 0.015 and 0.0085 at widths 128,
    # 256 and 512 (benchmarks/results/steering_rates_cpu.json). After 600 steps of 8,192 characters on an H200
    # (results/full/beyond/transfer), three seeds, 0.028 is best at 128 and 256, and 0.26 behind 0.014 at 512. AdamW
    # changes all weights of a row alike, which changes an output by up to ρ√n of its norm. Muon does not, and needs no
    # such power: its best rates at these widths are 0.028, 0.056 and 0.112, and 0.056 is at most 0.01 behind.
    "adamw": Preset("AdamW", 0.028, {"betas": (0.9, 0.95)}, falls=0.75),
    # The rate of the layer-rotation papers. digits: 96.0 %, and 95.8 % as the papers ran it. gpt: 2.417.
    "sgd": Preset("SGD", 3.0**-3),
    # The rate: gpt, three seeds: 2.019 at 0.028, 1.982 at 0.04, 1.988 at 0.056; one seed: 2.190 at 0.014, 2.223 at
    # 0.14; Muon by itself 1.970 at the best of three learning rates. longer, three seeds: 1.710 at 0.028, 1.736 at
    # 0.04, 1.785 at 0.056; Muon by itself 1.711. GPTs of seven sizes on an H200 (results/full/beyond/transfer, one to
    # three seeds): 0.028 loses up to 0.08 and 0.056 up to 0.05 to the best rate of the size. On repeated text a
    # larger rate overfits less (benchmarks/results/steering_regimes_*.json).
    "muon": Preset("Muon", 0.04),
    # Published by the authors of arXiv 2606.16899 for a GPT of 124 million parameters: rate 0.018 for both,
    # β = (0.9, 0.95), norms held. gpt: 2.326 and 2.358.
    "adamh": Preset("AdamW", 0.018, {"betas": (0.9, 0.95)}, project=False, norms="held"),
    "muonh": Preset("Muon", 0.018, project=False, norms="held"),
}

#: For a head of n inputs, more than this, `others_lr` is the preset's times `HEAD_INPUTS`/n, and ρ of some presets is
#: lower too. The evidence is above.
HEAD_INPUTS = 128
#: Options of the AdamW that steps the other parameters; it has no weight decay. The evidence for β₂ is above.
OTHERS: Mapping[str, Any] = {"betas": (0.9, 0.95)}


def preset(name: Any) -> Preset:
    """Return the preset of a name.

    >>> preset("sgd").rate == 3**-3
    True
    """
    if isinstance(name, str) and name in PRESETS:
        return PRESETS[name]
    given, hint = f"{name!r:.80}", 'Try "adamw".'
    if isinstance(name, str):
        near = get_close_matches(name.lower(), PRESETS, 1, 0.7)
        hint = f'Try "{near[0]}".' if near else hint
        if name.lower() == "hyperball":
            hint = 'Hyperball goes around an optimizer: use "adamh" or "muonh", or project=False with another `inner`.'
    elif isinstance(name, Optimizer):
        kind = type(name).__name__
        given = f"an optimizer, {kind}"
        hint = f"steer builds it: give the class {kind} and its options in `inner_options`, or use gyroscope.Layca."
    elif real(name) == real(name):
        hint = f"Try rate={name!r}."
    raise ControlError(
        f"`inner` must be one of {', '.join(map(repr, PRESETS))}, or a function of parameter groups that returns an "
        f"optimizer, got {given}. {hint}"
    )


def maker(chosen: Preset) -> Callable[..., Optimizer]:
    """Return the class of a preset's inner optimizer.

    >>> maker(preset("adamw")) is torch.optim.AdamW
    True
    """
    found: Callable[..., Optimizer] = getattr(torch.optim, chosen.inner)
    return found
