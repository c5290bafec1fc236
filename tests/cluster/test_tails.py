"""Tails of prompts between real engines: the one that decodes computes nothing of a prompt, and no bit changes."""

import ast
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from headwater.account import TierOutcome
from headwater.engine.tiers import tails as module
from headwater.errors import OutOfPages
from headwater.events import TokenEvent
from headwater.models.load import read_spec
from headwater.request import Drafting, Generation, SamplingParams
from headwater.schedule.kinds.request import Request
from headwater.schedule.sequence import Purpose, key_of
from headwater.schedule.tail import Handover, TailPlace
from headwater.tiers.fingerprint import Fingerprint
from tests.cluster.fake import until
from tests.cluster.test_pulls import Worker, changing, pool
from tests.exactness.rig import Answer, Make, words
from tests.exactness.test_matrix import FAMILIES
from tests.models.test_mtp import always_drafting, with_head  # noqa: F401  a fixture
from tests.models.test_mtp import make as make_with_head  # noqa: F401  a fixture

PROMPT = words(340, "tail")  # tokens: 5 pages, and 20 tokens
END = 320
CODE = Path(__file__).parents[2] / "src" / "headwater"
ID = b"number of a tail"
KEEPS = TailPlace(ID)
pytestmark = pytest.mark.usefixtures("short_runs")


@contextmanager
def two(make, of_other: dict | None = None, **more) -> Iterator[tuple[Worker, Worker]]:
    """Yield a worker that prefills, and one that decodes."""
    a, b = Worker(make, **more), Worker(make, **more | (of_other or {}))
    with pool(a, b):
        yield a, b
    assert not a.tiers.busy
    assert not b.tiers.busy


def prefilled(a: Worker, prompt: list[int] = PROMPT) -> Answer:
    """The first token of an answer, from a worker that keeps the prompt's tail."""
    return a.ask(prompt, tail=KEEPS, max_tokens=1, keep_output=False)


def handed_over(a: Worker, b: Worker, prompt: list[int] = PROMPT, **more) -> Answer:
    """The whole answer, from the other worker."""
    return b.ask(prompt, a, tail=TailPlace(ID, a.incarnation), **more)


def whole(first: Answer, rest: Answer) -> Answer:
    """The rest's answer with the logits of the first token, which were computed by the other worker."""
    assert rest.tokens[: len(first.tokens)] == first.tokens
    rest.logits = [*first.logits, *rest.logits]
    return rest


def prompt_tokens(worker: Worker) -> int:
    """Tokens of prompts that a worker has computed."""
    return worker.rig.engine.scheduler.computed[Purpose.PROMPT]


def kept(worker: Worker) -> int:
    return len(worker.tiers.peers.tails._kept)


def free(worker: Worker) -> int:
    with worker.rig.engine.changed:
        return worker.cache.pool.free


@pytest.mark.parametrize("tokens", [340, 321, 320, 64, 30], ids=str)
def test_nothing_of_a_prompt_is_computed_again(make, same_bits_as_without_a_cache, tokens: int) -> None:
    """Its last page has some tokens, or one, or is full; or it is the only one."""
    prompt = PROMPT[:tokens]
    with two(make) as (a, b):
        first = prefilled(a, prompt)
        assert kept(a) == 1
        rest = whole(first, handed_over(a, b, prompt, max_tokens=70))
        assert prompt_tokens(b) == 0
        assert (kept(a), b.counts.get("corrupt", 0)) == (0, 0)
        b.rig.settle()
        turn = b.ask([*rest.everything, *words(40, "turn")])
    account = rest.account
    assert (account.resumed_at, account.cached_tokens, account.loaded_tokens) == (tokens, tokens, tokens)
    assert turn.account.cached_tokens == len(rest.everything), "its answer was made canonical"
    assert all(same_bits_as_without_a_cache(make, [rest, turn]))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "family",
    [
        one if one in ("qwen3", "qwen3_window", "mamba2") else pytest.param(one, marks=pytest.mark.full)
        for one in FAMILIES
    ],
)
def test_tails_of_every_family(load, same_bits_as_without_a_cache, family, dtype) -> None:
    """Each kind of memory comes whole, among them the keys of a window, only KV, and only states."""
    make = Make(*load(family, dtype, 2))
    with two(make) as (a, b):
        rest = whole(prefilled(a), handed_over(a, b))
        assert prompt_tokens(b) == 0
    assert rest.account.loaded_tokens == len(PROMPT)
    assert all(same_bits_as_without_a_cache(make, [rest]))


