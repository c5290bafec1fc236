"""Redis as a tier: killed, paused, evicting by itself, with a password, over TLS."""

import socket
import subprocess
import time
from collections.abc import Callable
from unittest.mock import Mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headwater.account import TierOutcome
from headwater.engine.tiers.tier import Tier, TierFingerprints
from headwater.schedule.sequence import key_of
from headwater.tiers.fingerprint import Fingerprint
from headwater.tiers.names import state_name
from headwater.tiers.part import Sealer
from headwater.tiers.place import TierPlace
from headwater.tiers.redis import PIECE_BYTES, RedisStore
from headwater.tiers.store import StoreError
from tests.engine.tiers.test_tier_io import alike, mended, outcomes
from tests.exactness.rig import words
from tests.exactness.test_tiers import PROMPT, copied, server
from tests.redis_server import RedisServer, redis_server
from tests.support import examples


def test_redis_may_be_killed_at_any_time(make, tmp_path) -> None:
    prompts = [words(PROMPT, i) for i in range(3)]
    with redis_server(tmp_path) as redis:
        store = RedisStore(redis.url, None)
        with server(make, [store]) as rig:
            answers = [rig.ask(prompts[0])]
            copied(rig)
            store.client.connection_pool.disconnect()
            submitted = rig.submit(prompts[1], 8)
            redis.kill()
            answers += [rig.wait(submitted), rig.ask(prompts[2])]
        with server(make, [RedisStore(redis.url, None)]) as rig:  # before it starts
            answers.append(rig.ask(prompts[0]))
            assert outcomes(rig)["errors"] >= 1
            with redis_server(tmp_path, port=redis.port):
                mended(rig)
                written = outcomes(rig).get("written", 0)
                answers.append(rig.ask(words(PROMPT, "again")))
                copied(rig)
                assert outcomes(rig)["written"] > written
    assert alike(make, [*prompts, prompts[0], words(PROMPT, "again")], answers)


def test_redis_that_pauses_is_not_waited_for(make, tmp_path) -> None:
    prompt = words(PROMPT, "paused")
    with redis_server(tmp_path) as redis:
        with server(make, [RedisStore(redis.url, None)]) as rig:
            first = rig.ask(prompt)
        store = RedisStore(redis.url, None)
        with server(make, [store]) as rig:
            rig.engine.scheduler.tiers.timeout = 0.2
            store.client.execute_command("CLIENT", "PAUSE", 2000, "ALL")
            begun = time.monotonic()
            again = rig.ask(prompt)
            assert time.monotonic() - begun < 1.9
            assert again.account.tier_outcome == TierOutcome.SLOW
    assert alike(make, [prompt] * 2, [first, again])


