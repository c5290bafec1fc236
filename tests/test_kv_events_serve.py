"""`headwater serve --kv-events` as a process: whole blocks that requests find are predicted; no token is published."""

import re
import time
from array import array
from pathlib import Path

import httpx
import pytest
import zmq

from headwater.cluster.messages import KV, SEGMENTS, STATES, BlockRemoved, BlockStored, Digests, decode
from headwater.cluster.picture import Follower
from headwater.cluster.sockets import opened
from headwater.tiers.names import read_key
from tests.forked import PATIENCE, address, headwater, serving

STEM = "the quiet river flows under the old stone bridge and " * 30
PROMPTS = [STEM + end for end in ("so the miller said", "then a heron rose", "nothing else moved that day " * 12)]
ANY = "tcp://127.0.0.1:*"
FLAGS = "--port", "0", "--kv-events", "--kv-events-endpoint", ANY, "--kv-events-replay-endpoint", ANY
UNIT = 64


class Served:
    """A server that publishes, a follower of it, and a subscriber that keeps all bytes."""

    def __init__(self, said: list[str], key: Path) -> None:
        self.url = address(said)
        line = next(line for line in said if line.startswith("KV events: "))
        live, replay = re.findall(r"tcp://127\.0\.0\.1:\d+", line)
        self.raw: list[bytes] = []
        self.follower = Follower(live, replay, "kv-events")
        self.subscriber = opened(zmq.SUB)
        self.subscriber.subscribe("")
        self.subscriber.connect(live)
        self.digests = Digests(read_key(key), 4 * UNIT)

    def close(self) -> None:
        self.follower.close()
        self.subscriber.close()

    def post(self, path: str, **body) -> dict:
        response = httpx.post(f"{self.url}/{path}", json=body, timeout=PATIENCE)
        response.raise_for_status()
        return response.json()

    def completed(self, prompt: str, **more) -> dict:
        return self.post("completions", prompt=prompt, max_tokens=4, temperature=0, **more)

    def ids(self, prompt: str) -> list[int]:
        base = self.url.removesuffix("/v1")
        response = httpx.post(f"{base}/tokenize", json={"prompt": prompt}, timeout=PATIENCE)
        response.raise_for_status()
        return response.json()["tokens"]

    def settle(self) -> None:
        """Wait until the server has nothing to do, and all that it published was received."""
        deadline = time.monotonic() + PATIENCE
        while True:
            figures = httpx.get(f"{self.url.removesuffix('/v1')}/cache").json()
            idle = not any(figures[name] for name in ("requests_running", "requests_waiting", "answers_waiting"))
            self.follower.follow(0.2)  # a heartbeat comes after a second without changes
            while self.subscriber.poll(0):
                self.raw.append(self.subscriber.recv_multipart()[2])
            if idle and self.follower.picture.is_whole and self.raw and is_heartbeat(self.raw[-1]):
                return
            assert time.monotonic() < deadline

    def predicted(self, prompt: str, salt: str = "") -> int:
        ids = self.ids(prompt)
        return self.follower.picture.resumable(self.digests.prompt(ids, salt), len(ids))


def is_heartbeat(payload: bytes) -> bool:
    (event, *more) = decode(payload)
    return isinstance(event, BlockRemoved) and not event.block_hashes and not more


def cached(reply: dict) -> int:
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return tmp_path / "key"


def test_followers_predict_reuse_in_whole_blocks_and_events_contain_no_text(key: Path) -> None:
    with serving(*FLAGS, "--kv-events-key", str(key)) as (process, said):
        served = Served(said, key)
        served.settle()
        assert served.predicted(PROMPTS[0]) == 0
        found, hits = [], []
        for prompt in (*PROMPTS, PROMPTS[2], PROMPTS[0]):
            predicted, hit = served.predicted(prompt), cached(served.completed(prompt))
            assert predicted in (hit // UNIT * UNIT, max(0, hit - 1) // UNIT * UNIT), prompt  # tails are not announced
            found.append(predicted)
            hits.append(hit)
            served.settle()
        whole = {prompt: (len(served.ids(prompt)) - 1) // UNIT * UNIT for prompt in PROMPTS}
        assert found[0] == 0 < found[1] <= found[2] < found[3] == whole[PROMPTS[2]]
        assert found[4] == whole[PROMPTS[0]]
        assert hits[3:] == [len(served.ids(prompt)) for prompt in (PROMPTS[2], PROMPTS[0])]
        salted = served.completed(PROMPTS[0], cache_salt="a-secret-salt")
        assert cached(salted) == 0
        served.settle()
        assert served.predicted(PROMPTS[0], "a-secret-salt") == found[4]
        assert served.predicted(PROMPTS[0], "another") == 0
        base = served.url.removesuffix("/v1")
        warmed = httpx.post(f"{base}/cache/segments", json={"texts": [STEM]}, timeout=PATIENCE)
        assert warmed.json()["data"][0]["outcome"] == "stored", warmed.json()
        first = [{"role": "user", "content": STEM + "tell me more"}]
        answer = served.post("chat/completions", messages=first, max_tokens=90, temperature=0, ignore_eos=True)
        served.settle()
        late = Follower(served.follower._live.getsockopt_string(zmq.LAST_ENDPOINT), served.follower._replay_address)
        deadline = time.monotonic() + PATIENCE
        while not late.picture.is_whole and time.monotonic() < deadline:
            late.follow(0.1)
        assert late.picture.held == served.follower.picture.held
        late.close()
        assert len(served.follower.picture.held[SEGMENTS]) == 1
        assert answer["usage"]["completion_tokens"] == 90
        check_nothing_said(served)
        process.terminate()
        assert process.wait(PATIENCE) == 0
        served.close()
    assert key.stat().st_mode & 0o777 == 0o600


def check_nothing_said(served: Served) -> None:
    """No token ids and no text in any byte that was published; events of KV and of states are there."""
    stored = [event for raw in served.raw for event in decode(raw) if isinstance(event, BlockStored)]
    assert {event.group_idx for event in stored} >= {KV, STATES, SEGMENTS}
    assert all(event.token_ids == [] and event.extra_keys is None for event in stored)
    everything = b"".join(served.raw)
    for word in (b"river", b"bridge", b"miller", b"secret", b"salt", b"heron"):
        assert word not in everything
    ids = served.ids(PROMPTS[0])
    for at in range(0, len(ids) - 4):
        assert array("I", ids[at : at + 4]).tobytes() not in everything


@pytest.mark.full
def test_occupied_events_port_is_refused_before_the_model_is_loaded(key: Path) -> None:
    with opened(zmq.PUB) as taken:
        taken.bind(ANY)
        place = taken.getsockopt_string(zmq.LAST_ENDPOINT)
        flags = "--port", "0", "--kv-events", "--kv-events-endpoint", place, "--kv-events-key", str(key)
        run = headwater("serve", *flags)
    assert run.returncode == 2
    assert re.match(r"headwater: kv_events_endpoint is 'tcp://.*Address already in use", run.stderr)