@pytest.mark.parametrize("piece", [0, 2, 3, 5, -1], ids=["header", "first token", "KV", "state", "digest"])
def test_a_tail_that_is_damaged_is_computed(make, same_bits_as_without_a_cache, piece: int) -> None:
    def flipped(pieces: list[bytes]) -> list[bytes]:
        content = bytearray(pieces[piece])
        content[len(content) // 2] ^= 1
        pieces[piece] = bytes(content)
        return pieces

    with two(make) as (a, b):
        first = prefilled(a)
        changing(a, flipped, "sealed_tail")
        rest = handed_over(a, b)
        assert b.counts["corrupt"] == 1
        assert prompt_tokens(b) >= len(PROMPT) - END
    assert rest.tokens[:1] == first.tokens
    assert all(same_bits_as_without_a_cache(make, [rest]))


@pytest.mark.parametrize("how", ["dropped", "of another seed", "of another fingerprint", "never kept", "sent before"])
def test_a_tail_that_does_not_come_is_computed(make, same_bits_as_without_a_cache, how: str) -> None:
    other = {"fingerprint": Fingerprint.of({"probe": "another"})} if how == "of another fingerprint" else {}
    with two(make, other) as (a, b):
        first = prefilled(a)
        tails = a.tiers.peers.tails
        if how == "dropped":
            changing(a, lambda pieces: None, "sealed_tail")
        elif how == "of another seed":
            (one,) = tails._kept.values()
            one.tail.first = type(one.tail.first)(one.tail.first.token, None, (), 17)
        elif how == "never kept":
            tails.give_up()
        elif how == "sent before":
            with tails.sealed(ID, 0) as pieces:
                assert pieces is not None
        rest = handed_over(a, b)
        assert prompt_tokens(b) == (len(PROMPT) if other else len(PROMPT) - END)
    assert rest.tokens[:1] == first.tokens
    assert rest.account.loaded_tokens == (0 if other else END)
    assert all(same_bits_as_without_a_cache(make, [rest]))


def test_tail_later_than_its_recomputation_is_not_read(make, same_bits_as_without_a_cache) -> None:
    """The control is the other tests, in which a token takes a second."""
    with two(make) as (a, b):
        prefilled(a)
        b.ask(PROMPT[:END] + words(20, "other"), max_tokens=1, keep_output=False)
        b.tiers.prefill_seconds = lambda tokens: 1e-9 * tokens
        rest = handed_over(a, b)
        assert kept(a) == 1, "nobody has asked for it"
        assert prompt_tokens(b) == len(PROMPT) + len(PROMPT) - END
    assert (rest.account.resumed_at, rest.account.loaded_tokens) == (END, 0)
    assert all(same_bits_as_without_a_cache(make, [rest]))


def test_without_its_prefix_a_tail_is_of_no_use(make, same_bits_as_without_a_cache) -> None:
    with two(make) as (a, b):
        prefilled(a)
        before = free(b)
        parts = a.pulling.sending.parts
        parts.find = lambda *given: None
        rest = handed_over(a, b, keep_output=False, max_tokens=1)
        assert b.counts["read"] == 1
        assert prompt_tokens(b) == len(PROMPT)
        assert rest.account.loaded_tokens == 0
        cached = b.cache.stats()
        own = cached.pages_kv + cached.pages_checkpoint + cached.pages_tail
        assert free(b) == before - own, "its pages were given back"
    assert all(same_bits_as_without_a_cache(make, [rest]))


def test_drawn_tokens_and_their_log_probabilities_come_with_the_tail(make) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.3, seed=2**62 + 1, logprobs=5, ignore_eos=True)

    def ask(worker: Worker, max_tokens: int, **more) -> list[TokenEvent]:
        events, done = [], threading.Event()

        def on_event(event) -> None:
            events.append(event)
            if not isinstance(event, TokenEvent):
                done.set()

        generation = Generation(tuple(PROMPT), SamplingParams(**_fields(params) | {"max_tokens": max_tokens}))
        worker.rig.engine.submit(generation, on_event, Handover(**more))
        assert done.wait(60)
        return events[:-1]

    with two(make) as (a, b):
        alone = ask(a, 6)
        assert ask(a, 1, tail=KEEPS) == alone[:1]
        place = TailPlace(ID, a.incarnation)
        assert ask(b, 6, peers=(a.incarnation,), tail=place) == alone
        assert prompt_tokens(b) == 0


def _fields(params: SamplingParams) -> dict:
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


