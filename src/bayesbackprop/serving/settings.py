"""What a service is told: where its log is, what agent it makes, whom it lets in, and its limits."""

import dataclasses
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from bayesbackprop._errors import Described, check_choice, check_count, check_positive, invalid
from bayesbackprop.bandits import Agent, EpsilonGreedy, LinearThompson, ThompsonSampling, Uniform, load
from bayesbackprop.serving.access import digest

AGENTS: dict[str, type[Agent]] = {
    "thompson": ThompsonSampling,
    "linear": LinearThompson,
    "epsilon": EpsilonGreedy,
    "uniform": Uniform,
}

# Tokens are taken from these variables, and workers get their settings in the last.
TOKEN, READ_TOKEN, _SETTINGS = "BBB_SERVE_TOKEN", "BBB_SERVE_READ_TOKEN", "BBB_SERVE_SETTINGS"

# The shortest token: what is shorter can be guessed.
_SHORTEST = 16


@dataclass(frozen=True)
class Limits:
    """What is refused.

    Args:
        body: Bytes of a request.
        batch: Decisions or rewards of a request.
        queue: Requests that wait to be written at the same time.
        waiting: Decisions that wait for their reward.
        expire: Seconds after which a decision waits no longer, and its reward is refused.
    """

    body: int = 1_000_000
    batch: int = 1_000
    queue: int = 1_000
    waiting: int = 1_000_000
    expire: float = 7 * 24 * 60 * 60.0

    def __post_init__(self) -> None:
        check_count("Limits", body=self.body, batch=self.batch, queue=self.queue, waiting=self.waiting)
        check_positive("Limits", expire=self.expire)


@dataclass(frozen=True)
class Settings:
    """A service.

    Args:
        log: A file of SQLite, or the URL of a database.
        snapshots: The folder of the agent's snapshots; workers on several machines share it. None: beside the file.
        features: The width of a context. None: what the log was made for.
        actions: How many there are. None: what the log was made for.
        agent: A name of :data:`AGENTS`, or a file that ``agent.save`` wrote. None: that of the log, or "thompson".
        seed: Of a new agent.
        tokens: Hashes of tokens that may do everything; see :func:`~bayesbackprop.serving.access.digest`.
        read_tokens: Hashes of tokens that may read the state and the metrics.
        anyone: Whether everyone may do everything if there are no tokens; else this machine alone.
        limits: What is refused.
        snapshot_seconds: How often the learner writes a snapshot, at most.
        lease_seconds: For how long a learner that does not answer keeps its office.
    """

    log: str
    snapshots: str | None = None
    features: int | None = None
    actions: int | None = None
    agent: str | None = None
    seed: int = 0
    tokens: tuple[str, ...] = ()
    read_tokens: tuple[str, ...] = ()
    anyone: bool = False
    limits: Limits = field(default_factory=Limits)
    snapshot_seconds: float = 2.0
    lease_seconds: float = 5.0

    def __post_init__(self) -> None:
        check_positive("Settings", snapshot_seconds=self.snapshot_seconds, lease_seconds=self.lease_seconds)
        given = {
            name: size for name, size in (("features", self.features), ("actions", self.actions)) if size is not None
        }
        check_count("Settings", **given)

    @property
    def url(self) -> str:
        """The log as SQLAlchemy names it."""
        if "://" not in self.log:
            return f"sqlite:///{Path(self.log).absolute()}"
        scheme, _, rest = self.log.partition("://")
        return f"postgresql+psycopg://{rest}" if scheme in ("postgres", "postgresql") else self.log

    @property
    def folder(self) -> Path:
        """Where the snapshots are."""
        if self.snapshots is not None:
            return Path(self.snapshots)
        prefix = "sqlite:///"
        return Path(f"{self.url.removeprefix(prefix)}.snapshots" if self.url.startswith(prefix) else "bandit.snapshots")

    def make_agent(self) -> Agent:
        """The agent of a log that is new."""
        if self.agent is not None and Path(self.agent).is_file():
            agent = load(self.agent)
            if agent.replicas != 1:
                raise invalid("agent", "bbb serve", "one agent, not several replicas", self.agent)
            return agent
        kind = self.agent or "thompson"
        check_choice("bbb serve", [*AGENTS, "a file that agent.save wrote"], agent=kind)
        if self.features is None or self.actions is None:
            missing = "features" if self.features is None else "actions"
            raise invalid(missing, "bbb serve", "given where the log is new", None)
        return AGENTS[kind](self.features, self.actions, seed=self.seed)

    def check_agent(self, agent: Agent) -> None:
        """Refuse the agent of an existing log that is not what these settings ask for."""
        for name in ("features", "actions"):
            wanted, found = getattr(self, name), getattr(agent, name)
            if wanted is not None and wanted != found:
                constraint = f"that of the log {self.log}, which was made for {found}; or name another log"
                raise invalid(name, "bbb serve", constraint, wanted)
        if self.agent is None:
            return
        is_file = self.agent not in AGENTS and Path(self.agent).is_file()
        wanted_kind = type(load(self.agent)) if is_file else AGENTS.get(self.agent)
        if wanted_kind is not type(agent):
            constraint = f"that of the log {self.log}, which was made for {type(agent).__name__}; or name another log"
            raise invalid("agent", "bbb serve", constraint, self.agent)

    def to_environment(self) -> None:
        """Leave the settings to processes that this one starts."""
        os.environ[_SETTINGS] = json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_environment(cls) -> "Settings":
        """What the process that started this one left."""
        values = json.loads(os.environ[_SETTINGS])
        tokens = {name: tuple(values.pop(name)) for name in ("tokens", "read_tokens")}
        return cls(**{**values, **tokens, "limits": Limits(**values["limits"])})


def read_tokens(variable: str, option: str, files: Iterable[Path]) -> tuple[str, ...]:
    """The hashes of the tokens in an environment variable and in the files of an option, one a line.

    A place that was named and holds no token is refused: whoever names one wants the service guarded.
    """
    places = [(variable, "nothing", os.environ[variable])] if variable in os.environ else []
    places += [(option, f"{file} with none", file.read_text()) for file in files]
    found: list[str] = []
    for name, empty, text in places:
        lines = [line.strip() for line in text.splitlines()]
        tokens = [line for line in lines if line and not line.startswith("#")]
        if not tokens:
            raise invalid(name, "bbb serve", "left out, or hold at least one token", Described(empty))
        found += tokens
    for token in found:
        if len(token) < _SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
            constraint = f"at least {_SHORTEST} printable ASCII characters without spaces"
            raise ValueError(f"A token of {variable} or its file must be {constraint}. Got {len(token)} instead.")
    return tuple(digest(token) for token in found)
