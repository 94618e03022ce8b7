"""A run that ends when its cost has stopped falling: the test, the learning rate, checkpoints, and warnings."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesbackprop as bbb
from bayesbackprop.callbacks import Callback, Checkpoint, Convergence, ConvergenceWarning
from bayesbackprop.convergence import Fall, fall
from bayesbackprop.training import Batches, Run, fit


def noisy(n: int, seed: int) -> Tensor:
    """Numbers around 0, each of which has a part of the one before: x_t = .5 x_(t-1) + noise."""
    steps = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()
    values = [steps[0]]
    for step in steps[1:]:
        values.append(0.5 * values[-1] + step)
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.statistical
def test_the_standard_error_is_that_of_costs_that_depend_on_each_other() -> None:
    """z = drop / e of 400 runs at rest is of Student's t of about 18 degrees: variance 1.125, here within 5 errors."""
    falls = [fall(noisy(4000, seed).tolist()) for seed in range(400)]
    z = torch.tensor([each.drop / each.standard_error for each in falls])
    variance = z.square().mean()
    assert abs(variance - 18 / 16) < 5 * z.square().std() / math.sqrt(len(z))


def test_the_drop_is_that_of_the_last_two_quarters() -> None:
    costs = [100.0] * 40 + [9.0] * 20 + [7.0] * 20
    assert fall(costs) == Fall(2.0, 0.0)
    with pytest.raises(ValueError, match="'costs' parameter of fall must be at least 40 numbers"):
        fall(costs[:39])


