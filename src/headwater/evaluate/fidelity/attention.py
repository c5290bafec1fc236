"""Where in a segment attention goes wrong if the segment is computed alone (HYPIC, section 3.2, figure 3).

T tokens of the prompt, N rows of a step, K keys, H heads, G KV heads, Q queries that share one, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from headwater.evaluate.fidelity.prompt import Prompt
from headwater.evaluate.fidelity.recipe import Recipe
from headwater.evaluate.fidelity.skipping import with_attention
from headwater.evaluate.fidelity.workbench import Workbench
from headwater.mixers.attention.layer import Attention
from headwater.models.hybrid import Function, HybridModel, Step
from headwater.request import Span


@dataclass(frozen=True, slots=True)
class Deviation:
    """Mean absolute difference of the attention that a key of that place gets, over heads and the segments' queries.

    Attention sums to 1 over all keys of a query. A query that was computed alone gives none to other segments.
    """

    head: float  # the first tokens of segments
    interior: float
    tail: float  # the last ones

    @classmethod
    def of(cls, prompt: Prompt, ends: int, whole_HTT: torch.Tensor, alone: list[torch.Tensor]) -> Deviation:
        """`alone`: attention within each of the prompt's segments. `ends`: tokens of a head, and of a tail."""
        sums, counts = [0.0] * 3, [0] * 3
        spliced_HTT = torch.zeros_like(whole_HTT)
        for span, own in zip(prompt.segments, alone, strict=True):
            spliced_HTT[:, span.start : span.end, span.start : span.end] = own
        query = torch.cat([torch.arange(span.start, span.end) for span in prompt.segments])
        off_NT = (whole_HTT - spliced_HTT)[:, query].abs().mean(dim=0)
        for span in prompt.segments:
            for place, keys in enumerate(_places(span, ends)):
                key = torch.arange(keys.start, keys.stop)
                sums[place] += float(off_NT[:, key].double().sum())
                counts[place] += int((query[:, None] >= key).sum())
        return cls(*(total / max(1, count) for total, count in zip(sums, counts, strict=True)))


class AttentionWatch:
    """Runs a model, and keeps the attention of each layer with grouped queries."""

    def __init__(self, model: HybridModel, tokens: int) -> None:
        """Of prompts of at most so many tokens."""
        self._mixers = {layer: mixer for layer, mixer in model.mixers.attention.items() if isinstance(mixer, Attention)}
        self._seen: dict[int, torch.Tensor] = {}
        self._bench = Workbench(with_attention(model, self._watched), tokens)

    def deviations(self, prompt: Prompt, ends: int) -> Mapping[int, Deviation]:
        """By layer, of the prompt's segments that are longer than both ends."""
        prompt = Prompt(prompt.tokens, tuple(s for s in prompt.segments if s.end - s.start > 2 * ends))
        if not prompt.segments:
            return {}
        whole = self._attention(prompt.tokens)
        alone = [self._attention(prompt.tokens[span.start : span.end]) for span in prompt.segments]
        return {
            layer: Deviation.of(prompt, ends, whole_HTT, [one[layer] for one in alone])
            for layer, whole_HTT in whole.items()
        }

    def of_last(self, prompt: Prompt, recipe: Recipe) -> list[float]:
        """What the last token of the composed prompt gives each segment in the deepest such layer, a mean over heads.

        Raises ValueError for a model without one.
        """
        self._seen = {}
        self._bench.composed(prompt, recipe)
        if not self._seen:
            raise ValueError("0 layers of attention with grouped queries, at least 1 is needed")
        given_K = self._seen[max(self._seen)][:, -1].mean(dim=0)
        return [float(given_K[span.start : span.end].sum()) for span in prompt.segments]

    def _attention(self, tokens: tuple[int, ...]) -> dict[int, torch.Tensor]:
        self._seen = {}
        self._bench.whole(Prompt(tokens, ()))
        return self._seen

    def _watched(self, layer: int, function: Function) -> Function:
        if layer not in self._mixers:
            return function

        def watched(x_NC: torch.Tensor, step: Step) -> torch.Tensor:
            out_NC = function(x_NC, step)
            self._seen[layer] = probabilities(self._mixers[layer], x_NC, step)
            return out_NC

        return watched


def probabilities(mixer: Attention, x_NC: torch.Tensor, step: Step) -> torch.Tensor:
    """The attention of the tokens of a step's last slice, whose keys are written: [H, N, K], to all keys up to them."""
    last = step.batch.slices[-1]
    assert step.attention is not None, "it is a layer of attention"
    q_NGQD = mixer.heads.project(x_NC, step.batch).q_NGQD[last.first : last.first + last.length]
    keys, _ = step.attention.arena.gather(mixer.layer, last.table_P, last.end)
    k_KGD = keys[: last.end].unflatten(-1, (mixer.shape.kv_heads, -1))
    scale = q_NGQD.shape[-1] ** -0.5 if mixer.shape.scale is None else mixer.shape.scale
    score_GQNK = torch.einsum("ngqd,kgd->gqnk", q_NGQD.float(), k_KGD.float()) * scale
    unseen_NK = torch.ones(score_GQNK.shape[-2:], dtype=torch.bool).triu(1 + last.start)
    return score_GQNK.masked_fill_(unseen_NK, -torch.inf).softmax(dim=-1).flatten(0, 1)


def _places(span: Span, ends: int) -> tuple[range, range, range]:
    return (
        range(span.start, span.start + ends),
        range(span.start + ends, span.end - ends),
        range(span.end - ends, span.end),
    )
