"""The ways of serving that are compared: what each adds to a request so that it is served so."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from headwater.evaluate.item import Item, Json


@dataclass(frozen=True, slots=True)
class Asking:
    """One request of a run, for a way to make its fields of. Texts that servers keep apart begin with `run`."""

    item: Item
    number: int  # of the item
    time: int  # 0 for the first time that this way asks it
    run: str  # unlike any other run's


@dataclass(frozen=True, slots=True)
class Way:
    fields: Callable[[Asking], Json]  # added to the request's body
    columns: tuple[str, ...]  # one name for each time that every item is asked


def as_it_is(asking: Asking) -> Json:
    """However the server serves: what it knows from before helps."""
    return {}


def never_seen(asking: Asking) -> Json:
    """Exactly, in a namespace of its own for each request, so that nothing matches."""
    return {"cache_salt": f"{asking.run}-cold-{asking.number}-{asking.time}", "exact": True}


def one_namespace(asking: Asking) -> Json:
    """Exactly, in one namespace for all, so that each finds what came before it, and nothing from before the run."""
    return {"cache_salt": f"{asking.run}-prefix", "exact": True}


SEPARATOR = "<|segment|>"  # as servers have it unless they are told otherwise


def marked(item: Item, number: int) -> list[Json]:
    """Its messages with a separator before each of its documents that stands there, and one after the last.

    Documents of a message change places, in each item of a group in another way: so they were stored from prompts in
    which they stood elsewhere.
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
    held = standing(plain, documents)
    if not held:
        return content
    gaps = (plain[a.stop : b.start] for a, b in pairwise([range(0), *held]))
    texts = [plain[place.start : place.stop] for place in held]
    shuffled = random.Random(number).sample(texts, len(texts))
    parts = (gap + SEPARATOR + text for gap, text in zip(gaps, shuffled, strict=True))
    return "".join(parts) + SEPARATOR + plain[held[-1].stop :]


def standing(content: str, documents: Sequence[str]) -> list[range]:
    """Where each document stands, in characters, ascending; without what stands nowhere, or only in a longer one."""
    found: list[range] = []
    for text in sorted(filter(None, documents), key=len, reverse=True):
        at = content.find(text)
        while at >= 0 and any(at < other.stop and other.start < at + len(text) for other in found):
            at = content.find(text, at + 1)
        if at >= 0:
            found.append(range(at, at + len(text)))
    return sorted(found, key=lambda place: place.start)


def computed_whole(asking: Asking) -> Json:
    """The prompt that segments are marked in, without any, in a namespace of its own."""
    return {**never_seen(asking), "messages": marked(asking.item, asking.number)}


def composed(fidelity: str, asking: Asking) -> Json:
    """Of segments: a document that stood in any prompt before is reused."""
    return {
        "messages": marked(asking.item, asking.number),
        "fidelity": fidelity,
        "cache_salt": f"{asking.run}-{fidelity}",
    }


def prefixes(asking: Asking) -> Json:
    """The same prompt exactly, in one namespace for all."""
    return {**one_namespace(asking), "messages": marked(asking.item, asking.number)}


COMPOSED = ("naive", "w0", "w4", "w16", "w32", "fast", "balanced", "high")  # fidelities; all but three are baselines
WAYS = {
    "served": Way(as_it_is, ("served",)),
    "cold": Way(never_seen, ("cold",)),
    "prefix": Way(one_namespace, ("prefix, first", "prefix, again")),
    "whole": Way(computed_whole, ("whole",)),
    "prefixes": Way(prefixes, ("prefixes",)),
    **{fidelity: Way(partial(composed, fidelity), (fidelity,)) for fidelity in COMPOSED},
}
SINGLE = ("served",)
PAIRED = ("cold", "prefix")  # the others are compared with the first
SEGMENTS = ("whole", "prefixes", *COMPOSED)  # likewise
