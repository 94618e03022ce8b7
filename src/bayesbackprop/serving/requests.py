"""What clients send and get: typed, and shown on the OpenAPI page."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

# As agents have it: larger numbers have no finite squares in single precision.
Number = Annotated[float, Field(strict=True, ge=-1e6, le=1e6, allow_inf_nan=False)]
Reward = Annotated[float, Field(strict=True, ge=-1e15, le=1e15, allow_inf_nan=False)]
# Printable ASCII without spaces.
Name = Annotated[str, Field(strict=True, min_length=1, max_length=100, pattern=r"^[!-~]+$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class DecisionRequest(_Strict):
    """A context to decide in."""

    context: list[Number] = Field(description="As many numbers as the service has features, each about 1 in size.")
    mask: list[Annotated[bool, Field(strict=True)]] | None = Field(
        default=None, description="Which actions are allowed, one for each; at least one. All unless given."
    )
    features: list[list[Number]] | None = Field(
        default=None, description="Numbers that describe each action in this request, if the agent takes them."
    )
    request: Name | None = Field(
        default=None, description="A name of the client's for this request: a second one gets the same decision."
    )


class DecisionRequests(_Strict):
    """Several contexts, decided and committed together."""

    requests: list[DecisionRequest] = Field(min_length=1)


class Decision(BaseModel):
    """What to do, and why."""

    id: str = Field(description="To be sent with the reward.")
    action: int
    propensity: float = Field(description="The exact probability with which the action was chosen.")
    probabilities: list[float] = Field(description="Of every action; 0 for those not allowed.")
    means: list[float] = Field(description="The expected reward of every action, as the agent believes.")
    spreads: list[float] = Field(description="The standard deviation of that belief.")
    explored: bool = Field(description="Whether another allowed action has a higher mean.")
    repeated: bool = Field(default=False, description="Whether this request had been decided before.")


class Decisions(BaseModel):
    """One decision for each request, in the same order."""

    decisions: list[Decision]


class RewardRequest(_Strict):
    """What came of a decision."""

    id: Name
    reward: Reward


class RewardRequests(_Strict):
    """Several rewards, committed together."""

    rewards: list[RewardRequest] = Field(min_length=1)


class NewArms(_Strict):
    """Actions to add."""

    count: Annotated[int, Field(strict=True, ge=1, le=1000)] = 1
    features: list[list[Number]] | None = Field(
        default=None, description="Numbers that describe each new action, if the agent takes them."
    )
    request: Name | None = Field(
        default=None, description="A name of the client's for this request: a second one adds nothing."
    )


class Arms(BaseModel):
    """The actions there are."""

    added: list[int] = Field(default=[], description="The numbers of the new actions.")
    actions: int = Field(description="How many there are, with those retired.")
    retired: list[int]
    repeated: bool = Field(default=False, description="Whether this request had been answered before.")


RewardStatus = Literal["accepted", "known", "unknown", "expired", "conflict"]


class RewardAnswer(BaseModel):
    """What became of a reward."""

    id: str
    status: RewardStatus = Field(
        description="accepted: it is in the log, and will be learnt once. known: it was there before, with the same "
        "value. unknown: there is no such decision. expired: the decision no longer waits. conflict: its reward is "
        "another."
    )


class RewardAnswers(BaseModel):
    """One answer for each reward, in the same order."""

    results: list[RewardAnswer]


class Problem(BaseModel):
    """An error."""

    error: str = Field(description="A short name of the reason.")
    message: str = Field(description="What is wrong, and what to do.")


class Arm(BaseModel):
    """One action."""

    action: int
    retired: bool
    chosen: int
    rewarded: int
    reward: float | None = Field(description="The mean of the rewards received.")
    deviation: float | None = Field(description="The standard deviation of the rewards received.")
    mean: float | None = Field(description="The reward expected when recent decisions were made, on average.")
    spread: float | None = Field(description="The standard deviation of that belief then, on average.")
    recent: float | None = Field(description="The share of recent decisions.")


class Learner(BaseModel):
    """How far learning is, as the worker that answers sees it."""

    position: int = Field(description="How many rewards of the log the deciding agent has learnt: its version.")
    lag: int = Field(description="How many rewards of the log it has not learnt yet.")
    is_learner: bool = Field(description="Whether this worker learns; others take over its snapshots.")
    snapshot: int = Field(description="How many rewards the newest snapshot has learnt that this worker knows.")
    skipped: int = Field(description="Rewards that the agent refused to learn since this worker started.")
    trouble: str | None = Field(description="What keeps the learner from learning, if anything does.")


class Point(BaseModel):
    """A point of the curve of regret."""

    decision: int
    time: float
    regret: float


class State(BaseModel):
    """How the service is doing."""

    agent: str
    features: int
    actions: int
    decisions: int
    rewards: int
    waiting: int = Field(description="Decisions that still wait for a reward.")
    lost: int = Field(description="Decisions that expired without a reward.")
    decisions_per_second: float
    rewards_per_second: float
    exploration_rate: float | None = Field(description="How often the action was not the one of the highest mean.")
    recent_exploration_rate: float | None
    regret: float = Field(description="What all decisions together lost against the best, as the agent believed then.")
    history: list[Point]
    arms: list[Arm]
    learner: Learner
    time: float
