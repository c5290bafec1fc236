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
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from tokenizers import Tokenizer

from headwater.cache.view import CacheView
from headwater.cluster.actions import Actions
from headwater.cluster.cost import Choice, LeastCost
from headwater.cluster.disaggregation import Prefilled
from headwater.cluster.link import Link
from headwater.cluster.links import Links
from headwater.cluster.preparing import Preparing
from headwater.cluster.routed import Routed
from headwater.cluster.selection import Selection
from headwater.cluster.sockets import PLAIN, Client, Contact
from headwater.cluster.unassigned import MAX_WAIT_SECONDS, NoWorker, Unassigned
from headwater.cluster.wire import (
    Cancel,
    FinishedMessage,
    FollowMessage,
    OfRequests,
    PreparedMessage,
    PromptMessage,
    TokenMessage,
    WorkerInfo,
)
from headwater.engine.meter import EngineStats
from headwater.errors import EngineStopped
from headwater.events import Event, FailedEvent, FinishedEvent
from headwater.request import Generation
from headwater.schedule.sequence import key_of
from headwater.spec import ModelSpec

PING_SECONDS = 0.2  # seconds between heartbeats
HEARTBEAT_TIMEOUT_SECONDS = 0.8  # seconds of a worker's silence
MAX_ATTEMPTS = 4  # workers that a request is given to, one after the other

