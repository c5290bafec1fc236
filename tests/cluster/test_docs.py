"""docs/kv-events.md: its reader works as printed, and its formula gives the digests."""

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

from headwater.cache.changes import SegmentStored
from headwater.cluster import publisher as publishers
from headwater.cluster.messages import KINDS
from tests.cache.toy import PAGE, words
from tests.cluster.rig import DIGESTS, KEY, TIGHT, held, logged
from tests.cluster.test_picture import existing
from tests.cluster.test_publisher import publishing, serve, settled

PAGE_TEXT = (Path(__file__).parents[2] / "docs" / "kv-events.md").read_text()


def printed_reader() -> Any:
    """Return the class that the page prints."""
    (_, code) = re.findall(r"```python\n(.*?)```", PAGE_TEXT, re.DOTALL)
    assert code.rstrip().count("\n") < 42
    names: dict[str, Any] = {}
    exec(code, names)
    return names["Reader"]


def test_printed_reader_follows_server_through_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishers, "HEARTBEAT_SECONDS", 0.05)
    toy = logged(TIGHT)
    with publishing(toy) as publisher:
        serve(toy, publisher, 1)
        settled(publisher)
        reader = printed_reader()(*publisher.addresses)  # type: ignore[attr-defined]
        for seed in range(2, 9):
            serve(toy, publisher, seed)
            settled(publisher)
            while reader.next is None or reader.next < publisher._stream.next:
                reader.read()
            assert reader.next == publisher._stream.next or reader.read() is None
            assert existing(reader.held) == existing(held(toy.cache))
            if seed % 3 == 0:
                serve(toy, publisher, 100 + seed)
                settled(publisher)
                reader.live.recv_multipart()  # lost
        reader.live.close()


def blake(kind: str, *parts: bytes) -> bytes:
    person = f"headwater {kind}".encode()
    return hashlib.blake2b(b"".join(parts), digest_size=8, key=KEY, person=person).digest()


@pytest.mark.parametrize("salt", ["", "sålt"])
def test_digests_follow_printed_formula(salt: str) -> None:
    tokens = words(3, 2 * PAGE + 1)
    ids = [token.to_bytes(4, "little") for token in tokens]
    name = salt.encode()
    running, expected = blake("root", len(name).to_bytes(8, "big"), name), []
    for at in (0, PAGE):
        running = blake("unit", running, *ids[at : at + PAGE])
        expected.append(int.from_bytes(running, "big"))
    assert DIGESTS.prompt(tokens, salt) == expected
    stored = SegmentStored(0, salt, b"".join(ids), 8, 9)
    parts = (8).to_bytes(4, "big") + (9).to_bytes(4, "big"), name, b"".join(ids)
    sized = [piece for part in parts for piece in (len(part).to_bytes(8, "big"), part)]
    assert DIGESTS.segment(stored) == int.from_bytes(blake("part", *sized), "big")


def test_kv_events_page_names_each_group() -> None:
    for kind in KINDS.values():
        assert f"`{kind}`" in PAGE_TEXT
