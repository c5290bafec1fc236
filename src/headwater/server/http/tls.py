"""TLS certificate of a server: checked at the start, and read again at SIGHUP."""

from __future__ import annotations

import logging
import signal
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from types import FrameType

from headwater.config import ServeConfig
from headwater.setting import SettingError

File = str | PathLike[str]

log = logging.getLogger("headwater.server")


def check_tls(config: ServeConfig) -> None:
    """Raise ConfigError if certificate or key is invalid, or they do not belong together."""
    if config.tls_cert is None or config.tls_key is None:
        return
    try:
        load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), config.tls_cert, config.tls_key)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        must = f"which TLS cannot use with tls_key {str(config.tls_key)!r}: {reason}"
        raise SettingError("tls_cert", repr(str(config.tls_cert)), must) from error


def load(context: ssl.SSLContext, cert: File, key: File) -> None:
    """Load a certificate with its key. An encrypted key is an error: with a password, none is asked for."""
    context.load_cert_chain(cert, key, password="")


class Renewal:
    """Renewal of a certificate: at SIGHUP the files are read again, for connections that are made later."""

    def __init__(self, context: ssl.SSLContext, cert: File, key: File) -> None:
        self._context, self._files = context, (cert, key)
        self._is_due = False

    @contextmanager
    def at_hang_up(self) -> Iterator[None]:
        """Note SIGHUP meanwhile; does nothing on a thread other than the main one, which gets no signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGHUP, self.request)
        try:
            yield
        finally:
            signal.signal(signal.SIGHUP, before)

    def request(self, number: int = signal.SIGHUP, frame: FrameType | None = None) -> None:
        """Let the next `renew` read the files."""
        self._is_due = True

    def renew(self) -> None:
        """Read the files if that was requested. If they are invalid, the earlier certificate stays in use."""
        if not self._is_due:
            return
        self._is_due = False
        try:
            load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), *self._files)  # first apart: a bad key would be half loaded
            load(self._context, *self._files)
        except (OSError, ValueError) as error:
            log.error("SIGHUP: %s cannot be used, the earlier certificate stays: %s", self._files[0], error)
        else:
            log.info("SIGHUP: certificate %s was read again", self._files[0])
