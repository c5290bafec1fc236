"""Index and policies against the published simulator of Marconi: the hits and evictions of every request."""

import io
import json
from array import array
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import zstandard

from headwater.cache.audit import check_index
from tests.covering import cells
from tests.reference.marconi_simulator import CHECKPOINT_BYTES, KV_BYTES, Served, Simulator, Tuned, flops

PUBLISHED = Path(__file__).parents[2] / "../shared/peers/marconi"
NAMES = sorted(path.stem for path in (PUBLISHED / "results").glob("*_v[123]*.json"))
ALWAYS = ("chat_v", "fewshot_v1_2", "fewshot_v2_5", "fewshot_v3a1", "agent_v3a1_5")
NONE = [pytest.param("", marks=pytest.mark.skip("no ../shared here"))]


@cache
def requests(trace: str) -> list[tuple[bytes, bytes]]:
    """Prompt, and prompt with output, of each request of a published trace."""
    read = []
    with (PUBLISHED / f"traces/{trace}.jsonl.zst").open("rb") as file:
        for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file)):
            request = json.loads(line)
            prompt = array("i", request["input"]).tobytes()
            read.append((prompt, prompt + array("i", request["output"]).tobytes()))
    return read


def simulator(policy: str, published: dict[str, Any]) -> Simulator:
    """v2's processes were done in some order, by which ties went: that of the published grid."""
    if policy == "v2":
        grid = (published["tuning"] or {"grid": [[0.0]]})["grid"]
        return Tuned(published["capacity_bytes"], order=[alpha for alpha, *_ in grid])
    return Simulator(published["capacity_bytes"], None if policy == "v1" else float(policy.removeprefix("v3a")))


@pytest.mark.parametrize("name", cells(NAMES, lambda name: name.startswith(ALWAYS) and "_rep" not in name) or NONE)
def test_every_published_result_comes_out(name: str) -> None:
    trace, policy, *_ = name.split("_")
    published = json.loads((PUBLISHED / f"results/{name}.json").read_text())
    simulated = simulator(policy, published)
    served = [simulated.serve(*request) for request in requests(trace)]
    check_index(simulated.index)
    assert [request.hit for request in served] == published["hits"]
    assert sum(flops(request.hit) for request in served) == published["flops_saved"]
    if "evictions" in published:
        evictions = [[at, *eviction] for at, request in enumerate(served) for eviction in request.evictions]
        assert evictions == published["evictions"]
    assert simulated.index.checkpoints == published["final_states"]
    assert simulated.size == published["final_states"] * CHECKPOINT_BYTES + published["final_kv_tokens"] * KV_BYTES
    if isinstance(simulated, Tuned) and published["tuning"]:
        assert simulated.alpha == published["alpha_final"]
        assert [round(saved / 1e12, 2) for saved in simulated.saved.values()] == [
            saved for *_, saved in published["tuning"]["grid"]
        ]


def serve(capacity: int, alpha: float | None, *requests: bytes) -> list[Served]:
    """Requests of one byte a token, without outputs."""
    simulated = Simulator(capacity, alpha)
    return [simulated.serve(key, key) for key in (array("i", [*request]).tobytes() for request in requests)]


def test_a_repeat_hits_in_whole_and_a_branch_on_its_third_request() -> None:
    served = serve(10**12, 0.0, b"aaaabbbb", b"aaaabbbb", b"aaaacccc", b"aaaadddd")
    assert [request.hit for request in served] == [0, 8, 0, 4]


def test_simulator_evicts_before_it_inserts_and_may_exceed_its_capacity() -> None:
    served = serve(CHECKPOINT_BYTES, None, b"aaaa", b"bbbbbbbb", b"aaaa")
    assert [request.evictions for request in served] == [(), (("L", 4, 4),), (("L", 8, 8),)]
    assert [request.hit for request in served] == [0, 0, 0]
