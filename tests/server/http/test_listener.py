"""Listening sockets: ports, paths and certificates, and invalid ones."""

import asyncio
import shutil
import socket
import stat
import subprocess

import pytest

from headwater.config import ServeConfig
from headwater.errors import ConfigError
from headwater.server.http.process import listener, tcp_listener, url
from headwater.server.http.tls import check_tls


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Return the paths of a key and of a self-signed certificate for 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate, and is not installed")
    return made_certificate(tmp_path_factory.mktemp("tls"))


def made_certificate(folder):
    """Make a key and a self-signed certificate in a folder; return their paths."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    named = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    made = ["openssl", "req", "-x509", *curve, *named, "-keyout", key, "-out", cert]
    subprocess.run(made, check=True, capture_output=True)
    return key, cert


def test_chosen_port_is_reported_as_a_url():
    config = ServeConfig(port=0)
    with listener(config) as sock:
        assert url(sock, config) == f"http://127.0.0.1:{sock.getsockname()[1]}/v1"


def test_port_in_use_is_an_error_with_advice():
    with listener(ServeConfig(port=0)) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match="Address already in use; --port 0 chooses a free port"):
            tcp_listener("127.0.0.1", port)


def test_connections_send_at_once():
    """With Nagle's algorithm the second part of an answer would wait 40 ms for the acknowledgement of the first."""

    async def delays():
        taken = asyncio.get_running_loop().create_future()
        with listener(ServeConfig(port=0)) as sock:
            async with await asyncio.start_server(lambda _, writer: taken.set_result(writer), sock=sock):
                _, client = await asyncio.open_connection(*sock.getsockname())
                writer = await taken
                sends_at_once = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                client.close()
                writer.close()
        return not sends_at_once

    assert not asyncio.run(delays())


def test_address_of_ip_6_stands_in_brackets():
    config = ServeConfig(host="::1", port=0)
    try:
        with listener(config) as sock:
            assert url(sock, config) == f"http://[::1]:{sock.getsockname()[1]}/v1"
    except ConfigError as error:
        pytest.skip(f"no IPv6 here: {error}")


def test_unix_socket_serves_owner_and_group_and_is_removed_afterwards(tmp_path):
    config = ServeConfig(uds=tmp_path / "hw.sock")
    with listener(config) as sock:
        mode = config.uds.stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o660
        assert url(sock, config) == f"unix:{tmp_path}/hw.sock"
    assert not config.uds.exists()


def test_stale_unix_socket_is_replaced(tmp_path):
    path = tmp_path / "hw.sock"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    assert path.exists()
    with listener(ServeConfig(uds=path)) as sock:
        sock.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_live_unix_socket_is_refused_and_kept(tmp_path):
    path = tmp_path / "hw.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ConfigError, match=r"hw\.sock.*another server"), listener(ServeConfig(uds=path)):
            pass
        assert path.is_socket()


def test_unix_socket_of_a_later_server_is_kept(tmp_path):
    path = tmp_path / "hw.sock"
    with listener(ServeConfig(uds=path)), socket.socket(socket.AF_UNIX) as later:
        later.bind(str(tmp_path / "new.sock"))
        (tmp_path / "new.sock").rename(path)
    assert path.is_socket()


def test_file_is_not_replaced_by_a_socket(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match=r"notes.*not a socket"), listener(ServeConfig(uds=tmp_path / "notes")):
        pass
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize("path", ["nowhere/hw.sock", "x" * 120])
def test_path_that_cannot_be_bound_is_named(tmp_path, path):
    with pytest.raises(ConfigError, match=path), listener(ServeConfig(uds=tmp_path / path)):
        pass


def test_certificate_with_its_key_is_accepted(certificate):
    key, cert = certificate
    check_tls(ServeConfig(tls_key=key, tls_cert=cert))
    check_tls(ServeConfig())


def test_invalid_certificate_or_key_is_refused_by_name(certificate, tmp_path):
    key, cert = certificate
    (tmp_path / "noise").write_text("noise")
    for other in ({"tls_key": tmp_path / "noise", "tls_cert": cert}, {"tls_key": key, "tls_cert": tmp_path / "noise"}):
        with pytest.raises(ConfigError, match=r"tls_cert is .*tls_key"):
            check_tls(ServeConfig(**other))
