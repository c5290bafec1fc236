"""Store in Redis, Valkey, or another server of their protocol: parts in pieces of 1 MB, and a manifest of each part.

Pieces belong to one upload, and expire until its manifest stands: what an interrupted server leaves goes by itself. If
a piece of a part is missing, as where Redis itself evicts, the part is gone. Sizes, times of use and what a part goes
on from are kept in the store, so servers that share it evict alike.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from headwater.tiers.catalog import Catalog, Entry
from headwater.tiers.names import STATE, is_name, tag_of
from headwater.tiers.part import Buffer, Header, is_duration
from headwater.tiers.replies import ReplyLimit, limited
from headwater.tiers.store import StoreError, StoreFull, Usage, spread

PIECE_BYTES = 1 << 20
PIECES_IN_FLIGHT = 16
UNFINISHED_SECONDS = 600  # after which pieces without a manifest expire
CONNECT_SECONDS, READ_SECONDS = 1.0, 5.0
EVICTION_LOCK_SECONDS = 30  # after which an evicting server is assumed to have ended
FREED_SHARE = 0.05  # of the limit; an eviction frees at least as much
NAMES_PER_CALL = 1000
MAX_REPLY_BYTES = (PIECES_IN_FLIGHT + 1) * PIECE_BYTES  # to one call
MAX_CATALOG_BYTES = 2**28  # to one call for all entries: of about 2 million parts
MANIFEST = re.compile(rb"([0-9a-f]{24}) (\d{1,15}) (\d{1,15})")  # upload, number of pieces, size
ENTRY = re.compile(rb"(\d{1,15}) (\S{1,32}) ([0-9a-f]*)")  # size, seconds, digest of the run that it continues

WRONG_TYPE = "WRONGTYPE"  # beginning of Redis' error
KINDS, NONE = (b"hash", b"zset", b"string", b"hash"), b"none"  # types of the shared keys; of a key that is not there

log = logging.getLogger("headwater.tiers")

# Publish an upload. KEYS: manifest, entries, times, bytes, states. ARGV: name, manifest, entry, time, size, pieces'
# prefix, n, tag of a state's fingerprint.
PUBLISH = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
for i = 0, tonumber(ARGV[7]) - 1 do
  if redis.call('PERSIST', ARGV[6] .. i) == 0 then return -1 end
end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
redis.call('ZADD', KEYS[3], ARGV[4], ARGV[1])
redis.call('INCRBY', KEYS[4], ARGV[5])
if ARGV[8] ~= '' then redis.call('HINCRBY', KEYS[5], ARGV[8], 1) end
return 1
"""
# Remove a part if it is still of that upload, or its key is not a string. KEYS likewise; ARGV: name, manifest, tag. The
# entry has the size.
REMOVE = """
local manifest = redis.pcall('GET', KEYS[1])
if type(manifest) ~= 'table' and manifest ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
local entry = redis.call('HGET', KEYS[2], ARGV[1])
if entry then
  redis.call('HDEL', KEYS[2], ARGV[1])
  local size = string.match(entry, '^%d+')
  if size and #size <= 15 then redis.call('DECRBY', KEYS[4], size) end
  if ARGV[3] ~= '' then redis.call('HINCRBY', KEYS[5], ARGV[3], -1) end
end
redis.call('ZREM', KEYS[3], ARGV[1])
return 1
"""


