"""Renewal of a TLS certificate while the server runs."""

import shutil
import signal
import ssl
from contextlib import closing

import pytest

from headwater.load.endpoint import Client, ServerError
from tests.forked import address, serving
from tests.server.http.test_draining import FOREVER, draining, engine  # noqa: F401  # fixtures
from tests.server.http.test_listener import certificate, made_certificate  # noqa: F401  # a fixture


def served(url):
    """Return the certificate that new connections get, as PEM."""
    host, port = url.split("/")[2].split(":")
    return ssl.get_server_certificate((host, int(port)))


@pytest.fixture
def files(certificate, tmp_path):  # noqa: F811
    """Return copies of a key and a certificate, which a test may replace, and another pair."""
    own = tmp_path / "key.pem", tmp_path / "cert.pem"
    for source, target in zip(certificate, own, strict=True):
        shutil.copy(source, target)
    (tmp_path / "next").mkdir()
    return own, made_certificate(tmp_path / "next")


def test_renewed_certificate_is_served_and_an_invalid_one_is_not(draining, files, caplog):  # noqa: F811
    (key, cert), (next_key, next_cert) = files
    server = draining(FOREVER, tls_key=key, tls_cert=cert)
    first = served(server.url)
    assert first == cert.read_text()
    shutil.copy(next_cert, cert)  # without its key
    server.renewal.request()
    while "cannot be used" not in caplog.text:
        pass  # until the server has looked
    assert served(server.url) == first
    shutil.copy(next_key, key)
    server.renewal.request()
    while served(server.url) == first:
        pass
    assert served(server.url) == next_cert.read_text()


def test_client_trusts_certificates_of_a_file_or_a_variable(draining, certificate, monkeypatch):  # noqa: F811
    key, cert = certificate
    url = draining(FOREVER, tls_key=key, tls_cert=cert).url.replace("http", "https")
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with closing(Client(url, None, 5)) as client, pytest.raises(ServerError, match="--ca of `headwater chat`"):
        client.get("/health")
    with closing(Client(url, None, 5, cert)) as client:
        assert client.get("/health")["model"] == "fake"
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    with closing(Client(url, None, 5)) as client:
        assert client.get("/health")["model"] == "fake"


@pytest.mark.full
def test_hang_up_renews_the_certificate_of_a_process(files):
    (key, cert), (next_key, next_cert) = files
    with serving("--port", "0", "--tls-key", str(key), "--tls-cert", str(cert)) as (process, said):
        assert served(address(said)) == cert.read_text()
        shutil.copy(next_cert, cert)
        shutil.copy(next_key, key)
        process.send_signal(signal.SIGHUP)
        while served(address(said)) != next_cert.read_text():
            assert process.poll() is None
        process.terminate()
        assert process.communicate()[1].count("was read again") == 1
