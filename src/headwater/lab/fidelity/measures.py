"""The fidelity study: prompts composed by several methods, measured against the same prompts computed whole.

Measured are the distances of states and keys, the divergence of the next token's distribution, and attention.

T tokens of the prompt, N rows of a step, V vocabulary, W elements that a layer keeps of a token; K keys, H heads,
G KV heads, Q queries that share one, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from headwater.lab.fidelity.figures import Deviation, Distance, Measured, Study
from headwater.lab.fidelity.forward import Computed, Recipe, Workbench, with_attention, without_attention
from headwater.lab.fidelity.prompts import Prompt, Wanted
from headwater.layers.attention import GroupedAttention
from headwater.mixers import numerics
from headwater.mixers.attention import Attention
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.models.hybrid import Function, HybridModel, Step
from headwater.models.load import load_model
from headwater.request import Fidelity, Span
from headwater.spec import ModelSpec

ENDS = 8  # tokens at a segment's ends whose attention is measured (HYPIC, section 4.3)


def distance(composed: torch.Tensor, whole: torch.Tensor) -> Distance:
    """Return the distance of one tensor from another: 0 if equal, zeros included; 90 degrees from a zero tensor."""
    a, b = composed.double().flatten(), whole.double().flatten()
    if torch.equal(a, b):
        return Distance(0.0, 0.0)
    norm_a, norm_b = float(a.norm()), float(b.norm())
    error = float((a - b).norm()) / norm_b if norm_b else math.inf
    if not norm_a or not norm_b:
        return Distance(error, 90.0)
    a, b = a / norm_a, b / norm_b  # from both chords: an arc cosine is blind below 1e-8
    return Distance(error, math.degrees(2 * math.atan2(float((a - b).norm()), float((a + b).norm()))))


def divergence(of_V: torch.Tensor, from_V: torch.Tensor) -> float:
    """Return the Kullback-Leibler divergence of two distributions, given as logits: Σ p (ln p − ln q), in nats.

    It is never below 0. Raises ValueError for logits that are NaN.
    """
    p_V, q_V = (logits.double().log_softmax(0) for logits in (of_V, from_V))
    found = float((p_V.exp() * (p_V - q_V)).sum())
    if math.isnan(found):
        raise ValueError("the logits are NaN")
    return max(0.0, found)


def measured(spec: ModelSpec, prompt: Prompt, recipe: Recipe, composed: Computed, whole: Computed) -> Measured:
    """Measure a composed prompt against the whole one. Raises ValueError for logits that are NaN."""
    widths = recipe.widths
    reused = [t for s in recipe.composed(prompt) for t in range(s.start + widths.head, s.end - widths.tail)]

    def kept(one: Computed) -> Mapping[int, tuple[torch.Tensor, ...]]:
        of_reused = {layer: tuple(kept_TW[reused] for kept_TW in found) for layer, found in one.kept.items()}
        return {**of_reused, **one.windows}

    def names(layer: int) -> tuple[str, ...]:
        return ("keys", "values") if isinstance(spec.layers[layer], GroupedAttention) else ("latents",)

    of_composed, of_whole = kept(composed), kept(whole)
    return Measured(
        tokens=len(prompt.tokens),
        anew=composed.anew,
        divergence=divergence(whole.logits_V, composed.logits_V),
        same_first=bool(whole.logits_V.argmax() == composed.logits_V.argmax()),
        states={layer: distance(state, whole.states[layer]) for layer, state in composed.states.items()},
        kept={
            layer: {
                name: distance(a_TW, b_TW)
                for name, a_TW, b_TW in zip(names(layer), of_composed[layer], of_whole[layer], strict=True)
            }
            for layer in sorted(of_composed)
        },
    )


def deviation(prompt: Prompt, ends: int, whole_HTT: torch.Tensor, apart: Sequence[torch.Tensor]) -> Deviation:
    """Return the error of attention in segments that are computed apart (HYPIC, section 3.2, figure 3).

    `apart` is the attention within each of the prompt's segments; a head and a tail have `ends` tokens each.
    """
    sums, counts = [0.0] * 3, [0] * 3
    spliced_HTT = torch.zeros_like(whole_HTT)
    for span, own in zip(prompt.segments, apart, strict=True):
        spliced_HTT[:, span.start : span.end, span.start : span.end] = own
    query = torch.cat([torch.arange(span.start, span.end) for span in prompt.segments])
    off_NT = (whole_HTT - spliced_HTT)[:, query].abs().mean(dim=0)
    for span in prompt.segments:
        for place, keys in enumerate(_places(span, ends)):
            key = torch.arange(keys.start, keys.stop)
            sums[place] += float(off_NT[:, key].double().sum())
            counts[place] += int((query[:, None] >= key).sum())
    return Deviation(*(total / max(1, count) for total, count in zip(sums, counts, strict=True)))


def _places(span: Span, ends: int) -> tuple[range, range, range]:
    """Return the head, the interior and the tail of a segment."""
    bounds = (span.start, span.start + ends, span.end - ends, span.end)
    return range(*bounds[:2]), range(*bounds[1:3]), range(*bounds[2:])


class AttentionWatch:
    """A model that keeps the attention of each layer with grouped queries, for prompts of at most `tokens` tokens."""

    def __init__(self, model: HybridModel, tokens: int) -> None:
        self._mixers = {layer: mixer for layer, mixer in model.mixers.attention.items() if isinstance(mixer, Attention)}
        self._seen: dict[int, torch.Tensor] = {}
        self._bench = Workbench(with_attention(model, self._watched), tokens)

    def deviations(self, prompt: Prompt, ends: int) -> Mapping[int, Deviation]:
        """Return deviations by layer, of the prompt's segments that are longer than both ends."""
        prompt = Prompt(prompt.tokens, tuple(s for s in prompt.segments if s.end - s.start > 2 * ends))
        if not prompt.segments:
            return {}
        whole = self.attention(prompt.tokens)
        alone = [self.attention(prompt.tokens[span.start : span.end]) for span in prompt.segments]
        return {
            layer: deviation(prompt, ends, whole_HTT, [one[layer] for one in alone])
            for layer, whole_HTT in whole.items()
        }

    def of_last(self, prompt: Prompt, recipe: Recipe) -> list[float]:
        """Return the attention that the composed prompt's last token gives each segment, a mean over heads.

        The deepest layer with grouped queries counts. Raises ValueError for a model without one.
        """
        self._seen = {}
        self._bench.composed(prompt, recipe)
        if not self._seen:
            raise ValueError("0 layers of attention with grouped queries, at least 1 is needed")
        given_K = self._seen[max(self._seen)][:, -1].mean(dim=0)
        return [float(given_K[span.start : span.end].sum()) for span in prompt.segments]

    def attention(self, tokens: tuple[int, ...]) -> dict[int, torch.Tensor]:
        """Run a prompt whole; returns the attention [H, T, T] by layer."""
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
    """Return the attention [H, N, K] of the tokens of a step's last slice to all keys up to them."""
    last = step.batch.slices[-1]
    assert step.attention is not None, "the layer has no attention"
    q_NGQD = mixer.heads.project(x_NC, step.batch).q_NGQD[last.first : last.first + last.length]
    keys, _ = step.attention.arena.gather(mixer.layer, last.table_P, last.end)
    k_KGD = keys[: last.end].reshape(last.end, mixer.shape.kv_heads, -1)
    scale = q_NGQD.shape[-1] ** -0.5 if mixer.shape.scale is None else mixer.shape.scale
    score_GQNK = torch.einsum("ngqd,kgd->gqnk", q_NGQD.float(), k_KGD.float()) * scale
    unseen_NK = torch.ones(score_GQNK.shape[-2:], dtype=torch.bool).triu(1 + last.start)
    score_GQNK.masked_fill_(unseen_NK, -torch.inf)
    attention_GQNK, sink_GQ = score_GQNK.softmax(dim=-1), mixer.heads.sink_GQ
    if sink_GQ is not None:
        attention_GQNK *= (score_GQNK.logsumexp(-1, keepdim=True) - sink_GQ[:, :, None, None]).sigmoid()
    return attention_GQNK.flatten(0, 1)


