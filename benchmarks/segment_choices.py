"""Choices of the segment tokens to recompute, by the divergence of the composed prompt from the whole one.

    python -m benchmarks.segment_choices [MODEL] [--prompts 20] [--segment 128] [--shortest 900] [--longest 1500]

Each way to spend tokens costs about what it takes to compute the K segments whole that are asked about, and seams of 8.
Prints the share that it really took, the divergence of the next token (nats), and how often that is the same.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import fmean, median

from headwater.cache.segments.compose import METHODS, Widths, relevant
from headwater.evaluate.items import DEFAULT_TASKS, read_items
from headwater.lab.fidelity.figures import Measured
from headwater.lab.fidelity.forward import Recipe, Workbench
from headwater.lab.fidelity.measures import AttentionWatch, measured
from headwater.lab.fidelity.prompts import Prompt, Prompts
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.models.files import embedded
from headwater.models.load import load_model
from headwater.request import Fidelity, Span

WIDEST = 400  # tokens of a seam
KINDS = ("single", "two_hop", "absent")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=embedded())
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--segment", type=int, default=128, help="adjacent documents are one segment up to this length")
    parser.add_argument("--shortest", type=int, default=900)
    parser.add_argument("--longest", type=int, default=1500)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    prepare_process(options.threads)
    numerics.use(Numerics())
    loaded = load_model(options.model, "float32")
    taps, spec = loaded.spec.conv_taps, loaded.spec
    found: dict[str, list[tuple[float, Measured]]] = {}
    bench = Workbench(loaded.model, 2 * options.longest)
    watch = AttentionWatch(loaded.model, 2 * options.longest)
    for number, prompt in enumerate(islice(prompts(Prompts(loaded), options), options.prompts)):
        whole = bench.whole(prompt)
        for name, recipe in recipes(prompt, taps, number, watch).items():
            one = measured(spec, prompt, recipe, bench.composed(prompt, recipe), whole)
            found.setdefault(name, []).append((share(prompt, recipe), one))
    if not found:
        raise SystemExit(f"0 prompts of {options.shortest:,} to {options.longest:,} tokens have three segments, 1 must")
    count = len(next(iter(found.values())))
    print(f"{loaded.name}, {count} prompts of {options.shortest} to {options.longest} tokens")
    print(f"{'way':24} {'computed':>8} {'KL':>7} {'median':>7} {'same token':>10}")
    for name, of_recipe in found.items():
        far = [one.divergence for _, one in of_recipe]
        same = fmean(one.same_first for _, one in of_recipe)
        print(f"{name:24} {fmean(s for s, _ in of_recipe):8.1%} {fmean(far):7.4f} {median(far):7.4f} {same:10.1%}")


def prompts(maker: Prompts, options: argparse.Namespace) -> Iterator[Prompt]:
    """Held-out items of these lengths, with at least three segments."""
    items = [i for i in read_items(DEFAULT_TASKS) if i.documents and i.kind in KINDS]
    items = [i for i in items if options.shortest <= i.tokens <= options.longest]
    random.Random(0).shuffle(items)
    for number, item in enumerate(items):
        prompt = joined(maker.of_item(item, number), options.segment)
        if len(prompt.segments) > 2:
            yield prompt


def joined(prompt: Prompt, least: int) -> Prompt:
    """Adjacent segments as one, until that has as many tokens."""
    spans: list[Span] = []
    for span in prompt.segments:
        if spans and spans[-1].end == span.start and spans[-1].end - spans[-1].start < least:
            spans[-1] = Span(spans[-1].start, span.end)
        else:
            spans.append(span)
    return Prompt(prompt.tokens, tuple(spans))


def recipes(prompt: Prompt, taps: int, number: int, watch: AttentionWatch) -> dict[str, Recipe]:
    """All ways for one prompt: those of the server, and what the same tokens could be spent on."""
    n, base = len(prompt.segments), METHODS[Fidelity.FAST].widths(taps)
    order = random.Random(number).sample(range(n), n)
    attended = by_attention(prompt, watch, base)
    ways = {str(fidelity): Recipe.of(fidelity, taps, prompt) for fidelity in Fidelity}
    for k in (1, 2, 3):
        asked = relevant(prompt.key, prompt.segments, k)
        recipe = Recipe(base, whole=frozenset(i for i, span in enumerate(prompt.segments) if span in asked))
        anew = share(prompt, recipe)
        ways[f"{k} asked about"] = recipe
        chosen = {"attended": attended[:k], "first": range(k), "last": range(n - k, n), "random": order[:k]}
        ways |= {f"{k} {name}": Recipe(base, whole=frozenset(some)) for name, some in chosen.items()}
        ways[f"~{k}, seams"] = as_wide(prompt, lambda w: Widths.of(w, taps), anew)
        ways[f"~{k}, heads"] = as_wide(prompt, lambda w: Widths(max(w, taps - 1), 0), anew)
        ways[f"~{k}, tails"] = as_wide(prompt, lambda w: Widths(taps - 1, w), anew)
    return ways


def by_attention(prompt: Prompt, watch: AttentionWatch, base: Widths) -> list[int]:
    """Segments by what the last token of a composed prompt gives them in the deepest attention layer."""
    given = watch.of_last(prompt, Recipe(base))
    return sorted(range(len(given)), key=lambda i: -given[i])


def share(prompt: Prompt, recipe: Recipe) -> float:
    """Return the share of the segments' tokens that is computed."""
    total = sum(span.end - span.start for span in prompt.segments)
    return 1 - sum(recipe.widths.interior(s.end - s.start) for s in recipe.composed(prompt)) / total


def as_wide(prompt: Prompt, make: Callable[[int], Widths], anew: float) -> Recipe:
    """The recipe whose share comes closest."""
    return min((Recipe(make(w)) for w in range(WIDEST)), key=lambda recipe: abs(share(prompt, recipe) - anew))


if __name__ == "__main__":
    main()
