"""Tenants: the work that is planned for one does not depend on what another sent.

No clock: two worlds have the same history, but for what tenant A said. What is planned for tenant B must be the same
in both, leg for leg and page for page; then no time that B measures can tell them apart.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from headwater.account import Reason
from headwater.plan import Retention
from headwater.request import Boundaries
from headwater.schedule.kinds.request import Request
from tests.covering import cells
from tests.schedule.ledger import Lab, words
from tests.support import examples

A, B = "salt of A", "salt of B"
PAGE = 4
SECRET = words(90, "what A sent, and B guesses")
OTHER = words(90, "what A sent, and B does not guess")
SYSTEM = words(40, "a system prompt that everybody knows")
BOUNDARIES = Boundaries(system_end=40, query_start=40, query_end=86)

Say = list[int]
History = Callable[[Lab, Say], None]


class Watched(Lab):
    """A lab that writes down all that is planned for a tenant, step by step, and what it took."""

    def __init__(self, tenant: str = B, **lab) -> None:
        super().__init__(page_size=PAGE, **lab)
        self.trace: list[tuple] = []
        plan_step = self.scheduler.plan_step

        def noted():
            step = plan_step()
            legs = [(leg.plan, leg.wants_token) for leg in step.legs if leg.seq.namespace == tenant]
            rows = [(one.positions, one.seq.table, one.plan) for one in step.decodes if one.seq.namespace == tenant]
            self.trace.append((self.steps, legs, rows, self.cache.stats()))
            return step

        self.scheduler.plan_step = noted

    def probe(self, prompt: Say, **generation) -> Request:
        """B's request, from an empty trace on, until nothing is left to do."""
        self.trace.clear()
        seq = self.submit(prompt, max_tokens=6, namespace=B, **generation)
        self.run()
        return seq


def asked_before(lab: Lab, said: Say) -> None:
    lab.ask(said, 6, namespace=A)


def asked_often(lab: Lab, said: Say) -> None:
    for _ in range(3):
        lab.ask(said, 6, namespace=A)


def in_prefill(lab: Lab, said: Say) -> None:
    """A's prompt is being computed: within one namespace the probe would wait for it."""
    lab.submit(said, 6, namespace=A)
    lab.step()


def in_decode(lab: Lab, said: Say) -> None:
    lab.submit(said, 30, namespace=A)
    for _ in range(8):
        lab.step()


def waiting(lab: Lab, said: Say) -> None:
    """A's prompt is still in the queue: within one namespace it would take a checkpoint where the probe leaves it."""
    for i in range(8):
        lab.submit(words(50, i), 12, namespace=A)
    lab.step()
    lab.submit(said, 6, namespace=A)


def answer_waiting(lab: Lab, said: Say) -> None:
    """A's answer is about to be prefilled once more."""
    seq = lab.submit(said, 6, namespace=A)
    while seq.n_output < 6:
        lab.step()


def memory_full(lab: Lab, said: Say) -> None:
    lab.ask(said, 6, namespace=A)
    for i in range(12):
        lab.ask(words(120, "filler", i), 4, namespace="somebody else")


def pushed_out(lab: Lab, said: Say) -> None:
    """Evict the prompt that A sent, so that its loss is remembered."""
    lab.ask(said, 6, namespace=A)
    for i in range(40):
        lab.ask(words(120, "filler", i), 4, namespace="somebody else")


def beside_own(lab: Lab, said: Say) -> None:
    """B has content of its own that begins as the probe does."""
    lab.ask(SYSTEM + words(50, "B's own"), 6, namespace=B, boundaries=BOUNDARIES)
    lab.ask(said, 6, namespace=A)


def ended(lab: Lab, said: Say) -> None:
    """A says that its conversation has ended, so that it goes first."""
    lab.ask(said, 6, namespace=A, boundaries=BOUNDARIES, ended=True)
    lab.ask(words(120, "filler"), 4, namespace="somebody else")


def retained(lab: Lab, said: Say) -> None:
    """A has its system prompt and its whole prompt retained."""
    hints = (Retention(40, 300.0), Retention(86, 3600.0))
    lab.ask(said, 6, namespace=A, boundaries=replace(BOUNDARIES, extra=(40, 86), retained=hints))
    for i in range(12):
        lab.ask(words(120, "filler", i), 4, namespace="somebody else")


def preferred(lab: Lab, said: Say) -> None:
    """A asks with high priority, and then much with low priority."""
    lab.ask(said, 6, namespace=A, boundaries=BOUNDARIES, priority=1)
    for i in range(12):
        lab.ask(words(120, "A's own", i), 4, namespace=A, priority=-1)
        lab.ask(words(120, "filler", i), 4, namespace="somebody else")


