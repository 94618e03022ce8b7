"""Options that change what training pays: class weights, label smoothing, ignored targets, and beta of a Gaussian."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesbackprop import Bayesian, Bernoulli, Categorical, FreeEnergy, Gaussian, Joint, Likelihood, Poisson
from bayesbackprop.prediction import predictive
from engine_parameters import DTYPES

pytestmark = pytest.mark.identities

WEIGHT = [0.5, 0.0, 3.0, 1.25]


def classes(batch: int, positions: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return 3 * torch.randn(batch, 4, *positions, dtype=dtype), torch.randint(4, (batch, *positions))


# --- classes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("positions", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("ignored", [None, -100, 2])
@pytest.mark.parametrize("smoothing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_costs_are_those_of_torch(
    weight: Any, smoothing: float, ignored: int | None, positions: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Of each target; an example adds up its targets, and the cost is the mean over the examples."""
    likelihood = Categorical(weight=weight, label_smoothing=smoothing, ignore_index=ignored)
    logits, target = classes(6, positions, dtype)
    if ignored == -100:
        target[::2] = ignored
    options = {"label_smoothing": smoothing, "ignore_index": -1 if ignored is None else ignored}
    tensor = None if weight is None else torch.tensor(weight, dtype=dtype)
    expected = F.cross_entropy(logits, target, tensor, reduction="none", **options).reshape(6, -1).sum(1)
    torch.testing.assert_close(likelihood.costs(logits, target), expected)
    torch.testing.assert_close(likelihood.cost(logits, target), expected.mean())
    kept = torch.ones_like(target, dtype=torch.bool) if ignored is None else target != ignored
    log_prob = logits.log_softmax(1).gather(1, torch.where(kept, target, 0).unsqueeze(1)).squeeze(1)
    log_prob = torch.where(kept, log_prob, 0)
    torch.testing.assert_close(likelihood.log_prob(logits, target), log_prob.reshape(6, -1).sum(1))
    torch.testing.assert_close(likelihood.distribution(logits).log_prob(target), log_prob)


def test_smoothing_by_hand() -> None:
    """Half of the target is spread over both classes: 3/4 of it stays where it was."""
    logits = torch.tensor([[1.0, 0.0]])
    p, q = torch.tensor(1.0).sigmoid(), torch.tensor(-1.0).sigmoid()
    cost = Categorical(label_smoothing=0.5).cost(logits, torch.tensor([0]))
    torch.testing.assert_close(cost, -(0.75 * p.log() + 0.25 * q.log()))


def test_an_ignored_target_has_no_gradient_and_no_say() -> None:
    logits, target = classes(6, (3,), torch.float64)
    logits.requires_grad_()
    target[0], target[1:, 2] = -1, -1
    likelihood = Categorical(ignore_index=-1)
    (slope,) = torch.autograd.grad(likelihood.cost(logits, target), logits)
    assert (slope[0] == 0).all()
    assert (slope[:, :, 2] == 0).all()
    assert (slope[1:, :, :2].abs().amax(1) > 0).all()
    predicted = predictive(likelihood, logits.detach().unsqueeze(0), 1)
    assert torch.equal(predicted.log_prob(target) == 0, target == -1)
    assert predicted.entropy.shape == (6, 3)


def test_a_weight_is_so_many_examples() -> None:
    """An integer weight of a class is as if its examples were there as often, but for N."""
    logits, target = classes(6, (), torch.float64)
    weight = torch.tensor([1, 2, 0, 3])
    often = weight[target]
    repeated = Categorical().costs(logits.repeat_interleave(often, 0), target.repeat_interleave(often)).sum()
    torch.testing.assert_close(Categorical(weight=weight).cost(logits, target), repeated / 6)


def test_predictions_do_not_see_them() -> None:
    outputs = torch.randn(3, 5, 4)
    plain, other = Categorical(), Categorical(weight=WEIGHT, label_smoothing=0.2, ignore_index=-1)
    first, second = (predictive(likelihood, outputs, 3) for likelihood in (plain, other))
    assert torch.equal(first.probs, second.probs)
    assert torch.equal(first.entropy, second.entropy)
    target = torch.randint(4, (5,))
    torch.testing.assert_close(first.log_prob(target), second.log_prob(target))
    torch.testing.assert_close(plain.log_prob(outputs[0], target), other.log_prob(outputs[0], target))


@pytest.mark.parametrize("options", [{"weight": WEIGHT}, {"label_smoothing": 0.1}, {"ignore_index": -1}], ids=str)
def test_training_pays_them(options: dict[str, Any]) -> None:
    """In a fully connected network, where a plain Categorical has a slope of its own."""
    likelihood = Categorical(**options)
    assert not likelihood.has_slope
    model = Bayesian(nn.Linear(3, 4).double(), likelihood, seed=0)
    x, y = torch.randn(5, 3).double(), torch.tensor([0, 2, 1, 3, options.get("ignore_index", 0)])
    cost = FreeEnergy(model, n=9)(x, y)
    torch.testing.assert_close(cost.likelihood, likelihood.cost(model.draw(1)(x), y))
    assert cost.likelihood != Categorical().cost(model.draw(1)(x), y.clamp(min=0))


