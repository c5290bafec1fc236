"""Rows of a table by their numbers: the embedding of a step's tokens, from a table or from panels of a head.

Bits are moved as they are; bfloat16 becomes float32 by 16 zero bits.
"""

from __future__ import annotations

from headwater.kernels.compiling import serial_kernel
from headwater.kernels.tile import PANEL


@serial_kernel
def copy_rows_into(out, table, index, width):
    """Write rows of a table [rows, width]; `out` and `table` have elements of one type."""
    for i in range(len(index)):
        for c in range(width):
            out[i * width + c] = table[index[i] * width + c]


@serial_kernel
def widen_rows_into(out, table, index, width):
    """Write rows of a table of bfloat16 (int16) as float32 (int32)."""
    for i in range(len(index)):
        for c in range(width):
            out[i * width + c] = table[index[i] * width + c] << 16


@serial_kernel
def widen_panel_rows_into(out, panels, index, width):
    """Write rows of a weight in panels of pairs of bfloat16 (int32) as float32 (int32); `width` is even."""
    for i in range(len(index)):
        at = index[i] // PANEL * (width // 2) * PANEL + index[i] % PANEL
        for c in range(0, width, 2):
            pair = panels[at + c // 2 * PANEL]
            out[i * width + c] = pair << 16
            out[i * width + c + 1] = pair & -65536


@serial_kernel
def copy_panel_rows_into(out, panels, index, width):
    """Write rows of a weight in panels of pairs of bfloat16 (int32) as bfloat16 (int16); `width` is even."""
    for i in range(len(index)):
        at = index[i] // PANEL * (width // 2) * PANEL + index[i] % PANEL
        for c in range(0, width, 2):
            pair = panels[at + c // 2 * PANEL]
            out[i * width + c] = pair & 0xFFFF
            out[i * width + c + 1] = pair >> 16
