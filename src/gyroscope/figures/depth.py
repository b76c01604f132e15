"""The colour of a layer: dark for the first, light for the last."""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.colors import ListedColormap

# Viridis ends in a yellow that cannot be seen on white.
_LIGHTEST = 0.92

#: Viridis from its dark end to the lightest colour that reads on white.
DEPTH = ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0, _LIGHTEST, 256)), name="depth")


def depth_colours(count: int) -> list[tuple[float, float, float, float]]:
    """Return one colour a layer, in order of depth.

    >>> first, last = depth_colours(2)
    >>> bool(sum(first[:3]) < sum(last[:3]))
    True
    """
    return [DEPTH(position) for position in np.linspace(0, 1, count)]
