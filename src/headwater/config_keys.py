"""Keys of a checkpoint's config.json, with their types: every error names the key and its value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwater.errors import CheckpointError

MAX_NUMBER = 1e30
MAX_SIZE = 2**31 - 1  # far above any size of a model
MAX_HEADS = 2**16
BROKEN = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@contextmanager
def checked(what: object) -> Iterator[None]:
    """Raise a CheckpointError that names a file for what its values of unexpected types make the reader raise."""
    try:
        yield
    except BROKEN as error:
        raise CheckpointError(f"{what}: a value is broken: {type(error).__name__}: {error}"[:500]) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file. Raises CheckpointError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except (OSError, ValueError, RecursionError) as error:  # no JSON, no UTF-8, too long a number, too many brackets
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, must be an object")
    return value


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the text model's part of a config.json: all of it, except for a multimodal checkpoint."""
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise CheckpointError(f"config.json: key 'text_config' is {text!r}, must be an object")
    return text


class ConfigKeys:
    """Typed access to a config.json; every error names the key."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._values: dict[str, Any] = {**text_config(config)}
        # A multimodal config has the key for tied embeddings at its top level.
        if "tie_word_embeddings" in config:
            self._values.setdefault("tie_word_embeddings", config["tie_word_embeddings"])
        self._values.setdefault("model_type", config.get("model_type"))

    def _typed(self, key: str, kinds: tuple[type, ...], default: Any) -> Any:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"config.json: key {key!r} is missing")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise CheckpointError(f"config.json: key {key!r} is {value!r}, must be {wanted}")
        return value

    def optional(self, key: str) -> Any:
        """Return the key's value, of any type; None if it is missing."""
        return self._values.get(key)

    def with_values(self, values: Mapping[str, Any]) -> ConfigKeys:
        """Return the keys with those of `values`, which precede."""
        return ConfigKeys({**self._values, **values})

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number."""
        return int(self._typed(key, (int,), default))

    def positive(self, key: str, default: int | None = None) -> int:
        """Return a whole number of 1 or more."""
        value = self.integer(key, default)
        most = MAX_HEADS if "heads" in key else MAX_SIZE
        if not 1 <= value <= most:
            raise CheckpointError(f"config.json: key {key!r} is {value:,}, must be from 1 to {most:,}")
        return value

    def automatic(self, key: str, automatic: int) -> int:
        """Return a positive number; `automatic` for "auto" and for a missing key."""
        return automatic if self._values.get(key) == "auto" else self.positive(key, automatic)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self._typed(key, (int, float), default)
        if not abs(value) < MAX_NUMBER:  # NaN, too
            raise CheckpointError(f"config.json: key {key!r} is {value}, must be a number below {MAX_NUMBER:g}")
        return float(value)

    def text(self, key: str) -> str:
        return str(self._typed(key, (str,), None))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._typed(key, (bool,), default))

    def require(self, key: str, value: object, default: object) -> None:
        """Raise unless the key, or its default, has the one value that the model code computes."""
        found = self._values.get(key)
        found = default if found is None else found
        if found != value:
            raise CheckpointError(f"config.json: key {key!r} is {found!r}, only {value!r} is supported")

    def divides(self, small: str, large: str) -> None:
        """Raise unless the number of key `large` is a multiple of that of key `small`."""
        a, b = self.positive(small), self.positive(large)
        if b % a:
            raise CheckpointError(f"config.json: {large!r} is {b}, must be a multiple of {small!r}, which is {a}")

    def listed(self, key: str, default: list[Any]) -> list[Any]:
        return list(self._typed(key, (list,), default))
