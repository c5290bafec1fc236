"""Time of a step on a device, by a roofline: the larger of the times of its FLOPs and its bytes, and an overhead.

Peaks of devices are dense ones, without sparsity, from the makers' data sheets: NVIDIA H100 (SXM5), H200 (SXM), A100
(80 GB, SXM4) and L4; H20's are given by its resellers, as NVIDIA has published none. `cpu` is an AMD EPYC 9654:
96 cores at 2.4 GHz with 32 (float32) or 64 (bfloat16) FLOPs a cycle, and twelve channels of DDR5-4800.
Efficiencies and overhead are guesses until `headwater fit` replaces them.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from headwater.errors import ConfigError
from headwater.layers.feed_forward import Experts
from headwater.models.profiles.profile import Profile
from headwater.schedule.step import Step


@dataclass(frozen=True, slots=True)
class Device:
    """Peaks of a device in FLOPs and bytes a second; `overhead` in seconds a step, whatever its work."""

    name: str
    flops32: float  # with float32 weights (TF32, on a GPU)
    flops16: float  # bfloat16 and float16
    flops8: float  # float8
    bandwidth: float  # of its memory
    link: float  # one way to the other devices in parallel; 0: there are none
    compute_efficiency: float = 0.5
    memory_efficiency: float = 0.8
    overhead: float = 0.002
    source: str = "data sheet; efficiencies and overhead are guesses"

    def peak(self, dtype_name: str) -> float:
        """Return FLOPs a second with weights of that dtype."""
        return {"float32": self.flops32, "float8": self.flops8}.get(dtype_name, self.flops16)

    def as_toml(self) -> str:
        """Return the TOML that `load_device` reads."""
        # JSON's numbers and strings are TOML's, but for pairs of escapes (characters beyond U+FFFF) and a plain DEL
        values = {name: json.dumps(value, ensure_ascii=False) for name, value in asdict(self).items()}
        return "".join(f"{name} = {value}\n" for name, value in values.items()).replace("\x7f", r"\u007f")


DEVICES = {
    device.name: device
    for device in (
        Device("h100", 494.5e12, 989.5e12, 1979e12, bandwidth=3.35e12, link=450e9),
        Device("h200", 494.5e12, 989.5e12, 1979e12, bandwidth=4.8e12, link=450e9),
        Device("a100", 156e12, 312e12, 312e12, bandwidth=2.039e12, link=300e9),
        Device("h20", 74e12, 148e12, 296e12, bandwidth=4.0e12, link=450e9),
        Device("l4", 60.5e12, 121e12, 242.5e12, bandwidth=300e9, link=32e9),
        Device("cpu", 7.37e12, 14.7e12, 14.7e12, bandwidth=460.8e9, link=0.0),
    )
}


def load_device(name: str) -> Device:
    """Return a device by its name, or by the path of a TOML file written by `headwater fit`.

    Raises ConfigError for a name that is neither, and for a file that does not describe a device.
    """
    if name in DEVICES:
        return DEVICES[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"{name!r} is neither a file nor a device of {', '.join(DEVICES)}")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return _checked(path, values)


def _checked(path: Path, values: dict[str, object]) -> Device:
    kinds = {one.name: str if one.type == "str" else float for one in fields(Device)}
    if unknown := sorted(values.keys() - kinds):
        raise ConfigError(f"{path}: {unknown[0]!r} is not one of {', '.join(kinds)}")
    for name, value in values.items():
        wanted = (str,) if kinds[name] is str else (int, float)
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise ConfigError(f"{path}: {name} is {value!r}, must be {'text' if kinds[name] is str else 'a number'}")
        least_is_in = name in ("link", "overhead")
        if isinstance(value, int | float) and not (0 < value < float("inf") or (least_is_in and value == 0)):
            raise ConfigError(f"{path}: {name} is {value}, must be {'at least' if least_is_in else 'above'} 0")
    try:
        return Device(**values)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(f"{path}: {str(error).split('__init__() ')[-1]}") from error


Line = tuple[float, float]  # value at 0, and slope


@dataclass(frozen=True, slots=True)
class Load:
    """Work of one step, as sums over its prefill legs and decode rows."""

    prefill_tokens: int = 0  # of all legs
    prefill_squares: int = 0  # end² - start² of each leg
    prefix_tokens: int = 0  # before the legs: their KV is read
    legs: int = 0
    rows: int = 0  # decode rows, a token each
    kv_tokens: int = 0  # before the rows: their KV is read
    states: int = 0  # read and written: of each leg and decoding sequence, and of each checkpoint saved or restored
    logits: int = 0  # rows
    segments: int = 0  # composed or built ones: their states and transitions are read or written
    moved_tokens: int = 0  # of composed segments: their KV is read and written before it is read as a prefix


def load_of(step: Step) -> Load:
    tokens = squares = before = states = logits = segments = moved = 0
    for leg in step.legs:
        plan = leg.plan
        composed = plan.end - plan.start - plan.computed_tokens
        tokens += plan.computed_tokens
        squares += sum(end * end - start * start for start, end in plan.intervals)
        before += plan.start + composed
        moved += composed
        segments += len(plan.composed) + (plan.build is not None and plan.build.is_last)
        states += 1 + len(plan.saves) + bool(plan.restore)
        logits += leg.wants_token
    for decode in step.decodes:
        states += 1
        logits += decode.wants_token * (1 + len(decode.drafts))
    return Load(
        prefill_tokens=tokens,
        prefill_squares=squares,
        prefix_tokens=before,
        legs=len(step.legs),
        rows=sum(decode.rows for decode in step.decodes),
        kv_tokens=sum(sum(decode.positions) for decode in step.decodes),
        states=states,
        logits=logits,
        segments=segments,
        moved_tokens=moved,
    )


class StepCost:
    """Seconds of a step of a model on a device.

    FLOPs are the profile's (attention's pairs at 16 bits, also where weights have 8). Bytes are the weights once, as
    they are held (of experts those that the step's tokens are expected to choose), KV read and written, states, and the
    head where there are logits; activations are ignored, as are the FLOPs of transitions and of composing.
    `profile.tensor_parallel` devices share both evenly. They add up every layer's output in a ring, which moves
    2(n - 1)/n of it over each link; nothing overlaps with that.
    """

    def __init__(self, profile: Profile, device: Device) -> None:
        n = profile.tensor_parallel
        if n > 1 and not device.link:
            raise ConfigError(f"{n} devices in parallel, but {device.name} has no link to others")
        self.profile, self.device = profile, device
        layers = profile.layers
        compute = 1 / (n * device.compute_efficiency)
        linear, pairs = compute / device.peak(profile.multiplies), compute / device.flops16
        if profile.multiplies == "float32":
            pairs = linear
        a_byte = 1 / (n * device.memory_efficiency * device.bandwidth)
        self._token = profile.flops.linear * linear
        self._square = profile.flops.quadratic * pairs
        self._logits = profile.head_flops * linear
        self._kv = profile.kv_bytes_per_token * a_byte
        self._state = 2 * profile.checkpoint_bytes * a_byte
        self._segment = (profile.checkpoint_bytes + profile.transition.bytes) * a_byte
        self._head = profile.head_bytes * a_byte
        self._weights = a_byte * sum(count * profile.layer_bytes(layer) for layer, count in layers)
        self._unread = tuple(  # seconds saved on experts that no token chooses, and each token's chance to miss one
            (a_byte * count * layer.experts * profile.layer_bytes(layer.expert), 1 - layer.per_token / layer.experts)
            for layer, count in layers
            if isinstance(layer, Experts)
        )
        moved = profile.hidden_size * profile.element_bytes * sum(count for _, count in layers)
        self._reduce = 2 * (n - 1) / n * moved / device.link if n > 1 else 0.0
        self._overhead = device.overhead

    def seconds(self, load: Load, steps: int = 1) -> float:
        """Return the seconds of `steps` equal steps; after each, every decode row has one more token to read."""
        compute, memory = self.sides(load)
        fixed = steps * (self._overhead + self._reduce * (load.prefill_tokens + load.rows))
        if steps == 1:
            return fixed + (compute if compute > memory else memory)
        growth = 2 * self._square * load.rows, self._kv * load.rows
        return fixed + sum_of_larger((compute, growth[0]), (memory, growth[1]), steps)

    def sides(self, load: Load) -> tuple[float, float]:
        """Return the seconds of one step's FLOPs, and of its bytes."""
        rows, kv_tokens, tokens = load.rows, load.kv_tokens, load.prefill_tokens + load.rows
        squares = load.prefill_squares + 2 * kv_tokens + rows  # a row that ends at e adds e² - (e - 1)²
        compute = self._token * tokens + self._square * squares + self._logits * load.logits
        kv = load.prefix_tokens + kv_tokens + tokens + 2 * load.moved_tokens
        memory = self._weights + self._kv * kv + self._state * load.states + self._segment * load.segments
        for weights, missed in self._unread:
            memory -= weights * missed**tokens
        if load.logits:
            memory += self._head
        return compute, memory


def sum_of_larger(one: Line, other: Line, n: int) -> float:
    """Return the sum over i in 0..n-1 of the larger of two lines."""
    high, low = (one, other) if one >= other else (other, one)
    before = n  # number of steps at which the line that begins higher is the larger
    if (high[0] - low[0]) < n * (low[1] - high[1]):
        before = min(n, int((high[0] - low[0]) / (low[1] - high[1])) + 1)
    after = n - before
    return (
        before * high[0] + high[1] * before * (before - 1) / 2
        + after * low[0] + low[1] * (n * (n - 1) - before * (before - 1)) / 2
    )  # fmt: skip
