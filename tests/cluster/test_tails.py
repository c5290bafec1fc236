"""Tails of prompts between real engines: the one that decodes computes nothing of a prompt, and no bit changes."""

import ast
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from headwater.account import TierOutcome
from headwater.errors import OutOfPages
from headwater.events import TokenEvent
from headwater.models.load import read_spec
from headwater.request import Drafting, Generation, SamplingParams
from headwater.schedule.handover import Handover
from headwater.schedule.kinds.request import Request
from headwater.schedule.sequence import Purpose, key_of
from headwater.tiers.fingerprint import Fingerprint
from headwater.tiers.names import TAIL
from headwater.tiers.part import Header
from tests.cluster.test_pulls import Worker, changing, pool
from tests.covering import cells
from tests.exactness.rig import Answer, Make, words
from tests.exactness.test_matrix import FAMILIES
from tests.exactness.test_tiers import MODELS
from tests.models.test_mtp import always_drafting, with_head  # noqa: F401  a fixture
from tests.models.test_mtp import make as make_with_head  # noqa: F401  a fixture

PROMPT = words(340, "tail")  # tokens: 5 pages, and 20 tokens
END = 320
CODE = Path(__file__).parents[2] / "src" / "headwater"
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
    return a.ask(prompt, max_tokens=1, keep_output=False)


def handed_over(a: Worker, b: Worker, prompt: list[int] = PROMPT, **more) -> Answer:
    """The whole answer, from the other worker."""
    return b.ask(prompt, a, **more)


def whole(first: Answer, rest: Answer) -> Answer:
    """The rest's answer, whose first token, from the tail's hidden row, is that of the other worker."""
    assert rest.tokens[: len(first.tokens)] == first.tokens
    assert torch.equal(rest.logits[0], first.logits[0])
    return rest


def prompt_tokens(worker: Worker) -> int:
    """Tokens of prompts that a worker has computed."""
    return worker.rig.engine.scheduler.computed[Purpose.PROMPT]


def is_tail(pieces: list[bytes]) -> bool:
    found = Header.of(pieces[0])
    return found is not None and found.kind == TAIL


def free(worker: Worker) -> int:
    with worker.rig.engine.changed:
        return worker.cache.pool.free


@pytest.mark.parametrize("tokens", [340, 321, 320, 64, 30], ids=str)
def test_nothing_of_a_prompt_is_computed_again(make, same_bits_as_without_a_cache, tokens: int) -> None:
    """Its last page has some tokens, or one, or is full; or it is the only one."""
    prompt = PROMPT[:tokens]
    with two(make) as (a, b):
        first = prefilled(a, prompt)
        rest = whole(first, handed_over(a, b, prompt, max_tokens=70))
        assert prompt_tokens(b) == 0
        assert b.counts.get("corrupt", 0) == 0
        b.rig.settle()
        turn = b.ask([*rest.everything, *words(40, "turn")])
    account = rest.account
    assert (account.resumed_at, account.cached_tokens, account.loaded_tokens) == (tokens, tokens, tokens)
    assert turn.account.cached_tokens == len(rest.everything), "its answer was made canonical"
    assert all(same_bits_as_without_a_cache(make, [rest, turn]))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("recipe", "form"), cells(MODELS, lambda recipe, form: recipe in ("qwen3", "qwen3_window", "mamba2"))
)
def test_tails_of_every_family_and_format(load, same_bits_as_without_a_cache, recipe, form, dtype) -> None:
    """Each kind of memory comes whole, among them the keys of a window, only KV, and only states."""
    make = Make(*load(recipe, dtype, 2, form))
    with two(make) as (a, b):
        rest = whole(prefilled(a), handed_over(a, b))
        assert prompt_tokens(b) == 0
    assert rest.account.loaded_tokens == len(PROMPT)
    assert all(same_bits_as_without_a_cache(make, [rest]))


@pytest.mark.parametrize("piece", [0, 2, 3, -1], ids=["header", "KV", "rows", "digest"])
def test_a_tail_that_is_damaged_is_computed(make, same_bits_as_without_a_cache, piece: int) -> None:
    def flipped(pieces: list[bytes]) -> list[bytes]:
        if not is_tail(pieces):
            return pieces
        content = bytearray(pieces[piece])
        content[len(content) // 2] ^= 1
        pieces[piece] = bytes(content)
        return pieces

    with two(make) as (a, b):
        first = prefilled(a)
        changing(a, flipped)
        rest = handed_over(a, b)
        assert b.counts["corrupt"] == 1
        assert prompt_tokens(b) >= len(PROMPT) - END
    assert rest.tokens[:1] == first.tokens
    assert all(same_bits_as_without_a_cache(make, [rest]))


@pytest.mark.parametrize("how", ["dropped", "of another fingerprint", "evicted"])
def test_a_tail_that_does_not_come_is_computed(make, same_bits_as_without_a_cache, how: str) -> None:
    other = {"fingerprint": Fingerprint.of({"probe": "another"})} if how == "of another fingerprint" else {}
    with two(make, other) as (a, b):
        first = prefilled(a)
        if how == "dropped":
            changing(a, lambda pieces: None if is_tail(pieces) else pieces)
        elif how == "evicted":
            with a.rig.engine.changed:
                for tail in list(a.cache.tails):
                    a.cache.tails.evict(tail)
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
        assert b.counts.get("read", 0) == 0
        assert prompt_tokens(b) == len(PROMPT) + len(PROMPT) - END
    assert (rest.account.resumed_at, rest.account.loaded_tokens) == (END, 0)
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
        assert ask(a, 1) == alone[:1]
        assert ask(b, 6, peers=(a.incarnation,)) == alone
        assert prompt_tokens(b) == 0


def _fields(params: SamplingParams) -> dict:
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


def test_a_request_without_room_for_a_tail_computes(make, same_bits_as_without_a_cache) -> None:
    """The control is the other tests, in which there is room."""
    with two(make) as (a, b):
        prefilled(a)
        reserve, b.cache.reserve = b.cache.reserve, _refusing(b)
        rest = handed_over(a, b)
        b.cache.reserve = reserve
        assert prompt_tokens(b) == len(PROMPT)
    assert all(same_bits_as_without_a_cache(make, [rest]))


def _refusing(worker: Worker) -> Callable:
    reserve = worker.cache.reserve

    def refusing(draft, *given):
        if draft.saving.tails and not draft.slot:
            raise OutOfPages(1, 0, 0)
        return reserve(draft, *given)

    return refusing


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
        pages = b.cache.hold(-1, "", key_of(prompt), (tokens - 1) // 64 * 64, with_state=False)
        assert b.rig.engine.runner.mtp.complete(pages.table)
        b.cache.release(-1)
    assert alone
    assert [one.positions for one in after] == [one.positions for one in alone]
    assert all(torch.equal(one.logits, other.logits) for one, other in zip(after, alone, strict=True))


def test_workers_with_and_without_a_head_share_tails(make_with_head) -> None:  # noqa: F811
    made = make_with_head("qwen3_5")
    for one, other in (("off", "mtp"), ("mtp", "off")):
        with two(made, {"speculation": other}, speculation=one) as (a, b):
            rest = whole(prefilled(a), handed_over(a, b))
            assert b.counts.get("corrupt", 0) == 0
            assert prompt_tokens(b) == 0
        assert rest.account.tier_outcome == TierOutcome.LOADED


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
