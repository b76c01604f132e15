"""Operations of a step recorded and done again: what a replayed CUDA graph does, on a CPU."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorder(TorchDispatchMode):
    """Operations with the memory that they read and write; reading a value on the host is refused."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert op is not torch.ops.aten._local_scalar_dense.default, "a value is read on the host"
        found = op(*args, **kwargs)
        # What is allocated stays where it is.
        if not op.is_view and op is not torch.ops.aten.empty.memory_format:
            self.calls.append((op, args, kwargs, found))
        return found

    def replay(self):
        with torch._C._AutoDispatchBelowAutograd():
            for op, args, kwargs, found in self.calls:
                again = op(*args, **kwargs)
                for new, old in zip(tree_leaves(again), tree_leaves(found), strict=True):
                    if isinstance(new, torch.Tensor) and new is not old:
                        old.copy_(new)
