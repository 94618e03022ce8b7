"""What the page sends and gets: typed, and limited in size."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MOST_POINTS = 300
MOST_CLASSES = 3

# Where the pictures end. Points may be a little outside.
END = 3.0
Coordinate = Annotated[float, Field(ge=-2 * END, le=2 * END, allow_inf_nan=False)]


class _Fixed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Settings(_Fixed):
    """What a network is, and how it is trained."""

    prior: Literal["normal", "laplace", "mixture"] = Field(
        default="normal", description="The density of a weight. The mixture is the paper's: a slab and a narrow spike."
    )
    prior_scale: float = Field(default=1.0, ge=0.01, le=10, description="Its width; of the mixture, that of the slab.")
    noise: float = Field(default=0.1, ge=0.01, le=2, description="The standard deviation of the noise of the points.")
    family: Literal["conditional", "diagonal", "low-rank", "mixture", "full"] = "conditional"
    estimator: Literal["auto", "shared", "local", "flipout"] = Field(
        default="auto", description="Of the gradient; auto is what bayesbackprop.fit would take."
    )
    temperature: float = Field(default=1.0, ge=0, le=4, description="A factor on the complexity cost; 1 is Bayes.")
    sigma: float = Field(default=0.05, ge=1e-4, le=1, description="The standard deviation of the weights at the start.")
    width: int = Field(default=32, ge=1, le=64, description="Units of a hidden layer.")
    layers: int = Field(default=2, ge=1, le=3, description="Hidden layers.")
    activation: Literal["relu", "silu", "tanh"] = "silu"
    seed: int = Field(default=0, ge=0, lt=2**31, description="Of the first weights and all noise.")


class _Paced(_Fixed):
    pace: float | None = Field(
        default=None, ge=0, le=1000, description="Steps a second at most: 0 to wait, None for as many as there can be."
    )


class Regression(_Paced):
    """Points (x, y) to learn a function from."""

    task: Literal["regression"]
    points: list[tuple[Coordinate, Coordinate]] = Field(max_length=MOST_POINTS)
    settings: Settings = Settings()


class Classification(_Paced):
    """Points (x, y, class) to learn the classes of a plane from."""

    task: Literal["classification"]
    points: list[tuple[Coordinate, Coordinate, Annotated[int, Field(ge=0, lt=MOST_CLASSES)]]] = Field(
        max_length=MOST_POINTS
    )
    settings: Settings = Settings()


class Bandit(_Paced):
    """A world of three actions, and two agents in it that differ in how they explore."""

    task: Literal["bandit"]
    world: Literal["crossing", "rare", "coins"] = "crossing"
    epsilon: float = Field(default=0.1, ge=0, le=1, description="How often EpsilonGreedy acts at random.")
    exploration: float = Field(default=1.0, ge=0, le=10, description="How far ThompsonSampling draws from its mean.")
    seed: int = Field(default=0, ge=0, lt=2**31, description="Of the world and of both agents.")


Work = Annotated[Regression | Classification | Bandit, Field(discriminator="task")]


class Band(_Fixed):
    """The predictive distribution of a function, at each x."""

    kind: Literal["band"] = "band"
    x: list[float]
    quantiles: list[list[float]] = Field(description="2.5, 25, 50, 75 and 97.5 %, for each x.")
    epistemic: list[float] = Field(description="The standard deviation that comes from not knowing the weights.")
    aleatoric: list[float] = Field(description="The standard deviation of the noise.")
    functions: list[list[float]] = Field(description="Functions of networks drawn from the posterior.")


class Map(_Fixed):
    """The predictive distribution of classes on a grid, row by row from the lowest y."""

    kind: Literal["map"] = "map"
    size: int = Field(description="Points of a row, and rows.")
    probabilities: list[list[int]] = Field(description="Of each class, in 255ths.")
    epistemic: list[int] = Field(description="The mutual information of class and weights, in 255ths of log 2.")
    classes: list[list[int]] = Field(description="The most probable class by each of a few drawn networks.")
    leads: list[list[int]] = Field(description="How far its logit is above the second, in 16ths, at most 255.")


class Costs(_Fixed):
    """The free energy over the steps, in nats: total = likelihood + complexity, the latter times the temperature."""

    step: list[int]
    likelihood: list[float]
    complexity: list[float]


class Histogram(_Fixed):
    """How many weights have a log10 of |mean| / standard deviation between each two edges; the ends take the rest."""

    edges: list[float]
    counts: list[int]


class Trained(_Fixed):
    """A network in training."""

    picture: Band | Map = Field(discriminator="kind")
    costs: Costs
    snr: Histogram
    weights: int = Field(description="How many the network has.")
    estimator: str
    draws: int = Field(description="Of a step.")


class Player(_Fixed):
    """An agent of the bandit."""

    name: str
    means: list[list[float]] = Field(description="The expected reward of each action, at each context.")
    spreads: list[list[float]] = Field(description="The standard deviation of each of these.")
    chosen: list[int] = Field(description="How often it took each action.")
    regret: list[float] = Field(description="What it lost against the best action, at each of the steps.")


class Played(_Fixed):
    """A bandit, and what the agents made of it."""

    contexts: list[float]
    truth: list[list[float]] = Field(description="The probability of a reward of each action, at each context.")
    steps: list[int] = Field(description="Those at which the regret is known.")
    players: list[Player]


Status = Literal["training", "settled", "failed"]


class Snapshot(_Fixed):
    """What a session has made of its work at one moment."""

    version: int = Field(description="It grows from snapshot to snapshot of a session.")
    work: int = Field(description="Which of the works that were put to the session it is of.")
    task: Literal["regression", "classification", "bandit"]
    step: int
    rate: float = Field(description="Steps a second.")
    status: Status
    message: str = Field(description="What went wrong, if anything did.")
    trained: Trained | None = None
    played: Played | None = None


class Accepted(_Fixed):
    """A work that was put to a session."""

    work: int = Field(description="Its number.")
