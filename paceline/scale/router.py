"""Which replica answers: the one that had the conversation's beginning, unless it is much busier than others.
Ray's own PrefixCacheAffinityRouter keeps its tree in an actor that it waits for with the loop held up, sends
all that begin with one system prompt to one replica, and routes nothing once that actor is lost; so this is a
RequestRouter of our own, on Ray's interface. Invariant: a request always has a replica while there is one;
what is remembered is bounded, and of replicas that are gone nothing is.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

PIECE = 512  # characters of a prompt that is one text
MOST_PIECES = 64  # of one request: a longer conversation is known by its beginning and its last pieces
MOST_KNOWN = 200_000  # pieces that are remembered


def pieces_of(body: Any) -> tuple[str, ...]:
    """Names of the beginnings of what a body asks, shortest first. Of a conversation they end with messages;
    what many conversations share (system prompt, tools) is part of each name and has none of its own."""
    if not isinstance(body, dict):
        return ()
    shared: list[Any] = [body.get("tools")]
    shared += [_plain(body[name]) for name in ("system", "instructions") if body.get(name) is not None]
    said = body.get("messages", body.get("input", body.get("prompt")))
    if isinstance(said, list) and all(isinstance(each, dict) for each in said):
        count = 0
        while count < len(said) and said[count].get("role") in ("system", "developer"):
            count += 1
        shared += [_plain(each.get("content")) for each in said[:count]]
        return tuple(_names(shared, said[count:]))
    length = PIECE if isinstance(said, str) else PIECE // 4  # a list of tokens
    if not isinstance(said, str | list):
        return ()
    return tuple(_names(shared, [said[i : i + length] for i in range(0, len(said) - length + 1, length)]))


def _names(shared: Any, pieces: Iterable[Any]) -> Iterator[str]:
    name = json.dumps(shared).encode()
    for piece in pieces:
        if isinstance(
            piece, dict
        ):  # what is sent back of an answer has fields that its first telling had not
            piece = [piece.get("role"), _plain(piece.get("content"))]
        name = hashlib.blake2b(name + json.dumps(piece).encode(), digest_size=12).digest()
        yield name.hex()


def _plain(content: Any) -> Any:
    """Texts in parts are the same prompt as one text."""
    if isinstance(content, list) and all(isinstance(each, dict) and "text" in each for each in content):
        return "".join(str(each["text"]) for each in content)
    return content


class PrefixRouter(RequestRouter):
    def initialize_state(self, slack: int = 8) -> None:
        """slack: how many more requests than the least busy replica a conversation's own may have."""
        self.slack = slack
        self._known: OrderedDict[str, set[str]] = OrderedDict()  # a beginning: the replicas that read it
        self._held = Counter[str]()  # pieces by replica
        self._running = Counter[str]()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One at a time, the best first: Ray asks the next where one is full."""
        pieces, avoid = _asked(pending_request)
        best = self.ranked([replica.replica_id.unique_id for replica in candidate_replicas], pieces, avoid)
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        return [[by_name[name]] for name in best]

    def ranked(self, replicas: list[str], pieces: Sequence[str], avoid: Sequence[str]) -> list[str]:
        """avoid: those to be asked last."""
        least = min((self._running[name] for name in replicas if name not in avoid), default=0)
        homes = next((found for each in reversed(pieces) if (found := self._known.get(each))), set())

        def cost(name: str) -> tuple[Any, ...]:
            is_home = name in homes and self._running[name] - least <= self.slack
            return name in avoid, not is_home, self._running[name], self._held[name], name

        return sorted(replicas, key=cost)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._running[replica_id.unique_id] += 1

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self.note(replica_id.unique_id, _asked(pending_request)[0])

    def note(self, replica: str, pieces: Sequence[str]) -> None:
        """The replica reads these beginnings."""
        for piece in [*pieces[: MOST_PIECES // 2], *pieces[MOST_PIECES // 2 :][-MOST_PIECES // 2 :]]:
            readers = self._known.setdefault(piece, set())
            self._held[replica] += replica not in readers
            readers.add(replica)
            self._known.move_to_end(piece)
        while len(self._known) > MOST_KNOWN:
            _, readers = self._known.popitem(last=False)
            self._held.subtract(readers)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Of one that could not even be sent, too: it was never counted."""
        name = replica_id.unique_id
        self._running[name] = max(0, self._running[name] - 1)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._keep_only()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._keep_only()

    def _keep_only(self) -> None:
        """Forget the replicas that are gone."""
        here = {replica_id.unique_id for replica_id in self.curr_replicas}
        gone = (self._held.keys() | self._running.keys()) - here
        if not gone:
            return
        self._known = OrderedDict((piece, left) for piece, had in self._known.items() if (left := had - gone))
        for name in gone:
            del self._held[name], self._running[name]


def _asked(request: PendingRequest | None) -> tuple[Sequence[str], Sequence[str]]:
    """What `Fleet.attend` gave with the request."""
    if request is None or len(request.args) != 2:
        return (), ()
    return request.args[0], request.args[1]