class Costs(nn.Module):
    """An objective whose costs are given, whatever the parameters are."""

    def __init__(self, costs: list[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self._costs = iter(costs)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return next(self._costs) + 0 * self.weight


class Rates(Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_step(self, run: Run) -> None:
        self.rates.append(run.optimiser.param_groups[0]["lr"])


BATCHES = [(torch.zeros(2, 1), torch.zeros(2, 1))]


def run_of(costs: list[float], batches: Any = BATCHES, **settings: Any) -> tuple[list[bbb.training.Record], Rates]:
    rates, objective = Rates(), Costs(costs)
    optimiser = torch.optim.SGD(objective.parameters(), lr=1.0)
    callbacks = [Convergence(**settings.pop("convergence", {})), rates]
    return fit(objective, batches, optimiser=optimiser, callbacks=callbacks, **settings), rates


def test_a_run_ends_half_as_many_steps_after_its_cost_has_stopped_falling() -> None:
    """It falls up to step 100, tests are made at 40, 52, 68, 89, 116, 151, 197 ..., and of 197 half are at rest."""
    costs = [1000.0 - each for each in range(100)] + [900 + 0.01 * (-1) ** each for each in range(2000)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history, rates = run_of(costs, convergence={"first": 40})
    assert len(history) == 197 + 99
    assert rates.rates[:196] == [1.0] * 196
    torch.testing.assert_close(torch.tensor(rates.rates[196:]), torch.linspace(1, 0, 100), rtol=0, atol=1e-6)


def test_batches_share_an_epoch() -> None:
    history, rates = run_of([1.0] * 1000, BATCHES * 10, convergence={"first": 45})
    assert len(history) == 5 + 3  # the test is made when the epoch is over
    assert rates.rates[-1] == 0
    assert rates.rates[49] == 1.0


@pytest.mark.parametrize(
    ("settings", "steps"), [({"convergence": {"first": 40, "most": 90}}, 90), ({"epochs": 90}, 90), ({"epochs": 3}, 3)]
)
def test_a_run_that_has_not_converged_says_so(settings: dict[str, Any], steps: int) -> None:
    with pytest.warns(ConvergenceWarning, match=f"still falling.* ended after {steps} steps: it has not converged"):
        history, rates = run_of([1000.0 - each for each in range(2000)], **settings)
    assert len(history) == steps
    assert rates.rates[-1] == pytest.approx(0, abs=1e-9)


def test_a_scheduler_of_the_users_own_decides_the_rate() -> None:
    objective, rates = Costs([1.0] * 1000), Rates()
    optimiser = torch.optim.SGD(objective.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimiser, 0.25, 10_000)
    history = fit(objective, BATCHES, optimiser=optimiser, scheduler=scheduler, callbacks=[Convergence(40), rates])
    assert rates.rates == [0.25] * 60
    assert len(history) == 60


def test_each_run_is_tested_anew_and_gives_the_rate_back() -> None:
    convergence, objective = Convergence(40), Costs([1.0] * 60 + [1000.0 - each for each in range(300)])
    optimiser = torch.optim.SGD(objective.parameters(), lr=1.0)
    assert len(fit(objective, BATCHES, optimiser=optimiser, callbacks=[convergence])) == 60
    assert optimiser.param_groups[0]["lr"] == 1.0
    with pytest.warns(ConvergenceWarning, match="after 90 steps"):
        assert len(fit(objective, BATCHES, optimiser=optimiser, epochs=90, callbacks=[convergence])) == 90


def test_a_run_that_another_callback_stops_is_not_judged() -> None:
    class Stop(Callback):
        def on_epoch(self, run: Run) -> None:
            if run.epoch == 20:
                run.stop()

    objective = Costs([1000.0 - each for each in range(300)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(fit(objective, BATCHES, callbacks=[Convergence(40), Stop()])) == 20


def test_what_an_objective_calls_n_is_its_own_affair() -> None:
    objective = Costs([1000.0 - 0.1 * each for each in range(300)])
    objective.n = objective.warmup = 2
    with pytest.warns(ConvergenceWarning):
        fit(objective, BATCHES, callbacks=[Convergence(40, most=90)])


def points() -> tuple[Tensor, Tensor]:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
    return x, x[:, :1] - 2 * x[:, 1:2]


def small(seed: int = 0) -> bbb.Bayesian:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return bbb.Bayesian(nn.Linear(3, 1), bbb.Gaussian(0.5), bbb.Normal(1.0), seed=seed)


class Kill(Callback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, run: Run) -> None:
        if run.step == self._step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("step", [35, 85, 115])
def test_it_goes_on_after_a_kill_as_if_nothing_had_been(step: int, tmp_path: Path) -> None:
    """Before the first test, after it, and while the rate falls."""
    whole, again = small(), small()
    batches = Batches(*points(), batch_size=30)
    expected = fit(whole, batches, callbacks=[Convergence(80)])
    checkpoint = tmp_path / "checkpoint.safetensors"
    with pytest.raises(KeyboardInterrupt):
        fit(again, batches, callbacks=[Convergence(80), Checkpoint(checkpoint), Kill(step)])
    again = small()
    found = fit(again, batches, callbacks=[Convergence(80), Checkpoint(checkpoint)])
    assert len(expected) > step / 2
    assert [record["cost"] for record in found] == [record["cost"] for record in expected]
    for one, other in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("name", "value"),
    [("begin", -1), ("end", 3), ("next", 1.5), ("last", [math.nan, 1.0]), ("costs", torch.zeros(2, 2))],
)
def test_a_damaged_state_is_refused(name: str, value: Any) -> None:
    state = Convergence().state_dict()
    Convergence().load_state_dict(state)
    with pytest.raises((TypeError, ValueError)):
        Convergence().load_state_dict({**state, name: value})


@pytest.mark.learning
def test_without_epochs_a_linear_regression_reaches_its_posterior() -> None:
    """Where the inputs are orthogonal the posterior is diagonal: precision 1 + sum(x^2) / s^2, mean as in ridge."""
    random = torch.Generator().manual_seed(0)
    x = torch.linalg.qr(torch.randn(60, 3, generator=random)).Q * math.sqrt(60)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.5 * torch.randn(60, 1, generator=random)
    model = bbb.Bayesian(nn.Linear(3, 1, bias=False), bbb.Gaussian(0.5), bbb.Normal(1.0), seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(model, Batches(x, y, 60))
    precision = 1 + 60 / 0.25
    q = model.posterior["weight"]
    torch.testing.assert_close(q.mu.detach().T, x.T @ y / 0.25 / precision, rtol=0, atol=0.3 / math.sqrt(precision))
    torch.testing.assert_close(q.sigma.detach(), torch.full((1, 3), precision**-0.5), rtol=0.05, atol=0)
