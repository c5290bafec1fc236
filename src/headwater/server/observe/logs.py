"""Log with one line for each answer, as text or JSON. It never holds text of prompts or answers."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime

from headwater.server.http.middleware import RequestContext, current_request_id
from headwater.server.observe.record import GenerationEnd, Watcher

TEXT = "%(asctime)s %(name)s %(message)s"
LONGEST = 200  # characters of a line
TAIL = 80  # characters kept at the end of a longer one, which names the request
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

log = logging.getLogger("headwater.request")


class TextFormatter(logging.Formatter):
    """Formatter that writes one line of at most LONGEST characters, with control characters escaped.

    A longer line loses its middle. An exception's traceback follows the line.
    """

    def __init__(self) -> None:
        super().__init__(TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = CONTROL.sub(lambda found: ascii(found[0])[1:-1], super().formatMessage(record))
        return line if len(line) <= LONGEST else f"{line[: LONGEST - TAIL - 3]} … {line[-TAIL:]}"


class JsonFormatter(logging.Formatter):
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


def configure_logging(log_format: str) -> None:
    """Log to standard error from level `info`, in one of FORMATTERS."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATTERS[log_format]())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


class RequestLog(Watcher):
    """Watcher that writes a line for each answer, and for each request without one.

    In a line of text, figures that are zero are left out, and so is a resume position that equals the cached tokens.
    """

    def ended(self, end: GenerationEnd) -> None:
        figures = {**end.account.as_dict(), "output_tokens": end.event.output_tokens}
        if figures["resumed_at"] == figures["cached_tokens"]:
            figures["resumed_at"] = 0
        account = " ".join(f"{_short(name)}={_shown(value)}" for name, value in figures.items() if value)
        text = f"{account} finish={end.event.finish_reason} ttft={end.first_token:.3f}s total={end.total:.3f}s"
        extra = {"fields": end.as_dict()}
        log.info("%s[%d] %s id=%s", end.endpoint, end.number, text, end.request.id, extra=extra)

    def lost(self, request: RequestContext, endpoint: str, error: Exception | None) -> None:
        fields = {"request_id": request.id, "endpoint": endpoint, "total_seconds": round(request.seconds, 6)}
        if error is None:
            extra = {"fields": {**fields, "outcome": "cancelled"}}
            log.info("%s cancelled total=%.3fs id=%s", endpoint, request.seconds, request.id, extra=extra)
            return
        extra = {"fields": {**fields, "outcome": "failed", "error": type(error).__name__}}
        log.warning("%s failed=%s: %s id=%s", endpoint, type(error).__name__, error, request.id, extra=extra)


def _short(name: str) -> str:
    return name.removesuffix("_tokens").removesuffix("_at")


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
