"""Who may ask, and how much: tokens, the size of a request, and errors as JSON."""

import hashlib
import hmac
import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Open to everyone: they say nothing about the bandit.
_OPEN = ("/", "/health", "/docs", "/openapi.json")
# What a token for reading opens.
_READING = ("/state", "/metrics")

# The names of this machine for itself. A page from elsewhere that has made its own name point here sends that name.
_LOCAL = ("localhost", "127.0.0.1", "[::1]")


class RefusedError(HTTPException):
    """A request that is refused: the HTTP status, a short name of the reason, and a sentence."""

    def __init__(self, status: int, error: str, message: str) -> None:
        super().__init__(status, message, {"Retry-After": "1"} if status in (429, 503) else None)
        self.error = error


def digest(token: str) -> str:
    """What is kept of a token: from it nobody can tell the token."""
    return hashlib.sha256(token.encode()).hexdigest()


def malformed(error: ValueError, agent: object, path: str) -> RefusedError:
    """The refusal of what an agent refused, which names the path that the client asked and not the agent's method."""
    return RefusedError(422, "malformed", re.sub(rf"\b{type(agent).__name__}\.\w+", path, str(error), count=1))


def answer(status: int, error: str, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error, as every error is said."""
    return JSONResponse({"error": error, "message": message}, status, headers)


class Guard:
    """Lets those requests pass that have a token and are not too large; wraps the whole application.

    Without tokens it serves this machine alone, and refuses requests that name another host.
    """

    def __init__(self, app: ASGIApp, tokens: Sequence[str], read_tokens: Sequence[str], body: int, local: bool) -> None:
        self._app, self._tokens, self._read_tokens = app, tokens, read_tokens
        self._body, self._local = body, local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {
            name: value for name, value in scope["headers"] if name in (b"authorization", b"content-length", b"host")
        }
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._body:  # a client that did not say how long the body is, or not the truth
                raise RefusedError(413, "too_large", self._too_large)
            return message

        await self._app(scope, counted, send)

    @property
    def _too_large(self) -> str:
        return f"A request may have {self._body:,} bytes. Send fewer in one batch."

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> JSONResponse | None:
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._body:
            return answer(413, "too_large", self._too_large)
        host = headers.get(b"host", b"").decode("latin-1").rpartition(":")
        if self._local and (host[0] if host[2].isdigit() else "".join(host)).lower() not in _LOCAL:
            return answer(
                421, "other_host", "This service has no token and serves its own machine, by its own name, alone."
            )
        if not self._tokens or path in _OPEN:
            return None
        kind, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = hashlib.sha256(token.strip()).hexdigest() if kind.lower() == b"bearer" else ""
        # All are compared, so that the time does not tell which is near.
        full = sum(hmac.compare_digest(given, each) for each in self._tokens)
        reads = sum(hmac.compare_digest(given, each) for each in self._read_tokens)
        if full or (reads and path in _READING):
            return None
        if reads:
            return answer(403, "read_only", "This token may read /state and /metrics alone.")
        message = "Send the header 'Authorization: Bearer TOKEN' with a token of this service."
        return answer(401, "no_access", message, {"WWW-Authenticate": "Bearer"})


def say_errors_as_json(app: FastAPI) -> None:
    """Every error of ``app`` becomes ``{"error": name, "message": sentence}``."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        kind = request.headers.get("content-type", "")
        if any(each["loc"] == ("body",) for each in error.errors()) and not _is_json(kind):  # it was taken for text
            got = f"Got {kind!r} instead." if kind else "It is missing."
            return answer(422, "malformed", f"The 'Content-Type' header must be 'application/json'. {got}")
        return answer(422, "malformed", "; ".join(_sentence(each) for each in error.errors()[:3]))

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> JSONResponse:
        names = {400: "malformed", 404: "no_such_page", 405: "other_method"}
        name = error.error if isinstance(error, RefusedError) else names.get(error.status_code, "refused")
        return answer(error.status_code, name, error.detail, dict(error.headers or {}))


def _is_json(kind: str) -> bool:
    """Whether a body of this type is read as JSON."""
    main, _, sub = kind.split(";")[0].strip().lower().partition("/")
    return main == "application" and (sub == "json" or sub.endswith("+json"))


def _sentence(error: dict[str, Any]) -> str:
    if error["type"] == "json_invalid":
        return f"the body is not JSON: {error['ctx']['error']}, at character {error['loc'][-1]}"
    place = ".".join(str(part) for part in error["loc"] if part != "body")
    return f"{place or 'the body'}: {error['msg']}"
