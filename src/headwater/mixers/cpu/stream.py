"""Residual stream on a CPU: embedded tokens, and norms together with the sum before them, each by one kernel.

The same kernels compute prompts and answers. N rows, C model width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.kernels import residual
from headwater.kernels.recording import empty, flat
from headwater.kernels.vectors import LANES
from headwater.mixers.activations import RMSNorm, StreamNorm
from headwater.mixers.linear import Embedding


class EmbeddingOnCpu(Embedding):
    """Embedding whose rows a kernel looks up, if its table is in bfloat16 or in the model's dtype.

    For the tokens of one decode step, torch needs 0.1 ms.
    """

    def __call__(self, token_N: Tensor) -> Tensor:
        table_VD = self.table_VD
        if table_VD is None or table_VD.dtype not in (self.dtype, torch.bfloat16) or self.dtype == torch.float16:
            return super().__call__(token_N)
        width = table_VD.shape[1]
        row_ND = empty(len(token_N), width, dtype=self.dtype)
        if table_VD.dtype == self.dtype:
            residual.copy_rows_into(flat(row_ND), flat(table_VD), token_N.numpy(), width)
        else:
            residual.widen_rows_into(flat(row_ND.view(torch.int32)), flat(table_VD), token_N.numpy(), width)
        return row_ND


class StreamNormOnCpu(StreamNorm):
    """Norm of the residual stream by a kernel, if rows are whole vectors."""

    def __init__(self, norm: RMSNorm, dtype: torch.dtype) -> None:
        super().__init__(norm, dtype)
        self._weight: np.ndarray[Any, Any] = flat(norm.scale_C)
        self._whole = len(norm.scale_C) % LANES == 0

    def __call__(self, x_NC: Tensor) -> Tensor:
        return self._normed(x_NC, None, 1.0) if self._whole else super().__call__(x_NC)

    def after(self, x_NC: Tensor, out_NC: Tensor, scale: float) -> Tensor:
        return self._normed(x_NC, out_NC, scale) if self._whole else super().after(x_NC, out_NC, scale)

    def _normed(self, x_NC: Tensor, out_NC: Tensor | None, scale: float) -> Tensor:
        assert x_NC.is_contiguous()
        normed_NC = empty(*x_NC.shape, dtype=self.dtype)
        normed, x = flat(normed_NC), flat(x_NC)
        out = normed if out_NC is None else flat(out_NC.contiguous())
        residual.norm_into(x, out, normed, self._weight, *x_NC.shape, out_NC is not None, scale, self.norm.eps)
        return normed_NC