class RedisStore:
    """Parts in a database of a Redis server, at most `limit` bytes."""

    kind = "redis"

    def __init__(
        self,
        url: str,
        limit: int | None,
        password_file: Path | None = None,
        clock: Callable[[], float] = time.time,
        prefix: str = "headwater:",
    ) -> None:
        """Nothing is asked of the server yet. Raises StoreError for a URL or a file that cannot be used."""
        try:
            import redis
            from redis._parsers import _RESP2Parser  # hiredis allocates the lengths that a server declares
        except ImportError as error:
            raise StoreError("a redis tier needs another package: pip install 'headwater[redis]'") from error
        self._redis, self._clock, self.limit = redis, clock, limit
        parts = urlsplit(url)
        self.shown = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))
        more: dict[str, Any] = {}
        try:
            if password_file is not None:
                more["password"] = password_file.read_text(encoding="utf-8").strip()
            self.client: Any = redis.Redis.from_url(
                url,
                socket_connect_timeout=CONNECT_SECONDS,
                socket_timeout=READ_SECONDS,
                retry=None,
                retry_on_error=[],
                parser_class=_RESP2Parser,
                **more,
            )
        except (OSError, ValueError) as error:
            raise StoreError(f"{self.shown} cannot be used: {error}") from error
        self._replies = ReplyLimit(MAX_REPLY_BYTES, READ_SECONDS)
        pool = self.client.connection_pool
        pool.connection_class = limited(pool.connection_class, self._replies)
        self._prefix = prefix
        self._shared = prefix + "entries", prefix + "used", prefix + "bytes", prefix + "states"
        self._publish = self.client.register_script(PUBLISH)
        self._remove = self.client.register_script(REMOVE)
        self._evicted = 0

    # -- parts

    def has(self, names: Sequence[str]) -> list[bool]:
        found: list[bool] = []
        with self._errors("cannot be read"):
            for first in range(0, len(names), NAMES_PER_CALL):
                pipe = self.client.pipeline(transaction=False)
                for name in names[first : first + NAMES_PER_CALL]:
                    pipe.exists(self._manifest(name))
                found += [bool(n) for n in pipe.execute()]
        return found

    def get(self, name: str) -> Buffer | None:
        found = self._get(name, None)
        return None if found is None else b"".join(found)

    def read_into(self, name: str, pieces: Sequence[memoryview]) -> bool:
        found = self._get(name, sum(map(len, pieces)))
        return found is not None and spread(found, pieces)

    def _get(self, name: str, expected: int | None) -> list[bytes] | None:
        """Return the pieces of a part; None if there is none, or it has not the `expected` size.

        A part without a valid manifest has no bytes: its reader finds it corrupt.
        """
        with self._errors("cannot be read"):
            manifest = self._read_key(self._manifest(name))
            if manifest is None:
                return None
            found = _read_manifest(manifest)
            if found is None:
                return []
            if found[2] != (found[2] if expected is None else expected):
                return None
            if expected is None and found[2] > MAX_REPLY_BYTES:
                return []
            upload, count, _ = found
            pieces: list[bytes] = []
            for first in range(0, count, PIECES_IN_FLIGHT):
                pipe = self.client.pipeline(transaction=False)
                for number in range(first, min(first + PIECES_IN_FLIGHT, count)):
                    pipe.get(self._piece(upload, number))
                pieces += (piece for piece in map(self._found, pipe.execute(raise_on_error=False)) if piece)
                if len(pieces) < min(first + PIECES_IN_FLIGHT, count):
                    self._drop(name)
                    return None
            with suppress(self._redis.RedisError):  # a server that takes no writes serves
                self.client.zadd(self._shared[1], {name: self._clock()}, xx=True)
            return pieces

    def _read_key(self, key: str) -> bytes | None:
        """Return the value of a key: None if it is missing, empty if it is not a string."""
        try:
            return self._found(self.client.get(key))
        except self._redis.ResponseError as error:
            return self._found(error)

    def _found(self, answer: bytes | Exception | None) -> bytes | None:
        """Return the answer to a GET; nothing for a key of another type, which no server of ours has written.

        Raises other errors.
        """
        if isinstance(answer, Exception):
            if isinstance(answer, self._redis.ResponseError) and str(answer).startswith(WRONG_TYPE):
                return b""
            raise answer
        return answer

    def _drop(self, name: str) -> None:
        """Delete a part that is not whole, if the server takes writes."""
        with suppress(self._redis.RedisError):
            self._delete(name)

    def put(self, name: str, pieces: Sequence[Buffer], keep: Set[str] = frozenset()) -> None:
        size = sum(map(len, pieces))
        with self._errors("cannot be written"):
            if self.client.exists(self._manifest(name)):
                return
            self._make_room(size, keep)
            upload, count = secrets.token_hex(12), 0
            pipe = self.client.pipeline(transaction=False)
            for count, piece in enumerate(_cut(pieces), start=1):
                pipe.set(self._piece(upload, count - 1), piece, ex=UNFINISHED_SECONDS)
                if count % PIECES_IN_FLIGHT == 0:
                    pipe.execute()
            pipe.execute()
            header = Header.of(bytes(pieces[0]))
            entry = f"{size} {header.seconds if header else 0.0!r} {header.below if header else ''}"
            manifest = f"{upload} {count} {size}"
            args = name, manifest, entry, self._clock(), size, self._piece(upload), count, _counted_tag(name)
            published = self._publish(keys=[self._manifest(name), *self._shared], args=args)
            if published != 1:
                self.client.delete(*(self._piece(upload, number) for number in range(count)))
            if published < 0:
                raise StoreError(f"{self.shown} has lost pieces of a part before it was whole: is its memory full?")

    def touch(self, names: Sequence[str]) -> None:
        with self._errors("cannot be written"):
            if names:
                self.client.zadd(self._shared[1], dict.fromkeys(names, self._clock()), xx=True)

    def delete(self, names: Sequence[str]) -> None:
        with self._errors("cannot be written"):
            for name in names:
                self._delete(name)

    def usage(self) -> Usage:
        with self._errors("cannot be read"):
            pipe = self.client.pipeline(transaction=False)
            pipe.hlen(self._shared[0])
            pipe.get(self._shared[2])
            pipe.hgetall(self._shared[3])
            parts, size, states = pipe.execute()
            by_tag = {tag.decode(): int(count) for tag, count in states.items()}
            return Usage(parts, int(size or 0), self.limit, self._evicted, by_tag)

    def catalog(self) -> Catalog:
        with self._errors("cannot be read"):
            return self._catalog()

    def close(self) -> None:
        self.client.close()

    # -- room

    def _make_room(self, size: int, keep: Set[str]) -> None:
        """Evict until `size` more bytes fit. Raises StoreFull."""
        if self.limit is None:
            return
        if size > self.limit:
            raise StoreFull(f"{self.shown}: a part of {size:,} bytes, and the limit is {self.limit:,}")
        if int(self.client.get(self._shared[2]) or 0) + size <= self.limit:
            return
        lock, own = self._prefix + "evicting", secrets.token_hex(8)
        if self.client.ttl(lock) == -1:  # no server of ours has set it
            self.client.delete(lock)
        if not self.client.set(lock, own, nx=True, ex=EVICTION_LOCK_SECONDS):
            raise StoreFull(f"{self.shown} is full, and another server evicts")
        try:
            catalog = self._catalog()
            wanted = max(0, int(self.limit * (1 - FREED_SHARE)) - size)
            for names in catalog.evict(wanted, self._clock(), keep, self._delete):
                self._evicted += len(names)
            self._recount(catalog)
            if catalog.bytes + size > self.limit:
                raise StoreFull(f"{self.shown}: {size:,} bytes do not fit in addition to {catalog.bytes:,}")
        finally:
            if self.client.get(lock) == own.encode():
                self.client.delete(lock)

    def _recount(self, catalog: Catalog) -> None:
        """Set bytes and numbers of states: what Redis itself evicted was counted until now."""
        pipe = self.client.pipeline()
        pipe.set(self._shared[2], catalog.bytes)
        pipe.delete(self._shared[3])
        for tag, count in catalog.states.items():
            if tag:
                pipe.hset(self._shared[3], tag, count)
        pipe.execute()

    def _catalog(self) -> Catalog:
        """Return the catalog; entries without a manifest, and parts without a valid entry, are dropped."""
        catalog = Catalog()
        with self._replies.of(MAX_CATALOG_BYTES):
            entries = self.client.hgetall(self._shared[0])
            used = dict(self.client.zrange(self._shared[1], 0, -1, withscores=True))
        known = [name for name in entries if is_name(name.decode("latin-1"))]
        there = dict(zip(known, self.has([name.decode() for name in known]), strict=True))
        for name, stored in entries.items():
            entry = _read_entry(stored, used.get(name, 0.0))
            if not there.get(name):
                self.client.hdel(self._shared[0], name)
                self.client.zrem(self._shared[1], name)
            elif entry is None:
                log.warning("%s: part %s is dropped: its entry is invalid", self.shown, name.decode())
                self._delete(name.decode())
            else:
                catalog.add(name.decode(), entry)
        return catalog

    def _delete(self, name: str) -> None:
        """Remove a part, and only its own upload: another server may store it again meanwhile."""
        manifest = self._read_key(self._manifest(name))
        if manifest is None:
            return
        removed = self._remove(keys=[self._manifest(name), *self._shared], args=(name, manifest, _counted_tag(name)))
        upload, pieces, _ = _read_manifest(manifest) or ("", 0, 0)
        for first in range(0, pieces if removed else 0, NAMES_PER_CALL):
            numbers = range(first, min(first + NAMES_PER_CALL, pieces))
            if not self.client.delete(*(self._piece(upload, number) for number in numbers)):
                return  # a manifest that is not ours may claim any number

    def _mend(self) -> None:
        """Delete shared keys of other types than Headwater writes, which would make every later call fail.

        What they said of parts is lost: these are read as before, but not counted.
        """
        _, _, size, states = self._shared
        wrong = [
            key for key, kind in zip(self._shared, KINDS, strict=True) if self.client.type(key) not in (kind, NONE)
        ]
        if size not in wrong and not _is_number(self.client.get(size) or b"0"):
            wrong.append(size)
        if states not in wrong and not all(
            re.fullmatch(rb"[0-9a-f]*", tag) and _is_number(count) for tag, count in self.client.hgetall(states).items()
        ):
            wrong.append(states)
        for key in wrong:
            log.warning("%s: key %s is deleted: its value is invalid", self.shown, key)
            self.client.delete(key)

    def _manifest(self, name: str) -> str:
        return f"{self._prefix}part:{name}"

    def _piece(self, upload: str, number: int | str = "") -> str:
        return f"{self._prefix}piece:{upload}:{number}"

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._redis.RedisError as error:
            with suppress(Exception):
                if isinstance(error, self._redis.ResponseError):  # the server answers
                    self._mend()
                self.client.connection_pool.disconnect(inuse_connections=False)
            raise StoreError(f"{self.shown} {what}: {error}") from error
        except StoreError:
            raise
        except Exception as error:  # whatever a server sends
            with suppress(Exception):
                self._mend()
            raise StoreError(f"{self.shown} {what}: {error}") from error


