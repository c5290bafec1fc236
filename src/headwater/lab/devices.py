"""What a model runs on: published peaks, and how much of them is reached.

Peaks are dense ones, without sparsity, from the makers' data sheets: NVIDIA H100 (SXM5), H200 (SXM), A100 (80 GB, SXM4)
and L4; H20's are those that its resellers give, as NVIDIA has published none. `cpu` is an AMD EPYC 9654: 96 cores at
2.4 GHz with 32 (float32) or 64 (bfloat16) FLOPs a cycle, and twelve channels of DDR5-4800.
Efficiencies and overhead are guesses until `headwater fit` has replaced them.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from headwater.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """Peaks in FLOPs and bytes a second; `overhead` in seconds a step, whatever the step holds."""

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
        """FLOPs a second with weights of that dtype."""
        return {"float32": self.flops32, "float8": self.flops8}.get(dtype_name, self.flops16)

    def as_toml(self) -> str:
        """What `load_device` reads."""
        values = ((one.name, getattr(self, one.name)) for one in fields(self))
        return "".join(
            f'{name} = "{_escaped(v)}"\n' if isinstance(v, str) else f"{name} = {v!r}\n" for name, v in values
        )


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")


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
    """A device by its name, or by the path of a TOML file as `headwater fit` writes.

    Raises ConfigError for a name that is neither, and for a file that does not describe a device.
    """
    if name in DEVICES:
        return DEVICES[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"{name!r} is no file, and no device of {', '.join(DEVICES)}")
    try:
        values = tomllib.loads(path.read_text())
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
