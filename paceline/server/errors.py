"""What a client is told when a request cannot be answered, in OpenAI's shape with the status that fits.
Invariant: every failure of a request becomes one `ApiError`; its message names the value and the remedy and
holds no secret.
"""

from __future__ import annotations

from typing import Any

KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
CODES = {"GrammarError": "invalid_grammar", "TooLong": "context_length_exceeded"}
ENGINE_LOST = "the engine stopped while it was answering and is being started again; send the request again"
# By the engine's state, "lost" for what ran when it ended: the message and the code.
UNAVAILABLE = {
    "draining": ("the server is shutting down; send the request to another", "draining"),
    "lost": (ENGINE_LOST, "engine_lost"),
}
RETRY_AFTER_S = {"queue_full": 1, "engine_lost": 2, "engine_unavailable": 2, "draining": 5}  # by code


class ApiError(Exception):
    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = {"retry-after": str(RETRY_AFTER_S[code])} if code in RETRY_AFTER_S else {}
        if status == 401:
            self.headers["www-authenticate"] = "Bearer"

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, code, param)


def unavailable(state: str) -> ApiError:
    usual = (f"the engine is {state}; try again in a moment", "engine_unavailable")
    return ApiError(503, *UNAVAILABLE.get(state, usual))


def from_engine(error: dict[str, Any]) -> ApiError:
    """A refusal or failure that the engine process reported."""
    if error["kind"] == "InternalError":
        return ApiError(500, error["message"], "internal_error")
    return bad_request(error["message"], code=CODES.get(error["kind"]))
