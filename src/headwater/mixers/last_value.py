"""Values that a layer computes from one object, and keeps until it is given another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LastValue(Generic[Value]):
    """The value for the last object: the same from layer to layer of a step, or from step to step.

    Threads may share it, as engines in one process that share a model do: each gets the value for its own object.
    """

    def __init__(self, make: Callable[..., Value]) -> None:
        """`make`: computes the value."""
        self._make = make
        self._last: tuple[object, Value] | None = None

    def of(self, key: object, *given: object) -> Value:
        """Return the value for the object `key`: that of the last call, or else what `make` returns for `given`."""
        last = self._last  # another thread may replace it
        if last is None or last[0] is not key:
            last = self._last = key, self._make(*given)
        return last[1]
