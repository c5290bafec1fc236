"""Log with one line for each answer, as text or JSON. It never holds text of prompts or answers."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from headwater.errors import for_log
from headwater.events import FailedEvent, FinishedEvent
from headwater.request import Generation
from headwater.server.http.middleware import RequestContext, current_request_id
from headwater.server.observe.record import GenerationEnd, Watcher

TEXT = "%(asctime)s %(name)s %(message)s"
MAX_LINE_CHARACTERS = 200
TAIL_CHARACTERS = 80  # kept at the end of a longer line, which names the request
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
MAX_KINDS = 1_000  # of warnings, whose times are remembered

log = logging.getLogger("headwater.request")


class DiscreetFormatter(logging.Formatter):
    """Formatter whose tracebacks hold no messages during a request: libraries repeat what the client sent."""

    def formatException(self, ei: Any) -> str:
        return super().formatException(ei) if current_request_id() is None else stack_of(ei[1])


def stack_of(error: BaseException) -> str:
    """Return the traceback of an error and of those before it, with their classes only."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    head = f"{stack_of(before)}\n\n" if before is not None else ""
    return f"{head}Traceback:\n{''.join(traceback.format_tb(error.__traceback__))}{type(error).__qualname__}"


class TextFormatter(DiscreetFormatter):
    """Formatter that writes one line of at most MAX_LINE_CHARACTERS, with control characters escaped.

    Words of a longer line's middle are left out. An exception's traceback follows the line.
    """

    def __init__(self) -> None:
        super().__init__(TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = CONTROL.sub(lambda found: ascii(found[0])[1:-1], super().formatMessage(record))
        return line if len(line) <= MAX_LINE_CHARACTERS else shortened(line)


def shortened(line: str) -> str:
    """Shorten a line to at most MAX_LINE_CHARACTERS by whole words of its middle, so that no number is cut."""
    tail = line[-TAIL_CHARACTERS:].partition(" ")[2] or line[-TAIL_CHARACTERS:]
    head = line[: MAX_LINE_CHARACTERS - len(tail) - 3]
    return f"{head.rpartition(' ')[0] or head} … {tail}"


class JsonFormatter(DiscreetFormatter):
    """Formatter that writes one object: time, level, logger, message, the request's id, and `extra={"fields": ...}`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = current_request_id()
        if request_id is not None:
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


FORMATTERS: dict[str, type[logging.Formatter]] = {"text": TextFormatter, "json": JsonFormatter}


class OncePerSecond(logging.Filter):
    """Filter that passes one warning of a kind in each second, with the number of those that it left out before.

    Warnings of a kind have the same logger, the same first line before its values are filled in, and the same type of
    exception. The lines of requests all pass.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._passed: dict[tuple[object, ...], tuple[float, int]] = {}  # kind -> time of the last one, left out since

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or record.name == log.name:
            return True
        error = record.exc_info[0] if record.exc_info else None
        kind, now = (record.name, str(record.msg).partition("\n")[0], error), self._clock()
        last, left_out = self._passed.get(kind, (-math.inf, 0))
        if now - last < 1:
            self._passed[kind] = (last, left_out + 1)
            return False
        if len(self._passed) >= MAX_KINDS:
            self._passed.clear()
        self._passed[kind] = (now, 0)
        if left_out:
            record.msg = f"{record.msg} ({left_out:,} more like it since the last)"
        return True


def configure_logging(log_format: str, level: str = "info") -> None:
    """Log to standard error from a level, in one of FORMATTERS."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATTERS[log_format]())
    handler.addFilter(OncePerSecond())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request that this process sends


def is_logged(request_id: str, share: float) -> bool:
    """Return whether a request is in the logged share: the same requests in all processes of a cluster."""
    return zlib.crc32(request_id.encode()) < share * 2**32


class RequestLog(Watcher):
    """Watcher that writes a line for each answer of a share of the requests, and for each request without one.

    In a line of text, figures that are zero are left out, and so is a resume position that equals the cached tokens.
    """

    def __init__(self, share: float = 1.0) -> None:
        self._share = share

    def ended(self, end: GenerationEnd) -> None:
        if not is_logged(end.request.id, self._share):
            return
        figures = {**end.account.as_dict(), "output_tokens": end.event.output_tokens}
        if figures["resumed_at"] == figures["cached_tokens"]:
            figures["resumed_at"] = 0
        account = " ".join(f"{_short(name)}={_shown(value)}" for name, value in figures.items() if value)
        key = _labels(end.request)
        text = f"{account} finish={end.event.finish_reason} ttft={end.first_token:.3f}s total={end.total:.3f}s{key}"
        extra = {"fields": end.as_dict()}
        log.info("%s[%d] %s id=%s", end.endpoint, end.number, text, end.request.id, extra=extra)

    def lost(self, request: RequestContext, endpoint: str, error: Exception | None) -> None:
        fields = {"request_id": request.id, "endpoint": endpoint, "total_seconds": round(request.seconds, 6)}
        fields |= request.labels
        text = f"id={request.id}{_labels(request)}"
        if error is None and not is_logged(request.id, self._share):
            return
        if error is None:
            extra = {"fields": {**fields, "outcome": "cancelled"}}
            log.info("%s cancelled total=%.3fs %s", endpoint, request.seconds, text, extra=extra)
            return
        extra = {"fields": {**fields, "outcome": "failed", "error": type(error).__name__}}
        log.warning("%s failed=%s: %s %s", endpoint, type(error).__name__, for_log(error), text, extra=extra)


def log_worker_end(share: float, generation: Generation, event: FinishedEvent | FailedEvent) -> None:
    """Log the end of a request at a worker of a cluster, with the id that its router logs."""
    fields: dict[str, object] = {"request_id": generation.request_id, "number": generation.params.choice}
    if isinstance(event, FailedEvent):
        name = type(event.error).__name__
        extra = {"fields": {**fields, "outcome": "failed", "error": name}}
        log.warning("worker failed=%s: %s id=%s", name, for_log(event.error), generation.request_id, extra=extra)
    elif is_logged(generation.request_id, share):
        account = event.account
        extra = {"fields": {**fields, **account.as_dict(), "output_tokens": event.output_tokens}}
        text = f"prompt={account.prompt_tokens:,} cached={account.cached_tokens:,} output={event.output_tokens:,}"
        log.info("worker[%d] %s id=%s", generation.params.choice, text, generation.request_id, extra=extra)


def _labels(request: RequestContext) -> str:
    return "".join(f" {name}={value}" for name, value in request.labels.items())


def _short(name: str) -> str:
    return name.removesuffix("_tokens").removesuffix("_at")


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
