"""Rows of an embedding on a CPU, by a kernel: torch takes 0.1 ms for the tokens of a decode step."""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.kernels import lookup
from headwater.kernels.arrays import flat
from headwater.kernels.recording import empty
from headwater.mixers.linear import Embedding


class EmbeddingOnCpu(Embedding):
    """An embedding whose rows are looked up by a kernel, if its table is in bfloat16 or in the model's dtype."""

    def __call__(self, token_N: Tensor) -> Tensor:
        table_VD = self.table_VD
        if table_VD is None or table_VD.dtype not in (self.dtype, torch.bfloat16) or self.dtype == torch.float16:
            return super().__call__(token_N)
        width = table_VD.shape[1]
        row_ND = empty(len(token_N), width, dtype=self.dtype)
        if table_VD.dtype == self.dtype:
            lookup.copy_rows_into(flat(row_ND), flat(table_VD), token_N.numpy(), width)
        else:
            lookup.widen_rows_into(flat(row_ND.view(torch.int32)), flat(table_VD), token_N.numpy(), width)
        return row_ND
