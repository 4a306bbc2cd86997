"""What a client is told when a request cannot be answered, in OpenAI's shape with the status that fits.

Invariant: every failure of a request becomes one `ApiError`; its message names the value and the remedy and
holds no secret.
"""

from __future__ import annotations

from typing import Any

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_after = (
            status,
            message,
            code,
            param,
            retry_after,
        )

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"retry-after": str(max(1, round(self.retry_after)))}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, code, param)


def engine_lost() -> ApiError:
    return ApiError(
        503,
        "the engine stopped while it was answering and is being started again; send the request again",
        "engine_lost",
        None,
        2,
    )


def from_engine(error: dict[str, Any]) -> ApiError:
    """A refusal or failure that the engine process reported."""
    if error["kind"] == "InternalError":
        return ApiError(500, error["message"], "internal_error")
    code = {"GrammarError": "invalid_grammar", "TooLong": "context_length_exceeded"}.get(error["kind"])
    return ApiError(400, error["message"], code)
