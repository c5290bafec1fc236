"""Settings as values: name, kind, group and help, from which flags, variables, files and docs are made."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headwater.errors import ConfigError

UNITS = {"": 1, "B": 1}
UNITS |= {f"{prefix}B": 1000 ** (i + 1) for i, prefix in enumerate("KMGT")}
UNITS |= {f"{prefix}iB": 1024 ** (i + 1) for i, prefix in enumerate("KMGT")}
SWITCH_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
OFF = "off"  # an option that is not used
MASK = "***"  # shown instead of a secret


class SettingError(ConfigError):
    """Invalid setting: `name` is `shown`, `must`. `origin` is the source of its value, if known."""

    def __init__(self, name: str, shown: str, must: str, origin: str = "") -> None:
        super().__init__(f"{name} is {shown}{f' (from {origin})' if origin else ''}, {must}")
        self.name, self.shown, self.must = name, shown, must

    def at(self, origin: str) -> SettingError:
        return SettingError(self.name, self.shown, self.must, origin)


@dataclass(frozen=True, slots=True)
class Kind:
    """Syntax of one kind of value. `parse` raises ValueError, or ConfigError, for an invalid text."""

    metavar: str
    parse: Callable[[str], Any]
    natives: tuple[type, ...]  # types of TOML values accepted besides text
    must: str
    show: Callable[[Any], str] = str


def parse_bytes(text: str) -> int:
    """Bytes of "4GB" (4·10⁹), "4GiB" (4·2³⁰), "512MB", "65536"; raises ConfigError for anything else."""
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", text)
    units = {name.lower(): size for name, size in UNITS.items()}
    if found is None or found[2].lower() not in units:
        raise SettingError("memory", repr(text), BYTES.must)
    return int(float(found[1]) * units[found[2].lower()])


def show_bytes(size: int) -> str:
    """The shortest spelling that `parse_bytes` reads as `size`."""
    exact = [f"{size // unit}{name}" for name, unit in UNITS.items() if size % unit == 0 and size >= unit and name]
    return min([str(size), *exact], key=len)


def _parse_switch(text: str) -> bool:
    if text.strip().lower() not in SWITCH_WORDS:
        raise ValueError(text)
    return SWITCH_WORDS[text.strip().lower()]


def _parse_finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _parse_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _parse_path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # ~ of an unknown user
        raise ValueError(text) from error


def without_password(place: str) -> str:
    """Mask the user and password of a URL, and its query, which may have them."""
    return re.sub(r"\?[^,]*", f"?{MASK}", re.sub(r"//.*@", f"//{MASK}@", place))


TEXT = Kind("TEXT", str, (), "must be text")
COUNT = Kind("N", int, (int,), "must be a whole number")
NUMBER = Kind("X", _parse_finite, (int, float), "must be a number")
SECONDS = Kind("SECONDS", _parse_finite, (int, float), "must be a number of seconds", lambda number: f"{number:g}")
BYTES = Kind("SIZE", parse_bytes, (int,), "must be a number and a unit, such as 4GB (10^9) or 4GiB (2^30)", show_bytes)
SWITCH = Kind("", _parse_switch, (bool,), "must be true or false", lambda on: "on" if on else "off")
FILE = Kind("PATH", _parse_path, (), "must be a path")
TIERS = Kind(
    "PLACE",
    lambda text: tuple(text.split()),
    (list,),
    "must be places with spaces between",
    lambda places: " ".join(map(without_password, places)),
)
NAMES = Kind("A,B,...", _parse_names, (list,), "must be names with commas between", ",".join)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a server, with its flag, variable, TOML key and row of the docs."""

    group: str
    help: str
    kind: Kind
    choices: tuple[str, ...] = ()
    unset: str = ""  # meaning of None, shown as the default; "": the setting always has a value
    secret: bool = False
    least: float | None = None  # the smallest value
    name: str = ""
    default: Any = None

    def check(self, value: Any) -> None:
        """Raise SettingError for a value outside the choices, or below the least."""
        if self.choices and value not in self.choices:
            raise SettingError(self.name, repr(value), f"must be one of {', '.join(self.choices)}")
        if self.least is not None and value is not None and not value >= self.least:
            raise SettingError(self.name, f"{value:,}", f"must be at least {self.least:,}")

    @property
    def flag(self) -> str:
        """The option of `headwater serve`."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "HEADWATER_" + self.name.upper()

    def read(self, given: object) -> Any:
        """Parse a text or check a TOML value. Raises SettingError if it is invalid."""
        shown = MASK if self.secret else repr(given)
        try:
            if isinstance(given, str):
                return self.kind.parse(given)
        except (ValueError, ConfigError) as error:
            raise SettingError(self.name, shown, self.kind.must) from error
        if isinstance(given, list) and list in self.kind.natives and all(isinstance(name, str) for name in given):
            return tuple(given)
        if list in self.kind.natives or type(given) not in self.kind.natives:
            raise SettingError(self.name, shown, self.kind.must)
        return given

    def show(self, value: Any) -> str:
        """Return a text that `read` parses back to `value`; a mask for a secret."""
        if value is None:
            return self.unset
        return MASK if self.secret else self.kind.show(value)


def setting(default: Any, kind: Kind, group: str, help: str, **more: Any) -> Any:
    """Declare a dataclass's field as a setting; `more` are choices, unset, secret and least of Setting."""
    one = Setting(group, help, kind, **more)
    return field(default=default, metadata={"setting": one}, repr=not one.secret)


def settings_of(fields: tuple[Any, ...]) -> tuple[Setting, ...]:
    """Return the settings among a dataclass's fields, in order."""
    kept = [one for one in fields if "setting" in one.metadata]
    return tuple(replace(one.metadata["setting"], name=one.name, default=one.default) for one in kept)
