"""A head of multi-token prediction (MTP): a block that drafts the token after the next, from its model's hidden states.

It keeps one entry of each token of a sequence but the first, as an attention layer does: that of position t is made of
token t and of the model's hidden state at t − 1, after the final norm. So an entry depends on the tokens up to its own,
and a page of entries is part of the prefix that the model's page belongs to. Position 0 has none, and is masked.

N rows, C model width, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.memory.arena import Arena
from headwater.memory.slots import StateMemory
from headwater.mixers.activations import StreamNorm
from headwater.mixers.attention import AttentionStep
from headwater.mixers.batch import StepBatch
from headwater.mixers.linear import Linear
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
