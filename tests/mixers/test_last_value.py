"""Values that a layer keeps of the last object: computed once, and never those of another object."""

from collections.abc import Callable

from headwater.mixers.batch import LastValue


class Told:
    """A value that calls a function when it is dropped: meanwhile another thread may run, as with a tensor."""

    def __init__(self, name: str, dropped: Callable[[], object] = int) -> None:
        self.name, self._dropped = name, dropped

    def __del__(self) -> None:
        self._dropped()


def test_value_is_computed_again_only_for_another_object() -> None:
    made: list[str] = []
    last = LastValue(lambda name: made.append(name) or [name])
    first, equal = ["x"], ["x"]
    assert last.of(None, "none") == ["none"]
    found = last.of(first, "first")
    assert last.of(first, "first again") is found
    assert last.of(equal, "equal") == ["equal"], "an equal object is another one"
    assert made == ["none", "first", "equal"]


def test_each_thread_gets_the_value_of_its_own_object() -> None:
    """The other one asks just when the earlier value is dropped."""
    last, others = LastValue(Told), []
    last.of(1, "one", lambda: others.append(last.of(2, "two").name))
    assert last.of(3, "three").name == "three"
    assert others == ["two"]
