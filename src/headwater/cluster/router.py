"""Router: an engine for the server that sends each request to a worker, which it chooses by its cache.

A silent worker is lost. A request that has sent tokens is resumed and not begun again: another worker of the same
fingerprint gets the prompt, the seed and these tokens, and continues bit by bit. It computes the last of these tokens
again, which the router compares, and does not send a second time.

A router holds no state that it cannot rebuild from its workers, so that several may run.
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
from headwater.cluster.assigning import MAX_WAIT_SECONDS, Assigning, NoWorker
from headwater.cluster.cost import Choice, LeastCost
from headwater.cluster.disaggregation import Prefilled
from headwater.cluster.links import Link, Links
from headwater.cluster.routed import Routed
from headwater.cluster.sockets import PLAIN, Actions, Client, Contact
from headwater.cluster.wire import (
    Cancel,
    FinishedMessage,
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
from headwater.schedule.sequence import TOKEN_BYTES, key_of
from headwater.spec import ModelSpec
from headwater.threads import restarts, run_again

PING_SECONDS = 0.2  # between heartbeats
HEARTBEAT_TIMEOUT_SECONDS = 0.8  # of a worker's silence

log = logging.getLogger("headwater.cluster")


@dataclass(frozen=True)
class RoutedModel:
    """Parts of a model that a router needs: tokenizer, template and shapes."""

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

        `patience` and `heartbeat_timeout` are in seconds, see MAX_WAIT_SECONDS and HEARTBEAT_TIMEOUT_SECONDS.
        """
        self.model_name, self.tokenizer, self.chat_template = model.name, model.tokenizer, model.chat_template
        self.special_tokens, self.generation_defaults, self.spec = model.special_tokens, model.generation, model.spec
        self.counts: Counter[str] = Counter()  # requests, by outcome
        self.actions = Actions()
        self.links = Links(uuid.uuid4().bytes, client, heartbeat_timeout, self.actions.waker)
        self._requests: dict[int, Routed] = {}  # open ones
        self._ids = count(1)
        given = choice or LeastCost(), self._ids, self.counts, self._refuse
        self.assigning = Assigning(key, model.spec, self.links, *given)
        self.assigning.patience = patience
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
        self.actions.waker.wake()
        if self._thread.is_alive():
            self._thread.join()
        self.actions.waker.close()

    def refuse_new(self) -> None:
        """Refuse new requests with EngineStopped; open ones run to their ends."""
        self._refusing = True

    def join(self, name: str, contact: Contact) -> None:
        """Add a worker; it gets requests once it has sent its info."""
        self.actions.put(lambda: self._join(name, contact))

    def drain(self, name: str) -> None:
        """Send a worker no more requests; its open ones run to their ends."""
        self.actions.put(lambda: self.links.drain(name))

    def leave(self, name: str) -> None:
        """Remove a worker; its open requests are resumed on others."""
        self.actions.put(lambda: self._remove(name, "was removed"))

    def wait_for(self, workers: int, seconds: float) -> bool:
        """Wait until at least `workers` workers are known; False if they are not within `seconds`."""
        return self.links.wait_for(workers, seconds, PING_SECONDS / 4)

    def is_idle(self, name: str) -> bool:
        """Return whether a draining worker has none of this router's requests, and none waits for its fingerprint."""
        link = self.links.get(name)
        if link is None or link.info is None or not link.draining:
            return False
        return not link.open and not self.assigning.is_needed(link.info.fingerprint)

    def serves(self, name: str) -> bool:
        """Return whether a worker gets requests."""
        link = self.links.get(name)
        return link is not None and link.info is not None and not link.draining

    def submit(self, generation: Generation, on_event: Callable[[Event], None]) -> int:
        """Route a request; returns its id. Raises EngineStopped. Errors of workers are events.

        Without a seed the router draws one, so that another worker can continue the answer.
        """
        if self._refusing or self._stopping:
            raise EngineStopped("the router is stopping and takes no more requests")
        if generation.params.seed is None:
            params = replace(generation.params, seed=secrets.randbits(63))
            generation = replace(generation, params=params)
        request = Routed(next(self._ids), generation, on_event, time.monotonic(), key_of(generation.prompt))
        self.actions.put(lambda: self._begin(request))
        return request.id

    def cancel(self, request_id: int) -> None:
        """Cancel a request. Unknown and finished ids are ignored."""
        self.actions.put(lambda: self._cancel(request_id))

    def prefilled(self, request_id: int) -> None:
        """Return None: workers do not report how far a prompt is computed."""

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer that every worker accepts."""
        return min((info.max_model_len for info in self.links.infos), default=self.spec.max_length)

    @property
    def draft_bytes(self) -> int:
        """Memory of all workers for drafts."""
        return sum(info.draft_bytes for info in self.links.infos)

    @property
    def mtp_bytes(self) -> int:
        """Memory of all workers for the entries of the model's head; 0: no worker has one."""
        return sum(info.mtp_bytes for info in self.links.infos)

    def health(self) -> dict[str, Any]:
        infos = self.links.infos
        status = "stopping" if self._stopping else "draining" if self._refusing else "ok" if infos else "no worker"
        shared = infos[0].health if infos else {}
        state = self.state()
        busy = {what: sum(one[what] for one in state["workers"]) for what in ("running", "waiting")}
        return {**shared, "status": status, "model": self.model_name, "router": os.getpid(), **busy, **state}

    def state(self) -> dict[str, Any]:
        """Return the workers, and the outcomes of requests."""
        workers = [one | {"drained": self.is_idle(one["name"])} for one in self.links.state()]
        return {"workers": workers, "requests": dict(self.counts)}

    def stats(self) -> EngineStats:
        """Return the sums of all workers' gauges and counters, and of this process's restarted threads."""
        stats = self.links.stats()
        return replace(stats, thread_restarts=stats.thread_restarts + restarts.total())

    def view(self) -> CacheView:
        """Return an empty tree: workers have their own."""
        return CacheView((), (), 0, 0, 0, 0)

    # -- on the router's thread

    def _route(self) -> None:
        due = 0.0
        while not self._stopping:
            milliseconds = max(0, int((due - time.monotonic()) * 1000)) + 1
            heard = self.links.poll(0 if self.actions else milliseconds)
            self.actions.run()
            now = time.monotonic()
            if now >= due:  # all links: messages may have come while this thread did not run
                heard = list(self.links.values())
            for link in heard:
                self._hear(link)
            if now >= due:
                now = time.monotonic()
                due = now + PING_SECONDS
                self._ping(now)
            if self.assigning.has_waiting:
                self.assigning.assign_waiting()

    def _hear(self, link: Link) -> None:
        """Handle a worker's messages. One that cannot be handled costs that worker: its requests continue on others."""
        try:
            for message in link.receive() if self.links.get(link.name) is link else ():
                self._take(link, message)
        except Exception:
            log.exception("a message of worker %s cannot be handled", link.name)
            self._remove(link.name, "sent a message that cannot be handled")

    def _run(self) -> None:
        run_again(self._route, lambda: self._stopping)
        for request in tuple(self._requests.values()):
            self._end(request, FailedEvent(EngineStopped("the router was stopped before the answer was complete")))
        for link in self.links.values():
            link.close()

    # -- workers

    def _join(self, name: str, contact: Contact) -> None:
        if name in self.links:
            if self.links[name].contact == contact:
                return
            self._remove(name, "was started again")
        self.links.add(name, contact)

    def _ping(self, now: float) -> None:
        for link, silence in self.links.ping(now):
            self._remove(link.name, f"was silent for {silence:.1f} s")
        self.links.tell_members()
        self.assigning.preparing.take_late(now)

    def _remove(self, name: str, why: str) -> None:
        """Remove a worker, and assign its requests to others."""
        link = self.links.remove(name)
        if link is None:
            return
        level = logging.INFO if link.draining and not link.open else logging.WARNING
        log.log(level, "worker %s %s; %d requests continue on others", name, why, len(link.open))
        self.lost(name)
        self.assigning.move(link)
        self.assigning.selection.choice.left(name)

    def _reassign_all(self, link: Link) -> None:
        """Assign the requests of a worker again: it has cancelled them, since it had not heard from this router."""
        if link.open:
            log.warning("worker %s had forgotten this router; %d requests continue", link.name, len(link.open))
        for request in link.open.values():  # one may have come after the worker had forgotten
            link.send(Cancel(request.id, request.attempt))
        self.assigning.move(link)

    # -- requests

    def _begin(self, request: Routed) -> None:
        self._requests[request.id] = request
        self.counts["routed"] += 1
        try:
            self.assigning.assign(request, None)
        except Exception as error:
            log.exception("request %d cannot be assigned", request.id)
            self._end(request, FailedEvent(error))

    def _cancel(self, request_id: int) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self.counts["cancelled"] += 1
        self.assigning.forget(request)
        self.assigning.preparing.cancel(request)
        if request.link is not None:
            request.link.send(Cancel(request_id, request.attempt))

    def _take(self, link: Link, message: OfRequests) -> None:
        """Handle a worker's message about a request, unless another worker has the request now."""
        if isinstance(message, WorkerInfo):
            link.members = ()  # the worker has forgotten them
            self._reassign_all(link)
            return
        if isinstance(message, PreparedMessage):
            self.assigning.preparing.prepared(message)
            return
        request = link.open.get(message.request)
        if request is None or request.attempt != message.attempt:
            return
        if isinstance(message, TokenMessage):
            self._token(request, message)
        elif isinstance(message, PromptMessage):
            if not request.scored:
                request.scored = True
                self._deliver(request, message.event)
        elif isinstance(message, FinishedMessage):
            self._finished(request, link, message.event)
        elif message.kind == EngineStopped.__name__:
            self._remove(link.name, "does not answer any more")
        else:
            self.counts["failed"] += 1
            self._end(request, message.event)

    def _token(self, request: Routed, message: TokenMessage) -> None:
        event, again = message.event, request.again
        self.assigning.selection.begun(request)
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
        """End a request; hand it over if its worker only prefills, unless the first token was the end."""
        account = event.account
        request.count_reads(account, self.counts)
        if request.prefilled is None:  # a prediction is counted once a request, by its prefill
            request.count_prediction(event, link.unit_bytes // TOKEN_BYTES, self.counts)
        if request.prefills:
            if event.finish_reason == "length":
                self._hand_over(request, link, event)
                return
            event = replace(event, account=replace(account, prefilled_by=link.name))
        elif request.prefilled is not None:
            self.assigning.keep_answer(request, link, event)
            event = request.prefilled.whole(event)
        self.counts["answered"] += 1
        link.answered += 1
        account = request.account_of(event.account)
        self._end(request, event if account is event.account else replace(event, account=account))

    def _hand_over(self, request: Routed, link: Link, event: FinishedEvent) -> None:
        """Continue a request on another worker after the first token, which pulls the prefix from this one."""
        assert link.info is not None
        link.open.pop(request.id)
        self.assigning.selection.forget(request)
        request.prefilled = Prefilled(link.name, event.account, event.queued_seconds)
        request.prefiller = link.incarnation or b""
        self.counts["handed_over"] += 1
        self.assigning.assign(request, link.info.fingerprint)

    def _refuse(self, request: Routed, error: NoWorker) -> None:
        self._end(request, FailedEvent(error))

    def _end(self, request: Routed, event: Event) -> None:
        self._requests.pop(request.id, None)
        self.assigning.forget(request)
        self._deliver(request, event)

    def _deliver(self, request: Routed, event: Event) -> None:
        try:
            request.on_event(event)
        except Exception:
            log.exception("request %d: its listener failed", request.id)
            self._cancel(request.id)
