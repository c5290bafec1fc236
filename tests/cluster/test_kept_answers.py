"""Answers that were handed over are prefilled for their next turn where the router says: at one worker, once."""

from dataclasses import replace

import pytest
import torch

from headwater.cluster import assigning
from headwater.cluster.cost import Candidate, Prompt, Role
from headwater.cluster.disaggregation import keeper, kept
from headwater.engine.meter import Backlog
from headwater.errors import EngineStopped
from headwater.request import Generation
from headwater.schedule.prefill_seconds import PrefillSpeed
from headwater.schedule.sequence import Purpose, key_of
from tests.cluster.fake import asking, formula, kill, until
from tests.cluster.test_disaggregation import (
    PROMPT,
    SLOW,
    decode_worker,
    disaggregated,
    lose_the_decoder,
    one_server,
    real,
    worker,
)
from tests.cluster.test_routed_answers import ask, generation, settle
from tests.cluster.test_router import submit
from tests.exactness.rig import words

PROMPT_AND_ANSWER = Prompt(1088)  # 960 of which are cached
DECODED = worker(Role.DECODE, 4, name="d", reusable=960, cached=960)  # the request is one of the four
PREFILLED = worker(Role.PREFILL, name="p", reusable=960, cached=960)

# -- the rule


@pytest.mark.parametrize(
    ("decoded", "prefilled", "chosen"),
    [
        pytest.param({}, {}, "p", id="answers would wait for it where it was decoded"),
        pytest.param({"running": 1}, {}, "d", id="nobody would"),
        pytest.param({"running": 1, "queued_tokens": 500}, {}, "p", id="prompts that come first are queued there"),
        pytest.param({}, {"running": 5}, "d", id="prompts would wait for it where it was prefilled"),
        pytest.param({}, {"queued_tokens": 2000}, "d", id="prompts that come first are queued there"),
        pytest.param({}, {"reusable": 0, "cached": 0}, "d", id="the prompt was evicted where it was prefilled"),
        pytest.param({"reusable": 0, "cached": 0}, {"running": 5}, "p", id="it was where it was decoded"),
        pytest.param({}, {"memory_held": 0.9}, "d", id="what is evicted for it would be needed"),
        pytest.param({"pull": SLOW}, {}, "d", id="its next turn would read it slowly"),
        pytest.param({"pull": None}, {}, "d", id="its next turn could not read it"),
        pytest.param(None, {"running": 9, "queued_tokens": 9999}, "p", id="one has left that has decoded it"),
        pytest.param({}, None, "d", id="one has left that has prefilled it"),
        pytest.param(None, None, None, id="both have"),
    ],
)
def test_an_answer_is_prefilled_where_that_costs_less(decoded, prefilled, chosen) -> None:
    both = [(PREFILLED, prefilled), (DECODED, decoded)]
    workers: list[Candidate] = [replace(one, **other) for one, other in both if other is not None]
    at = keeper(PROMPT_AND_ANSWER, workers, "d")
    assert (None if at is None else workers[at].name) == chosen


@pytest.mark.parametrize(("tokens", "end"), [(1000, None), (1001, 1001), (1100, 1100)])
def test_answer_is_kept_up_to_its_last_token(tokens, end) -> None:
    found = kept(Prompt(1000, range(15)), tokens)
    assert (None if found is None else (found.tokens, list(found.blocks))) == (end and (end, [*range(15)]))


# -- the router


def busy() -> Backlog:
    return Backlog(20, 0, 0, PrefillSpeed(0.0, 0.001), 1.0)


def orders(p, decoding) -> list[tuple[str, Generation]]:
    """Return the answers that workers were to prefill, with the workers' names."""
    return [(name, asked) for name, one in {"p": p, **decoding}.items() for asked in one.engine.kept]


def test_an_answer_is_prefilled_where_its_prompt_was() -> None:
    """The order has the request as it was asked, with all tokens; the worker that decodes caches none of them."""
    asked = asking(PROMPT, 40, namespace="salted", priority=1)
    with disaggregated() as (router, p, decoding):
        received = submit(router, asked).wait()
        until(lambda: p.engine.kept)
        assert orders(p, decoding) == [("p", replace(asked, prompt=(*PROMPT, *formula(PROMPT, 40))))]
        assert decoding["d"].engine.seen[-1] == replace(asked, keep_output=False)
        assert router.counts["answers_apart"] == 1
        assert received.tokens == formula(PROMPT, 40)


