"""The papers' figures on our data: a figure a file, in a table by name. No torch."""

from papers.figure import Figure, Found, Line, Shape
from papers.lab import Lab
from papers.page import page_of
from papers.table import FIGURES, figures_named

__all__ = ["FIGURES", "Figure", "Found", "Lab", "Line", "Shape", "figures_named", "page_of"]
