"""Steps are taken whole or in part, compared with the row they name, and left out with a reason."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bayesbackprop_paper.bench import measuring, report
from bayesbackprop_paper.bench.contenders import (
    OPTIMISERS,
    OURS,
    OWN,
    SGD,
    Contender,
    Part,
    Task,
    Trainee,
    UnsupportedError,
    fully_connected,
)
from bayesbackprop_paper.timing import Quartiles

pytestmark = pytest.mark.identities

TASK = fully_connected((5, 4, 3))
CONFIG = measuring.Config(report.this_run("step", "", threads=1, rounds=2, seed=0))


def refuse(_: Task) -> Trainee:
    raise UnsupportedError("it cannot")


class Counted:
    """A linear network that counts its costs, and keeps itself."""

    def __init__(self) -> None:
        self.net = nn.Linear(5, 3)
        self.costs = 0

    def build(self, task: Task) -> Trainee:
        return Trainee(self.net, lambda x, y: self.cost(task, x, y), self.net)

    def cost(self, task: Task, x: Tensor, y: Tensor) -> Tensor:
        self.costs += 1
        return task.loss(self.net(x), y)


@pytest.mark.parametrize(
    ("part", "at_first", "costs", "moves"), [("step", 0, 3, True), ("gradients", 0, 3, False), ("update", 1, 0, True)]
)
def test_a_step_is_taken_whole_or_in_part_as_often_as_told(part: Part, at_first: int, costs: int, moves: bool) -> None:
    counted = Counted()
    step = measuring.Step(Contender("", "", counted.build, part=part, repeat=3), TASK, *TASK.data(2))
    before = counted.net.weight.detach().clone()
    assert counted.costs == at_first
    step()
    assert counted.costs == at_first + costs
    assert torch.equal(counted.net.weight, before) != moves


ADAMS = ("Adam", "fused Adam", "foreach Adam", OWN)


@pytest.mark.parametrize(("optimiser", "states"), [("SGD", 0), *((name, 2) for name in ADAMS)])
def test_between_steps_there_are_parameters_gradients_and_the_optimisers_state(optimiser: str, states: int) -> None:
    step = measuring.Step(OURS._replace(optimiser=optimiser), TASK, *TASK.data(2))
    assert step.held() == 0  # nothing has been learnt yet
    step()
    counters = 4 * 8 * (states > 0)  # Adam counts the steps of each of the eight parameters
    assert step.held() == 4 * (2 + states) * 2 * TASK.weights + counters
    assert set(OPTIMISERS) == {"SGD", *ADAMS}


def test_what_cannot_be_built_is_left_out_and_says_why() -> None:
    contenders = [SGD, Contender("other", "its objective", refuse, against="sgd")]
    extra = measuring.memory(CONFIG, TASK, 2, contenders)
    plain, other = measuring.steps(CONFIG, TASK, 2, contenders, warm_up=0, extra=extra)
    assert plain.milliseconds is not None
    assert (other.note, other.milliseconds, other.ratio, other.memory) == ("left out: it cannot", None, None, None)
    predicted = measuring.predictions(measuring.Config(CONFIG.run, [contenders[1]]), TASK, 2, 3)
    assert [(row.name, row.note) for row in predicted if row.milliseconds is None] == [("other", "left out: it cannot")]


def rows_of(**against: str | None) -> list[report.Row]:
    times = {name: Quartiles(0.5, time, 9.0, 0.25) for name, time in (("sgd", 2.0), ("other", 3.0))}
    extra = {name: {"against": base} for name, base in against.items()}
    return measuring.rows(CONFIG.run, TASK, 2, times, {"sgd": "", "other": ""}, extra, "a table")


def test_a_ratio_is_that_of_the_medians_of_a_row_and_the_one_it_names() -> None:
    plain, other = rows_of(sgd=None, other="sgd")
    assert (plain.ratio, other.ratio, other.against) == (None, 1.5, "sgd")
    assert (other.ratio_sgd, other.milliseconds, other.quartiles) == (None, 3.0, (0.5, 9.0))
    assert (other.network, other.units, other.batch, other.table) == ("5-4-3", 4, 2, "a table")


def test_where_none_names_another_all_are_divided_by_those_everyone_knows() -> None:
    plain, other = rows_of()
    assert (plain.ratio_sgd, other.ratio_sgd, other.ratio) == (1.0, 1.5, None)


def test_peers_predict_in_evaluation_mode() -> None:
    modes: list[bool] = []

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            modes.append(self.training)
            return torch.zeros(len(x), 3)

    def build(_: Task) -> Trainee:
        net: Callable[..., Tensor] = Net()
        return Trainee(net, lambda x, _: net(x), net)

    measuring.predictions(measuring.Config(CONFIG.run, [Contender("other", "", build)]), TASK, 2, draws=4)
    assert modes == [False] * (4 * 3)  # one round to warm up
