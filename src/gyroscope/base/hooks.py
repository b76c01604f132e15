"""When hooks act: once per step that a training takes, not inside a CUDA graph, and for one instrument at a time.

torch wraps its step hooks around the `step` of every class that has had an instance. A class whose `step` calls
`super().step()` then runs the same hooks twice, one pair inside the other.

torch.distributed.checkpoint calls `step` with rates and gradients of zero, so that an optimizer creates its state. For
one that keeps none, such as SGD, it does so whenever a checkpoint is saved. These are not steps of a training.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

Hook = Callable[..., Any]

# The function that torch wraps around `step`; all classes share its code.
_AROUND = Optimizer.profile_hook_step(lambda self: None).__code__
# The function of torch.distributed.checkpoint that makes an optimizer create its state.
_CREATES_STATE = "_init_optim_state"
# Instruments that run a model now, the innermost last. Not a context variable: the threads of a backward pass, in which
# checkpointing runs modules again, would not see it.
_OWNERS: list[tuple[object, ...]] = []


def register_outermost(
    optimizer: Optimizer, before: Hook, after: Hook, unreal: Hook | None = None
) -> list[RemovableHandle]:
    """Call `before` and `after` around each step that the user takes, but not around a step inside that step.

    `before` may return other arguments for the step, as torch's hooks may. `unreal` is called after a step that only
    creates state: weights were written and are the same.

    >>> class Mine(torch.optim.SGD):
    ...     def step(self, closure=None):
    ...         return super().step(closure)
    >>> heard, weight = [], torch.ones(2)
    >>> _, mine = torch.optim.SGD([weight], lr=0.1), Mine([weight], lr=0.1)
    >>> _ = register_outermost(mine, lambda *_: heard.append("before"), lambda *_: heard.append("after"))
    >>> mine.step(); heard
    ['before', 'after']
    """
    begun = nested = creating = False

    # The stack is inspected only if a step began and has not ended: a step that raised looks the same.
    def pre(stepped: Optimizer, *arguments: Any) -> Any:
        nonlocal begun, nested, creating
        if torch.compiler.is_compiling():  # the stack does not show compiled steps
            return before(stepped, *arguments)
        if begun and _is_inside(stepped):
            nested = True
            return None
        begun, nested, creating = True, False, _creates_state(stepped)
        return None if creating else before(stepped, *arguments)

    def post(stepped: Optimizer, *arguments: Any) -> None:
        nonlocal begun
        if torch.compiler.is_compiling():
            after(stepped, *arguments)
            return
        if nested and _is_inside(stepped):
            return
        begun = False
        if not creating:
            after(stepped, *arguments)
        elif unreal is not None:
            unreal(stepped, *arguments)

    handles = [optimizer.register_step_pre_hook(pre)]
    try:
        handles.append(optimizer.register_step_post_hook(post))
    except BaseException:
        handles[0].remove()
        raise
    return handles


def _creates_state(optimizer: Optimizer) -> bool:
    """Return whether the step whose hook is running only creates state. The stack is inspected if the rate is 0."""
    rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    if isinstance(rate, torch.Tensor) and rate.device.type != "cpu":
        return False  # its value would be waited for; theirs is on a CPU
    if rate != 0:
        return False
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != _CREATES_STATE:
        frame = frame.f_back
    return frame is not None


def _is_inside(optimizer: Optimizer) -> bool:
    """Return whether the step whose hook is running was called by another step of the same optimizer."""
    steps = 0
    frame: Any = sys._getframe(1)
    while frame is not None and steps < 2:
        if frame.f_code is _AROUND and frame.f_locals.get("self") is optimizer:
            steps += 1
        frame = frame.f_back
    return steps > 1


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured, so that nothing may wait for the device."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


@contextmanager
def alone(*owners: object) -> Iterator[None]:
    """Let only the hooks of `owners` act within the block.

    >>> with alone("one", "two"):
    ...     listens("one"), listens("three")
    (True, False)
    """
    _OWNERS.append(owners)
    try:
        yield
    finally:
        _OWNERS.remove(owners)


def listens(who: object) -> bool:
    """Return whether the hooks of `who` act now.

    >>> listens("anybody")
    True
    """
    return not _OWNERS or any(who is one for one in _OWNERS[-1])
