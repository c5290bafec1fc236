"""The fidelity study: prompts of one model, composed by several methods and measured against the whole prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headwater.evaluate.fidelity import Deviation, Measured, Study
from headwater.evaluate.fidelity_forward import Recipe, Workbench, without_attention
from headwater.evaluate.fidelity_measures import AttentionWatch, measured
from headwater.evaluate.fidelity_prompts import Prompt, Wanted
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.models.hybrid import HybridModel
from headwater.models.load import load_model
from headwater.request import Fidelity

ENDS = 8  # tokens at a segment's ends whose attention is measured (HYPIC, section 4.3)


def studied(
    model: Path, dtype: str, threads: int | None, wanted: Wanted, methods: Sequence[Fidelity], skip_attention: bool
) -> Study:
    """Load a model and study it. Raises CheckpointError, and ConfigError as `Wanted.prompts` does."""
    prepare_process(threads)
    numerics.use(Numerics())
    loaded = load_model(model, dtype)
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
