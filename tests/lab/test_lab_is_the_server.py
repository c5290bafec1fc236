"""The lab's hits equal those of an engine that runs the model: the same code, the same requests."""

from array import array
from pathlib import Path

import pytest

from headwater.engine.proof.selfcheck import SelfCheck
from headwater.lab.cost import StepCost, load_device
from headwater.lab.serving import Engine, Serving
from headwater.lab.setup import Setup
from headwater.models.load import LoadedModel
from headwater.models.profiles import profile_of
from headwater.traces.loads import make_arrivals
from headwater.traces.request import Request, Trace
from tests.exactness.rig import Answer, Make, words

SESSIONS, TURNS, OUTPUT = 5, 4, 40
TOKENS_PER_STEP = 512
CELLS = [(40, "structural", "lru"), (40, "branch", "seglen"), *((n, "headwater", "headwater") for n in (40, 400))]


def conversation(make: Make, pages: int, **policies: str) -> tuple[list[Answer], object]:
    """Chats that share a system prompt, their turns interleaved, one request at a time; and what the cache did."""
    with make(pages, max_tokens_per_step=TOKENS_PER_STEP, **policies) as rig:
        said = {session: words(150, "system") for session in range(SESSIONS)}
        answers = []
        for turn in range(TURNS):
            for session in range(SESSIONS):
                answer = rig.ask(said[session] + words(100, session, turn), OUTPUT)
                rig.settle()
                said[session] = answer.everything
                answers.append(answer)
        return answers, rig.engine.scheduler.cache.stats()


def recorded(answers: list[Answer]) -> Trace:
    requests = []
    for number, answer in enumerate(answers):
        text = array("i", answer.everything).tobytes()
        known = len(answer.everything)
        requests.append(Request(str(number), text, len(answer.prompt), OUTPUT, known, at=100.0 * number))
    return Trace("recorded", requests)


@pytest.mark.parametrize(("pages", "placement", "eviction"), CELLS)
def test_lab_and_engine_hit_the_same_tokens(
    served: tuple[LoadedModel, Path], pages: int, placement: str, eviction: str
) -> None:
    loaded, path = served
    make = Make(loaded, SelfCheck(True, None, "compiled"))
    answers, stats = conversation(make, pages, placement=placement, eviction=eviction)
    trace = recorded(answers)
    profile = profile_of(loaded.spec, path)
    setup = Setup(profile, pages * loaded.spec.page_bytes, placement, eviction)
    lab = Serving(trace, setup, Engine(StepCost(profile, load_device("h100")), tokens_per_step=TOKENS_PER_STEP))
    tally = lab.run(make_arrivals(trace))
    hits = [answer.account.resumed_at for answer in answers if answer.account is not None]
    assert [outcome.resumed_at for outcome in tally.outcomes] == hits
    assert [outcome.reason for outcome in tally.outcomes] == [str(a.account.reason) for a in answers if a.account]
    assert lab.cache.stats() == stats
    assert sum(hits) > 0
    assert (stats.evicted_checkpoints > 0) == (pages == 40)  # type: ignore[attr-defined]
