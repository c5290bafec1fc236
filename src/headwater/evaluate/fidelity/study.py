"""Prompts of one model, composed in several ways and held to what is computed whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headwater.errors import ConfigError
from headwater.evaluate.fidelity.attention import AttentionWatch, Deviation
from headwater.evaluate.fidelity.distance import Measured
from headwater.evaluate.fidelity.prompt import Prompt, Prompts
from headwater.evaluate.fidelity.recipe import Recipe
from headwater.evaluate.fidelity.skipping import without_attention
from headwater.evaluate.fidelity.summary import Summary, mean_deviations
from headwater.evaluate.fidelity.workbench import Workbench
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.models.hybrid import HybridModel
from headwater.models.load import LoadedModel, load_model
from headwater.request import Fidelity

ENDS = 8  # tokens at a segment's ends, where attention is looked at (HYPIC, section 4.3)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which prompts: of a file, or cut out of documents, or a sample."""

    file: Path | None = None
    cut: int | None = None  # tokens
    parts: int = 2  # that these are cut into
    count: int = 8  # of the sample
    longest: int = 1024  # tokens of a prompt of the sample
    seed: int = 0

    def of(self, loaded: LoadedModel) -> list[Prompt]:
        """Those with segments; raises ConfigError where there are none, or one is longer than the model takes."""
        if self.file is not None and self.cut is not None:
            raise ConfigError(f"prompts are {self.file} and {self.cut:,} tokens of documents: ask for one of them")
        maker = Prompts(loaded)
        if self.file is not None:
            found = list(maker.read(self.file))
        elif self.cut is not None:
            found = [maker.cut(self.cut, self.parts, self.seed)]
        else:
            found = maker.sampled(self.count, self.seed, self.longest)
        chosen = [prompt for prompt in found if prompt.segments]
        if not chosen:
            raise ConfigError(f"{len(found)} prompts, 0 of them with segments: at least 1 is needed")
        longest, most = max(len(prompt.tokens) for prompt in chosen), loaded.spec.max_length
        if longest > most:
            raise ConfigError(f"a prompt has {longest:,} tokens, the model takes {most:,}")
        return chosen


@dataclass(frozen=True)
class Study:
    """What came of it."""

    model: str
    measured: Mapping[str, Sequence[Measured]]  # way -> each prompt
    deviations: Mapping[int, Deviation]  # attention layer -> of segments computed alone

    @property
    def ways(self) -> dict[str, Summary]:
        return {way: Summary.of(found) for way, found in self.measured.items()}

    def as_json(self) -> dict[str, Any]:
        """Means, and each prompt's figures."""
        return {
            "model": self.model,
            "ways": {
                way: {"mean": asdict(mean), "prompts": [asdict(one) for one in self.measured[way]]}
                for way, mean in self.ways.items()
            },
            "attention": {layer: asdict(one) for layer, one in self.deviations.items()},
        }


def studied(
    model: Path, dtype: str, threads: int | None, wanted: Wanted, ways: Sequence[Fidelity], skip_attention: bool
) -> Study:
    """Raises CheckpointError, and ConfigError as `Wanted.of` does."""
    prepare_process(threads)
    numerics.use(Numerics())
    loaded = load_model(model, dtype)
    prompts = wanted.of(loaded)
    computing = without_attention(loaded.model) if skip_attention else loaded.model
    longest = max(len(prompt.tokens) for prompt in prompts)
    watch = AttentionWatch(computing, longest)
    return Study(
        loaded.name,
        compared(computing, prompts, ways, longest),
        mean_deviations([watch.deviations(prompt, ENDS) for prompt in prompts]),
    )


def compared(
    model: HybridModel, prompts: Sequence[Prompt], ways: Sequence[Fidelity], longest: int
) -> dict[str, list[Measured]]:
    """Every prompt, of at most so many tokens, in every way."""
    bench = Workbench(model, longest)
    measured: dict[str, list[Measured]] = {str(way): [] for way in ways}
    for prompt in prompts:
        whole = bench.whole(prompt)
        for way in ways:
            recipe = Recipe.of(way, model.spec.conv_taps, prompt)
            composed = bench.composed(prompt, recipe)
            measured[str(way)].append(Measured.of(model.spec, prompt, recipe, composed, whole))
    return measured
