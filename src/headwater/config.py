"""What a user may set of a server. Checked once, on construction; every error names the setting and its value."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from headwater.errors import ConfigError

DEVICES = ("cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16")
POOLS = ("unified", "split")
DECODE_REUSE = ("canonical", "raw", "none")
PAGE_GRID = 64  # tokens; recurrences are cut at multiples of it
UNITS = {"": 1, "B": 1}
UNITS |= {f"{prefix}B": 1000 ** (i + 1) for i, prefix in enumerate("KMGT")}
UNITS |= {f"{prefix}iB": 1024 ** (i + 1) for i, prefix in enumerate("KMGT")}


def parse_bytes(text: str) -> int:
    """Bytes of "4GB" (4·10⁹), "4GiB" (4·2³⁰), "512MB", "65536"; raises ConfigError for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    units = {name.lower(): size for name, size in UNITS.items()}
    if found is None or found[2].lower() not in units:
        raise ConfigError(f"memory is {text!r}, must be a number and a unit, such as 4GB (10^9) or 4GiB (2^30)")
    return int(float(found[1]) * units[found[2].lower()])


def user_cache_dir() -> Path:
    """Where Headwater keeps what it makes for this user: $XDG_CACHE_HOME/headwater, or ~/.cache/headwater."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headwater"


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """The settings of one server. Raises ConfigError where one is out of range or contradicts another."""

    model: Path | None = None  # a checkpoint's folder; None: the embedded default
    memory: int = 4 * 10**9  # bytes for KV, checkpoints and running states together
    device: str = "cpu"
    dtype: str = "auto"
    page_size: int = 64  # tokens
    max_running: int = 16  # requests that compute at once
    max_tokens_per_step: int = 1024  # prefill and decode tokens of one step
    placement: str = "structural"  # a name out of headwater.cache.placement's table
    eviction: str = "lru"  # a name out of headwater.cache.eviction's table
    pool: str = "unified"
    state_fraction: float | None = None  # of a split pool: the share of memory that only states may use
    decode_reuse: str = "canonical"
    cache: bool = True
    host: str = "127.0.0.1"
    port: int = 8000
    threads: int | None = None  # None: as many as torch takes by itself
    reproducible: bool = True  # False: do without what makes a hit change no bit
    model_name: str | None = None  # as clients see it; None: the folder's name
    max_waiting: int = 256  # requests that may wait for a slot; more are refused with 503
    request_timeout: float | None = None  # seconds that a request may take; None: any
    drain: float = 30.0  # seconds that running requests have to end after SIGTERM
    api_key: str | None = None  # None: nobody needs one
    cors: tuple[str, ...] = ()  # origins that browsers may call from; "*" is any
    tls_key: Path | None = None
    tls_cert: Path | None = None
    uds: Path | None = None  # a Unix socket to listen on in place of host and port
    log_format: str = "text"  # or "json"
    otlp_endpoint: str | None = None  # where OpenTelemetry spans go (HTTP); None: nowhere
    tool_format: str = "auto"  # how the model writes tool calls; auto: told by its chat template
    reasoning_format: str = "auto"  # likewise for its reasoning
    cache_dir: Path = field(default_factory=user_cache_dir)  # the embedded default is kept there

    def __post_init__(self) -> None:
        if self.model is not None and not (self.model / "config.json").is_file():
            raise ConfigError(f"model is {str(self.model)!r}, which is no folder with a config.json")
        _one_of("device", self.device, DEVICES)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("pool", self.pool, POOLS)
        _one_of("decode_reuse", self.decode_reuse, DECODE_REUSE)
        if self.page_size < PAGE_GRID or self.page_size % PAGE_GRID:
            raise ConfigError(f"page_size is {self.page_size}, must be a multiple of {PAGE_GRID}")
        _at_least("memory", self.memory, 1)
        _at_least("max_running", self.max_running, 1)
        _at_least("max_tokens_per_step", self.max_tokens_per_step, self.page_size)
        if self.threads is not None:
            _at_least("threads", self.threads, 1)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}, must be in 0 to 65535")
        self._check_pool()

    def _check_pool(self) -> None:
        if self.pool == "split" and self.state_fraction is None:
            raise ConfigError("pool is 'split', so state_fraction must be given, for example 0.5")
        if self.pool == "unified" and self.state_fraction is not None:
            raise ConfigError(f"state_fraction is {self.state_fraction}, but pool is 'unified': it needs 'split'")
        if self.state_fraction is not None and not 0 < self.state_fraction < 1:
            raise ConfigError(f"state_fraction is {self.state_fraction}, must be between 0 and 1")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}, must be one of {', '.join(allowed)}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} is {value:,}, must be at least {least:,}")
