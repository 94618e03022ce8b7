"""The application: the page, and three endpoints behind it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path as File
from typing import Annotated

from fastapi import FastAPI, Path, Response
from fastapi.responses import HTMLResponse

from bayesbackprop._version import __version__
from bayesbackprop.playground.requests import Accepted, Snapshot, Work
from bayesbackprop.playground.sessions import Limits, Sessions
from bayesbackprop.serving.access import Guard, RefusedError, say_errors_as_json

# A page of nothing but its own text.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"

Name = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$", description="Any name of 32 hexadecimal digits.")]


def make_app(limits: Limits = Limits(), *, local: bool = True) -> FastAPI:  # noqa: B008 (it cannot be changed)
    """The web application of a playground.

    Args:
        limits: How much it does.
        local: Whether it refuses requests that call this machine by another name than its own for itself.
    """
    sessions = Sessions(limits)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(sessions.end)

    app = FastAPI(title="bayesbackprop playground", version=__version__, lifespan=lifespan, redoc_url=None)
    app.add_middleware(Guard, (), (), limits.body, local)
    say_errors_as_json(app)
    page = read_page()

    @app.put("/sessions/{name}")
    def put(name: Name, work: Work) -> Accepted:
        """Train this from now on, in the session of this name."""
        try:
            return Accepted(work=sessions.put(name, work))
        except ValueError as error:
            raise RefusedError(422, "refused", str(error)) from None

    @app.get("/sessions/{name}", responses={204: {"description": "There is nothing newer."}}, response_model=Snapshot)
    def newest(name: Name, after: int = 0) -> Response:
        """The newest snapshot of a session."""
        found = sessions.newest(name, after)
        if found is None:
            return Response(status_code=204)
        return Response(found.model_dump_json(), media_type="application/json")

    @app.post("/sessions/{name}/close", status_code=204)
    def close(name: Name) -> None:
        """End a session: what a page says when it is left."""
        sessions.close(name)

    @app.get("/", include_in_schema=False)
    def playground() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY, "X-Frame-Options": "DENY"})

    app.state.sessions = sessions
    return app


def read_page() -> str:
    """The page with its style and its scripts in it."""
    folder = File(__file__).parent
    page = (folder / "page.html").read_text()
    for name in ("page.css", "charts.js", "page.js"):
        page = page.replace(f"/* {name} */", (folder / name).read_text())
    return page