@pytest.mark.parametrize("then", ["busy", "lost", "drained", "started again"])
def test_an_answer_is_prefilled_where_it_was_decoded(then) -> None:
    """If the worker that prefilled has much to do by then, takes no requests, or has lost its cache."""
    with disaggregated() as (router, p, decoding):
        received = submit(router, asking(PROMPT, 100))
        received.wait_for(2)
        if then == "busy":
            p.engine.backlog = busy
            until(lambda: router.links["p"].backlog.running == 20)
        elif then == "drained":
            router.drain("p")
        else:
            kill(router, "p", p)
        if then == "started again":
            other = decode_worker()
            other.engine.backlog = busy
            router.join("p", other.worker.contact)
            until(lambda: router.serves("p") and router.links["p"].backlog.running == 20)
        assert received.wait().tokens == formula(PROMPT, 100)
        until(lambda: decoding["d"].engine.kept)
        assert orders(p, decoding) == [("d", asking((*PROMPT, *formula(PROMPT, 100)), 100))]
        assert router.counts["answers_apart"] == 0
        if then == "started again":
            assert not other.engine.kept
            other.worker.close()
            other.engine.close()


def test_an_answer_whose_decode_worker_is_lost_is_prefilled_once() -> None:
    with disaggregated(d=decode_worker(), e=decode_worker()) as (router, p, decoding):
        received = submit(router, asking(PROMPT, 60))
        other = lose_the_decoder(router, received, decoding)
        assert received.wait().tokens == formula(PROMPT, 60)
        until(lambda: orders(p, decoding))
        ((_, found),) = orders(p, decoding)
        assert found == asking((*PROMPT, *formula(PROMPT, 60)), 60)
        assert [one.keep_output for one in other.engine.seen if len(one.prompt) == 1000] == [False]


@pytest.mark.parametrize("why", ["forbidden", "cancelled", "first is last", "not handed over"])
def test_uncacheable_answer_gets_no_order(why) -> None:
    prompt = range(60) if why == "not handed over" else PROMPT
    asked = asking(prompt, 60, keep_output=why != "forbidden")
    with disaggregated() as (router, p, decoding):
        p.engine.finish_reason = "stop" if why == "first is last" else "length"
        received = submit(router, asked)
        if why == "cancelled":
            received.wait_for(30)
            router.cancel(received.id)
        else:
            received.wait()
        p.engine.finish_reason = "length"
        later = submit(router, asking(PROMPT[1:], 90)).wait()
        until(lambda: orders(p, decoding))
        assert [one.prompt for _, one in orders(p, decoding)] == [(*PROMPT[1:], *later.tokens)]
        assert router.counts["prefilled_apart"] == (1 if why == "not handed over" else 2)


def test_a_worker_that_refuses_an_answer_disturbs_no_request() -> None:
    def refuse(asked) -> None:
        refused.append(asked)
        raise EngineStopped("stopping")

    refused: list = []
    with disaggregated() as (router, p, decoding):
        p.engine.keep_answer = refuse
        for _ in range(2):
            assert submit(router, asking(PROMPT, 60)).wait().tokens == formula(PROMPT, 60)
        until(lambda: len(refused) == 2)
        assert not decoding["d"].engine.kept
        assert router.counts["prefilled_apart"] == 2, "it is no lost worker"


# -- real engines


def held(one, tokens, namespace: str = "") -> tuple[int, int]:
    """Return the leading tokens at which a worker could resume after all of these, and those it has KV for."""
    engine = one.engine
    assert engine.drain(60)
    match = engine.scheduler.cache.match(key_of(tuple(tokens)), len(tokens) + 1, namespace)
    return match.checkpoint_tokens, match.kv_tokens


def at(name: str):
    """Return a rule that has answers prefilled at one worker."""
    return lambda answer, candidates, decoded: next(i for i, one in enumerate(candidates) if one.name == name)


KINDS = [
    "greedy", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("drawn", "penalties")),
    "pattern", "second choice", "stop string", "stop token",
]  # fmt: skip


