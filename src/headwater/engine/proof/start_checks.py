"""Checks of the settings against machine and checkpoint, before a server starts: memory, data type, drafts."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

import torch

from headwater.config import ServeConfig
from headwater.engine.proof.selfcheck import SelfCheck, weight_shapes
from headwater.machine import UNKNOWN, free_memory, in_units, memory_limit, total_memory
from headwater.mixers.linear import slowdown
from headwater.mixers.numerics import Numerics
from headwater.mixers.products import product_dtype
from headwater.schedule.speculation import MTP, OFF, Speculation, speculation_of
from headwater.setting import TIERS, SettingError, show_bytes
from headwater.spec import ModelSpec
from headwater.tiers.place import MEMORY
from headwater.tiers.store import Store

log = logging.getLogger("headwater.engine")


def check_memory(config: ServeConfig) -> None:
    """Refuse more memory than the machine has, and warn of more than is free. Raises SettingError."""
    total, free = device_memory(config.device)
    if config.memory > total:
        raise too_much_memory(config)
    if config.memory > free:
        log.warning(
            "memory is %s, %s are free: the process may be ended as it fills", *map(in_units, (config.memory, free))
        )


def check_memory_tiers(config: ServeConfig, stores: Iterable[Store]) -> None:
    """Refuse tiers larger than the host's memory; log a better choice on a CPU. Raises SettingError."""
    on_cpu = config.device == "cpu"
    size = sum(store.limit or 0 for store in stores if store.kind == MEMORY)
    memory, total = (config.memory if on_cpu else 0), min(total_memory(), memory_limit() or UNKNOWN)
    if size and size + memory > total:
        has = f"but the host has {in_units(total)}" + f", and memory is {in_units(memory)}" * on_cpu
        raise SettingError("tier", repr(TIERS.show(config.tier)), has)
    if size and size + memory > (free := free_memory()):
        log.warning(
            "tiers in memory are %s, %s are free: the process may be ended as they fill", *map(in_units, (size, free))
        )
    if size and on_cpu:
        log.warning(
            "a tier in memory is below the memory of a card: on a CPU a larger --memory caches as much, uncopied"
        )


def too_much_memory(config: ServeConfig) -> SettingError:
    total, free = map(in_units, device_memory(config.device))
    has = f"more than this machine can give: {total} in all, {free} free (the weights need memory besides)"
    return SettingError("memory", repr(show_bytes(config.memory)), has)


def device_memory(device: str) -> tuple[int, int]:
    """Return the bytes of the device's memory, swap included, and those that are free."""
    if torch.device(device).type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, free
    return total_memory(), free_memory()


def warn_if_slow(spec: ModelSpec, device: str, mode: str) -> None:
    """Warn if the processor has no products in the model's data type, with the factor that this costs."""
    dtype = getattr(torch, spec.dtype_name)
    if mode != "compiled" and product_dtype(dtype, device) != dtype:
        factor = slowdown(*max(weight_shapes(spec), key=math.prod), dtype, Numerics(mode))
        log.warning(
            "%s is slow on this CPU: products take %.1f times as long as with --dtype float32 (auto's choice)",
            spec.dtype_name,
            factor,
        )


def no_mtp(spec: ModelSpec, config: ServeConfig) -> SettingError:
    """Return why no MTP head can draft."""
    if config.device != "cpu":
        return SettingError("speculation", repr(MTP), f"which runs only on the CPU, and device is {config.device!r}")
    why = "its family has none" if spec.mtp is None else f"tensor {spec.mtp.product!r} is missing"
    return SettingError("speculation", repr(MTP), f"but the checkpoint has no MTP head: {why}")


def exact_speculation(config: ServeConfig, check: SelfCheck) -> Speculation:
    """Return the speculation of the setting; off, with the reason, if drafts may change bits of an answer."""
    if check.deterministic or config.speculation == OFF:
        return speculation_of(config.speculation)
    log.warning("speculation is off, since drafts may change bits of answers here: %s", check.broken_by)
    return Speculation(why_off=f"not exact: {check.broken_by}")
