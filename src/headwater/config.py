"""Settings of a server. They are checked on construction; every error names the setting and its value."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path

from headwater.api_keys import ApiKey, read_keys
from headwater.hub_name import HubName
from headwater.request import Healing, SegmentEviction
from headwater.setting import (
    BYTES,
    COUNT,
    FILE,
    NAMES,
    NUMBER,
    SECONDS,
    SWITCH,
    TEXT,
    TIERS,
    SettingError,
    setting,
    settings_of,
)
from headwater.unreadable import is_gguf, why_no_model

DEVICES = ("cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16")
WEIGHTS = ("auto", "int8", "int4")  # what headwater.spec has
DECODE_REUSE = ("canonical", "raw", "none")
SPECULATION = ("off", "auto", "ngram", "suffix", "mtp", "draft")
TIER_STORE = ("selective", "through")
HEALING = tuple(map(str, Healing))
SEGMENT_EVICTION = tuple(map(str, SegmentEviction))
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
TOOL_CALLS = ("held", "free")
TOOL_FORMATS = (  # what headwater.server.answer.formats has
    "auto", "none", "qwen_xml", "hermes", "nemotron", "kimi", "jamba", "minimax", "minimax_xml", "granite", "python",
)  # fmt: skip
REASONING_FORMATS = ("auto", "none", "think", "harmony")  # likewise
SHORTEST = 0.1  # seconds, of a timeout
PAGE_GRID = 64  # tokens; recurrences are cut at multiples of it
DEFAULT_SEPARATOR = "<|segment|>"
SEPARATOR = re.compile(r"\S{2,64}")  # of one character nothing could be quoted: a quoted one is encoded in two pieces

ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")  # RFC 6454, section 6.2: no path, not even a slash
EVENTS_ADDRESS = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._*-]+):(\d{1,5}|\*)|ipc://.+")
HOST = re.compile(r"\*|[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")  # a name, or an address without brackets

MODEL, MEMORY, SCHEDULING = "Model", "Memory and cache", "Scheduling"
NETWORK, ACCESS, LOGGING, EVENTS = "Network", "Access", "Logging", "KV events"


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """The settings of one server. Raises ConfigError if one is out of range or contradicts another."""

    model: Path | HubName | None = setting(
        None,
        FILE,
        MODEL,
        "Folder in Hugging Face format, a GGUF file, or ORG/NAME or ORG/NAME@REVISION, which is downloaded.",
        unset="the embedded model",
    )
    more_models: tuple[str, ...] = setting(
        (), NAMES, MODEL, "Further models in this process. A request names one, and --memory is divided among all."
    )
    model_name: str | None = setting(
        None, TEXT, MODEL, "Name of the model for clients; without it, ORG/NAME stays.", unset="the folder's name"
    )
    device: str = setting("cpu", TEXT, MODEL, "Device that computes.", choices=DEVICES)
    dtype: str = setting("auto", TEXT, MODEL, "Data type of the computation.", choices=DTYPES)
    weights: str = setting("auto", TEXT, MODEL, "Format of weights in memory; auto: as stored.", choices=WEIGHTS)
    keep_weights: bool = setting(
        True, SWITCH, MODEL, "Keep what --weights converts in the cache folder: later starts take seconds."
    )
    rope_scaling: str | None = setting(
        None,
        TEXT,
        MODEL,
        "Scaling of rotary positions for longer sequences: yarn:4, linear:2, or keys of rope_parameters as JSON.",
        unset="the model's own",
    )
    threads: int | None = setting(
        None,
        COUNT,
        MODEL,
        "Threads that compute.",
        unset="torch's own choice, within a quota of cores",
        least=1,
    )
    reproducible: bool = setting(True, SWITCH, MODEL, "Off: a hit may change the last bits of an answer.")
    unload_after: float | None = setting(
        None, SECONDS, MODEL, "Idle time after which weights leave memory; the cache stays.", unset="never", least=0.1
    )
    recheck: bool = setting(False, SWITCH, MODEL, "Prove again that hits are exact, although a proof is kept.")
    warm_up: bool = setting(True, SWITCH, MODEL, "Warm up before the first request.")
    tool_format: str = setting(
        "auto",
        TEXT,
        MODEL,
        "Format of the model's tool calls; auto: detected in its chat template.",
        choices=TOOL_FORMATS,
    )
    tool_calls: str = setting(
        "held",
        TEXT,
        MODEL,
        "Calls with tool_choice auto: held to known tools and their schemas, or free.",
        choices=TOOL_CALLS,
    )
    reasoning_format: str = setting(
        "auto",
        TEXT,
        MODEL,
        "Format of the model's reasoning; auto: detected in its chat template.",
        choices=REASONING_FORMATS,
    )

    billing_lines: bool = setting(
        False, SWITCH, MODEL, "Keep agents' billing lines in system texts: each request has another, so nothing hits."
    )

    memory: int = setting(
        4 * 10**9, BYTES, MEMORY, "Memory for KV, checkpoints and running states; GB is 10^9 bytes, GiB 2^30.", least=1
    )
    page_size: int = setting(64, COUNT, MEMORY, f"Tokens of a page, a multiple of {PAGE_GRID}.")
    cache: bool = setting(True, SWITCH, MEMORY, "Reuse of earlier prompts. Off: every prompt is computed whole.")
    placement: str = setting(
        "headwater", TEXT, MEMORY, "Placement of checkpoints: headwater, structural, branch, every_block(4), none."
    )
    eviction: str = setting("headwater", TEXT, MEMORY, "Eviction policy: headwater, lru, seglen, ...")
    decode_reuse: str = setting(
        "canonical", TEXT, MEMORY, "Cached form of answers: recomputed, as decoded, none.", choices=DECODE_REUSE
    )
    tails: bool = setting(True, SWITCH, MEMORY, "Resume prompts at any token, on a CPU; off: at pages.")
    segment_separator: str = setting(
        DEFAULT_SEPARATOR, TEXT, MEMORY, "Separator of segments in prompts and messages (PIC_SEPARATOR)."
    )
    segment_share: float = setting(
        0.5, NUMBER, MEMORY, "Share of memory up to which segments displace prefixes, 0 to 1."
    )
    segment_eviction: str = setting(
        "cost",
        TEXT,
        MEMORY,
        "Segment to evict first: cost (least work saved for its memory) or lru.",
        choices=SEGMENT_EVICTION,
    )
    healing: str = setting(
        "idle",
        TEXT,
        MEMORY,
        "Exact recomputation of composed prompts, so that the next turn is exact.",
        choices=HEALING,
    )

    tier: tuple[str, ...] = setting(
        (), TIERS, MEMORY, "Store that keeps states and KV beyond memory and the process: disk:/path,size=100GB."
    )
    tier_store: str = setting(
        "selective",
        TEXT,
        MEMORY,
        "Checkpoints to store: those that were hit and, at SIGTERM, the others (selective), or each (through).",
        choices=TIER_STORE,
    )
    tier_key: Path | None = setting(
        None,
        FILE,
        MEMORY,
        "File with the secret key of tiers; it is created, with mode 600, if it does not exist.",
        unset="in the cache folder",
    )
    tier_timeout: float = setting(
        0.5, SECONDS, MEMORY, "Longest time that a request waits for the lookup in tiers.", least=0
    )

    speculation: str = setting(
        "off",
        TEXT,
        SCHEDULING,
        "Drafts of steps: ngram (from prompts), suffix (and answers), mtp (model's head), draft (small model), auto.",
        choices=SPECULATION,
    )
    draft_model: Path | None = setting(
        None, FILE, SCHEDULING, "Small model with the same tokenizer that drafts.", unset="needed for `draft`"
    )
    max_running: int = setting(16, COUNT, SCHEDULING, "Requests that compute at the same time.", least=1)
    max_tokens_per_step: int = setting(1024, COUNT, SCHEDULING, "Tokens of one step, prefill and decode together.")
    max_waiting: int = setting(
        256, COUNT, SCHEDULING, "Requests that may wait for a slot; further ones are refused with 503.", least=1
    )
    request_timeout: float | None = setting(
        None, SECONDS, SCHEDULING, "Limit for a request, waiting included.", unset="no limit"
    )
    constraint_time: float = setting(
        10.0, SECONDS, SCHEDULING, "Computing time of one answer's constraint; others wait for it.", least=SHORTEST
    )
    drain: float = setting(30.0, SECONDS, SCHEDULING, "Time for running requests to finish after SIGTERM.", least=0)

    host: str = setting("127.0.0.1", TEXT, NETWORK, "Address to listen on; 0.0.0.0 and :: are all addresses.")
    port: int = setting(8000, COUNT, NETWORK, "Port to listen on; 0 is any free port.")
    uds: Path | None = setting(
        None, FILE, NETWORK, "Unix socket to listen on, instead of host and port.", unset="host and port"
    )
    tls_cert: Path | None = setting(
        None, FILE, NETWORK, "Certificate with its chain (PEM); needs --tls-key.", unset="plain HTTP"
    )
    tls_key: Path | None = setting(None, FILE, NETWORK, "Private key of the certificate (PEM).", unset="plain HTTP")
    max_connections: int = setting(
        1000, COUNT, NETWORK, "Open connections; beyond them a waiting one is closed, or the new one refused.", least=1
    )
    max_connections_per_address: int | None = setting(
        None,
        COUNT,
        NETWORK,
        "Likewise for each client address; not on a Unix socket.",
        unset="max_connections",
        least=1,
    )
    head_timeout: float = setting(
        10.0, SECONDS, NETWORK, "Time for the head of a request to arrive, from its first byte.", least=SHORTEST
    )
    body_timeout: float = setting(
        60.0, SECONDS, NETWORK, "Time for the body of a request to arrive, from the end of its head.", least=SHORTEST
    )
    idle_timeout: float = setting(75.0, SECONDS, NETWORK, "Time between two requests of a connection.", least=SHORTEST)
    send_timeout: float = setting(
        60.0, SECONDS, NETWORK, "Time in which a client must read some of its answer.", least=SHORTEST
    )
    stream_start: float = setting(
        2.0, SECONDS, NETWORK, "Time after which a stream begins even if nothing is computed yet.", least=0
    )
    keep_alive: float = setting(
        10.0, SECONDS, NETWORK, "Time without a byte after which a stream sends a comment or a ping.", least=0.01
    )

    api_key: str | None = setting(
        None, TEXT, ACCESS, "Key that every request but /health must send.", unset="no key is needed", secret=True
    )
    api_key_file: Path | None = setting(
        None, FILE, ACCESS, "File that holds the key, or .toml file of several; read again at SIGHUP.", unset="no file"
    )
    cors: tuple[str, ...] = setting((), NAMES, ACCESS, "Origins that browsers may call from; * is any origin.")
    allowed_hosts: tuple[str, ...] = setting(
        (), NAMES, ACCESS, "Host names other than localhost that are served on a loopback address; * is any name."
    )

    log_format: str = setting("text", TEXT, LOGGING, "Format of log lines.", choices=LOG_FORMATS)
    log_level: str = setting("info", TEXT, LOGGING, "Level from which lines are logged.", choices=LOG_LEVELS)
    log_requests: float = setting(1.0, NUMBER, LOGGING, "Share of requests with a line, 0 to 1; failed ones have one.")
    otlp_endpoint: str | None = setting(
        None, TEXT, LOGGING, "URL that receives OpenTelemetry spans over HTTP.", unset="no spans are sent"
    )

    record: Path | None = setting(
        None, FILE, LOGGING, "New file that records traffic for a replay: hashes, no text.", unset="no recording"
    )

    kv_events: bool = setting(
        False, SWITCH, EVENTS, "Publish what enters and leaves the cache over ZeroMQ, in the form of vLLM's KV events."
    )
    kv_events_endpoint: str = setting(
        "tcp://127.0.0.1:5557", TEXT, EVENTS, "Address of live messages; port * is any free one."
    )
    kv_events_replay_endpoint: str = setting("tcp://127.0.0.1:5558", TEXT, EVENTS, "Address of replays and snapshots.")
    kv_events_topic: str = setting("kv-events", TEXT, EVENTS, "Topic of live messages.")
    kv_events_tokens: bool = setting(
        False, SWITCH, EVENTS, "Publish the token ids of prompts without cache_salt, too: some routers need them."
    )
    kv_events_key: Path | None = setting(
        None,
        FILE,
        EVENTS,
        "File with the secret key of block hashes; it is created, with mode 600, if it does not exist.",
        unset="in the cache folder",
    )

    max_memory: int = 0  # bytes, more than `memory`, to which caches of other models may lend; 0: none do

    def __post_init__(self) -> None:
        for one in SETTINGS:
            one.check(getattr(self, one.name))
        if isinstance(self.model, Path) and not ((self.model / "config.json").is_file() or is_gguf(self.model)):
            why = f"which is not a folder with a config.json: {why_no_model(self.model)}"
            raise SettingError("model", repr(str(self.model)), why)
        if self.page_size < PAGE_GRID or self.page_size % PAGE_GRID:
            raise SettingError("page_size", str(self.page_size), f"must be a multiple of {PAGE_GRID}")
        if self.max_tokens_per_step < self.page_size:
            least = f"must be at least {self.page_size:,}"
            raise SettingError("max_tokens_per_step", f"{self.max_tokens_per_step:,}", least)
        if self.request_timeout is not None and not self.request_timeout > 0:
            raise SettingError("request_timeout", f"{self.request_timeout:g}", "must be more than 0 seconds")
        if not 0 <= self.port <= 65535:
            raise SettingError("port", str(self.port), "must be in 0 to 65535")
        for origin in self.cors:
            if not ORIGIN.fullmatch(origin):
                raise SettingError("cors", repr(origin), "must be * or an origin such as https://chat.example:8443")
        for host in self.allowed_hosts:
            if not HOST.fullmatch(host):
                raise SettingError("allowed_hosts", repr(host), "must be * or a name such as chat.example, no port")
        if not SEPARATOR.fullmatch(self.segment_separator):
            raise SettingError("segment_separator", repr(self.segment_separator), "must be 2 to 64 signs, no spaces")
        for name in ("segment_share", "log_requests"):
            if not 0 <= getattr(self, name) <= 1:
                raise SettingError(name, f"{getattr(self, name):g}", "must be 0 to 1")
        if self.record is not None and not self.record.parent.is_dir():
            raise SettingError("record", repr(str(self.record)), "must be in a folder that exists")
        self._check_several()
        self._check_unloading()
        self._check_drafts()
        self._check_tiers()
        self._check_tls()
        self._check_events()
        self.accepted_keys()

    def accepted_keys(self) -> tuple[ApiKey, ...]:
        """Return the keys one of which requests must send, from their file if one is set; none: no key is needed."""
        if self.api_key_file is None:
            if self.api_key is not None and not self.api_key.strip():
                raise SettingError("api_key", "empty", "must be a text that cannot be guessed")
            return () if self.api_key is None else (ApiKey(self.api_key.encode()),)
        if self.api_key is not None:
            raise SettingError("api_key_file", repr(str(self.api_key_file)), "but api_key is given too: one is enough")
        try:
            return read_keys(self.api_key_file)
        except (OSError, ValueError) as error:
            shown = repr(str(self.api_key_file))
            raise SettingError("api_key_file", shown, f"which cannot be read: {error}") from error

    def _check_several(self) -> None:
        """Refuse, for several models, settings that fit only one."""
        of_memory = [place for place in self.tier if place.partition(",")[0] == "memory"]
        of_one = {name: getattr(self, name) for name in ("model_name", "draft_model", "record", "kv_events")}
        for name, value in (of_one | {"tier": " ".join(of_memory)}).items():
            if self.more_models and value:
                shown = "on" if value is True else repr(str(value))
                raise SettingError(name, shown, f"but {1 + len(self.more_models)} models are served: it fits only one")

    def _check_unloading(self) -> None:
        """Refuse to unload what other parts refer to: heads that draft share weights, and a card has no such memory."""
        fits = {"device": ("cpu",), "speculation": ("off", "ngram", "suffix")}
        for name, values in fits.items():
            if self.unload_after is not None and (value := getattr(self, name)) not in values:
                raise SettingError(
                    "unload_after", f"{self.unload_after:g}", f"but {name} is {value!r}: it needs {' or '.join(values)}"
                )

    def _check_drafts(self) -> None:
        if self.speculation == "draft" and self.draft_model is None:
            raise SettingError("speculation", "'draft'", "so draft_model must name a small model")
        if self.draft_model is None:
            return
        shown = repr(str(self.draft_model))
        if self.speculation not in ("auto", "draft"):
            raise SettingError(
                "draft_model", shown, f"but speculation is {self.speculation!r}: it needs 'draft' or 'auto'"
            )
        if not ((self.draft_model / "config.json").is_file() or is_gguf(self.draft_model)):
            why = why_no_model(self.draft_model)
            raise SettingError("draft_model", shown, f"which is not a folder with a config.json: {why}")

    def _check_tiers(self) -> None:
        if not self.tier:
            return
        shown = repr(TIERS.show(self.tier))
        if not self.cache:
            raise SettingError("tier", shown, "but the cache is off: there is nothing to keep")
        if self.decode_reuse == "raw":
            raise SettingError("tier", shown, "but decode_reuse is 'raw': what it caches is not exact")

    @property
    def resume_grid(self) -> int:
        """Tokens whose multiples are the positions at which prompts can resume."""
        return 1 if self.tails and self.device == "cpu" else self.page_size

    def _check_events(self) -> None:
        for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
            if not EVENTS_ADDRESS.fullmatch(getattr(self, name)):
                raise SettingError(name, repr(getattr(self, name)), "must be an address such as tcp://127.0.0.1:5557")
        if self.kv_events and not self.cache:
            raise SettingError("kv_events", "on", "but the cache is off: nothing enters it")

    def _check_tls(self) -> None:
        for name, other in (("tls_key", "tls_cert"), ("tls_cert", "tls_key")):
            path: Path | None = getattr(self, name)
            if path is None:
                continue
            if getattr(self, other) is None:
                raise SettingError(name, repr(str(path)), f"but {other} is not given: TLS needs both")
            if not path.is_file():
                raise SettingError(name, repr(str(path)), "which is not a file")
            if self.uds is not None:
                raise SettingError(name, repr(str(path)), f"but uds is {str(self.uds)!r}: a Unix socket has no TLS")


SETTINGS = settings_of(fields(ServeConfig))