def studied(
    model: Path,
    formats: tuple[str, str],
    threads: int | None,
    wanted: Wanted,
    methods: Sequence[Fidelity],
    skip_attention: bool,
) -> Study:
    """Load a model in a data type, with weights held in a format, and study it.

    Raises CheckpointError, and ConfigError as `Wanted.prompts` does.
    """
    prepare_process(threads)
    numerics.use(Numerics())
    dtype, weights = formats
    loaded = load_model(model, dtype, weights=weights)
    prompts = wanted.prompts(loaded)
    computing = without_attention(loaded.model) if skip_attention else loaded.model
    longest = max(len(prompt.tokens) for prompt in prompts)
    watch = AttentionWatch(computing, longest)
    return Study(
        loaded.name,
        compared(computing, prompts, methods, longest),
        Deviation.means([watch.deviations(prompt, ENDS) for prompt in prompts]),
    )


def compared(
    model: HybridModel, prompts: Sequence[Prompt], methods: Sequence[Fidelity], longest: int
) -> dict[str, list[Measured]]:
    """Measure every prompt, of at most `longest` tokens, by every method."""
    bench = Workbench(model, longest)
    found: dict[str, list[Measured]] = {str(method): [] for method in methods}
    for prompt in prompts:
        whole = bench.whole(prompt)
        for method in methods:
            recipe = Recipe.of(method, model.spec.conv_taps, prompt)
            composed = bench.composed(prompt, recipe)
            found[str(method)].append(measured(model.spec, prompt, recipe, composed, whole))
    return found
