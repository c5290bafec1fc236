"""TLS certificate of a server: checked at the start, and read again at SIGHUP."""

from __future__ import annotations

import logging
import ssl
from os import PathLike

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


def renew(context: ssl.SSLContext, cert: File, key: File) -> None:
    """Read a certificate again, for connections that are made later. If it is invalid, the earlier one stays in use."""
    try:
        load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), cert, key)  # first apart: a bad key would be half loaded
        load(context, cert, key)
    except (OSError, ValueError) as error:
        log.error("SIGHUP: %s cannot be used, the earlier certificate stays: %s", cert, error)
    else:
        log.info("SIGHUP: certificate %s was read again", cert)
