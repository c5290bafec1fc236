"""Places of tiers in settings: `disk:/path,size=100GB`, `redis://host:6379/0,size=1TB`, `memory,size=20GB`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headwater.errors import ConfigError
from headwater.setting import BYTES, SettingError, parse_bytes
from headwater.tiers.disk import DiskStore
from headwater.tiers.memory import MemoryStore
from headwater.tiers.redis import RedisStore
from headwater.tiers.store import Store

DISK, MEMORY, REDIS = "disk", "memory", ("redis", "rediss")
KINDS = (DISK, MEMORY, *REDIS)
EXAMPLES = "disk:/path,size=100GB or redis://host:6379/0,size=1TB"


@dataclass(frozen=True, slots=True)
class TierPlace:
    """Kind and place of a tier, its greatest size in bytes, or None, and the file with its password."""

    kind: str
    place: str
    size: int | None = None
    password_file: Path | None = None

    @classmethod
    def parse(cls, text: str) -> TierPlace:
        """Read a setting. Raises ConfigError."""
        place, *options = text.split(",")
        kind, colon, rest = place.partition(":")
        if kind not in KINDS or not (colon or kind == MEMORY):
            raise ConfigError(f"a tier is a kind and a place, such as {EXAMPLES}")
        if kind == DISK and not rest:
            raise ConfigError("a disk tier needs a folder: disk:/path")
        size, password_file = None, None
        for option in options:
            name, _, value = option.partition("=")
            if name == "size":
                size = _size(value)
            elif name == "password-file" and kind in REDIS:
                password_file = Path(value).expanduser()
            else:
                more = " and password-file=PATH" if kind in REDIS else ""  # the option may be part of a password
                raise ConfigError(f"a {kind} tier has the options size=100GB{more}, and no other")
        if kind == MEMORY and rest:
            raise ConfigError("a memory tier has no place: memory,size=20GB")
        if kind == MEMORY and size is None:
            raise ConfigError("a memory tier needs a size: memory,size=20GB")
        return cls(kind, rest, size, password_file)

    def open(self) -> Store:
        """Return the store. Raises StoreError."""
        if self.kind == DISK:
            return DiskStore(Path(self.place).expanduser(), self.size)
        if self.kind == MEMORY:
            return MemoryStore(self.size)
        return RedisStore(f"{self.kind}:{self.place}", self.size, self.password_file)


def _size(text: str) -> int:
    """Return a size of one byte or more. Raises ConfigError."""
    with suppress(SettingError):
        if size := parse_bytes(text):
            return size
    raise ConfigError(f"size is {text!r}, {BYTES.must} of 1 byte or more")
