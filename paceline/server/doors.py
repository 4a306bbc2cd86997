"""The routes of two more protocols, OpenAI's Responses and Anthropic's Messages. Both ask the chat underneath
and differ in words only, so sampling, limits, drafts, errors and cancelling are the chat's. Invariant: of the
responses that are kept, a client sees those made with its own key.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from fastapi import Request
from pydantic import ValidationError
from starlette.responses import Response

from paceline.server import anthropic_messages, openai_responses
from paceline.server.anthropic_types import CountRequest, MessageRequest
from paceline.server.formats import Fields
from paceline.server.responses import ApiError, JsonResponse, from_validation
from paceline.server.responses_types import ResponseRequest
from paceline.server.service import Service


class ResponseStore:
    """Responses for `previous_response_id` and GET, in memory: those last used. What is kept never exceeds a
    number and a number of bytes."""

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


class Doors:
    def __init__(self, service: Service) -> None:
        self.service, config = service, service.config
        self.store = ResponseStore(config.max_stored_responses, config.max_stored_bytes)

    def routes(self) -> dict[str, Callable[..., Awaitable[Response]]]:
        return {
            "POST /v1/responses": self.respond,
            "GET /v1/responses/{name}": self.response,
            "DELETE /v1/responses/{name}": self.delete_response,
            "POST /v1/messages": self.messages,
            "POST /v1/messages/count_tokens": self.count_tokens,
        }

    async def respond(self, request: Request, body: ResponseRequest) -> Response:
        owner, before, earlier = _owner(request), body.previous_response_id, list[Fields]()
        translator = self.service.translator(body.model)
        if before is not None:
            earlier = self.store.get(owner, before, "previous_response_id")["messages"]
        items = [item.model_dump() for item in body.input]
        messages = openai_responses.as_messages(items, earlier)
        with _named(openai_responses.NAMES):
            job = translator.chat(openai_responses.as_chat(body, messages))

        def keep(response: Fields) -> None:
            if body.store is not False:
                said = openai_responses.as_messages(response["output"], messages)
                self.store.put(owner, response, said)

        door = partial(openai_responses.ResponseWriter, body=body, keep=keep)
        return await self.service.answer(request, job, door=door)

    async def response(self, request: Request, name: str) -> Response:
        for option in request.query_params:  # stream, include and others would not be obeyed
            raise ApiError(400, f"{option[:80]} is not an option of this route", param=option[:80])
        return JsonResponse(self.store.get(_owner(request), name)["response"])

    async def delete_response(self, request: Request, name: str) -> Response:
        self.store.delete(_owner(request), name)
        return JsonResponse({"id": name, "object": "response", "deleted": True})

    async def messages(self, request: Request, body: MessageRequest) -> Response:
        with _named(anthropic_messages.NAMES):
            job = self.service.translator(body.model).chat(anthropic_messages.as_chat(body))
        door = partial(anthropic_messages.MessageWriter, body=body)
        return await self.service.answer(request, job, door=door)

    async def count_tokens(self, body: CountRequest) -> Response:
        with _named(anthropic_messages.NAMES):
            job = self.service.translator(body.model).chat(anthropic_messages.as_chat(body))
        counted = await self.service.engine.ask({"do": "tokenize", "prompt": job.parts[0]["prompt"]})
        return JsonResponse({"input_tokens": counted["count"]})


def _owner(request: Request) -> bytes:
    return bytes(request.scope["state"]["owner"])


@contextmanager
def _named(names: Mapping[str, str]) -> Iterator[None]:
    """What the chat underneath refuses is told in the names of the door."""
    try:
        yield
        return
    except ValidationError as error:
        told = from_validation(error.errors())
    except ApiError as error:
        told = error
    if new := names.get(told.param or ""):
        told = ApiError(told.status, told.message.replace(str(told.param), new, 1), told.code, new)
    raise told