HISTORIES: list[History] = [
    asked_before, asked_often, in_prefill, in_decode, waiting, answer_waiting, memory_full, pushed_out, beside_own,
    ended, retained, preferred,
]  # fmt: skip
LABS = {
    "plenty": {"n_pages": 400},
    "scarce": {"n_pages": 90},
    "seglen": {"n_pages": 90, "eviction": "seglen"},
    "headwater": {"n_pages": 90, "eviction": "headwater"},
    "split": {"n_pages": 120, "state_fraction": 0.3},
    "raw": {"n_pages": 400, "decode_reuse": "raw"},
    "one at a time": {"n_pages": 120, "max_running": 1},
}


def watched(lab: str, history: History, said: Say, probe: Say) -> tuple[list[tuple], Request]:
    world = Watched(**LABS[lab])
    history(world, said)
    seq = world.probe(probe, boundaries=BOUNDARIES)
    return world.trace, seq


@pytest.mark.parametrize(
    ("history", "lab"),
    cells(product(HISTORIES, LABS), lambda history, lab: (HISTORIES.index(history) + [*LABS].index(lab)) % 3 == 0),
)
def test_probe_of_another_tenants_prompt_is_planned_as_an_unknown_one(history, lab):
    hit_by_other, one = watched(lab, history, SYSTEM + SECRET, SYSTEM + SECRET)
    missed_by_all, two = watched(lab, history, words(40, "no system prompt") + OTHER, SYSTEM + SECRET)
    assert one.account == two.account
    assert [t[:3] for t in hit_by_other] == [t[:3] for t in missed_by_all]  # plans, down to the page ids
    assert [t[3] for t in hit_by_other] == [t[3] for t in missed_by_all]  # what is free, held and was evicted


@pytest.mark.parametrize("lab", ["plenty", "raw"])
def test_probe_with_one_shared_salt_differs(lab):
    """So the test above can fail."""
    traces = []
    for said in (SYSTEM + SECRET, words(40, "no system prompt") + OTHER):
        world = Watched(**LABS[lab])
        world.ask(said, 6, namespace=B)
        seq = world.probe(SYSTEM + SECRET)
        traces.append((len(world.trace), seq.account.cached_tokens))
    assert traces[0] != traces[1]
    assert traces[0][1] > 0 == traces[1][1]


@pytest.mark.parametrize("seed", range(examples(40)))
def test_prompts_of_one_tenant_change_nothing_for_another(seed):
    """Random traffic of A, with its words replaced one for one, beside the same traffic of B, memory often full."""
    rng = random.Random(seed)
    size = {"n_pages": rng.choice([70, 100, 400]), "max_running": rng.choice([1, 3, 8]), "tokens_per_step": 32}
    script = list(drawn_script(rng))
    known = [play(Watched(**size), script, lambda token: token) for _ in range(2)]
    renamed = play(Watched(**size), script, lambda token: 200_000 - token)
    assert known[0] == known[1]
    assert renamed == known[0]


def drawn_script(rng: random.Random) -> list[tuple]:
    """Requests of A and B that share beginnings within and across the two, and steps between them."""
    script: list[tuple] = []
    for _ in range(rng.randint(10, 25)):
        tenant = rng.choice([A, A, B])
        said = words(rng.choice([8, 20, 44]), "beginning", rng.randrange(3)) + words(rng.randint(1, 40), rng.random())
        script.append((tenant, said, rng.randint(1, 12), rng.randint(0, 6)))
    return script


def play(world: Watched, script: list[tuple], rename: Callable[[int], int]) -> tuple:
    """All that is planned for B, and its accounts, with A's words renamed."""
    asked = []
    for tenant, said, max_tokens, steps in script:
        prompt = [rename(token) for token in said] if tenant == A else said
        seq = world.submit(prompt, max_tokens, namespace=tenant)
        asked += [seq] if tenant == B else []
        for _ in range(steps):
            world.step()
    world.run()
    return [t[:3] for t in world.trace], [(seq.account, seq.preemptions, seq.tokens) for seq in asked]


def test_the_reason_tells_no_more_than_that_there_are_others():
    """Decision 011: of an empty namespace it says whether all others are empty too, whatever they hold."""
    reasons = {}
    for name, said in {"nobody": None, "the same": SYSTEM + SECRET, "another": OTHER}.items():
        world = Watched()
        if said is not None:
            world.ask(said, 2, namespace=A)
        reasons[name] = world.probe(SYSTEM + SECRET).account.reason
    assert reasons == {
        "nobody": Reason.COLD, "the same": Reason.OTHER_NAMESPACE, "another": Reason.OTHER_NAMESPACE
    }  # fmt: skip
    world = Watched()
    world.ask(words(30, "B's own"), 2, namespace=B)
    world.ask(SYSTEM + SECRET, 2, namespace=A)
    assert world.probe(SYSTEM + SECRET).account.reason is Reason.COLD  # B is not empty: it hears of nobody
