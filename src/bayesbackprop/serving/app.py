"""The application: its endpoints, and what starts and ends with it."""

import asyncio
import copy
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy.exc import SQLAlchemyError

from bayesbackprop._errors import Described, invalid
from bayesbackprop._version import __version__
from bayesbackprop.bandits import Agent
from bayesbackprop.serving import reference
from bayesbackprop.serving.access import Guard, RefusedError, answer, malformed, say_errors_as_json
from bayesbackprop.serving.arms import LastArmError, NoSuchArmError
from bayesbackprop.serving.learning import Learner
from bayesbackprop.serving.log import Conflict, Entry, Log
from bayesbackprop.serving.monitoring import Metrics
from bayesbackprop.serving.requests import (
    Arms,
    Decision,
    DecisionRequest,
    DecisionRequests,
    Decisions,
    NewArms,
    Problem,
    RewardAnswer,
    RewardAnswers,
    RewardRequest,
    RewardRequests,
    RewardStatus,
    State,
)
from bayesbackprop.serving.settings import Limits, Settings
from bayesbackprop.serving.state import state_of
from bayesbackprop.serving.writing import Writer, unwritable

_say = logging.getLogger("bayesbackprop.serving")

_ABOUT = """A contextual bandit: ask `/decide` what to do in a context, and tell `/reward` what came of it, whenever it
is known. Both are answered when they are in the durable log. An answer other than 2xx changed nothing, except that
after a 503, or without any answer, it is not known whether it did: send the same again. With `request`, a name of your
own for a decision, the second is the first one again; a reward is counted once in any case."""

# A page of nothing but its own text.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"

# The statuses of a reward that is refused.
_REFUSED: dict[RewardStatus, tuple[int, str]] = {
    "unknown": (404, "There is no decision of this id."),
    "expired": (410, "The decision no longer waits for a reward."),
    "conflict": (409, "The decision has another reward already."),
}

_PROBLEMS: dict[int | str, dict[str, Any]] = {
    401: {"model": Problem, "description": "No token, or an unknown one."},
    413: {"model": Problem, "description": "Too many bytes, or too large a batch."},
    422: {"model": Problem, "description": "Not what it must be."},
    503: {"model": Problem, "description": "The log cannot be written now."},
}

# Seconds after which a thread that waits for Python's lock gets it, a tenth of what is usual.
_SWITCH = 0.0005


