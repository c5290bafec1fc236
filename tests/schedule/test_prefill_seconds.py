"""Measured speeds of prefills: tiny prompts, slow steps and positions in a prompt do not change those of long ones."""

import random
from itertools import pairwise

import pytest

from headwater.plan import PrefillFlops
from headwater.schedule.prefill_seconds import PrefillSeconds, PrefillSpeed

BESIDE, TOKEN = 4e-3, 1.6e-4  # seconds of a step beside its tokens, and of a token
LONG = 8192
TRUE = LONG * (TOKEN + BESIDE / 1024)  # of a prompt in steps of 1,024 tokens


def after(*tokens: int) -> PrefillSeconds:
    """Return what steps of so many tokens have measured, which are as fast as `BESIDE` and `TOKEN` say."""
    measured = PrefillSeconds()
    for n in tokens:
        measured.note(n, BESIDE + n * TOKEN)
    return measured


def seconds(measured: PrefillSeconds, tokens: int = LONG) -> float:
    assert measured.speed is not None
    return measured.speed.seconds(0, tokens)


def test_nothing_is_known_before_any_step() -> None:
    assert PrefillSeconds().speed is None


def test_tiny_prompts_do_not_change_the_estimate_for_long_ones() -> None:
    measured = after(192, *[1024] * 8)
    assert seconds(measured) == pytest.approx(TRUE, rel=1e-9)
    for n in [30, 7, 1, 64, 255] * 40:
        measured.note(n, 3e-3 * n)
        assert seconds(measured) == pytest.approx(TRUE, rel=1e-9)
    assert seconds(measured, 30) == pytest.approx(0.09, rel=0.05), "short prompts are as slow as they were"


@pytest.mark.parametrize("tiny", [[], [30] * 50, [7, 30, 12] * 30], ids=["none", "of one length", "of several"])
def test_estimate_before_any_long_prompt_is_the_probes(tiny: list[int]) -> None:
    """The prior is the prefill of 192 tokens at a worker's start, with its share of BESIDE: a tenth too slow here."""
    assert seconds(after(192, *tiny)) == pytest.approx(LONG * (TOKEN + BESIDE / 192)) == pytest.approx(1.1 * TRUE, 0.01)


def test_the_first_long_prompt_replaces_the_probe() -> None:
    assert seconds(after(192, 30, 30, 1024)) == pytest.approx(TRUE)


def test_prefill_estimates_do_not_depend_on_the_order_of_prompts() -> None:
    lengths = [*range(1, 1025, 31)] * 4
    for seed in range(5):
        random.Random(seed).shuffle(lengths)
        measured = after(*lengths)
        for tokens in (1, 100, 1000, LONG):
            true = BESIDE + tokens * TOKEN if tokens <= 1024 else TRUE
            assert seconds(measured, tokens) == pytest.approx(true, rel=0.1)


def test_steps_that_others_delayed_do_not_count() -> None:
    measured = after(*[1024, 20] * 9)
    for _ in range(3):
        measured.note(1024, 5.0)
        measured.note(20, 5.0)
    assert seconds(measured) == pytest.approx(TRUE)
    assert seconds(measured, 20) == pytest.approx(BESIDE + 20 * TOKEN, rel=0.1)


def test_a_worker_that_has_become_slow_is_slow() -> None:
    measured = after(*[1024] * 20)
    for _ in range(9):
        measured.note(1024, 3 * (BESIDE + 1024 * TOKEN))
    assert seconds(measured) == pytest.approx(3 * TRUE)


def test_tokens_deep_in_a_prompt_are_slower_at_the_same_speed() -> None:
    """Attention is counted: one worker has seen prompts' beginnings alone, the other one a prompt of 16,384 tokens."""
    flops, a_flop = PrefillFlops(2e7, 2e3), 1e-11
    shallow, deep = PrefillSeconds(flops), PrefillSeconds(flops)
    for start in range(0, 2 * LONG, 1024):
        for measured, at in ((shallow, 0), (deep, start)):
            work = flops.between(at, at + 1024)
            measured.note(work, a_flop * work)
    for measured in (shallow, deep):
        assert measured.speed == PrefillSpeed(0.0, pytest.approx(2e-4), pytest.approx(2e-8), measured.speed.full)
        assert measured.speed.seconds(LONG, 2 * LONG) == pytest.approx(a_flop * flops.between(LONG, 2 * LONG))


def test_longer_prompts_take_longer() -> None:
    rng = random.Random(3)
    measured = PrefillSeconds()
    for _ in range(300):
        measured.note(rng.randrange(1, 2000), rng.random())
        times = [seconds(measured, tokens) for tokens in (1, 10, 100, 1000, LONG)]
        assert all(shorter <= longer * (1 + 1e-9) for shorter, longer in pairwise(times))
