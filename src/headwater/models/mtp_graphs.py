"""Recorded passes of an MTP head, as decode steps are recorded (`models/decode_graphs.py`).

N rows, R rows that draft, C model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwater import kernels
from headwater.memory.arena import Arena
from headwater.mixers import numerics
from headwater.mixers.batch import StepBatch
from headwater.models.decode_graphs import Inputs, Recorder, Shape, Work
from headwater.models.mtp import MtpModule


@dataclass(frozen=True)
class Recorded:
    """A pass over memory that stays where it is."""

    inputs: Inputs
    row_R: Tensor
    hidden_NC: Tensor
    own_RC: Tensor  # hidden states of the head
    again: Work

    def __call__(self, batch: StepBatch, hidden_NC: Tensor) -> tuple[Tensor, Tensor]:
        self.inputs.take(batch)
        self.row_R.copy_(batch.logits_row_R)
        self.hidden_NC.copy_(hidden_NC)
        return self.again(), self.own_RC


class MtpGraphs:
    """The passes of one head over its arena, each recorded when its sizes come up again."""

    def __init__(self, module: MtpModule, arena: Arena, recorder: Recorder | None) -> None:
        """Without a recorder no pass is recorded."""
        self.module, self.arena, self.recorder = module, arena, recorder
        self._known: dict[tuple[Shape, int], Recorded | None] = {}  # None: such a pass cannot be recorded
        self._seen = set[tuple[Shape, int]]()

    @classmethod
    def over(cls, module: MtpModule, arena: Arena) -> MtpGraphs:
        """Return the passes, recorded where kernels can be."""
        if not (kernels.available() and numerics.current().mode == "compiled"):
            return cls(module, arena, None)
        from headwater.kernels.recording import CpuRecorder

        return cls(module, arena, CpuRecorder())

    def __len__(self) -> int:
        return len(self._seen) + len(self._known)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, hidden_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Run a pass as `MtpModule.forward` does. The results are valid until the next one."""
        if self.recorder is None:
            return self.module.forward(batch, self.arena, hidden_NC)
        key = Shape.of(batch, self.arena.page_size), len(batch.logits_row_R)
        if key not in self._seen:
            self._seen.add(key)
            return self.module.forward(batch, self.arena, hidden_NC)
        if key not in self._known:
            return self._record(self.recorder, key, batch, hidden_NC)
        known = self._known[key]
        return self.module.forward(batch, self.arena, hidden_NC) if known is None else known(batch, hidden_NC)

    def _record(
        self, recorder: Recorder, key: tuple[Shape, int], batch: StepBatch, hidden_NC: Tensor
    ) -> tuple[Tensor, Tensor]:
        inputs = Inputs.empty(key[0], batch.token_N.device)
        row_R, given_NC = batch.logits_row_R.clone(), hidden_NC.clone()
        own_RC = given_NC.new_empty(len(row_R), given_NC.shape[1])
        inputs.take(batch)

        def work() -> Tensor:
            rows = replace(inputs.batch(batch), logits_row_R=row_R.view(len(row_R)), wants_all=False)
            logits_RV, its_RC = self.module.forward(rows, self.arena, given_NC)
            own_RC.copy_(its_RC)
            return logits_RV

        logits_RV, again = recorder.record(work)
        self._known[key] = None if again is work else Recorded(inputs, row_R, given_NC, own_RC, again)
        return logits_RV, own_RC