class Service:
    """What the endpoints use: the log, the learner and the writer."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.log = Log(settings.url)
        self.learner = Learner(self.log, open_log(self.log, settings), settings)
        self.writer = Writer(self.log, self.learner, settings.limits)

    def start(self) -> None:
        """Take over the newest snapshot; what the log has after it is learnt while requests are answered."""
        self.learner.take_over()
        self.learner.start()
        self.writer.start()

    def end(self) -> None:
        """Write what waits, then a snapshot."""
        self.writer.end()
        self.learner.end()
        self.log.close()

    def add_arms(self, wanted: NewArms) -> Arms:
        """Add actions to the log."""
        try:
            copy.deepcopy(self.agent).add_arms(wanted.count, wanted.features)  # so that the learner can do it
            change, repeated = self.log.add_arms(wanted.count, wanted.features, wanted.request)
        except ValueError as error:
            raise malformed(error, self.agent, "/arms") from None
        except SQLAlchemyError as error:
            raise unwritable(error) from None
        if isinstance(change, Conflict):
            raise RefusedError(409, "conflict", f"The request {change.request!r} asked for other actions before.")
        return self._arms(added=[*range(change.action, change.action + change.added)], repeated=repeated)

    def retire(self, action: int) -> Arms:
        """Retire an action in the log."""
        try:
            self.log.retire(action)
        except NoSuchArmError as error:
            raise RefusedError(404, "unknown", str(error)) from None
        except LastArmError as error:
            raise RefusedError(409, "last_arm", str(error)) from None
        except SQLAlchemyError as error:
            raise unwritable(error) from None
        return self._arms()

    def _arms(self, **answer: Any) -> Arms:
        self.learner.wake()
        found = self.log.arms()
        return Arms(actions=found.actions, retired=sorted(found.retired), **answer)

    @property
    def agent(self) -> Agent:
        """The agent that decides now."""
        return self.learner.agent


def _service_of(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


_Here = Annotated[Service, Depends(_service_of)]


def open_log(log: Log, settings: Settings) -> Agent:
    """The agent before the first reward, of a log that exists or is made; refuses one of other sizes."""
    if not log.exists():
        made = settings.make_agent()
        settings.check_agent(made)
        log.create(made)
        if made.waiting:  # a log says with which probability a decision was made, and an agent has forgotten that
            _say.warning(
                "%d decisions wait for a reward in the agent %s. They are not in the log, and /reward does not know "
                "them. Give their rewards by agent.reward, save the agent, and begin a new log with it.",
                made.waiting,
                settings.agent,
            )
    agent = log.open()
    settings.check_agent(agent)
    return agent


def make_app(settings: Settings) -> FastAPI:
    """The web application of a service."""
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service = app.state.service = await asyncio.to_thread(Service, settings)
        metrics.watch(service.log, service.learner)
        await asyncio.to_thread(service.start)
        try:
            yield
        finally:
            await asyncio.to_thread(service.end)

    app = FastAPI(
        title="bayesbackprop",
        version=__version__,
        description=_ABOUT,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    limits = settings.limits
    local = not settings.tokens and not settings.anyone
    app.add_middleware(Guard, settings.tokens, settings.read_tokens, limits.body, local)
    app.add_middleware(metrics.timed)
    say_errors_as_json(app)
    page = Path(__file__).with_name("page.html").read_text()

    @app.post("/decide", responses=_PROBLEMS)
    async def decide(body: DecisionRequest, service: _Here) -> Decision:
        """What to do in a context; the decision is in the log when this is answered."""
        _check(body, service.agent, "/decide")
        (entry,) = await service.writer.decide([body])
        return _decision(entry)

    @app.post("/decide/batch", responses=_PROBLEMS)
    async def decide_many(body: DecisionRequests, service: _Here) -> Decisions:
        """Several at once: all of them are in the log, or none."""
        _check_batch(len(body.requests), limits)
        for each in body.requests:
            _check(each, service.agent, "/decide/batch")
        return Decisions(decisions=[_decision(entry) for entry in await service.writer.decide(body.requests)])

    @app.post("/reward", responses={**_PROBLEMS, **{status: {"model": Problem} for status in (404, 409, 410)}})
    async def reward(body: RewardRequest, service: _Here) -> RewardAnswer:
        """What came of a decision: once, in any order. It is in the log when this is answered, and learnt soon."""
        _check_rewards([body], service.agent, "/reward")
        (status,) = await service.writer.reward([body])
        if status in _REFUSED:
            code, message = _REFUSED[status]
            raise RefusedError(code, f"{status}", message)
        return RewardAnswer(id=body.id, status=status)

    @app.post("/reward/batch", responses={**_PROBLEMS, 207: {"model": RewardAnswers}})
    async def reward_many(body: RewardRequests, service: _Here, response: Response) -> RewardAnswers:
        """Several at once; each has an answer of its own, and the status is 207 if one of them was refused."""
        _check_batch(len(body.rewards), limits)
        _check_rewards(body.rewards, service.agent, "/reward/batch")
        statuses = await service.writer.reward(body.rewards)
        if not _REFUSED.keys().isdisjoint(statuses):
            response.status_code = 207
        results = [RewardAnswer(id=each.id, status=status) for each, status in zip(body.rewards, statuses, strict=True)]
        return RewardAnswers(results=results)

    @app.post("/arms", responses={**_PROBLEMS, 409: {"model": Problem}})
    async def add_arms(body: NewArms, service: _Here) -> Arms:
        """Add actions; they are in the log when this is answered, and the agent takes them soon."""
        return await asyncio.to_thread(service.add_arms, body)

    @app.delete("/arms/{action}", responses={**_PROBLEMS, **{status: {"model": Problem} for status in (404, 409)}})
    async def retire(action: int, service: _Here) -> Arms:
        """Retire an action: no decision that is answered after this takes it. Late rewards of it are still learnt."""
        return await asyncio.to_thread(service.retire, action)

    @app.get("/state", responses={401: _PROBLEMS[401]})
    def state(service: _Here) -> State:
        """How the service is doing."""
        return state_of(service.log, service.learner)

    @app.get("/metrics", response_class=Response, responses={401: _PROBLEMS[401]})
    def all_metrics(_: _Here) -> Response:
        """The same for Prometheus, with times of requests."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/health")
    def health(service: _Here) -> JSONResponse:
        """Whether this worker decides and writes."""
        if service.writer.is_alive() and service.learner.is_alive():
            return JSONResponse({"status": "ok"})
        return answer(503, "not_working", "A thread of this worker has ended: restart it.")

    @app.get("/", include_in_schema=False)
    def live_page() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY, "X-Frame-Options": "DENY"})

    @app.get("/docs", include_in_schema=False)
    def reference_page() -> HTMLResponse:
        return HTMLResponse(reference.page(app.openapi()), headers={"Content-Security-Policy": _POLICY})

    return app


def from_environment() -> FastAPI:
    """The application of a worker process, whose settings are in the environment."""
    prepare_process()
    _end_with_parent()
    return make_app(Settings.from_environment())


def prepare_process() -> None:
    """Make the process one that serves.

    Requests are small, so one thread of torch is quickest, and learning gives the same numbers on every machine of a
    kind. A thread that has something to answer soon gets its turn from the one that learns.
    """
    torch.set_num_threads(1)
    sys.setswitchinterval(_SWITCH)


def _end_with_parent() -> None:
    """End this process when the one that started it is killed: it would hold the port, and nobody could restart it."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def _check(request: DecisionRequest, agent: Agent, path: str) -> None:
    """Refuse a request that does not fit the agent."""
    if len(request.context) != agent.features:
        got = Described(f"{len(request.context)}")
        raise malformed(invalid("context", path, f"a list of {agent.features} numbers", got), agent, path)


def _check_rewards(rewards: Sequence[RewardRequest], agent: Agent, path: str) -> None:
    """Refuse rewards that the agent could not learn."""
    try:
        agent.check_rewards([each.reward for each in rewards])
    except ValueError as error:
        raise malformed(error, agent, path) from None


def _check_batch(size: int, limits: Limits) -> None:
    if size > limits.batch:
        raise RefusedError(413, "too_many", f"A batch may have {limits.batch:,} entries. Got {size:,}: send several.")


def _decision(entry: Entry) -> Decision:
    return Decision(
        id=entry.id,
        action=entry.action,
        propensity=entry.propensity,
        probabilities=entry.probabilities,
        means=entry.means,
        spreads=entry.spreads,
        explored=entry.explored,
        repeated=entry.repeated,
    )
