"""The ways of serving that are compared: what each adds to a request so that it is served so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    """A namespace of its own for each request, so that nothing matches."""
    return {"cache_salt": f"{asking.run}-cold-{asking.number}-{asking.time}"}


def one_namespace(asking: Asking) -> Json:
    """One namespace for all, so that each finds what came before it, and nothing from before the run."""
    return {"cache_salt": f"{asking.run}-prefix"}


WAYS = {
    "served": Way(as_it_is, ("served",)),
    "cold": Way(never_seen, ("cold",)),
    "prefix": Way(one_namespace, ("prefix, first", "prefix, again")),
}
SINGLE = ("served",)
PAIRED = ("cold", "prefix")  # the others are compared with the first