def _counted_tag(name: str) -> str:
    """Return the tag of a state's fingerprint; "" of other parts, which are not counted by it."""
    return tag_of(name) if name.startswith(STATE) else ""


def _is_number(text: bytes) -> bool:
    return re.fullmatch(rb"-?\d{1,18}", text) is not None


def _read_manifest(manifest: bytes) -> tuple[str, int, int] | None:
    """Return upload, number of pieces and size; None if it is not a manifest."""
    found = MANIFEST.fullmatch(manifest)
    if found is None or int(found[2]) != -(-int(found[3]) // PIECE_BYTES):
        return None
    return found[1].decode(), int(found[2]), int(found[3])


def _read_entry(entry: bytes, used: float) -> Entry | None:
    """Return the entry of a part that was used at `used`; None if it is not an entry."""
    found = ENTRY.fullmatch(entry)
    with suppress(ValueError):
        if found is not None and is_duration(seconds := float(found[2])):
            return Entry(int(found[1]), used, seconds, found[3].decode())
    return None


def _cut(pieces: Sequence[Buffer]) -> Iterator[bytes]:
    """Yield the bytes of pieces, one after the other, in pieces of at most PIECE_BYTES."""
    waiting = bytearray()
    for piece in pieces:
        view = memoryview(piece).cast("B")
        while len(view):
            take = min(len(view), PIECE_BYTES - len(waiting))
            waiting += view[:take]
            view = view[take:]
            if len(waiting) == PIECE_BYTES:
                yield bytes(waiting)
                waiting.clear()
    if waiting:
        yield bytes(waiting)