def test_what_is_not_given_costs_nothing() -> None:
    assert Categorical().has_slope
    assert Categorical(label_smoothing=0).has_slope
    assert repr(Categorical()) == "Categorical()"
    assert repr(Categorical(weight=[1, 2], ignore_index=-1)) == "Categorical(weight=[1.0, 2.0], ignore_index=-1)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"weight": value}, "The 'weight' parameter of Categorical must be a list") for value in (1.0, "12", [], {})),
        *(
            ({"weight": value}, "The 'weight' parameter of Categorical must be a float in [0, inf)")
            for value in ([1.0, -1.0], [float("nan")], ["1"], [[1.0]], [None], torch.ones(2, 2))
        ),
        *(
            ({"label_smoothing": value}, "The 'label_smoothing' parameter of Categorical must be a float in [0, 1]")
            for value in (-0.1, 1.1, True, None, "0")
        ),
        *(
            ({"ignore_index": value}, "The 'ignore_index' parameter of Categorical must be an int in")
            for value in (0.5, True, "0", 2**63, -(2**63) - 1)
        ),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Categorical(**options)


def test_classes_that_the_options_do_not_know_are_refused() -> None:
    logits, target = classes(6, (), torch.float32)
    for weight in (WEIGHT[:3], [*WEIGHT, 1.0]):
        message = f"a list of 4 floats, as many as the output has classes. Got {len(weight)} of them instead."
        with pytest.raises(ValueError, match=re.escape(message)):
            Categorical(weight=weight).cost(logits, target)
    target[0] = -100
    with pytest.raises(ValueError, match=re.escape("class indices in [0, 3]. Got indices from -100 to ")):
        Categorical(ignore_index=-1).cost(logits, target)
    target[1] = 4
    with pytest.raises(ValueError, match=r"class indices in \[0, 3\]\. Got indices from \d to 4 instead"):
        Categorical(ignore_index=-100).cost(logits, target)


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 1), (5, 3), (5, 2, 3)], ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.25, 0.5, 1.0])
def test_beta_multiplies_by_a_constant_power_of_the_noise(beta: float, shape: tuple[int, ...]) -> None:
    mean, raw, target = torch.randn(3, *shape, dtype=torch.float64)
    output = torch.cat([mean, raw], -1).requires_grad_()
    likelihood = Gaussian("per-input", beta=beta)
    noise = F.softplus(output.chunk(2, -1)[1])
    expected = -torch.distributions.Normal(output.chunk(2, -1)[0], noise).log_prob(target) * noise.detach() ** (
        2 * beta
    )
    cost = likelihood.cost(output, target)
    torch.testing.assert_close(cost, expected.reshape(5, -1).sum(1).mean())
    torch.testing.assert_close(likelihood.costs(output, target), expected.reshape(5, -1).sum(1))
    torch.testing.assert_close(
        torch.autograd.grad(cost, output), torch.autograd.grad(expected.reshape(5, -1).sum(1).mean(), output)
    )


def test_at_beta_1_the_means_learn_as_under_a_squared_error() -> None:
    mean, raw, target = torch.randn(3, 5, 2, dtype=torch.float64)
    output = torch.cat([mean, 3 * raw], -1).requires_grad_()
    (slope,) = torch.autograd.grad(Gaussian("per-input", beta=1.0).cost(output, target), output)
    torch.testing.assert_close(slope[:, :2], (mean - target) / 5)


def test_beta_is_no_part_of_the_likelihood() -> None:
    output, target = torch.randn(5, 2), torch.randn(5, 1)
    plain, other = Gaussian("per-input"), Gaussian("per-input", beta=0.5)
    assert torch.equal(plain.log_prob(output, target), other.log_prob(output, target))
    assert torch.equal(plain.distribution(output).stddev, other.distribution(output).stddev)
    assert not torch.equal(plain.costs(output, target), other.costs(output, target))
    assert repr(other) == "Gaussian(noise='per-input', beta=0.5)"


@pytest.mark.parametrize("noise", [0.1, "learnt"])
def test_beta_is_for_noise_per_input(noise: Any) -> None:
    with pytest.raises(ValueError, match="The 'beta' parameter of Gaussian must be 0 unless the noise is 'per-input'"):
        Gaussian(noise, beta=0.5)
    assert Gaussian(noise, beta=0).beta == 0


@pytest.mark.parametrize("beta", [-0.1, 1.5, True, None, "0.5", float("nan")])
def test_bad_betas_are_refused(beta: Any) -> None:
    with pytest.raises(ValueError, match=re.escape("The 'beta' parameter of Gaussian must be a float in [0, 1]")):
        Gaussian("per-input", beta=beta)


# --- costs of a user's own -------------------------------------------------------------------------------------------


class OnlyCosts(Categorical):
    def costs(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, label_smoothing=0.5, reduction="none")


class OnlyCost(Bernoulli):
    def cost(self, output: Tensor, target: Tensor) -> Tensor:
        return 2 * super().cost(output, target)


def test_a_subclass_has_the_cost_of_its_own_costs() -> None:
    logits, target = classes(6, (), torch.float64)
    likelihood = OnlyCosts()
    assert not OnlyCosts.has_slope
    assert OnlyCosts.cost is Likelihood.cost
    assert OnlyCosts.log_prob is Categorical.log_prob
    torch.testing.assert_close(likelihood.cost(logits, target), Categorical(label_smoothing=0.5).cost(logits, target))


def test_a_cost_alone_has_no_costs() -> None:
    """Its mean does not say what each example costs: a head of a Joint, and weights, need that."""
    logits, target = torch.randn(5, 1), torch.ones(5, 1)
    assert OnlyCost().cost(logits, target) == 2 * Bernoulli().cost(logits, target)
    message = "The 'costs' parameter of OnlyCost must be defined besides cost, where examples have weights"
    with pytest.raises(ValueError, match=message):
        Joint([OnlyCost(), Poisson()]).cost((logits, logits), (target, target))
    free_energy = FreeEnergy(Bayesian(nn.Linear(2, 1), OnlyCost(), seed=0), n=9)
    with pytest.raises(ValueError, match=message):
        free_energy(torch.randn(5, 2), target, weights=torch.ones(5))
    assert free_energy.step == 0
