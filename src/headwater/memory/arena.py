"""The arena: one run of equal pages that holds all KV and all checkpoints.

Shapes: P pages, B bytes of a page, W rows written, K keys (rounded up), T tokens of a page, G KV heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from headwater.memory.lazy import LazyBytes
from headwater.spec import KEY_BLOCK, ModelSpec


class Arena:
    """`n_pages` blobs of `spec.page_bytes`; a page of KV holds, a layer after the other, its keys and then its values.

    On the CPU the operating system hands out the memory as it is first touched, so resident memory grows with use.
    """

    def __init__(self, spec: ModelSpec, n_pages: int, device: str | torch.device = "cpu") -> None:
        self.n_pages = n_pages
        self.page_size = spec.page_size
        self._memory = LazyBytes(n_pages * spec.page_bytes, device)
        self.pages = self._memory.tensor.view(n_pages, spec.page_bytes)
        self._heads = spec.attention.kv_heads
        self._row = spec.kv_row_elements
        dtype = getattr(torch, spec.dtype_name)
        flat = self.pages.view(-1).view(dtype)
        stride = spec.page_bytes // spec.element_bytes
        size = spec.page_size * self._row
        self._layers = {
            layer: tuple(flat.as_strided((n_pages, size), (stride, 1), (2 * i + j) * size) for j in (0, 1))
            for i, layer in enumerate(spec.attention_layers)
        }
        self._scratch = (flat.new_empty(0, self._row), flat.new_empty(0, self._row))
        self._dirty = 0  # rows of scratch from here on are zeros

    def write(
        self, layer: int, page_W: torch.Tensor, offset_W: torch.Tensor, k_WGD: torch.Tensor, v_WGD: torch.Tensor
    ) -> None:
        """Store the keys and values of W tokens of a layer, each at its offset (in tokens) in its page."""
        for pages, rows in zip(self._layers[layer], (k_WGD, v_WGD), strict=True):
            pages.view(self.n_pages, self.page_size, self._row)[page_W, offset_W] = rows.reshape(-1, self._row)

    def gather(self, layer: int, table_P: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a sequence's first `length` tokens, [K, G, D] each, K rounded up to 512.

        They are views of scratch, valid until the next call. Rows from `length` on are zeros, whatever the pages hold
        there: they get masked, and a mask does not hide a NaN.
        """
        n_keys = -(-length // KEY_BLOCK) * KEY_BLOCK
        n_pages = -(-length // self.page_size)
        self._grow(max(n_keys, n_pages * self.page_size))
        table = table_P[:n_pages]
        dirty = max(self._dirty, n_pages * self.page_size)
        for pages, scratch in zip(self._layers[layer], self._scratch, strict=True):
            into = scratch[: n_pages * self.page_size].view(n_pages, -1)
            torch.index_select(pages, 0, table, out=into)
            scratch[length : min(dirty, n_keys)].zero_()
        self._dirty = length if dirty <= n_keys else dirty
        k_KGD, v_KGD = (scratch[:n_keys].view(n_keys, self._heads, -1) for scratch in self._scratch)
        return k_KGD, v_KGD

    def discard(self, page_ids: Iterable[int]) -> None:
        """Give back the physical memory of pages that are lent to a slot, and so neither read nor written."""
        size = self.pages.shape[1]
        for page in page_ids:
            self._memory.discard(page * size, size)

    def _grow(self, n_tokens: int) -> None:
        have = self._scratch[0].shape[0]
        if have < n_tokens:
            n = max(n_tokens, 2 * have)
            self._scratch = (self._scratch[0].new_zeros(n, self._row), self._scratch[1].new_zeros(n, self._row))
            self._dirty = 0
