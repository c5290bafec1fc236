"""Time to the first token of a request that does not wait: Jamba-1.5-Mini on four A100 of 40 GB (section 5.1)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from headwater.lab.cost import Load, StepCost
from headwater.lab.devices import load_device
from headwater.lab.tally import Outcome
from headwater.layers.mamba import Mamba
from headwater.models.profiles import Profile, load_profile

STATE = 128  # the paper serves it with this state size; the published model has 16
BANDWIDTH = 1.555e12  # bytes a second, of the 40 GB board; NVIDIA A100 data sheet


def jamba() -> Profile:
    profile = load_profile("jamba-1.5-mini")
    layers = tuple((replace(one, state=STATE) if isinstance(one, Mamba) else one, n) for one, n in profile.layers)
    return replace(profile, name=f"jamba-1.5-mini, N = {STATE}", layers=layers, tensor_parallel=4)


def cost() -> StepCost:
    return StepCost(jamba(), replace(load_device("a100"), bandwidth=BANDWIDTH))


def ttft_ms(model: StepCost, prompt: int, resumed: int) -> float:
    """Of one prefill that runs alone, in one step."""
    load = Load(
        prefill_tokens=prompt - resumed,
        prefill_squares=prompt**2 - resumed**2,
        prefix_tokens=resumed,
        legs=1,
        states=1 + bool(resumed),
        logits=1,
    )
    return 1000 * model.seconds(load)


def ttfts(model: StepCost, outcomes: Iterable[Outcome]) -> list[float]:
    return [ttft_ms(model, one.prompt_tokens, one.resumed_at) for one in outcomes]


def without_cache(model: StepCost, outcomes: Iterable[Outcome]) -> list[float]:
    return [ttft_ms(model, one.prompt_tokens, 0) for one in outcomes]
