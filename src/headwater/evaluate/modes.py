"""Serving modes that are compared, each with the request fields that select it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from headwater.evaluate.items import Item, Json

SEPARATOR = "<|segment|>"  # the default of `headwater serve`


@dataclass(frozen=True, slots=True)
class Asking:
    """One request of a run, for which a mode builds its fields."""

    item: Item
    number: int  # of the item
    time: int  # 0 for the first round of this mode
    run: str  # unique to the run; namespaces begin with it


@dataclass(frozen=True, slots=True)
class Mode:
    """A serving mode: the fields it adds to a request's body, and a column of the results for each round."""

    fields: Callable[[Asking], Json]
    columns: tuple[str, ...]


def unchanged(asking: Asking) -> Json:
    """Add nothing: the server's defaults, with whatever its cache already holds."""
    return {}


def uncached(asking: Asking) -> Json:
    """Ask for an exact answer in a namespace of its own, so that nothing matches."""
    return {"cache_salt": f"{asking.run}-cold-{asking.number}-{asking.time}", "exact": True}


def shared_prefixes(asking: Asking) -> Json:
    """Ask for an exact answer in the run's namespace: earlier requests of the run match, older ones do not."""
    return {"cache_salt": f"{asking.run}-prefix", "exact": True}


def uncached_segments(asking: Asking) -> Json:
    """Ask for the prompt with marked segments, none of which is reused."""
    return {**uncached(asking), "messages": marked(asking.item, asking.number)}


def shared_prefixes_of_segments(asking: Asking) -> Json:
    """Ask for the prompt with marked segments exactly, in the run's namespace."""
    return {**shared_prefixes(asking), "messages": marked(asking.item, asking.number)}


def composed(fidelity: str, asking: Asking) -> Json:
    """Ask for the prompt to be composed of segments; a document of any earlier prompt is reused."""
    return {
        "messages": marked(asking.item, asking.number),
        "fidelity": fidelity,
        "cache_salt": f"{asking.run}-{fidelity}",
    }


COMPOSED = ("naive", "w0", "w4", "w16", "w32", "fast", "balanced", "high")  # fidelities; the first five are baselines
MODES = {
    "served": Mode(unchanged, ("served",)),
    "cold": Mode(uncached, ("cold",)),
    "prefix": Mode(shared_prefixes, ("prefix, first", "prefix, again")),
    "whole": Mode(uncached_segments, ("whole",)),
    "prefixes": Mode(shared_prefixes_of_segments, ("prefixes",)),
    **{fidelity: Mode(partial(composed, fidelity), (fidelity,)) for fidelity in COMPOSED},
}
SINGLE = ("served",)
PAIRED = ("cold", "prefix")  # the columns after the first are compared with it
SEGMENTS = ("whole", "prefixes", *COMPOSED)  # likewise


def marked(item: Item, number: int) -> list[Json]:
    """Return an item's messages with a separator before each of its documents, and one after the last.

    Documents of a message change places, in another order for each item of a group: the prompts that stored them had
    them at other positions.
    """
    messages = []
    for message in item.messages:
        content = message.get("content")
        if isinstance(content, str):
            content = _marked(content, item.documents, number)
        messages.append({**message, "content": content})
    return messages


def _marked(content: str, documents: Sequence[str], number: int) -> str:
    plain = content.replace(SEPARATOR, "")
    held = places(plain, documents)
    if not held:
        return content
    gaps = (plain[a.stop : b.start] for a, b in pairwise([range(0), *held]))
    texts = [plain[place.start : place.stop] for place in held]
    shuffled = random.Random(number).sample(texts, len(texts))
    parts = (gap + SEPARATOR + text for gap, text in zip(gaps, shuffled, strict=True))
    return "".join(parts) + SEPARATOR + plain[held[-1].stop :]


def places(content: str, documents: Sequence[str]) -> list[range]:
    """Return the span of each document in `content`, in characters, ascending.

    A document that is not there, or only within a longer one, has none.
    """
    found: list[range] = []
    for text in sorted(filter(None, documents), key=len, reverse=True):
        at = content.find(text)
        while at >= 0 and any(at < other.stop and other.start < at + len(text) for other in found):
            at = content.find(text, at + 1)
        if at >= 0:
            found.append(range(at, at + len(text)))
    return sorted(found, key=lambda place: place.start)
