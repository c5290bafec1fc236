"""KV events through vLLM's own structures, both ways: `make test-peers VENV_VLLM=FOLDER`, an environment with vLLM.

`test_event_messages` has these structures written down again, and needs no such environment.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from headwater.cluster.messages import BlockStored, decode
from tests.cluster.test_event_messages import payloads

PLACE = os.environ.get("VENV_VLLM")
PROGRAM = """
import json, sys
import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

for line in sys.stdin:
    batch = msgspec.msgpack.decode(bytes.fromhex(line), type=KVEventBatch)
    events = [[type(one).__name__, msgspec.structs.asdict(one)] for one in batch.events]
    print(json.dumps([batch.ts, batch.data_parallel_rank, events]))
stored = BlockStored(
    [1, 2], None, [5, 6], 1, None, "GPU", None, group_idx=1, kv_cache_spec_kind="mamba", session_id="a"
)
events = [AllBlocksCleared(), stored, BlockRemoved([1], "GPU", group_idx=1)]
print(msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=events, data_parallel_rank=0)).hex())
"""


@pytest.mark.peers
@pytest.mark.skipif(not PLACE, reason="VENV_VLLM names no environment with vLLM")
def test_vllm_decodes_published_events_and_its_own_are_read() -> None:
    sent = payloads()
    command = [str(Path(PLACE) / "bin" / "python"), "-c", PROGRAM]
    lines = "\n".join(payload.hex() for payload in sent)
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *decoded, theirs = done.stdout.splitlines()[-len(sent) - 1 :]
    seen = set()
    for payload, line in zip(sent, decoded, strict=True):
        ts, rank, events = json.loads(line)
        assert (ts, rank) == (1.5, 0)
        for (name, fields), ours in zip(events, decode(payload), strict=True):
            seen.add(name)
            assert name == type(ours).__name__
            assert {key: getattr(ours, key, None) for key in fields} == fields
    assert seen == {"AllBlocksCleared", "BlockStored", "BlockRemoved"}
    cleared, stored, removed = decode(bytes.fromhex(theirs))
    assert (stored.block_hashes, stored.group_idx, stored.kv_cache_spec_kind) == ([1, 2], 1, "mamba")
    assert (type(cleared).__name__, removed.block_hashes, removed.group_idx) == ("AllBlocksCleared", [1], 1)
    assert isinstance(stored, BlockStored)