def test_pages_of_a_tail_are_given_back(make) -> None:
    """By the one that keeps it once it is sent, and by the one that reads it once it is copied."""
    with two(make) as (a, b):
        prefilled(a)
        held = a.cache.stats()
        assert held.pages_private + held.pages_slot == 1 + make.checkpoint_pages
        handed_over(a, b)
        b.rig.settle()
        for worker in (a, b):
            until(lambda worker=worker: worker.cache.stats().pages_private + worker.cache.stats().pages_slot == 0)
            assert worker.cache.stats().leases == 0


def test_the_oldest_tails_are_given_up(make, monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_HELD_TAILS", 2)
    a = Worker(make)
    tails = a.tiers.peers.tails
    with pool(a):
        for number in range(4):
            a.ask(PROMPT, tail=TailPlace(bytes([number])), max_tokens=1, keep_output=False)
        assert list(tails._kept) == [b"\2", b"\3"]
        monkeypatch.setattr(module, "HELD_SECONDS", -1.0)
        a.ask(PROMPT, tail=TailPlace(b"late"), max_tokens=1, keep_output=False)
        monkeypatch.setattr(module, "HELD_SECONDS", 10.0)
        a.ask(PROMPT, tail=KEEPS, max_tokens=1, keep_output=False)
        assert list(tails._kept) == [b"\3", ID], "one is too old, and one too many"


def test_a_tail_gives_way_to_requests(make, same_bits_as_without_a_cache) -> None:
    """A request that needs all pages of the worker that keeps it gets them."""
    pages = 7 + 2 * make.checkpoint_pages - 12 * make.checkpoint_pages  # a page less than for both
    with two(make, pages=pages) as (a, b):
        first = prefilled(a)
        other = a.rig.ask(words(380, "other"))
        assert kept(a) == 0
        rest = handed_over(a, b)
        assert prompt_tokens(b) >= len(PROMPT) - END
    assert rest.tokens[:1] == first.tokens
    assert all(same_bits_as_without_a_cache(make, [other, rest]))


def test_a_request_without_room_for_a_tail_computes(make, same_bits_as_without_a_cache) -> None:
    """The control is the other tests, in which there is room."""
    with two(make) as (a, b):
        prefilled(a)
        b.tiers.peers.tails._scheduler.cache.reserve, reserve = _refusing(b), b.cache.reserve
        rest = handed_over(a, b)
        b.cache.reserve = reserve
        assert prompt_tokens(b) == len(PROMPT) - END
    assert all(same_bits_as_without_a_cache(make, [rest]))


def _refusing(worker: Worker) -> Callable:
    reserve = worker.cache.reserve

    def refusing(draft, *given):
        if not draft.sharing.reuse:
            raise OutOfPages(1, 0, 0)
        return reserve(draft, *given)

    return refusing


@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_a_tail_that_is_given_up_gives_its_pages_back(make, monkeypatch, how: str) -> None:
    goes_on, asked = threading.Event(), threading.Event()

    def hang(pieces: list[bytes]) -> list[bytes]:
        asked.set()
        assert goes_on.wait(60)
        return pieces

    with two(make) as (a, b):
        prefilled(a)
        changing(a, hang, "sealed_tail")
        if how == "late":
            monkeypatch.setattr(module, "WAIT_SECONDS", 0.1)
        answers: list[Answer] = []
        thread = threading.Thread(target=lambda: answers.append(handed_over(a, b)))
        thread.start()
        assert asked.wait(60)
        if how == "cancelled":
            (request,) = b.tiers.peers.tails._reading
            b.rig.engine.cancel(request)
            until(lambda: not len(b.rig.engine.scheduler.waiting))
        goes_on.set()
        until(lambda: not b.tiers.busy)
        if how == "late":
            thread.join(60)
            assert answers
        b.rig.settle()
        assert b.cache.stats().leases == 0
        for answer in b.rig._answers.values():
            answer.done.set()
        thread.join(60)


def test_a_preempted_request_computes_its_prompt(make, same_bits_as_without_a_cache) -> None:
    """The tail was given back: the answer continues as after any preemption."""
    with two(make) as (a, b):
        first = prefilled(a)
        engine, run = b.rig.engine, b.rig.engine.loop.execute

        def preempting(*given) -> None:
            run(*given)
            with engine.changed:
                for seq in tuple(engine.scheduler.running.values()):
                    if isinstance(seq, Request) and seq.n_output == 3 and not seq.preemptions:
                        engine.scheduler.preemption.preempt(seq)
                        engine.scheduler.workload.gate.is_crowded = False

        engine.loop.execute = preempting
        rest = whole(first, handed_over(a, b))
        engine.loop.execute = run
        assert engine.scheduler.preemptions == 1
    assert all(same_bits_as_without_a_cache(make, [rest]))


@pytest.mark.parametrize("tokens", [340, 384])
def test_the_head_drafts_as_after_its_own_prefill(make_with_head, monkeypatch, tokens: int) -> None:  # noqa: F811
    made, prompt = make_with_head("qwen3_5"), words(tokens, "head")
    drafting = {"drafting": Drafting(tokens=2), "max_tokens": 12, "keep_output": False}
    with two(made, speculation="mtp") as (a, b):
        with always_drafting(monkeypatch, b.rig) as passes:
            b.ask(prompt, **drafting | {"namespace": "alone"})
            alone = list(passes)
        computed = prompt_tokens(b)
        prefilled(a, prompt)
        with always_drafting(monkeypatch, b.rig) as passes:
            handed_over(a, b, prompt, **drafting)
            after = list(passes)
        assert prompt_tokens(b) == computed
        pages = b.cache.hold(-1, "", key_of(prompt), tokens // 64 * 64, with_state=False)
        assert b.rig.engine.runner.mtp.complete(pages.table)
        b.cache.release(-1)
    assert alone
    assert [one.positions for one in after] == [one.positions for one in alone]
    assert all(torch.equal(one.logits, other.logits) for one, other in zip(after, alone, strict=True))


def test_worker_without_a_head_sends_no_tail_to_a_head(make_with_head) -> None:  # noqa: F811
    made = make_with_head("qwen3_5")
    with two(made, {"speculation": "mtp"}, speculation="off") as (a, b):
        first = prefilled(a)
        rest = handed_over(a, b)
        assert b.counts.get("corrupt", 0) == 0
        assert prompt_tokens(b) == len(PROMPT) - END
    assert rest.tokens[:1] == first.tokens
    with two(made, {"speculation": "off"}, speculation="mtp") as (a, b):
        prefilled(a)
        handed_over(a, b)
        assert prompt_tokens(b) == 0
    assert rest.account.tier_outcome == TierOutcome.LOADED


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_window", "mamba2"])
def test_all_bytes_of_slot_and_page_are_handed_over(load, family: str) -> None:
    """Also those that no layer has declared: a new kind of memory needs no code that knows of it."""
    make = Make(*load(family, "float32", 2))
    declared, sent, came = make.loaded.spec.state.bytes, [], []
    with two(make) as (a, b):
        keeping, copying = a.rig.engine.runner, b.rig.engine.runner
        keep, copy = keeping.keep_tail, copying._copy

        def marked(seq, tail) -> None:
            keeping.states.bytes_RB[seq.slot, declared:] = 7
            sent.extend(bytes_of(keeping, seq.slot, seq.table))
            keep(seq, tail)

        def noted(leg, copied) -> None:
            copy(leg, copied)
            came.extend(bytes_of(copying, leg.slot, leg.plan.table))

        keeping.keep_tail, copying._copy = marked, noted
        prefilled(a)
        handed_over(a, b)
    assert (sent[0][declared:] == 7).all()
    assert len(sent[0]) > declared
    assert len(sent) == len(came) == 1 + make.loaded.spec.layout(10**9).kv_pages_per_unit
    assert all(torch.equal(one, other) for one, other in zip(sent, came, strict=True))


def bytes_of(runner, slot: int, table) -> list[torch.Tensor]:
    return [runner.states.bytes_RB[slot].clone(), *(runner.arena.pages[page].clone() for page in table[-1:])]


def test_no_code_of_a_hand_over_names_a_kind_of_memory(checkpoint) -> None:
    """Kinds are what layers declare as states; the control is the code of the mixers, which names them."""
    specs = [read_spec(checkpoint(family), "float32") for family in FAMILIES]
    kinds = {part.name for spec in specs for part in spec.state.parts}
    assert len(kinds) > 3
    moves = [*(file for room in ("cluster", "schedule", "tiers", "cache") for file in (CODE / room).rglob("*.py"))]
    moves += [*(CODE / "engine" / "tiers").glob("*.py"), CODE / "engine" / "runner.py"]
    assert not kinds & literals(moves)
    assert kinds <= literals([*(CODE / "layers").glob("*.py"), *(CODE / "mixers").rglob("*.py")])


def literals(files: list[Path]) -> set[str]:
    """Return the strings in code."""
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
