"""What figures are drawn with, for those who draw their own: lines by depth, marked lines, edges, ticks, colors."""

from gyroscope.figures.bars import colours
from gyroscope.figures.depth import DEPTH, depth_colours
from gyroscope.figures.edges import edged, say
from gyroscope.figures.lines import depth_bar, draw_lines, finish, span
from gyroscope.figures.looks import limits, look_of
from gyroscope.figures.marked import SAYS, Colour, Dash, Line, Mark, draw_marked
from gyroscope.figures.ticks import log_ticks

__all__ = [
    "DEPTH",
    "SAYS",
    "Colour",
    "Dash",
    "Line",
    "Mark",
    "colours",
    "depth_bar",
    "depth_colours",
    "draw_lines",
    "draw_marked",
    "edged",
    "finish",
    "limits",
    "log_ticks",
    "look_of",
    "say",
    "span",
]
