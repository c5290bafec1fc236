"""Prefill apart from decode: one worker samples the first token, another one continues, and no bit changes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from headwater.cli.cluster import roles_of
from headwater.cluster.cost import Candidate, Prompt, Role, price_reads
from headwater.cluster.disaggregation import decoders, prefiller
from headwater.cluster.sockets import Contact
from headwater.cluster.wire import NO_CONTACT
from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.engine.meter import Backlog
from headwater.engine.verification import LogitsTap
from headwater.errors import ConfigError
from headwater.request import Span
from headwater.schedule.prefill_seconds import PrefillSpeed
from headwater.schedule.sequence import Purpose, key_of
from headwater.schedule.tier_load import ReadSpeed
from tests.cluster.fake import FakeWorker, FormulaEngine, Received, Router, asking, cluster, formula, kill, until
from tests.cluster.test_routed_answers import KINDS, Whole, ask, generation, lost_after
from tests.cluster.test_routed_answers import cluster as real_cluster
from tests.cluster.test_router import submit
from tests.exactness.rig import words

FAST, SLOW = ReadSpeed(0.001, 1e-7), ReadSpeed(0.001, 1e-2)
PROMPT = range(1000)
LONG = Prompt(1000)  # with no digests

# -- the rule


def worker(role: Role, running: int = 0, pull: ReadSpeed | None = FAST, **others: object) -> Candidate:
    own = {
        "waiting": 0,
        "queued_tokens": 0,
        "prefill": PrefillSpeed(0.0, 0.001),
        "request_seconds": 1.0,
        "max_running": 8,
    }
    return Candidate(**{**own, "running": running, "reusable": 0, "pull": pull, "role": role, "pool": "one", **others})


PREFILLS = worker(Role.PREFILL)


@pytest.mark.parametrize(
    ("decodes", "prompt", "chosen"),
    [
        pytest.param(worker(Role.DECODE, 2), LONG, 1, id="answers would wait for the prompt"),
        pytest.param(worker(Role.DECODE, 0), LONG, None, id="nobody waits for it"),
        pytest.param(worker(Role.DECODE, 2), Prompt(60), None, id="less than a block is computed again anyway"),
        pytest.param(worker(Role.DECODE, 2, reusable=960, cached=960), LONG, None, id="a high hit where it decodes"),
        pytest.param(worker(Role.DECODE, 2, underway=960), LONG, None, id="it is being computed where it decodes"),
        pytest.param(worker(Role.DECODE, 2, SLOW), LONG, None, id="pulling takes longer than computing"),
        pytest.param(worker(Role.DECODE, 2, None), LONG, None, id="it pulls nothing"),
        pytest.param(worker(Role.DECODE, 2, pool="another"), LONG, None, id="another fingerprint"),
        pytest.param(worker(Role.BOTH, 2), LONG, 1, id="a worker of both roles decodes, too"),
    ],
)
def test_a_prompt_is_prefilled_apart_where_that_costs_less(decodes, prompt, chosen) -> None:
    workers = [decodes, replace(PREFILLS)]
    price_reads(workers)
    assert prefiller(prompt, workers) == chosen


def test_the_worker_that_prefills_is_the_cheapest() -> None:
    busy, free = (worker(Role.PREFILL, queued_tokens=tokens) for tokens in (500, 0))
    assert prefiller(LONG, [worker(Role.DECODE, 3), busy, free]) == 2
    assert prefiller(LONG, [worker(Role.DECODE, 3), replace(busy, queued_tokens=5000)]) is None
    assert prefiller(LONG, [worker(Role.DECODE, 3), worker(Role.DECODE, 3)]) is None


def test_every_worker_decodes_if_none_of_that_role_is_there() -> None:
    assert decoders([worker(Role.PREFILL), worker(Role.DECODE), worker(Role.BOTH)]) == [1, 2]
    assert decoders([worker(Role.PREFILL), worker(Role.PREFILL)]) == [0, 1]


# -- the router


@contextmanager
def disaggregated(p_pace: float = 0.002, p_parts: Contact = NO_CONTACT, **decoding: FakeWorker) -> Iterator:
    """Yield a router over one worker that prefills and others that decode, all of which have much to do."""
    p = FakeWorker(FormulaEngine(p_pace), parts=p_parts, role=Role.PREFILL)
    decoding = decoding or {"d": decode_worker()}
    with cluster(p=p, **decoding) as router:
        until(lambda: all(link.backlog.pull for link in router.links.values() if link.name != "p"))
        for n in range(2 * len(decoding)):
            submit(router, asking([n], 100_000 - 10)).wait_for(1)
        assert not p.engine.seen, "short prompts are prefilled where they are decoded"
        yield router, p, decoding


def decode_worker() -> FakeWorker:
    return FakeWorker(FormulaEngine(0.01, pull=FAST), role=Role.DECODE)


def lose_the_decoder(router: Router, received: Received, decoding: dict[str, FakeWorker]) -> FakeWorker:
    """End the worker that decodes an answer, after ten of its tokens; return the other one."""
    received.wait_for(10)
    (home,) = (link.name for link in router.links.values() if received.id in link.open)
    kill(router, home, decoding[home])
    (other,) = (one for name, one in decoding.items() if name != home)
    return other


def test_a_long_prompt_is_prefilled_apart() -> None:
    with disaggregated() as (router, p, decoding):
        received = submit(router, asking(PROMPT, 20)).wait()
        assert received.tokens == formula(PROMPT, 20)
        assert received.text == "".join(f"{token} " for token in received.tokens)
        assert (received.finished.output_tokens, received.finished.account.prefilled_by) == (20, "p")
        assert (router.counts["prefilled_apart"], router.counts["handed_over"]) == (1, 1)
        assert router.counts["resumed"] == router.counts["moved"] == 0
        assert [one.params.max_tokens for one in p.engine.seen] == [1]
        assert decoding["d"].engine.seen[-1] == asking(PROMPT, 20, keep_output=False)
        assert decoding["d"].engine.peers[-1][:1] == (p.peer.incarnation,), "it has the prompt's tail"
        assert {one["name"]: one["role"] for one in router.state()["workers"]} == {"p": "prefill", "d": "decode"}
        until(lambda: router.links["p"].outstanding.number == 0)


def test_request_that_cannot_be_handed_over_is_prefilled_by_its_decoder() -> None:
    wanting_scores = replace(asking(PROMPT, 5), params=replace(asking(PROMPT, 5).params, prompt_logprobs=1))
    with disaggregated() as (router, p, _):
        for asked in (asking(PROMPT, 1), wanting_scores, asking(PROMPT, 5, segments=(Span(0, 9),))):
            received = submit(router, asked).wait()
            assert received.error is None
            assert received.finished.account.prefilled_by is None
        assert not p.engine.seen


def test_a_prompt_whose_prefill_worker_is_lost_is_begun_again() -> None:
    with disaggregated(p_pace=0.5) as (router, p, _):
        received = submit(router, asking(PROMPT, 20))
        until(lambda: p.engine.seen)
        kill(router, "p", p)
        assert received.wait().tokens == formula(PROMPT, 20)
        assert received.finished.account.prefilled_by is None
        assert (router.counts["moved"], router.counts["handed_over"]) == (1, 0)


def test_answer_continues_after_its_decode_worker_is_lost() -> None:
    with disaggregated(d=decode_worker(), e=decode_worker()) as (router, p, decoding):
        received = submit(router, asking(PROMPT, 60))
        other = lose_the_decoder(router, received, decoding)
        assert received.wait().tokens == formula(PROMPT, 60)
        assert received.finished.account.prefilled_by == "p"
        assert len(p.engine.seen) == 1, "it is not prefilled apart once more"
        assert other.engine.peers[-1][:1] == (p.peer.incarnation,)


@pytest.mark.parametrize(
    "then", ["handed over", "cancelled", "prefill worker lost", "decode worker lost", "first is last"]
)
def test_the_worker_that_decodes_reads_meanwhile(then) -> None:
    """The order is sent once; the worker continues the answer, and a cancellation is sent if it must not."""
    parts = Contact("tcp://127.0.0.1:1", b"")
    with disaggregated(p_pace=0.3, p_parts=parts, d=decode_worker(), e=decode_worker()) as (router, p, decoding):
        if then == "first is last":
            p.engine.finish_reason = "stop"
        received = submit(router, asking(PROMPT, 20))
        until(lambda: any(one.engine.followed for one in decoding.values()))
        ((name, home),) = [(name, one) for name, one in decoding.items() if one.engine.followed]
        (other,) = [one for one in decoding.values() if one is not home]
        assert home.engine.followed == [(p.peer.incarnation, "", key_of(PROMPT))]
        if then == "cancelled":
            router.cancel(received.id)
        elif then == "prefill worker lost":
            kill(router, "p", p)
        elif then == "decode worker lost":
            kill(router, name, home)
        if then == "cancelled":
            until(lambda: home.engine.unfollowed)
        else:
            received.wait()
        if then == "handed over":
            assert received.tokens == formula(PROMPT, 20)
            assert home.engine.seen[-1] == asking(PROMPT, 20, keep_output=False)
            assert not home.engine.unfollowed
        elif then in ("prefill worker lost", "decode worker lost"):
            assert received.tokens == formula(PROMPT, 20)
        if then in ("prefill worker lost", "first is last"):
            until(lambda: home.engine.unfollowed)
        assert not other.engine.followed


def test_without_workers_that_decode_the_others_do() -> None:
    with disaggregated() as (router, p, decoding):
        received = submit(router, asking(PROMPT, 60))
        received.wait_for(10)
        kill(router, "d", decoding["d"])
        assert received.wait().tokens == formula(PROMPT, 60)
        assert submit(router, asking([5], 9)).wait().tokens == formula([5], 9)
        assert len(p.engine.seen) > 2


# -- real engines


@contextmanager
def real(model, **roles: Role) -> Iterator[tuple]:
    """Yield a router and workers; those that decode say that they have much to do, and pull fast."""
    with real_cluster(model, **roles) as (router, workers):
        for name, role in roles.items():
            busy = Backlog(4 if role == Role.DECODE else 0, 0, 0, PrefillSpeed(0.0, 0.001), 1.0, pull=FAST)
            workers[name].engine.backlog = lambda busy=busy: busy
            workers[name].engine.scheduler.tiers.prefill_seconds = lambda tokens: 1.0 * tokens  # a tail pays
        until(lambda: all(link.backlog.pull == FAST for link in router.links.values()))
        yield router, workers


def one_server(model, *asked, tap: LogitsTap | None = None) -> list[Whole]:
    """Return the answers of one engine without a cache. `tap`: gets the logits of each token."""
    loaded, check = model
    engine = Engine.over(loaded, check, ServeConfig(cache=False, memory=600 * loaded.spec.page_bytes))
    engine.verification.logits_tap = tap
    engine.start()
    try:
        answers = [Whole() for _ in asked]
        for one, answer in zip(asked, answers, strict=True):
            engine.submit(one, answer.on_event)
            answer.wait()
        return answers
    finally:
        engine.stop()


def test_answers_prefilled_apart_have_the_bits_of_one_server(model) -> None:
    kinds = [kind for kind in KINDS if kind != "prompt scores"]
    asked = [generation(kind, words(700, kind), 20) for kind in kinds]
    asked.append(replace(asked[1], params=replace(asked[1].params, choice=1)))
    plain = one_server(model, *asked)
    first = plain[0]
    stops = [(first.text[:-1],), (first.events[0].text,)]
    asked += [replace(asked[0], params=replace(asked[0].params, stop=stop)) for stop in stops]
    asked.append(replace(asked[0], params=replace(asked[0].params, stop_token_ids=(first.tokens[0],))))
    asked = [replace(one, namespace=str(n)) for n, one in enumerate(asked)]  # nothing is cached
    plain += one_server(model, *asked[-3:])
    with real(model, p=Role.PREFILL, d=Role.DECODE) as (router, workers):
        answers = [ask(router, one).wait() for one in asked]
        counts = dict(router.counts)
        (pulls,) = workers["d"].engine.stats().tiers
        computed = workers["d"].engine.scheduler.computed[Purpose.PROMPT]
    assert [one.comparable for one in answers] == [one.comparable for one in plain]
    assert [one.finished.account.prefilled_by for one in answers] == ["p"] * len(asked)
    assert counts["prefilled_apart"] == len(asked)
    assert counts["handed_over"] == len(asked) - 2, "two ended at their first token"
    assert [one.finished.account.handed_over_tokens for one in answers[:6]] == [700] * 6
    assert pulls.corrupt == pulls.errors == computed == 0


def test_a_hand_over_that_fails_has_the_bits_of_one_server(model) -> None:
    """The prefix is evicted before it is pulled; then the worker that prefilled ends after the first token."""
    asked = [generation("drawn", words(700, name), 20) for name in ("evicted", "ended")]
    plain = one_server(model, *asked)
    with real(model, p=Role.PREFILL, d=Role.DECODE) as (router, workers):
        p, hand_over = workers["p"], router._hand_over
        parts = p.pulling.sending.parts
        find, parts.find, parts.follow = parts.find, lambda *given: None, lambda *given: None
        answers = [ask(router, asked[0]).wait()]
        parts.find = find

        def ending(request, *given) -> None:
            hand_over(request, *given)
            p.pulling.close()
            p.kill()

        router._hand_over = ending
        answers.append(ask(router, asked[1]).wait())
        assert router.counts["handed_over"] == router.counts["told_of_peers"] == 2, router.counts
        p.pulling.close = lambda: None
    assert [one.comparable for one in answers] == [one.comparable for one in plain]
    accounts = [one.finished.account for one in answers]
    assert [(one.prefilled_by, one.handed_over_tokens) for one in accounts] == [("p", 0)] * 2


def test_handed_over_answer_after_a_lost_worker_equals_one_server(model) -> None:
    asked = generation("penalties", words(700, "lost"))
    (plain,) = one_server(model, asked)
    with real(model, p=Role.PREFILL, d=Role.DECODE, e=Role.DECODE) as (router, workers):
        answer = lost_after(20, router, workers, asked)
        assert (router.counts["handed_over"], router.counts["resumed"]) == (1, 1)
    assert answer.comparable == plain.comparable
    assert answer.finished.account.prefilled_by == "p"


# -- the command


@pytest.mark.parametrize(
    ("settings", "prefill", "decode", "found"),
    [
        ({}, 0, 0, {Role.BOTH: 3}),
        ({}, 1, 2, {Role.PREFILL: 1, Role.DECODE: 2}),
        ({}, 1, 0, "both must be given, or neither"),
        ({}, 0, 2, "both must be given, or neither"),
        ({"cache": False}, 1, 2, "with a cache"),
        ({"device": "cuda"}, 1, 2, {Role.PREFILL: 1, Role.DECODE: 2}),
        ({"decode_reuse": "raw"}, 1, 2, "not with decode_reuse raw"),
    ],
)
def test_roles_are_given_together_and_need_pulls(settings, prefill, decode, found) -> None:
    config = replace(ServeConfig(), **settings)
    if isinstance(found, str):
        with pytest.raises(ConfigError, match=found):
            roles_of(config, 3, prefill, decode)
    else:
        assert roles_of(config, 3, prefill, decode) == found
