"""The routes of two more protocols, OpenAI's Responses and Anthropic's Messages. Both ask the chat underneath
and differ in words only, so sampling, limits, drafts, errors and cancelling are the chat's. Invariant: of the
responses that are kept, a client sees those made with its own key.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from fastapi import Request
from pydantic import ValidationError
from starlette.responses import Response

from paceline.server import anthropic_messages, openai_responses
from paceline.server.anthropic_types import CountRequest, MessageRequest
from paceline.server.formats import Fields
from paceline.server.response_store import ResponseStore
from paceline.server.responses import ApiError, JsonResponse, from_validation
from paceline.server.responses_types import ResponseRequest

if TYPE_CHECKING:
    from paceline.server.app import Service


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

        door = partial(openai_responses.ResponseWriter, body, keep=keep)
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
        return await self.service.answer(request, job, door=partial(anthropic_messages.MessageWriter, body))

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
