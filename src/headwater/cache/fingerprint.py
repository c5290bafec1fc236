"""Names for prefixes that say nothing of their content: two are alike only if the prefixes are, in one process."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable

from headwater.cache.view import CacheView

SHOWN = 12  # hexadecimal digits of a fingerprint


class Fingerprints:
    """HMAC-SHA-256 under a key that is drawn at random and never leaves the process."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def namespace(self, name: str) -> str:
        return _shown(self._begin(name))

    def prefix(self, namespace: str, edges: Iterable[bytes]) -> str:
        """Of what the edges say one after the other, wherever they are cut."""
        mac = self._begin(namespace)
        for edge in edges:
            mac.update(edge)
        return _shown(mac)

    def of_nodes(self, view: CacheView) -> dict[int, str]:
        """By node: of the prefix that ends there. Every edge is read once."""
        macs: dict[int, hmac.HMAC] = {}
        for node in view.nodes:
            mac = self._begin(node.namespace) if node.parent is None else macs[node.parent].copy()
            mac.update(node.edge)
            macs[node.id] = mac
        return {node: _shown(mac) for node, mac in macs.items()}

    def _begin(self, namespace: str) -> hmac.HMAC:
        name = namespace.encode(errors="surrogatepass")
        return hmac.new(self._key, len(name).to_bytes(8, "big") + name, "sha256")


def _shown(mac: hmac.HMAC) -> str:
    return mac.hexdigest()[:SHOWN]