log = logging.getLogger("headwater.cluster")


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

    def __init__(
        self,
        model: RoutedModel,
        key: bytes,
        choice: Choice | None = None,
        patience: float = MAX_WAIT_SECONDS,
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT_SECONDS,
        client: Client = PLAIN,
    ) -> None:
        """`key`: secret key of the block hashes in KV events. `client`: security of its sockets.

        The others are in seconds, see MAX_WAIT_SECONDS and HEARTBEAT_TIMEOUT_SECONDS.
        """
        self.model_name, self.tokenizer, self.chat_template = model.name, model.tokenizer, model.chat_template
        self.special_tokens, self.generation_defaults, self.spec = model.special_tokens, model.generation, model.spec
        self.counts: Counter[str] = Counter()  # requests by what became of them
        self._actions = Actions()
        self._key = key
        self._links = Links(uuid.uuid4().bytes, client, heartbeat_timeout, self._actions.waker)
        self._requests: dict[int, Routed] = {}  # open ones
        self._unassigned = Unassigned(patience)  # of them, those that no worker takes now
        self._ids = count(1)
        self._preparing = Preparing(self._ids, lambda request: self._assign(request, None), self.counts)
        self._selection = Selection(key, choice or LeastCost(), model.spec, self._preparing, self.counts)
        self._refusing = self._stopping = False
        self._thread = threading.Thread(target=self._run, name="headwater-router", daemon=True)
        self.lost: Callable[[str], None] = lambda name: None  # called with each worker that is lost

    # -- from any thread

    def start(self) -> None:
        """Begin to route."""
        self._thread.start()

    def stop(self, left: Callable[[], float] = lambda: 0.0) -> None:
        """End the thread; requests still open fail with EngineStopped."""
        self._stopping = True
        self._actions.waker.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._actions.waker.close()

    def refuse_new(self) -> None:
        """Refuse requests from now on with EngineStopped; earlier ones run to their ends."""
        self._refusing = True

    def join(self, name: str, contact: Contact) -> None:
        """Take a worker in; it gets requests once it has shown its info."""
        self._do(lambda: self._join(name, contact))

    def drain(self, name: str) -> None:
        """Give a worker no more requests; those that it has run to their ends."""
        self._do(lambda: self._links.drain(name))

    def leave(self, name: str) -> None:
        """Let a worker go; its open requests are resumed on others."""
        self._do(lambda: self._remove(name, "was taken out"))

    def wait_for(self, workers: int, seconds: float) -> bool:
        """Wait until at least `workers` workers are known; False if they are not within `seconds`."""
        return self._links.wait_for(workers, seconds, PING_SECONDS / 4)

    def is_idle(self, name: str) -> bool:
        """Return whether a draining worker has none of this router's requests, and none waits for its fingerprint."""
        link = self._links.get(name)
        if link is None or link.info is None or not link.draining:
            return False
        return not link.open and not self._unassigned.need(link.info.fingerprint)

    def serves(self, name: str) -> bool:
        """Return whether a worker gets requests."""
        link = self._links.get(name)
        return link is not None and link.info is not None and not link.draining

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
        return min((info.max_model_len for info in self._links.infos), default=self.spec.max_length)

    @property
    def draft_bytes(self) -> int:
        """Memory of all workers for drafts."""
        return sum(info.draft_bytes for info in self._links.infos)

    @property
    def mtp_bytes(self) -> int:
        """Memory of all workers for the entries of the model's head; 0: no worker has one."""
        return sum(info.mtp_bytes for info in self._links.infos)

    def health(self) -> dict[str, Any]:
        """Return the content of /health."""
        infos = self._links.infos
        status = "stopping" if self._stopping else "draining" if self._refusing else "ok" if infos else "no worker"
        shared = infos[0].health if infos else {}
        state = self.state()
        busy = {what: sum(one[what] for one in state["workers"]) for what in ("running", "waiting")}
        return {**shared, "status": status, "model": self.model_name, "router": os.getpid(), **busy, **state}

    def state(self) -> dict[str, Any]:
        """Return the workers, and what became of requests."""
        workers = [one | {"drained": self.is_idle(one["name"])} for one in self._links.state()]
        return {"workers": workers, "requests": dict(self.counts)}

    def stats(self) -> EngineStats:
        """Return the sums of all workers' gauges and counters."""
        return self._links.stats()

    def view(self) -> CacheView:
        """Return an empty tree: workers have their own."""
        return CacheView((), (), 0, 0, 0, 0)

    def _do(self, action: Callable[[], None]) -> None:
        self._actions.put(action)

    # -- on the router's thread

    def _run(self) -> None:
        try:
            due = 0.0
            while not self._stopping:
                milliseconds = max(0, int((due - time.monotonic()) * 1000)) + 1
                heard = self._links.poll(0 if self._actions else milliseconds)
                self._actions.run()
                now = time.monotonic()
                if now >= due:  # what came meanwhile, too: if this thread did not run, no worker was silent
                    heard = list(self._links.values())
                for link in heard:
                    for message in link.receive() if self._links.get(link.name) is link else ():
                        self._take(link, message)
                if now >= due:
                    now = time.monotonic()
                    due = now + PING_SECONDS
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

    # -- workers

    def _join(self, name: str, contact: Contact) -> None:
        if name in self._links:
            if self._links[name].contact == contact:
                return
            self._remove(name, "was started again")
        self._links.add(name, contact)

    def _ping(self, now: float) -> None:
        for link, silence in self._links.ping(now):
            self._remove(link.name, f"said nothing for {silence:.1f} s")
        self._links.tell_members()
        self._preparing.take_late(now)

    def _remove(self, name: str, why: str) -> None:
        """Take a worker out, and give its requests to others."""
        link = self._links.remove(name)
        if link is None:
            return
        open_requests, link.open = link.open, {}
        self._preparing.lost(link)
        level = logging.INFO if link.draining and not open_requests else logging.WARNING
        log.log(level, "worker %s %s; %d requests go on elsewhere", name, why, len(open_requests))
        self.lost(name)
        self._move(link, open_requests)
        self._selection.choice.left(name)

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
            self._selection.forget(request)
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
        links = self._links.taking(needed)
        request.link = None
        lost = request.attempt - (request.prefilled is not None)
        if lost >= MAX_ATTEMPTS:
            error = NoWorker(f"{lost} workers were lost with the request, {MAX_ATTEMPTS} is the limit")
            self._end(request, FailedEvent(error))
            return
        if not links:
            self._unassigned.add(request, needed)
            return
        selected = self._selection.select(request, request.prompt(self._key, links[0].unit_bytes, self.spec), links)
        if selected is None:  # its segments are prepared first
            return
        link, request.outstanding = selected.link, selected.outstanding
        link.outstanding.add(selected.outstanding)
        request.peers = tuple(one.incarnation or b"" for one in selected.holders)
        request.loads = selected.is_loaded
        self._unfollow(request, link if request.prefilled is not None else None)
        self._send(request, link, selected.predicted)
        decoder, peer, namespace = selected.decoder, link.as_peer, request.generation.namespace
        if decoder is not None and peer is not None:
            request.follower = decoder
            decoder.send(FollowMessage(request.id, request.attempt, namespace, request.key, peer.incarnation))

    def _unfollow(self, request: Routed, goes_to: Link | None = None) -> None:
        """Let the worker that reads a request's prefix from another one give that up, unless it has the request now."""
        follower, request.follower = request.follower, None
        link = None if follower is None else self._links.get(follower.name)
        if link is not None and link is follower and link is not goes_to:
            link.send(Cancel(request.id, request.attempt))

    def _send(self, request: Routed, link: Link, reusable: int) -> None:
        request.attempt += 1
        request.link, request.predicted, request.unassigned_since = link, reusable, None
        request.again = request.sent[-1] if request.sent else None
        link.open[request.id] = request
        self.counts["told_of_peers"] += bool(request.peers)
        self.counts["expected_loads"] += request.loads
        link.send(request.submission(time.monotonic()))

    def _assign_waiting(self) -> None:
        """Try again to give requests to workers; those that have waited too long fail."""
        for request, error in self._unassigned.take():
            if request.id not in self._requests:
                continue
            if error is None:
                self._assign(request, request.fingerprint)
            else:
                self._end(request, FailedEvent(error))

    def _cancel(self, request_id: int) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self.counts["cancelled"] += 1
        self._unfollow(request)
        self._preparing.cancel(request)
        self._selection.forget(request)
        if request.link is not None:
            request.link.open.pop(request_id, None)
            request.link.send(Cancel(request_id, request.attempt))

    def _take(self, link: Link, message: OfRequests) -> None:
        """Take what a worker says of a request, unless another one has it by now."""
        if isinstance(message, WorkerInfo):
            link.members = ()  # it has forgotten them, too
            self._reassign_all(link)
            return
        if isinstance(message, PreparedMessage):
            self._preparing.prepared(message)
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
        self._selection.begun(request)
        if again is None:
            request.sent.append(event)
            self._deliver(request, event)
            return
        request.again = None
        error = request.difference(event, again)
        if error is not None:
            self.counts["diverged"] += 1
            log.error("request %d: %s", request.id, error)
            self._cancel(request.id)
            self._deliver(request, FailedEvent(error))

    def _finished(self, request: Routed, link: Link, event: FinishedEvent) -> None:
        """End a request, or hand it over if its worker has only prefilled, and the first token was not its end."""
        account = event.account
        request.count_reads(account, self.counts)
        if request.prefilled is None:  # a prediction is counted once a request, by its prefill
            request.count_prediction(event, self.counts)
        if request.prefills:
            if event.finish_reason == "length":
                self._hand_over(request, link, event)
                return
            event = replace(event, account=replace(account, prefilled_by=link.name))
        elif request.prefilled is not None:
            self._keep_answer(request, link, event)
            event = request.prefilled.whole(event)
        self.counts["answered"] += 1
        account = request.account_of(event.account)
        self._end(request, event if account is event.account else replace(event, account=account))

    def _hand_over(self, request: Routed, link: Link, event: FinishedEvent) -> None:
        """Let another worker go on after the first token; it pulls the prefix from the one that prefilled."""
        assert link.info is not None
        link.open.pop(request.id)
        self._selection.forget(request)
        request.prefilled = Prefilled(link.name, event.account, event.queued_seconds)
        if request.tail is not None:
            request.tail = replace(request.tail, peer=link.incarnation or b"")
        self.counts["handed_over"] += 1
        self._assign(request, link.info.fingerprint)

    def _keep_answer(self, request: Routed, link: Link, event: FinishedEvent) -> None:
        """Let a handed-over answer be prefilled where that costs least: where it was decoded it is not cached."""
        kept = request.kept(request.prompt(self._key, link.unit_bytes, self.spec), event)
        if kept is None or link.info is None:
            return
        answer, order = kept
        keeper = self._selection.keeper(request, answer, link.name, self._links.taking(link.info.fingerprint))
        if keeper is not None:
            keeper.send(order)

    def _end(self, request: Routed, event: Event) -> None:
        self._requests.pop(request.id, None)
        self._unfollow(request)
        self._selection.forget(request)
        if request.link is not None:
            request.link.open.pop(request.id, None)
        self._deliver(request, event)

    def _deliver(self, request: Routed, event: Event) -> None:
        try:
            request.on_event(event)
        except Exception:
            log.exception("request %d: its listener failed", request.id)
            self._cancel(request.id)
