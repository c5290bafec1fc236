"""Fingerprints: all that the bits of stored parts depend on, by component, and the parts that stand for them in stores.

A store has one part for each fingerprint under which states were stored. From it, a server with another fingerprint
knows which components differ, and the names that a prompt has there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from headwater.tiers.names import FINGERPRINT
from headwater.tiers.part import CorruptPart, Part


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Digests of components by their names. Servers with equal ones compute states with equal bits."""

    components: Mapping[str, str]
    model: str = field(default="", compare=False)  # name, for people

    @classmethod
    def of(cls, values: Mapping[str, str], model: str = "") -> Fingerprint:
        """Return the fingerprint of these components."""
        digests = {name: hashlib.sha256(value.encode()).hexdigest()[:32] for name, value in values.items()}
        return cls(digests, model)

    @property
    def digest(self) -> str:
        """One digest of all components, by which names differ."""
        return hashlib.sha256(json.dumps(self.components, sort_keys=True).encode()).hexdigest()[:32]

    def differs(self, other: Fingerprint) -> list[str]:
        """Return the names of components that are not equal."""
        names = self.components.keys() | other.components.keys()
        return sorted(name for name in names if self.components.get(name) != other.components.get(name))

    def part(self) -> Part:
        """Return the part that stands for it in a store."""
        content = json.dumps({"components": dict(self.components), "model": self.model}, sort_keys=True)
        return Part(FINGERPRINT, 0, 0, b"", [content.encode()])

    @classmethod
    def read(cls, part: Part) -> Fingerprint:
        """Return the fingerprint of a part that was checked. Raises CorruptPart."""
        try:
            found = json.loads(b"".join(part.payload))
            return cls({str(name): str(digest) for name, digest in found["components"].items()}, str(found["model"]))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CorruptPart(f"it is not a fingerprint: {error}") from error
