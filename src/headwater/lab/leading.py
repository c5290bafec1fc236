"""A cache that keeps of each prompt no more than its leading part."""

from __future__ import annotations

from dataclasses import replace

from headwater.cache import PrefixCache
from headwater.plan import Draft, Plan


class LeadingParts(PrefixCache):
    """Publishes what a request's key tells, and takes no checkpoint behind that: the rest stays the request's own."""

    def reserve(self, draft: Draft) -> Plan:
        known = len(draft.key) // self.layout.unit_bytes * self.layout.unit_tokens
        publish = min(draft.publish, known)
        return super().reserve(
            replace(
                draft,
                publish=publish,
                checkpoints=tuple(at for at in draft.checkpoints if at <= publish),
                speculative=tuple(at for at in draft.speculative if at <= publish),
            )
        )
