"""Serving modes that are compared, each with the request fields that select it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
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
    """A serving mode: the fields that it adds to a request's body, and a column of the results for each round."""

    columns: tuple[str, ...]
    namespace: str = ""  # a format of the asking's fields; "" is the server's default, which holds earlier requests
    exact: bool = False
    segments: bool = False  # whether documents are marked
    fidelity: str | None = None

    def fields(self, asking: Asking) -> Json:
        fields: Json = {}
        if self.namespace:
            fields["cache_salt"] = self.namespace.format(asking=asking)
        if self.exact:
            fields["exact"] = True
        if self.fidelity is not None:
            fields["fidelity"] = self.fidelity
        if self.segments:
            fields["messages"] = marked(asking.item, asking.number)
        return fields


NAMESPACE_OF_REQUEST = "{asking.run}-cold-{asking.number}-{asking.time}"  # nothing matches
NAMESPACE_OF_RUN = "{asking.run}-prefix"  # earlier requests of the run match, older ones do not
COMPOSED = ("naive", "w0", "w4", "w16", "w32", "fast", "balanced", "high")  # fidelities; the first five are baselines
MODES = {
    "served": Mode(("served",)),
    "cold": Mode(("cold",), NAMESPACE_OF_REQUEST, exact=True),
    "prefix": Mode(("prefix, first", "prefix, again"), NAMESPACE_OF_RUN, exact=True),
    "whole": Mode(("whole",), NAMESPACE_OF_REQUEST, exact=True, segments=True),
    "prefixes": Mode(("prefixes",), NAMESPACE_OF_RUN, exact=True, segments=True),
    **{name: Mode((name,), "{asking.run}-" + name, segments=True, fidelity=name) for name in COMPOSED},
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