def ended_by_a_token(model, asked: Generation) -> Generation:
    """Return a request whose answer is ended by its 68th token, which fills a page with a prompt of 700."""
    for seed in range(30):
        params = replace(asked.params, seed=seed)
        (plain,) = one_server(model, replace(asked, params=params))
        if plain.tokens[67] not in plain.tokens[:67]:
            return replace(asked, params=replace(params, stop_token_ids=(plain.tokens[67],)))
    raise AssertionError("no answer has a new token there")


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_answer_is_cached_where_its_prompt_was(model, kind) -> None:
    """With the token that ended it, which is not sent; and nowhere else."""
    prompt = words(700, kind)
    asked = generation(kind if kind in ("greedy", "drawn", "penalties", "pattern") else "drawn", prompt, 70)
    (plain,) = one_server(model, asked)
    tokens = plain.tokens
    if kind == "second choice":
        asked = replace(asked, params=replace(asked.params, choice=1))
    elif kind == "stop string":
        asked = replace(asked, params=replace(asked.params, stop=(plain.text[:-1],)))
    elif kind == "stop token":
        asked = ended_by_a_token(model, asked)
        (whole,) = one_server(model, replace(asked, params=replace(asked.params, stop_token_ids=())))
        tokens = whole.tokens[:68]
    asked = replace(asked, namespace="salted")
    (plain,) = one_server(model, asked)
    tokens = tokens if kind == "stop token" else plain.tokens
    with real(model, p=Role.PREFILL, d=Role.DECODE) as (router, workers):
        answer = ask(router, asked).wait()
        end = (700 + len(tokens)) // 64 * 64
        assert end == 768 or kind in ("pattern", "stop string")
        assert answer.finished.output_tokens == len(tokens)
        until(lambda: workers["p"].engine.scheduler.computed[Purpose.ANSWER])
        assert held(workers["p"], [*prompt, *tokens], "salted") == (end, end)
        assert held(workers["d"], [*prompt, *tokens], "salted") == (640, 640)
        assert held(workers["p"], [*prompt, *tokens]) == (0, 0), "another namespace"
    assert answer.comparable == plain.comparable


@pytest.mark.parametrize(
    ("home", "is_lost", "text", "apart", "loaded"),
    [("p", False, 200, True, 0), ("p", False, 15, False, 20), ("d", False, 15, False, 0), ("d", True, 15, False, 0)],
    ids=["prefilled there", "read from there", "decoded there", "the worker that prefilled is lost"],
)
def test_next_turn_hits_the_kept_answer_and_equals_one_server(
    model, monkeypatch, home, is_lost, text, apart, loaded
) -> None:
    """It hits the answer where that was prefilled, or reads it from there, and only what follows is computed."""
    if not is_lost:
        monkeypatch.setattr(assigning, "keeper", at(home))
    prompt = words(700, "session")
    with real(model, p=Role.PREFILL, d=Role.DECODE) as (router, workers):
        for worker in workers.values():
            worker.engine.scheduler.tiers.prefill_seconds = lambda n: 1.0 * n  # reading always wins
        hand_over = router._hand_over

        def losing(request, *given) -> None:
            hand_over(request, *given)
            if is_lost:
                workers["p"].kill()
                router._remove("p", "was lost")

        router._hand_over = losing
        first = ask(router, generation("greedy", prompt, 20)).wait()
        there = workers[home].engine.scheduler
        until(lambda: there.computed[Purpose.ANSWER])
        for worker in workers.values():
            worker.engine.drain(60)
        settle(router)
        sampled: list[torch.Tensor] = []
        for worker in workers.values():
            worker.engine.verification.logits_tap = lambda request, logits_V: sampled.append(logits_V.clone())
        turn = generation("greedy", [*prompt, *first.tokens, *words(text, "turn")], 20)
        second = ask(router, turn).wait()
        assert router.counts["cached_as_predicted"] == 2
    account = second.finished.account
    assert (first.finished.account.prefilled_by, account.prefilled_by) == ("p", "p" if apart else None)
    assert (account.cached_tokens, account.loaded_tokens) == (720, loaded)
    expected: list[torch.Tensor] = []
    (plain,) = one_server(model, turn, tap=lambda request, logits_V: expected.append(logits_V.clone()))
    assert second.comparable == plain.comparable
    again = expected[:1] * apart  # the first token is sampled at both workers
    assert torch.equal(torch.stack(sampled), torch.stack([*again, *expected]))
