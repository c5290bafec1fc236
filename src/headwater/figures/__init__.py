"""The papers' figures on our data: a figure a file, in a table by name. No torch."""

from headwater.figures.figure import Figure, Found, Line, Shape
from headwater.figures.lab import Lab
from headwater.figures.page import page_of
from headwater.figures.table import FIGURES, figures_named

__all__ = ["FIGURES", "Figure", "Found", "Lab", "Line", "Shape", "figures_named", "page_of"]
