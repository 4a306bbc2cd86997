"""Responses that are kept for `previous_response_id` and GET, in memory: those last used, up to a number and
a number of bytes. Invariants: what is kept never exceeds either; a response is found only under the key it
was made with, and for all others there is no such response.
"""

from __future__ import annotations

import json
from collections import OrderedDict

from paceline.server.formats import Fields
from paceline.server.responses import ApiError


class ResponseStore:
    def __init__(self, most: int, most_bytes: int) -> None:
        self.most, self.most_bytes = most, most_bytes
        self._kept: OrderedDict[tuple[bytes, str], bytes] = OrderedDict()  # the last used at the end
        self._num_bytes = 0

    def put(self, owner: bytes, response: Fields, messages: list[Fields]) -> None:
        """The response, and the conversation with it. One that is too large alone is not kept."""
        data = json.dumps({"response": response, "messages": messages}).encode()
        if len(data) > self.most_bytes:
            return
        self._kept[owner, response["id"]] = data
        self._num_bytes += len(data)
        while len(self._kept) > self.most or self._num_bytes > self.most_bytes:
            self._num_bytes -= len(self._kept.popitem(last=False)[1])

    def get(self, owner: bytes, name: str, param: str | None = None) -> Fields:
        self._check(owner, name, param)
        self._kept.move_to_end((owner, name))
        return dict(json.loads(self._kept[owner, name]))

    def delete(self, owner: bytes, name: str) -> None:
        self._check(owner, name, None)
        self._num_bytes -= len(self._kept.pop((owner, name)))

    def _check(self, owner: bytes, name: str, param: str | None) -> None:
        if (owner, name) not in self._kept:
            what = f"there is no response {name!r:.80} here: it was never kept, or was deleted, or made room"
            what += f" (this server keeps the last {self.most:,}); send the whole conversation as input"
            raise ApiError(404, what, "previous_response_not_found" if param else "response_not_found", param)
