"""The ways of serving that are compared: what each adds to a request so that it is served so."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from headwater.quality.item import Item, Json


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
    """Its messages with a separator before each of its documents, and one after the last.

    Documents of a message change places, in each item of a group in another way: so they were stored from prompts in
    which they stood elsewhere.
    """
    messages = []
    for message in item.messages:
        content = message.get("content")
        held = [text for text in item.documents if isinstance(content, str) and text in content]
        if held:
            assert isinstance(content, str), "only text holds documents"
            rest = content.replace(SEPARATOR, "")
            held.sort(key=rest.find)
            between = []
            for text in held:
                before, _, rest = rest.partition(text)
                between.append(before)
            shuffled = random.Random(number).sample(held, len(held))
            documents = (gap + SEPARATOR + text for gap, text in zip(between, shuffled, strict=True))
            content = "".join(documents) + SEPARATOR + rest
        messages.append({**message, "content": content})
    return messages


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
