"""A head of multi-token prediction (MTP): a block that drafts the token after the next, from its model's hidden states.

It keeps one entry of each token of a sequence but the first, as an attention layer does: that of position t is made of
token t and of the model's hidden state at t − 1, after the final norm. So an entry depends on the tokens up to its own,
and a page of entries is part of the prefix that the model's page belongs to. Position 0 has none, and is masked.

Its passes are recorded as decode steps are (`models/decode_graphs.py`). N rows, C model width, R rows whose logits are
wanted, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwater.memory.arena import Arena
from headwater.memory.slots import StateMemory
from headwater.mixers.activations import StreamNorm
from headwater.mixers.attention import AttentionStep
from headwater.mixers.batch import StepBatch
from headwater.mixers.linear import Linear
from headwater.models.decode_graphs import Inputs, Recorder, Shape, Work, cpu_recorder
from headwater.models.hybrid import AttentionFunction, HybridModel, Output, Residual, Step
from headwater.spec import ModelSpec

FIRST_ENTRY = 1  # position


class MtpModule:
    """The weights of a head, and its passes. It owns no entries: the arena, laid out as `spec`, is an argument."""

    def __init__(
        self,
        spec: ModelSpec,
        model: HybridModel,
        input_norms: tuple[StreamNorm, StreamNorm],  # of embeddings, of hidden states
        product: Linear,
        blocks: list[Residual],
        norm: StreamNorm,
    ) -> None:
        self.spec, self.model, self.input_norms, self.product = spec, model, input_norms, product
        self.blocks, self.norm = blocks, norm
        self.states = StateMemory(spec.state, 0, spec.state.bytes)

    @torch.inference_mode()
    def store(self, batch: StepBatch, arena: Arena, hidden_NC: Tensor) -> None:
        """Write the entries of slices. `hidden_NC`: the hidden state before each of their tokens."""
        x_NC = self._inputs(batch, hidden_NC)
        step = self._step(batch, arena)
        first = self.blocks[0]
        assert step.attention is not None
        assert isinstance(first.functions[0], AttentionFunction), "the head does not begin with attention"
        first.functions[0].layer.store(first.norm(x_NC), step.attention)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, arena: Arena, hidden_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Write entries of decoding rows; return float32 logits [R, V], and the head's own hidden states [R, C].

        A draft's own pass takes the head's hidden state instead of the model's.
        """
        step, x_NC = self._step(batch, arena), self._inputs(batch, hidden_NC)
        output: Output | None = None
        for block in self.blocks:
            x_NC, output = block.forward(x_NC, output, step)
        assert output is not None
        rows = batch.logits_rows
        last_RC = self.norm.after(x_NC[rows], output[0][rows], output[1])
        return self.model.head(last_RC, 0).float(), last_RC

    def _inputs(self, batch: StepBatch, hidden_NC: Tensor) -> Tensor:
        of_embedding, of_hidden = self.input_norms
        embedded_NC = self.model.embed(batch.token_N)
        both_N2C = torch.cat((of_embedding(embedded_NC), of_hidden(hidden_NC.contiguous())), dim=1)
        x_NC = self.product(both_N2C, batch.n_prefill)
        return x_NC.float() if self.spec.float32_residual else x_NC

    def _step(self, batch: StepBatch, arena: Arena) -> Step:
        attention: AttentionStep = self.model.attention_step.of(batch, arena, self.model.dtype, FIRST_ENTRY)
        return Step(batch, attention, self.states, self.model.dtype, (), None)


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

    def __init__(self, module: MtpModule, arena: Arena) -> None:
        self.module, self.arena = module, arena
        self.recorder = cpu_recorder()  # None: no pass is recorded
        self._known: dict[tuple[Shape, int], Recorded | None] = {}  # None: such a pass cannot be recorded
        self._seen = set[tuple[Shape, int]]()

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
