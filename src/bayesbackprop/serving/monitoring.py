"""Metrics for Prometheus: of requests, and of the log and the learner."""

import os
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bayesbackprop.serving.learning import Learner
from bayesbackprop.serving.log import Log

# Where several workers add up their metrics: prometheus_client looks at it when it is imported.
FOLDER = "PROMETHEUS_MULTIPROC_DIR"

_PATHS = ("/decide", "/decide/batch", "/reward", "/reward/batch", "/arms", "/state", "/metrics", "/health", "/")
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class _OfTheLog(Collector):
    """What any worker finds out from the log, and how far it is itself."""

    def __init__(self, log: Log, learner: Learner) -> None:
        self._log, self._learner = log, learner

    def collect(self) -> Iterator[Metric]:
        position, counts = self._learner.position, self._log.counts()
        yield CounterMetricFamily("bbb_decisions", "Decisions in the log", counts.decided)
        yield CounterMetricFamily("bbb_rewards", "Rewards in the log", counts.rewarded)
        yield CounterMetricFamily("bbb_explored", "Decisions that did not take the highest mean", counts.explored)
        yield CounterMetricFamily("bbb_lost", "Decisions that expired without a reward", counts.lost)
        yield GaugeMetricFamily("bbb_waiting", "Decisions that wait for a reward", counts.waiting)
        yield GaugeMetricFamily("bbb_estimated_regret", "Sum of the losses that the agent expected", counts.regret)
        yield GaugeMetricFamily(
            "bbb_learner_lag", "Rewards not learnt by this worker", max(0, counts.rewarded - position)
        )
        trouble = self._learner.trouble is not None
        yield GaugeMetricFamily("bbb_learner_in_trouble", "Whether the learner of this worker fails", int(trouble))

    def describe(self) -> list[Metric]:
        return []  # else the log would be asked before there is one


class Metrics:
    """The metrics of one service."""

    def __init__(self) -> None:
        self._own = CollectorRegistry()
        self._requests = Counter("bbb_requests", "Requests by path and status", ("path", "status"), registry=self._own)
        self._seconds = Histogram(
            "bbb_request_seconds", "Seconds until the answer", ("path",), registry=self._own, buckets=_SECONDS
        )
        self._of_the_log: _OfTheLog | None = None

    def watch(self, log: Log, learner: Learner) -> None:
        """Also say what is in the log."""
        self._of_the_log = _OfTheLog(log, learner)

    def text(self) -> bytes:
        """As Prometheus reads it; of all workers."""
        registry = self._own
        if os.environ.get(FOLDER):
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        found = generate_latest(registry)
        if self._of_the_log is None:
            return found
        log = CollectorRegistry()
        log.register(self._of_the_log)
        return found + generate_latest(log)

    def timed(self, app: ASGIApp) -> ASGIApp:
        """``app``, whose requests are counted and timed."""

        async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            began, path = time.perf_counter(), scope["path"] if scope["path"] in _PATHS else "other"

            async def noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self._requests.labels(path, message["status"]).inc()
                    self._seconds.labels(path).observe(time.perf_counter() - began)
                await send(message)

            await app(scope, receive, noted)

        return wrapped
