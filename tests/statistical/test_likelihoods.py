"""What is learnt converges to what made the data: noise, dispersion, degrees of freedom, cut points, coefficients."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, distributions, nn

from bayesbackprop import (
    Bayesian,
    Bernoulli,
    Categorical,
    FreeEnergy,
    Gaussian,
    Joint,
    Likelihood,
    NegativeBinomial,
    Normal,
    Ordinal,
    Poisson,
    StudentT,
)

pytestmark = pytest.mark.learning


def fit(model, x, y, steps):
    free_energy = FreeEnergy(model, len(x))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(steps):
        optimiser.zero_grad()
        free_energy(x, y).backward()
        optimiser.step()


def test_learnt_noise_converges_to_the_true_noise():
    n, noise = 1000, 0.3
    x = torch.randn(n, 2)
    y = x @ torch.tensor([[1.0], [-2.0]]) + 0.5 + noise * torch.randn(n, 1)
    model = Bayesian(nn.Linear(2, 1), Gaussian(), seed=0)
    fit(model, x, y, steps=400)
    standard_error = noise / math.sqrt(2 * n)
    assert model.likelihood.log_noise.exp().item() == pytest.approx(noise, abs=4 * standard_error)


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_noise_per_input_converges_to_the_true_noise(beta):
    """Whatever beta: at the truth the expected gradient of each input is 0, however it is weighted."""
    n = 2000
    x = torch.randint(2, (n, 1)).float()
    y = torch.where(x == 1, 0.1, 0.5) * torch.randn(n, 1)
    model = Bayesian(nn.Linear(1, 2), Gaussian("per-input", beta=beta), seed=0)
    fit(model, x, y, steps=500)
    scale = model.likelihood.distribution(model.net(torch.tensor([[0.0], [1.0]]))).stddev.flatten()
    assert scale.tolist() == pytest.approx([0.5, 0.1], rel=4 / math.sqrt(n) * 1.5)


# --- counts, outliers, grades ----------------------------------------------------------------------------------------

SLOPE, START = 0.7, 1.2
LINE = {"net.weight": torch.tensor([[SLOPE]]), "net.bias": torch.tensor([START])}


class LogProb(nn.Module):
    """log P(D|w) of a network and its likelihood."""

    def __init__(self, net: nn.Module, likelihood: Likelihood) -> None:
        super().__init__()
        self.net, self.likelihood = net, likelihood

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.likelihood.log_prob(self.net(x), y).sum()


def assert_recovered(likelihood: Likelihood, truth: dict[str, Tensor], sample: Callable[[Tensor], Tensor]) -> None:
    """Training ends within four standard errors of each true parameter: those of the information in the data."""
    x = torch.randn(3000, 1)
    y = sample(SLOPE * x + START * ("net.bias" in truth))
    model = Bayesian(nn.Linear(1, 1, bias="net.bias" in truth), likelihood, Normal(10.0), sigma=1e-3, seed=0)
    shapes = {name: value.shape for name, value in truth.items()}

    def log_prob(values: Tensor) -> Tensor:
        parts = values.split([shape.numel() for shape in shapes.values()])
        named = {name: part.reshape(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        found: Tensor = torch.func.functional_call(LogProb(model.net, likelihood), named, (x, y))
        return found

    true = torch.cat([value.flatten() for value in truth.values()])
    errors = torch.autograd.functional.hessian(log_prob, true).neg().inverse().diagonal().sqrt()
    fit(model, x, y, steps=400)
    parameters = dict(model.named_parameters())
    found = torch.cat([parameters[name].detach().flatten() for name in truth])
    assert ((found - true).abs() < 4 * errors).all(), (found, true, errors)
    assert (errors < 0.2).all()  # so that to be within them says something


def test_poisson_finds_the_line():
    assert_recovered(Poisson(), LINE, lambda line: torch.poisson(line.exp()))


def test_negative_binomial_finds_the_dispersion():
    truth = {**LINE, "likelihood.log_dispersion": torch.tensor(0.4).log()}
    assert_recovered(
        NegativeBinomial(),
        truth,
        lambda line: distributions.NegativeBinomial(2.5, logits=line - math.log(2.5)).sample(),
    )


def test_student_finds_scale_and_degrees_of_freedom():
    truth = {**LINE, "likelihood.log_scale": torch.tensor(0.5).log(), "likelihood.log_df": torch.tensor(3.0).log()}
    assert_recovered(StudentT(), truth, lambda line: distributions.StudentT(3.0, line, 0.5).sample())


def test_ordered_classes_find_their_cut_points():
    made = Ordinal(4)
    with torch.no_grad():
        made.raw_cuts.copy_(torch.tensor([-1.0, 0.5, 1.0]))
    truth = {"net.weight": LINE["net.weight"], "likelihood.raw_cuts": made.raw_cuts.detach().clone()}
    assert_recovered(Ordinal(4), truth, lambda line: made.distribution(line).sample())


def test_outliers_move_a_gaussian_and_not_a_student():
    x = torch.randn(400, 1)
    y = 2 * x + 0.1 * torch.randn(400, 1)
    y[x > 1.5] -= 20
    found = []
    for likelihood in (Gaussian(), StudentT(initial_scale=0.3)):
        model = Bayesian(nn.Linear(1, 1), likelihood, Normal(10.0), sigma=1e-3, seed=0)
        fit(model, x, y, steps=400)
        found.append(model.net.weight.item())
    assert abs(found[0] - 2) > 1
    assert abs(found[1] - 2) < 0.05


def test_heads_learn_together():
    """Each finds its own line, on one trunk."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)

        def forward(self, x):
            return {"count": self.a(x), "yes": self.b(x)}

    x = torch.randn(3000, 1)
    y = {"count": torch.poisson((SLOPE * x + START).exp()), "yes": torch.bernoulli(torch.sigmoid(2 * x - 1))}
    model = Bayesian(Two(), Joint({"count": Poisson(), "yes": Bernoulli()}), Normal(10.0), sigma=1e-3, seed=0)
    fit(model, x, y, steps=400)
    assert model.net.a.weight.item() == pytest.approx(SLOPE, abs=0.05)
    assert model.net.a.bias.item() == pytest.approx(START, abs=0.05)
    assert model.net.b.weight.item() == pytest.approx(2, abs=0.4)
    assert model.net.b.bias.item() == pytest.approx(-1, abs=0.3)


def test_class_weights_undo_a_biased_sample():
    """Of one class only a tenth was kept: weights of 10 for it give the line of all the data."""
    x = torch.randn(20_000, 1)
    y = torch.bernoulli(torch.sigmoid(x + 0.5))[:, 0].long()
    kept = (y == 0) | (torch.rand(len(y)) < 0.1)
    found = []
    for likelihood in (Categorical(), Categorical(weight=[1.0, 10.0])):
        model = Bayesian(nn.Linear(1, 2), likelihood, Normal(10.0), sigma=1e-3, seed=0)
        fit(model, x[kept], y[kept], steps=300)
        found.append((model.net.bias[1] - model.net.bias[0]).item())
    assert found[0] == pytest.approx(0.5 + math.log(0.1), abs=0.15)
    assert found[1] == pytest.approx(0.5, abs=0.15)
