"""Router: an engine for the server that has others compute. It chooses a worker for each request by what it has cached.

A worker that is silent is lost. After its first token a request is resumed, not begun again: another worker of the same
fingerprint gets the prompt, the seed and the tokens that were sent, and goes on to the bit. It says the last of these
tokens once more, which is compared, and not sent again.

A router holds nothing that it cannot rebuild from its workers: several may run.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import zmq
from tokenizers import Tokenizer

from headwater.cache.view import CacheStats, CacheView
from headwater.cluster.choice import Candidate, Choice, LeastCost, Outstanding, Prompt, holders, price_pulls
from headwater.cluster.digests import TOKEN_BYTES, Digests
from headwater.cluster.disaggregation import (
    Prefilled,
    decoder_after,
    decoders,
    may_be_apart,
    note_prefilled,
    prefill_of,
    prefiller,
)
from headwater.cluster.link import Link, Routed
from headwater.cluster.preparing import Preparing, may_be_prepared, needed_by
from headwater.cluster.sockets import PLAIN, Client, Contact, Waker
from headwater.cluster.sums import pulled_bytes, pulls_of, summed, zero
from headwater.cluster.wire import (
    Cancel,
    FailedMessage,
    FinishedMessage,
    FollowMessage,
    FromWorker,
    Peer,
    Ping,
    PreparedMessage,
    PromptMessage,
    Submit,
    TokenMessage,
    WorkerInfo,
)
from headwater.engine.meter import EngineStats
from headwater.errors import EngineStopped, HeadwaterError
from headwater.events import Event, FailedEvent, FinishedEvent
from headwater.request import Generation
from headwater.schedule.sequence import key_of
from headwater.spec import ModelSpec
from headwater.tiers.store import PEER

PING = 0.2  # seconds between heartbeats
HEARTBEAT_TIMEOUT = 0.8  # seconds of a worker's silence
JOINING = 5.0  # seconds until a new worker must have answered
PATIENCE = 10.0  # seconds for which a request waits for a worker
MOST_ACTIONS = 64  # between two looks at workers and heartbeats, which a burst of requests must not delay
ACTING = 0.05  # seconds, likewise
MOST_ATTEMPTS = 4  # workers that a request is given to, one after the other

log = logging.getLogger("headwater.cluster")


class NoWorker(EngineStopped):
    """No worker can take a request, or go on with it."""


@dataclass(frozen=True)
class RoutedModel:
    """Parts of a model that a router needs: its texts, and its shapes."""

    name: str
    tokenizer: Tokenizer
    chat_template: str | None
    special_tokens: dict[str, str]
    generation: dict[str, Any]
    spec: ModelSpec


class Router:
    """Engine of a server over workers. `submit` and `cancel` may be called from any thread."""

    draft_bytes = mtp_bytes = 0  # of its own memory

    def __init__(
        self,
        model: RoutedModel,
        key: bytes,
        choice: Choice | None = None,
        patience: float = PATIENCE,
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
        client: Client = PLAIN,
    ) -> None:
        """`key`: secret key of the block hashes in KV events. `client`: security of its sockets.

        The others are in seconds, see PATIENCE and HEARTBEAT_TIMEOUT.
        """
        self.model_name, self.tokenizer, self.chat_template = model.name, model.tokenizer, model.chat_template
        self.special_tokens, self.generation_defaults, self.spec = model.special_tokens, model.generation, model.spec
        self.counts: Counter[str] = Counter()  # requests by what became of them
        self._key, self._choice, self._patience, self._heartbeat_timeout = (
            key,
            choice or LeastCost(),
            patience,
            heartbeat_timeout,
        )
        self._client = client
        self._identity = uuid.uuid4().bytes
        self._links: dict[str, Link] = {}  # by name
        self._requests: dict[int, Routed] = {}  # open ones
        self._unassigned: list[Routed] = []  # of them, those that no worker takes now
        self._ids = count(1)
        self._preparing = Preparing(self._ids, lambda request: self._assign(request, None), self.counts)
        self._actions: deque[Callable[[], None]] = deque()  # for the router's thread
        self._refusing = self._stopping = False
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="headwater-router", daemon=True)
        self.lost: Callable[[str], None] = lambda name: None  # called with each worker that is lost

    # -- from any thread

    def start(self) -> None:
        """Begin to route."""
        self._thread.start()

    def stop(self, left: Callable[[], float] = lambda: 0.0) -> None:
        """End the thread; requests still open fail with EngineStopped."""
        self._stopping = True
        self._waker.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._waker.close()

    def refuse_new(self) -> None:
        """Refuse requests from now on with EngineStopped; earlier ones run to their ends."""
        self._refusing = True

    def join(self, name: str, contact: Contact) -> None:
        """Take a worker in; it gets requests once it has shown its info."""
        self._do(lambda: self._join(name, contact))

    def drain(self, name: str) -> None:
        """Give a worker no more requests; those that it has run to their ends."""
        self._do(lambda: self._drain(name))

    def leave(self, name: str) -> None:
        """Let a worker go; its open requests are resumed on others."""
        self._do(lambda: self._remove(name, "was taken out"))

    def wait_for(self, workers: int, seconds: float) -> bool:
        """Wait until at least `workers` workers are known; False if they are not within `seconds`."""
        end = time.monotonic() + seconds
        while sum(1 for _ in self._infos()) < workers:
            if time.monotonic() > end:
                return False
            time.sleep(PING / 4)
        return True

    def is_idle(self, name: str) -> bool:
        """Return whether a worker has none of this router's requests."""
        link = self._links.get(name)
        return link is None or not link.open

    def submit(self, generation: Generation, on_event: Callable[[Event], None]) -> int:
        """Route a request; returns its id. Raises EngineStopped. Errors of workers are events.

        Without a seed the router draws one, so that another worker can go on with the answer.
        """
        if self._refusing or self._stopping:
            raise EngineStopped("the router is stopping and takes no more requests")
        if generation.params.seed is None:
            params = replace(generation.params, seed=secrets.randbits(63))
            generation = replace(generation, params=params)
        request = Routed(next(self._ids), generation, on_event, time.monotonic(), key_of(generation.prompt))
        self._do(lambda: self._begin(request))
        return request.id

    def cancel(self, request_id: int) -> None:
        """Give up a request. Unknown and finished ids are ignored."""
        self._do(lambda: self._cancel(request_id))

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer: what every worker takes."""
        return min((info.max_model_len for info in self._infos()), default=self.spec.max_length)

    def health(self) -> dict[str, Any]:
        """Return the content of /health."""
        infos = list(self._infos())
        status = "stopping" if self._stopping else "draining" if self._refusing else "ok" if infos else "no worker"
        shared = infos[0].health if infos else {}
        state = self.state()
        busy = {what: sum(one[what] for one in state["workers"]) for what in ("running", "waiting")}
        return {**shared, "status": status, "model": self.model_name, "router": os.getpid(), **busy, **state}

    def state(self) -> dict[str, Any]:
        """Return the workers, and what became of requests."""
        workers = [
            {
                "name": link.name,
                "fingerprint": link.info.fingerprint[:12] if link.info else None,
                "process": link.info.process if link.info else None,
                "role": link.info.role.value if link.info else None,
                "state": "draining" if link.draining else "up" if link.info else "joining",
                "requests": len(link.open),
                "running": link.backlog.running,
                "waiting": link.backlog.waiting,
                "pulled_bytes": pulled_bytes(link.stats),
            }
            for link in tuple(self._links.values())
        ]
        return {"workers": workers, "requests": dict(self.counts)}

    def stats(self) -> EngineStats:
        """Return the sums of all workers' gauges and counters."""
        found = [link.stats for link in tuple(self._links.values()) if link.stats is not None]
        if not found:
            return zero(EngineStats, cache=zero(CacheStats), tiers=())
        return replace(summed(found), tiers=pulls_of(found))

    def view(self) -> CacheView:
        """Return an empty tree: workers have their own."""
        return CacheView((), (), 0, 0, 0, 0)

    def _infos(self) -> Iterator[Any]:
        return (link.info for link in tuple(self._links.values()) if link.info is not None)

    def _do(self, action: Callable[[], None]) -> None:
        self._actions.append(action)
        self._waker.wake()

    # -- on the router's thread

    def _run(self) -> None:
        try:
            due = 0.0
            while not self._stopping:
                heard = self._poll(due - time.monotonic())
                self._act(time.monotonic() + ACTING)
                now = time.monotonic()
                if now >= due:  # what came meanwhile, too: if this thread did not run, no worker was silent
                    heard = list(self._links.values())
                for link in heard:
                    for message in link.receive() if self._links.get(link.name) is link else ():
                        self._take(link, message)
                if now >= due:
                    now = time.monotonic()
                    due = now + PING
                    self._ping(now)
                if self._unassigned:
                    self._assign_waiting()
        except Exception:
            log.exception("the router failed")
            self._refusing = True
        for request in tuple(self._requests.values()):
            self._end(request, FailedEvent(EngineStopped("the router was stopped before the answer was complete")))
        for link in self._links.values():
            link.close()

    def _act(self, until: float) -> None:
        """Run actions that callers have queued: at most `MOST_ACTIONS`, and none that would begin after `until`."""
        for _ in range(min(len(self._actions), MOST_ACTIONS)):
            self._actions.popleft()()
            if time.monotonic() > until:
                break

    def _poll(self, seconds: float) -> list[Link]:
        """Wait for messages or actions; return the workers that have sent something."""
        poller = zmq.Poller()
        poller.register(self._waker, zmq.POLLIN)
        for link in self._links.values():
            poller.register(link.socket, zmq.POLLIN)
        there = dict(poller.poll(0 if self._actions else max(0, int(seconds * 1000)) + 1))
        self._waker.clear()
        return [link for link in self._links.values() if link.socket in there]

    # -- workers

    def _join(self, name: str, contact: Contact) -> None:
        if name in self._links:
            if self._links[name].contact == contact:
                return
            self._remove(name, "was started again")
        self._links[name] = link = Link(name, contact, self._identity, self._client)
        link.send(Ping(is_first=True))

    def _drain(self, name: str) -> None:
        if name in self._links:
            self._links[name].draining = True

    def _ping(self, now: float) -> None:
        for link in tuple(self._links.values()):
            silence = now - link.heard
            if silence > (self._heartbeat_timeout if link.info else JOINING):
                self._remove(link.name, f"said nothing for {silence:.1f} s")
            else:
                link.send(Ping())
        self._tell_members()
        self._preparing.take_late(now)

    def _tell_members(self) -> None:
        """Tell workers of which others they may pull, where that has changed."""
        pools: defaultdict[str, list[Peer]] = defaultdict(list)
        for link in self._links.values():
            if link.info is not None and (peer := link.as_peer) is not None:
                pools[link.info.fingerprint].append(peer)
        for link in self._links.values():
            if link.info is not None:
                link.tell(tuple(pools[link.info.fingerprint]))

    def _remove(self, name: str, why: str) -> None:
        """Take a worker out, and give its requests to others."""
        link = self._links.pop(name, None)
        if link is None:
            return
        open_requests, link.open = link.open, {}
        link.close()
        self._preparing.lost(link)
        level = logging.INFO if link.draining and not open_requests else logging.WARNING
        log.log(level, "worker %s %s; %d requests go on elsewhere", name, why, len(open_requests))
        self.lost(name)
        self._move(link, open_requests)
        self._choice.left(name)

    def _reassign_all(self, link: Link) -> None:
        """Give the requests of a worker, which has cancelled them since it had not heard of this router, once more."""
        open_requests, link.open = link.open, {}
        self._preparing.lost(link)
        if open_requests:
            log.warning("worker %s had forgotten this router; %d requests go on", link.name, len(open_requests))
        for request in open_requests.values():  # one may have come after it had forgotten
            link.send(Cancel(request.id, request.attempt))
        self._move(link, open_requests)

    def _move(self, link: Link, requests: dict[int, Routed]) -> None:
        for request in requests.values():
            self._forget(request)
        for request in requests.values():
            self.counts["resumed" if request.sent else "moved"] += 1
            self._assign(request, link.info.fingerprint if link.info else None)

    # -- requests

    def _begin(self, request: Routed) -> None:
        self._requests[request.id] = request
        self.counts["routed"] += 1
        self._assign(request, None)

    def _assign(self, request: Routed, fingerprint: str | None) -> None:
        """Give a request to a worker: one of this fingerprint, if any of its answer was computed."""
        needed = fingerprint if request.sent or request.scored else None
        links = [
            link
            for link in self._links.values()
            if link.info is not None and not link.draining and needed in (None, link.info.fingerprint)
        ]
        request.link = None
        lost = request.attempt - (request.prefilled is not None)
        if lost >= MOST_ATTEMPTS:
            error = NoWorker(f"{lost} workers were lost with the request, {MOST_ATTEMPTS} is the limit")
            self._end(request, FailedEvent(error))
            return
        if not links:
            request.unassigned_since = request.unassigned_since or time.monotonic()
            request.fingerprint = needed
            self._unassigned.append(request)
            return
        prompt = self._prompt(request, links)
        candidates = [link.candidate(prompt) for link in links]
        if request.prefilled is not None and len(request.sent) == 1:  # it is being handed over
            note_prefilled(prompt, request.prefilled.name, candidates)
        price_pulls(candidates)
        chosen = self._with_segments(request, prompt, links, candidates)
        if chosen is None:  # its segments are prepared first
            return
        request.peers = tuple(links[at].incarnation or b"" for at in holders(chosen, candidates))
        request.outstanding = Outstanding(prompt, candidates[chosen].uncached(prompt), bool(request.sent))
        links[chosen].outstanding.add(request.outstanding)
        self._unfollow(request, links[chosen] if request.prefilled is not None else None)
        self._send(request, links[chosen], candidates[chosen].reusable)
        if request.prefills and (peer := links[chosen].as_peer) is not None:
            request.follower = links[decoder_after(prompt, candidates[chosen], candidates)]
            namespace, key = request.generation.namespace, request.key
            request.follower.send(FollowMessage(request.id, request.attempt, namespace, key, peer.incarnation))

    def _unfollow(self, request: Routed, goes_to: Link | None = None) -> None:
        """Let the worker that reads a request's prefix from another one give that up, unless it has the request now."""
        follower, request.follower = request.follower, None
        if follower is not None and follower is not goes_to and self._links.get(follower.name) is follower:
            follower.send(Cancel(request.id, request.attempt))

    def _with_segments(
        self, request: Routed, prompt: Prompt, links: Sequence[Link], candidates: Sequence[Candidate]
    ) -> int | None:
        """Return the worker that a request goes to now; None: workers prepare its segments, and it waits for them."""
        if request.combiner in links:
            at = next(at for at, link in enumerate(links) if link is request.combiner)
            candidates[at].compose(prompt, request.composed)
            return at
        chosen = self._chosen(request, prompt, candidates)
        if not may_be_prepared(request) or len(links) < 2 or not links[chosen].unit_bytes:
            return chosen
        digests = Digests(self._key, links[chosen].unit_bytes)
        needed = needed_by(request, digests, self.spec.conv_taps)
        if not needed:
            return chosen
        combiners = decoders(candidates) if isinstance(self._choice, LeastCost) else [chosen]
        return self._preparing.combine(request, needed, prompt, links, candidates, combiners)

    def _chosen(self, request: Routed, prompt: Prompt, candidates: Sequence[Candidate]) -> int:
        """Return the worker that a request goes to now, and note in it whether that one prefills for another."""
        names = [one.name for one in candidates]
        if request.prefilled is not None and request.follower is not None and request.follower.name in names:
            request.prefills = False
            return names.index(request.follower.name)  # it has read what was prefilled
        alone = None if request.sent or not may_be_apart(request.generation) else prefiller(prompt, candidates)
        request.prefills = alone is not None
        if alone is not None:
            self.counts["prefilled_apart"] += 1
            return alone
        serving = decoders(candidates)
        return serving[self._choice.choose(prompt, [candidates[i] for i in serving])]

    def _prompt(self, request: Routed, links: Sequence[Link]) -> Prompt:
        """Return a request's prompt with its digests, which are computed once."""
        info, generation = links[0].info, request.generation
        if info is None or not info.unit_bytes:
            return Prompt(len(generation.prompt))
        if not request.blocks:
            digests = Digests(self._key, info.unit_bytes)
            request.blocks = digests.prefix(generation.namespace, request.key)
        return Prompt(len(generation.prompt), request.blocks, info.unit_bytes // TOKEN_BYTES)

    def _send(self, request: Routed, link: Link, reusable: int) -> None:
        request.attempt += 1
        request.link, request.predicted, request.unassigned_since = link, reusable, None
        request.again = request.sent[-1] if request.sent else None
        output = tuple(event.token for event in request.sent[:-1])
        generation = prefill_of(request.generation) if request.prefills else request.generation
        if generation.deadline is not None:
            left = generation.deadline - (time.monotonic() - request.began)
            generation = replace(generation, deadline=max(0.001, left))
        link.open[request.id] = request
        self.counts["told_of_peers"] += bool(request.peers)
        without = replace(generation, prompt=())
        link.send(Submit(request.id, request.attempt, without, request.key, output, request.peers))

    def _assign_waiting(self) -> None:
        """Try again to give requests to workers; those that have waited too long fail."""
        waiting, self._unassigned = self._unassigned, []
        now = time.monotonic()
        for request in waiting:
            if request.id not in self._requests:
                continue
            since = request.unassigned_since or now
            if now - since > self._patience:
                sent, which = len(request.sent), "with the same fingerprint " if request.sent else ""
                error = NoWorker(f"no worker {which}was there for {now - since:.1f} s; {sent:,} tokens were sent")
                self._end(request, FailedEvent(error))
            else:
                self._assign(request, request.fingerprint)

    def _cancel(self, request_id: int) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self.counts["cancelled"] += 1
        self._unfollow(request)
        self._preparing.cancel(request)
        self._forget(request)
        if request.link is not None:
            request.link.open.pop(request_id, None)
            request.link.send(Cancel(request_id, request.attempt))

    def _take(self, link: Link, message: FromWorker) -> None:
        """Take what a worker says of a request, unless another one has it by now."""
        if isinstance(message, WorkerInfo):
            link.members = ()  # it has forgotten them, too
            self._reassign_all(link)
        if isinstance(message, PreparedMessage):
            self._preparing.prepared(message)
        if not isinstance(message, TokenMessage | PromptMessage | FinishedMessage | FailedMessage):
            return
        request = link.open.get(message.request)
        if request is None or request.attempt != message.attempt:
            return
        if isinstance(message, TokenMessage):
            self._said(request, message)
        elif isinstance(message, PromptMessage):
            if not request.scored:
                request.scored = True
                self._deliver(request, message.event)
        elif isinstance(message, FinishedMessage):
            self._finished(request, link, message.event)
        elif message.kind == EngineStopped.__name__:
            self._remove(link.name, "answers no more")
        else:
            self.counts["failed"] += 1
            self._end(request, message.event)

    def _said(self, request: Routed, message: TokenMessage) -> None:
        event, again = message.event, request.again
        if request.link is not None and request.outstanding is not None:
            request.link.outstanding.begin(request.outstanding)
            if not request.prefills:  # else the rule has not chosen it
                self._choice.begun(request.outstanding.prompt, request.link.name)
        if again is None:
            request.sent.append(event)
            self._deliver(request, event)
            return
        request.again = None
        if (event.token, event.logprob, event.top) != (again.token, again.logprob, again.top):
            self.counts["diverged"] += 1
            error = HeadwaterError(
                f"another worker went on with the answer and said token {event.token} in place of {again.token} at "
                f"{len(request.sent):,}: their bits differ, although their fingerprints are equal"
            )
            log.error("request %d: %s", request.id, error)
            self._cancel(request.id)
            self._deliver(request, FailedEvent(error))

    def _finished(self, request: Routed, link: Link, event: FinishedEvent) -> None:
        """End a request, or hand it over if its worker has only prefilled, and the first token was not its end."""
        self._note_prediction(request, event)
        if request.prefills:
            if event.finish_reason == "length":
                self._hand_over(request, link, event)
                return
            event = replace(event, account=replace(event.account, prefilled_by=link.name))
        elif request.prefilled is not None:
            event = request.prefilled.whole(event)
        self.counts["answered"] += 1
        self._end(request, replace(event, account=request.account_of(event.account)))

    def _hand_over(self, request: Routed, link: Link, event: FinishedEvent) -> None:
        """Let another worker go on after the first token; it pulls the prefix from the one that prefilled."""
        assert link.info is not None
        link.open.pop(request.id)
        self._forget(request)
        request.prefilled = Prefilled(link.name, event.account, event.queued_seconds)
        self.counts["handed_over"] += 1
        self._assign(request, link.info.fingerprint)

    def _note_prediction(self, request: Routed, event: FinishedEvent) -> None:
        """Count whether the worker had as much of the prompt as its picture said: once a request, by its prefill."""
        account = event.account
        loaded = 0 if account.loaded_segments else account.loaded_tokens  # of the prefix
        had = account.resumed_at - loaded
        self.counts["pulled"] += PEER in (account.loaded_from or "").split(",")
        if request.prefilled is not None:
            return
        kind = "as_predicted" if had == request.predicted else "less" if had < request.predicted else "more"
        self.counts[f"cached_{kind}"] += 1

    def _forget(self, request: Routed) -> None:
        """Tell the rule that a request's worker has it no more."""
        if request.link is not None and request.outstanding is not None:
            request.link.outstanding.remove(request.outstanding)
            if not request.prefills:
                self._choice.ended(request.outstanding.prompt, request.link.name)
        request.outstanding = None

    def _end(self, request: Routed, event: Event) -> None:
        self._requests.pop(request.id, None)
        self._unfollow(request)
        self._forget(request)
        if request.link is not None:
            request.link.open.pop(request.id, None)
        self._deliver(request, event)

    def _deliver(self, request: Routed, event: Event) -> None:
        try:
            request.on_event(event)
        except Exception:
            log.exception("request %d: its listener failed", request.id)
            self._cancel(request.id)
