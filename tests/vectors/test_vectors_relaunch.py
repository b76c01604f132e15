"""Kernels that are launched again."""

import pytest

from gyroscope.vectors.launch import relauncher
from interpreted import needs_triton


class Compiled:
    function = 1

    def __getitem__(self, grid):
        return lambda *arguments: (grid, arguments)


@needs_triton
@pytest.mark.parametrize(("version", "again"), [("3.2.0", False), ("3.3.0", True), ("3.10.1+git", True)])
def test_what_was_compiled_is_launched_again_where_it_takes_all_arguments(monkeypatch, version, again):
    import triton

    monkeypatch.setattr(triton, "__version__", version)
    launch = relauncher(Compiled(), 3)
    if again:
        assert launch("x", 2) == ((3, 1, 1), ("x", 2))
    else:
        assert launch is None
