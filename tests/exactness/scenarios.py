"""Situations in which a request hits. Each asserts the hit, and returns the answers to compare."""

from headwater.schedule.step import Step
from tests.exactness.rig import Answer, Make, Rig, words
from tests.support import FULL

PAGE = 64
AMPLE = 2000  # pages
# (tokens of a turn's message, of its answer)
TURNS = ((710, 80), (75, 80), (75, 80)) if FULL else ((446, 70), (110, 16), (115, 8))
PREEMPTING_PAGES, PREEMPTED_TOKENS = (26, 180) if FULL else (20, 76)
COMPANY_TOKENS = 40 if FULL else 16


def kv_pages(make: Make, n: int) -> int:
    """Pages that a scenario leaves for KV: none in a model that keeps none, or they would be room for checkpoints."""
    return n if make.loaded.spec.attention_layers else 0


def resend(make: Make) -> list[Answer]:
    with make(AMPLE) as rig:
        prompt = words(700, "resend")
        first, second = rig.ask(prompt, 70), rig.ask(prompt, 70)
    assert second.account.cached_tokens == 700
    return [first, second]


def chat_turn(make: Make) -> list[Answer]:
    first, *later = TURNS
    with make(AMPLE) as rig:
        turn = rig.ask(words(first[0], "chat"), first[1])  # a page is decoded whole
        answers = [turn]
        for i, (own, tokens) in enumerate(later):  # an answer reaches into another page
            rig.settle()
            before = len(turn.everything)
            turn = rig.ask(turn.everything + words(own, "turn", i), tokens)
            is_exact = make.settings.get("decode_reuse") != "raw"  # other engines do not prefill answers
            assert turn.account.cached_tokens == (before if is_exact else before // PAGE * PAGE)
            answers.append(turn)
    return answers


def tails_of_any_length(make: Make) -> list[Answer]:
    """Prompts that end in a tail, within another's, after 10 tokens of two, at a page, and after a tail was evicted.

    They are asked one by one, then again, then with a next turn and all at once.
    """
    base, own = words(128, "base"), words(63, "own")
    part, kept_pages = words(10, "part"), make.layout.is_stateless
    prompts = [base, base + own[:1], base + own, base + own[:30], base + part + own[:20], base + part + own[20:50]]
    prompts.append(base[:PAGE])
    lengths = list(map(len, prompts))
    with make(AMPLE) as rig:
        first = [rig.ask(prompt, 4) for prompt in prompts]
        assert cached(first) == [0, 128, 129, 157, 128, 138, PAGE - 1 if kept_pages else 0]
        rig.settle()
        answers = [rig.ask(prompt, 4) for prompt in prompts]
        assert cached(answers) == lengths
        rig.settle()
        turns = [rig.submit(prompt + words(5, "turn", i), 4) for i, prompt in enumerate(prompts)]
        answers += [*map(rig.wait, turns), *first]
        if make.memories > 1:  # a router may choose a worker that has less of a prompt, and less to do
            return answers
        assert cached(turns) == lengths
        parted = rig.ask(base + part + own[50:], 4)
        assert parted.account.cached_tokens == 138
        rig.settle()
        cache = rig.engine.scheduler.cache
        with rig.engine.changed:
            for tail in list(cache.tails):
                cache.tails.evict(tail)
        answers += [parted, rig.ask(base + own[:40], 4)]
        assert answers[-1].account.cached_tokens == (167 if kept_pages else 128)
    return answers


def cached(answers: list[Answer]) -> list[int]:
    return [answer.account.cached_tokens for answer in answers]


def shared_system_prompt(make: Make) -> list[Answer]:
    with make(AMPLE) as rig:
        system = words(910, "system")
        answers = [rig.ask(system + words(300 + i, "own", i), 10) for i in range(3)]
    assert answers[1].account.cached_tokens >= 910 - 1210 // 8 - PAGE
    assert answers[2].account.cached_tokens == 910
    return answers


def branch_in_mid_page(make: Make) -> list[Answer]:
    with make(AMPLE) as rig:
        trunk = words(1487, "trunk")
        rig.ask(trunk, 4)
        answers = [rig.ask(trunk[: 1000 + 20 * i] + words(200, "branch", i), 10) for i in range(4)]
    assert all(a.account.cached_tokens > 0 for a in answers)
    # left by the one before, which branched on the same page; without states, by the trunk
    assert answers[3].account.cached_tokens == (1060 if make.layout.is_stateless else 1040)
    return answers


def after_eviction_and_refill(make: Make) -> list[Answer]:
    with make(kv_pages(make, 30) + 4 * make.checkpoint_pages) as rig:
        prompt = words(1000, "kept")
        rig.ask(prompt, 4)
        for i in range(4):
            rig.ask(words(1400, "flood", i), 4)
        lost = rig.ask(prompt, 10)
        refilled = rig.ask(prompt, 10)
        stats = rig.engine.scheduler.cache.stats()
    spec = make.loaded.spec
    assert (stats.evicted_checkpoints > 0) == (not make.layout.is_stateless)
    assert (stats.evicted_kv_pages > 0) == bool(spec.attention_layers)
    assert lost.account.cached_tokens < 960
    assert refilled.account.cached_tokens >= 960  # tails are kept if they are worth their pages
    return [lost, refilled]


def rows_of_replays(rig: Rig) -> list[int]:
    """Return the rows of each decoding sequence in each step from now on; the list grows."""
    rows, scheduler = [], rig.engine.scheduler
    plan = scheduler.plan_step

    def noting() -> Step:
        step = plan()
        rows.extend(decode.count for decode in step.decodes)
        return step

    scheduler.plan_step = noting
    return rows


def after_preemption(make: Make) -> list[Answer]:
    """With a few pages more or less, in one of these memories an answer is preempted, and replayed among others."""
    grows = bool(make.loaded.spec.attention_layers)  # else a running request takes no page more, and none has to leave
    for more in range(8 if grows else 1):
        answers, replayed = preempted(make, kv_pages(make, PREEMPTING_PAGES + more) + 6 * make.checkpoint_pages)
        if any(a.account.preemptions for a in answers) and max(replayed) > 1:
            break
    assert any(a.account.preemptions for a in answers) == grows
    assert any(rows > 1 for rows in replayed) == grows
    assert all(a.account.cached_tokens > 0 for a in answers)
    return answers


def preempted(make: Make, pages: int) -> tuple[list[Answer], list[int]]:
    with make(pages) as rig:
        system = words(640, "system")
        rig.ask(system + words(20, "first"), 2)
        replayed = rows_of_replays(rig)
        # they end one after the other, so that an answer is replayed among others
        answers = [rig.submit(system + words(60 + i, i), PREEMPTED_TOKENS + 6 * i) for i in range(5)]
        for answer in answers:
            rig.wait(answer)
    return answers, replayed


def with_seven_other_requests_running(make: Make) -> list[Answer]:
    with make(AMPLE) as rig:
        prompt = words(800, "target")
        rig.ask(prompt, 4)
        others = [rig.submit(words(300 + 40 * i, "other", i), COMPANY_TOKENS) for i in range(7)]
        target = rig.submit(prompt + words(5, "more"), COMPANY_TOKENS)
        answers = [rig.wait(answer) for answer in (*others, target)]
    assert target.account.cached_tokens == 800
    assert target.most_running >= 8
    return answers


ALL = (
    resend, chat_turn, tails_of_any_length, shared_system_prompt, branch_in_mid_page, after_eviction_and_refill,
    after_preemption, with_seven_other_requests_running,
)  # fmt: skip
SCENARIOS = {scenario.__name__: scenario for scenario in ALL}