def test_a_part_that_redis_has_evicted_in_part_is_gone(make, tmp_path) -> None:
    """One piece of the states of six prompts is gone, as where Redis evicts keys by itself."""
    prompts = [words(PROMPT, i) for i in range(12)]
    with redis_server(tmp_path) as redis:
        store = RedisStore(redis.url, None)
        with server(make, [store]) as rig:
            answers = [rig.ask(prompt) for prompt in prompts]
            names = rig.engine.scheduler.tiers._names
        store = RedisStore(redis.url, None)
        for prompt in prompts[:6]:
            name = state_name(names.digests("", key_of(prompt)), (PROMPT - 1) // 64)
            upload = store.client.get(store._manifest(name)).split()[0].decode()
            assert store.client.delete(store._piece(upload, 0)) == 1
        with server(make, [store]) as rig:
            again = [rig.ask(prompt) for prompt in prompts]
    assert [answer.account.loaded_tokens > 0 for answer in again] == [False] * 6 + [True] * 6
    assert alike(make, prompts * 2, answers + again)


def test_a_part_without_its_pieces_costs_itself_where_redis_takes_no_writes(tmp_path, monkeypatch) -> None:
    with redis_server(tmp_path) as redis:
        store = RedisStore(redis.url, None)
        store.put("sabc", [b"content"])
        store.client.set(store._manifest("sdef"), f"{'0' * 24} 1 10")
        refuse = Mock(side_effect=store._redis.ReadOnlyError("You can't write against a read only replica."))
        monkeypatch.setattr(store, "_delete", refuse)
        assert store.get("sdef") is None
        assert bytes(store.get("sabc") or b"") == b"content"
        refuse.assert_called_once()


KEY = bytes(32)
ZEROS = b"0" * 24
NUMBERS = st.integers(-(1 << 70), 1 << 70) | st.sampled_from([0, -1, 1, 10**15, 10**14])
MANIFESTS = st.binary(max_size=60) | st.builds(
    lambda pieces, size: b"%s %d %d" % (ZEROS, -(-size // PIECE_BYTES) if pieces is None else pieces, size),
    st.none() | NUMBERS,
    NUMBERS,
)


def test_a_manifest_of_anybody_is_a_corrupt_part(tmp_path, caplog) -> None:
    """Whatever it claims: its part is missing, and is dropped, and counted; other parts stay."""
    with redis_server(tmp_path) as redis:
        store = RedisStore(redis.url, None)
        store.put("sabc", [b"content"])
        fingerprint = Fingerprint.of({"probe": "one"})
        tier = Tier(0, store, TierFingerprints(store, bytes(32), fingerprint, 4), Sealer(bytes(32)))

        @given(MANIFESTS)
        @settings(max_examples=examples(60), deadline=1000)
        @example(b"%s -1 -1048576" % ZEROS)
        @example(b"%s 953674317 %d" % (ZEROS, 10**15 - 1))
        @example(b"a\xff 1 1")
        @example(b"%s 1_0 10485760" % ZEROS)
        @example(b"")
        def of(manifest: bytes) -> None:
            before = tier.counts["corrupt"]
            store.client.set(store._manifest("sdef"), manifest)
            store.client.hset(store._shared[0], "sdef", manifest)
            assert tier.read("sdef", "s", 1, b"key", [memoryview(bytearray(10))]) == TierOutcome.CORRUPT
            assert (tier.counts["corrupt"], tier.usable, tier.writable) == (before + 1, True, True)
            store.client.set(store._manifest("sdef"), manifest)
            assert not store.get("sdef")
            store.delete(["sdef"])
            assert store.has(["sdef", "sabc"]) == [False, True]

        of()
        assert bytes(store.get("sabc") or b"") == b"content"
        assert "is dropped" in caplog.text


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        (b"sdef", b"7"),
        (b"sdef", b"-7 1.0 "),
        (b"sdef", b"99999999999999999999 1.0 "),
        (b"sdef", b"7 nan "),
        (b"sdef", b"7 inf "),
        (b"sdef", b"7 -1.0 "),
        (b"sdef", b"7 1.0 \xff"),
        (b"sdef", b""),
        (b"", b"7 1.0 "),
        (b"\xff", b"7 1.0 "),
        (b"other", b"7 1.0 "),
    ],
)
def test_foreign_entry_loses_only_itself(tmp_path, name, entry) -> None:
    """A full store evicts and stores new parts, with any foreign entry among its own."""
    with redis_server(tmp_path) as redis:
        store = RedisStore(redis.url, 1000)
        for part in (b"sabc", b"sdef"):
            store.put(part.decode(), [bytes(300)])
        store.client.set(store._prefix.encode() + b"part:" + name, f"{'0' * 24} 1 7")
        store.client.hset(store._shared[0], name, entry)
        assert set(store.catalog().entries) == {"sabc", "sdef"} - {name.decode("latin-1")}
        for part in ("s0", "s1", "s2"):
            store.put(part, [bytes(600)])
        assert store.has(["s2"]) == [True]
        assert not store.client.hexists(store._shared[0], name)


def of_a_list(store: RedisStore, key: str) -> None:
    """Let a key be of a type that no server of ours writes."""
    store.client.delete(key)
    store.client.rpush(key, "a")


def test_manifest_or_piece_of_another_type_loses_only_its_part(tmp_path) -> None:
    with redis_server(tmp_path) as redis:
        store = RedisStore(redis.url, None)
        tier = Tier(0, store, TierFingerprints(store, KEY, Fingerprint.of({}), 4), Sealer(KEY))
        for damaged in ("manifest", "piece"):
            store.put("sdef", [b"content of sdef"])
            store.put("sabc", [b"content"])
            upload = store.client.get(store._manifest("sdef")).decode().split()[0]
            of_a_list(store, store._manifest("sdef") if damaged == "manifest" else store._piece(upload, 0))
            assert not store.read_into("sdef", [memoryview(bytearray(len(b"content of sdef")))])
            tier.read("sdef", "s", 1, b"key", [memoryview(bytearray(10))])
            assert (tier.usable, tier.writable) == (True, True)
            assert store.has(["sdef", "sabc"]) == [False, True]
            assert bytes(store.get("sabc") or b"") == b"content"
            assert set(store.catalog().entries) == {"sabc"}


@pytest.mark.parametrize("key", ["entries", "used", "bytes", "states"])
def test_a_shared_key_of_another_type_is_deleted_and_costs_one_call(tmp_path, caplog, key) -> None:
    with redis_server(tmp_path) as redis:
        store = RedisStore(redis.url, 10**6)
        store.put("sabc", [b"content"])
        of_a_list(store, f"headwater:{key}")
        with pytest.raises(StoreError, match="WRONGTYPE"):
            _ = store.catalog() if key in ("entries", "used") else store.usage()
        assert f"key headwater:{key} is deleted" in caplog.text
        assert bytes(store.get("sabc") or b"") == b"content"
        store.put("sdef", [b"content"])
        assert store.usage().parts == len(store.catalog().entries) == (1 if key == "entries" else 2)


@pytest.mark.parametrize(("key", "spoil"), [("bytes", "SET"), ("states", "HSET")])
def test_figures_that_are_not_numbers_are_deleted_in_one_call(tmp_path, caplog, key, spoil) -> None:
    with redis_server(tmp_path) as redis:
        store = RedisStore(redis.url, 10**6)
        store.put("sabc", [b"content"])
        store.client.execute_command(spoil, f"headwater:{key}", *(["tag"] if spoil == "HSET" else []), "many")
        with pytest.raises(StoreError):
            store.usage()
        assert f"key headwater:{key} is deleted" in caplog.text
        store.put("sdef", [b"content"])
        assert store.usage().parts == 2


def test_tag_that_is_not_text_is_deleted_in_one_call(tmp_path, caplog) -> None:
    with redis_server(tmp_path) as redis:
        store = RedisStore(redis.url, 10**6)
        store.client.hset("headwater:states", b"\xff\xfe", "1")
        with pytest.raises(StoreError):
            store.usage()
        assert "key headwater:states is deleted" in caplog.text
        assert store.usage().parts == 0


def test_a_lock_that_never_ends_holds_up_no_eviction(tmp_path) -> None:
    with redis_server(tmp_path) as redis:
        store = RedisStore(redis.url, 100)
        store.put("sabc", [b"content"])
        store.client.set("headwater:evicting", "somebody")
        store.put("sdef", [b"x" * 95])
        assert store.has(["sabc", "sdef"]) == [False, True]


def test_silent_server_gets_no_second_call_for_the_reason(tmp_path, monkeypatch) -> None:
    with redis_server(tmp_path) as redis:
        store = RedisStore(redis.url, None)
        store.put("sabc", [b"content"])
    monkeypatch.setattr(store, "_mend", Mock())
    with pytest.raises(StoreError):
        store.get("sabc")
    store._mend.assert_not_called()


def test_redis_that_evicts_keys_by_itself_changes_no_answer(make, tmp_path) -> None:
    prompts, answers = [words(PROMPT, i) for i in range(12)], []
    with redis_server(tmp_path, "--maxmemory-policy", "allkeys-random", "--maxmemory", "11mb") as redis:
        for _ in range(2):
            store = RedisStore(redis.url, None)
            with server(make, [store]) as rig:
                answers += [rig.ask(prompt) for prompt in prompts]
                copied(rig)
            assert store.client.info("stats")["evicted_keys"] > 0
    assert alike(make, prompts * 2, answers)


def test_a_password_is_read_from_a_file_and_never_shown(tmp_path, caplog) -> None:
    file = tmp_path / "password"
    file.write_text("hidden\n")
    with redis_server(tmp_path, "--requirepass", "hidden") as redis:
        store = RedisStore(redis.url, None, file)
        store.put("sabc", [b"content"])
        assert bytes(store.get("sabc") or b"") == b"content"
        wrong = RedisStore(redis.url.replace("//", "//:other@"), None)
        assert "other" not in wrong.shown
        with pytest.raises(StoreError) as error:
            wrong.has(["sabc"])
        assert "other" not in str(error.value)
    assert "hidden" not in caplog.text


class Dying(RedisStore):
    """A store whose server is killed before, within or after the pipelines of a call."""

    def __init__(self, server: RedisServer, call: str, pipelines: int) -> None:
        """`pipelines`: of that call, that are answered; -1: all, and the server is killed when the call ends."""
        super().__init__(server.url, None)
        self._server, self._call, self._left = server, call, pipelines
        self._inside = False
        make_pipeline = self.client.pipeline

        def pipeline(*given, **more):
            pipe = make_pipeline(*given, **more)
            execute = pipe.execute
            pipe.execute = lambda *given, **more: self._counted(execute, *given, **more)
            return pipe

        self.client.pipeline = pipeline

    def _counted(self, execute: Callable, *given, **more):
        if self._inside:
            if self._left == 0:
                self._server.kill()
            self._left -= 1
        return execute(*given, **more)

    def _within(self, call: Callable, *given):
        self._inside = True
        try:
            return call(*given)
        finally:
            self._inside = False
            if self._left < 0:
                self._server.kill()

    def read_into(self, *given):
        return self._within(super().read_into, *given) if self._call == "read" else super().read_into(*given)

    def put(self, *given):
        return self._within(super().put, *given) if self._call == "write" else super().put(*given)


@pytest.mark.parametrize("pipelines", [0, 1, 2, -1], ids=["before", "after one", "after two", "after"])
@pytest.mark.parametrize("call", ["read", "write"])
def test_redis_that_ends_in_a_call_costs_no_request(make, tmp_path, monkeypatch, call, pipelines) -> None:
    monkeypatch.setattr("headwater.tiers.redis.PIECE_BYTES", 10_000)
    monkeypatch.setattr("headwater.tiers.redis.PIECES_IN_FLIGHT", 2)
    prompt, other = words(PROMPT, "dying"), words(PROMPT, "other")
    with redis_server(tmp_path) as redis:
        with server(make, [RedisStore(redis.url, None)] if call == "read" else []) as rig:
            first = rig.ask(prompt)
        with server(make, [Dying(redis, call, pipelines)]) as rig:
            answers = [rig.submit(prompt, 8), rig.submit(other, 8)]
            answers = [rig.wait(answer) for answer in answers]
            copied(rig)
            assert redis.process.poll() is not None, "it was killed"
            assert outcomes(rig)["errors"] >= 1
    assert alike(make, [prompt, prompt, other], [first, *answers])


def test_a_store_over_tls_needs_the_servers_certificate(tmp_path) -> None:
    """`rediss://` as a place of --tier; a server whose certificate is not known is not used."""
    key, certificate = tmp_path / "server.key", tmp_path / "server.crt"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        capture_output=True, text=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    tls = "--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key)
    with redis_server(tmp_path, *tls, "--tls-ca-cert-file", str(certificate), "--tls-auth-clients", "no"):
        place = f"rediss://127.0.0.1:{port}/0"
        store = TierPlace.parse(f"{place}?ssl_ca_certs={certificate}").open()
        store.put("sabc", [b"content"])
        assert bytes(store.get("sabc") or b"") == b"content"
        with pytest.raises(StoreError, match=r"(?i)certificate"):
            TierPlace.parse(place).open().has(["sabc"])
