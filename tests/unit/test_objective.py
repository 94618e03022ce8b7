"""The free energy: an epoch adds up to F(D), whatever the batches, and a refused step leaves no trace."""

import math
import re
from types import MappingProxyType

import pytest
import torch
from torch import Tensor, nn

from bayesbackprop import (
    Bayesian,
    Categorical,
    Cost,
    FreeEnergy,
    Gaussian,
    Laplace,
    LogLikelihood,
    Normal,
    ScaleMixture,
)

pytestmark = pytest.mark.identities

N = 7


def classifier(seed=0, **options) -> Bayesian:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return Bayesian(net, Categorical(), options.pop("prior", Normal(0.5)), sigma=0.2, seed=seed, **options)


def data(n: int = N) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, dtype=torch.float64), torch.randint(3, (n,))


def negative_log_likelihood(model: Bayesian, step: int, x: Tensor, y: Tensor, index: int = 0) -> Tensor:
    """Of all the examples together, at the weights of a draw, with the net called by hand."""
    logits = torch.func.functional_call(model.net, model.draw(step, index).weights, (x,))
    return -torch.distributions.Categorical(logits=logits).log_prob(y).sum()


# --- the scale -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("complexity", ["sampled", "closed"])
@pytest.mark.parametrize("scheme", ["uniform", "geometric", "custom"])
@pytest.mark.parametrize("batch_size", range(1, N + 1))
def test_an_epoch_adds_up_to_the_free_energy(batch_size, scheme, complexity):
    """sum_i |D_i| total_i = sum_i (pi_i KL_i - log P(D_i|w_i)): F(D), each minibatch at its own draw."""
    model = classifier()
    x, y = data()
    batches = -(-N // batch_size)
    weights = [i / sum(range(1, batches + 1)) for i in range(1, batches + 1)] if scheme == "custom" else scheme
    free_energy = FreeEnergy(model, N, complexity=complexity, minibatch_weights=weights, batch_size=batch_size)
    total, expected, shares = 0.0, 0.0, 0.0
    for i, (x_i, y_i) in enumerate(zip(x.split(batch_size), y.split(batch_size), strict=True)):
        cost = free_energy(x_i, y_i, *(() if scheme == "uniform" else (i,)))
        total += len(x_i) * cost.total
        pi = {
            "uniform": len(x_i) / N,
            "geometric": 2 ** (batches - i - 1) / (2**batches - 1),
            "custom": (i + 1) / sum(range(1, batches + 1)),
        }[scheme]
        kl = model.draw(i + 1).complexity() if complexity == "sampled" else model.complexity_closed()
        expected += pi * kl + negative_log_likelihood(model, i + 1, x_i, y_i)
        shares += len(x_i) * cost.complexity_weight
        assert cost.complexity_weight.item() == pytest.approx(pi / len(x_i), rel=1e-12)
    assert shares.item() == pytest.approx(1, rel=1e-12)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)


def test_the_whole_data_at_once_or_in_parts_costs_the_same():
    """At one draw: the mean over examples of the parts' totals is the total of the whole."""
    x, y = data()
    free_energy = FreeEnergy(classifier(), N)
    whole = free_energy(x, y)
    for batch_size in range(1, N):
        parts = []
        for x_i, y_i in zip(x.split(batch_size), y.split(batch_size), strict=True):
            free_energy.step.zero_()
            parts.append(len(x_i) / N * torch.stack([*free_energy(x_i, y_i)][:2]))
        torch.testing.assert_close(sum(parts), torch.stack([*whole][:2]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("n", [60_000, 7, 3])
def test_the_weight_of_the_complexity_does_not_depend_on_the_batch(n):
    """A mean over examples with KL / M in place of KL / N would make it batch_size times too strong."""
    free_energy = FreeEnergy(classifier(), n)
    for examples in (1, 2, 3):
        cost = free_energy(*data(examples))
        assert cost.complexity_weight.item() == pytest.approx(1 / n, rel=1e-12)


def test_repeating_the_data_halves_the_complexity_per_example():
    x, y = data()
    one, two = FreeEnergy(classifier(), N), FreeEnergy(classifier(), 2 * N)
    two.model.load_state_dict(one.model.state_dict())
    single, double = one(x, y), two(torch.cat([x, x]), torch.cat([y, y]))
    torch.testing.assert_close(double.likelihood, single.likelihood)
    torch.testing.assert_close(double.complexity, single.complexity)
    torch.testing.assert_close(double.complexity_weight, single.complexity_weight / 2)


@pytest.mark.parametrize("scheme", ["uniform", "geometric"])
@pytest.mark.parametrize("temperature", [0, 0.0, 0.1, 1, 1.0, 3.5])
def test_temperature_and_warmup(scheme, temperature):
    x, y = data(2)
    for warmup in (0, 1, 3, 10):
        free_energy = FreeEnergy(
            classifier(), 6, temperature=temperature, warmup=warmup, minibatch_weights=scheme, batch_size=2
        )
        for step in range(1, 13):
            batch = step % 3
            share = 1 / 6 if scheme == "uniform" else [4 / 7, 2 / 7, 1 / 7][batch] / 2
            cost = free_energy(x, y, batch=None if scheme == "uniform" else batch)
            expected = temperature * min(1, step / warmup if warmup else 1) * share
            assert cost.complexity_weight.item() == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize("complexity", ["sampled", "closed"])
@pytest.mark.parametrize("draws", [1, 2, 5])
def test_draws_are_averaged_not_summed(draws, complexity):
    model = classifier()
    x, y = data()
    cost = FreeEnergy(model, N, draws=draws, complexity=complexity)(x, y)
    likelihoods = torch.stack([negative_log_likelihood(model, 1, x, y, k) for k in range(draws)])
    complexities = torch.stack([model.draw(1, k).complexity() for k in range(draws)])
    expected = complexities.mean() if complexity == "sampled" else model.complexity_closed()
    torch.testing.assert_close(cost.likelihood, likelihoods.mean() / N)
    torch.testing.assert_close(cost.complexity, expected)
    assert len(likelihoods.unique()) == len(complexities.unique()) == draws


# --- the cost --------------------------------------------------------------------------------------------------------


def test_cost_is_what_it_says():
    model = classifier(prior=ScaleMixture())
    cost = FreeEnergy(model, N, temperature=0.5)(*data())
    assert isinstance(cost, Cost)
    assert [*cost] == [cost.total, cost.likelihood, cost.complexity, cost.complexity_weight]
    assert all(part.shape == () and part.dtype == torch.float64 for part in cost)
    torch.testing.assert_close(cost.total, cost.likelihood + cost.complexity_weight * cost.complexity)
    assert not cost.complexity_weight.requires_grad
    cost.backward()
    assert all((parameter.grad != 0).any() for parameter in model.parameters())


def test_a_cost_is_scaled_as_any_loss():
    """It unpacks as a tuple does, but multiplying it is arithmetic and not repetition."""
    model = classifier()
    cost = FreeEnergy(model, N)(*data())
    for scaled, factor in ((cost * 2, 2), (2 * cost, 2), (cost / 4, 0.25), (-cost, -1)):
        assert type(scaled) is Tensor
        assert scaled.item() == factor * cost.item()
    gradients = torch.autograd.grad(cost, list(model.parameters()), retain_graph=True)
    halves = torch.autograd.grad(cost / 2, list(model.parameters()))
    torch.testing.assert_close([2 * half for half in halves], list(gradients))


@pytest.mark.parametrize("estimator", ["shared", "local"])
def test_the_cost_has_the_type_of_the_network_in_every_scheme(estimator: str) -> None:
    free_energy = FreeEnergy(
        classifier(estimator=estimator).float(), N, minibatch_weights="geometric", batch_size=N, warmup=3
    )
    x, y = data()
    cost = free_energy(x.float(), y, batch=0)
    parts = (cost.total, cost.likelihood, cost.complexity, cost.complexity_weight)
    assert {part.dtype for part in parts} == {torch.float32}


@pytest.mark.parametrize("prior", [Normal(0.1), Laplace(0.1), ScaleMixture()], ids=repr)
def test_float32_agrees_with_float64(prior):
    model = classifier(prior=prior)
    x, y = data()
    double = [*FreeEnergy(model, N)(x, y)]
    single = FreeEnergy(model.float(), N)(x.float(), y)
    assert all(part.dtype == torch.float32 for part in single)
    for one, two in zip(single, double, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=1e-4, atol=1e-5)


# --- inputs ----------------------------------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
        return self.linear(left - 2 * right) * scale


@pytest.mark.parametrize(
    "wrap",
    [
        lambda left, right: (left, right),
        lambda left, right: (left, right, 1.0),
        lambda left, right: {"right": right, "left": left},
        lambda left, right: MappingProxyType({"right": right, "left": left, "scale": 1}),
    ],
    ids=["tuple", "tuple with a number", "dict", "another mapping"],
)
def test_inputs_of_several_parts(wrap):
    model = Bayesian(TwoInputs(), Gaussian(0.3), seed=0)
    left, right, y = torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 2)
    cost = FreeEnergy(model, 4)(wrap(left, right), y)
    expected = -Gaussian(0.3).log_prob(model.draw(1)(left, right), y).mean()
    torch.testing.assert_close(cost.likelihood, expected)
    left[1, 2] = math.nan
    with pytest.raises(ValueError, match="The 'inputs' parameter of FreeEnergy must be finite"):
        FreeEnergy(model, 4)(wrap(left, right), y)


def test_a_list_is_one_input():
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, parts: list[Tensor]) -> Tensor:
            return self.linear(sum(parts))

    model = Bayesian(Sum(), Gaussian(0.3), seed=0)
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    cost = FreeEnergy(model, 4)([x, x], y)
    torch.testing.assert_close(cost.likelihood, -Gaussian(0.3).log_prob(model.draw(1)([x, x]), y).mean())


def test_a_mask_may_hold_minus_infinity_and_the_data_may_not() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            output: Tensor = self.attention(x, x, x, attn_mask=mask)[0]
            return output

    x, mask = torch.randn(2, 6, 4), nn.Transformer.generate_square_subsequent_mask(6)
    free_energy = FreeEnergy(Bayesian(Masked(), Gaussian(1.0), seed=0), 10)
    free_energy((x, mask), torch.randn(2, 6, 4)).backward()
    with pytest.raises(ValueError, match=r"'inputs' .* finite"):
        free_energy((x.fill_(-torch.inf), mask), torch.randn(2, 6, 4))
    with pytest.raises(ValueError, match=r"'inputs' .* finite"):
        free_energy((torch.randn(2, 6, 4), mask.fill_(torch.nan)), torch.randn(2, 6, 4))


# --- errors ----------------------------------------------------------------------------------------------------------


X, Y = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3), torch.linspace(-2, 2, 8).double().reshape(4, 2)


def spoilt(values: Tensor, value: float) -> Tensor:
    values = values.clone()
    values[1, 1] = value
    return values


FORM = r"^The '{}' parameter of {} must be .+\. Got .+ instead\.$"

BEFORE_THE_NET = {  # what is wrong is found before the network runs
    "nan input": ((spoilt(X, math.nan), Y), "inputs", "FreeEnergy", "finite. Got NaN or inf in 1 of 12 numbers"),
    "inf input": ((spoilt(X, -math.inf), Y), "inputs", "FreeEnergy", "finite. Got NaN or inf in 1 of 12 numbers"),
    "nan target": ((X, spoilt(Y, math.nan)), "targets", "FreeEnergy", "finite. Got NaN or inf in 1 of 8 numbers"),
    "inf target": ((X, spoilt(Y, math.inf)), "targets", "FreeEnergy", "finite. Got NaN or inf in 1 of 8 numbers"),
    "empty": ((X[:0], Y[:0]), "inputs", "FreeEnergy", "a minibatch of at least one example. Got an empty one"),
    "empty targets": ((X, Y[:0]), "targets", "FreeEnergy", "a minibatch of at least one example"),
}

AFTER_THE_NET = {
    "overflow": ((1e200 * X, Y), "likelihood cost", "FreeEnergy", "finite"),
    "shape": ((X, Y[:, :1]), "target", "Gaussian", "a tensor of shape [4, 2]"),
    "too few targets": ((X, Y[:3]), "target", "Gaussian", "a tensor of shape [4, 2]"),
    "n too small": ((X.repeat(2, 1), Y.repeat(2, 1)), "n", "FreeEnergy", "at least the 8 examples"),
    "batch": ((X, Y, 0), "batch", "FreeEnergy", "left out with uniform weights"),
}


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("problem", [*BEFORE_THE_NET, *AFTER_THE_NET])
def test_a_refused_step_leaves_no_trace(problem):
    """Of batch normalisation only where the network need not run to see the problem: its statistics are the net's."""
    arguments, parameter, owner, constraint = (BEFORE_THE_NET | AFTER_THE_NET)[problem]
    normalised = [nn.BatchNorm1d(4)] if problem in BEFORE_THE_NET else []
    net = nn.Sequential(nn.Linear(3, 4), *normalised, nn.Linear(4, 2)).double()
    model = Bayesian(net, Gaussian("learnt"), seed=0)
    free_energy = FreeEnergy(model, 6)
    free_energy(X, Y)
    before = state(free_energy)
    with pytest.raises(ValueError, match=FORM.format(parameter, owner)) as error:
        free_energy(*arguments)
    assert constraint in str(error.value)
    after = state(free_energy)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in model.parameters())
    following = free_energy(X, Y)
    torch.testing.assert_close(following.complexity, model.draw(2).complexity())


@pytest.mark.parametrize("batch", [None, -1, 3, 1.0, "0", True, torch.tensor(1)])
def test_bad_batch_numbers_are_refused(batch):
    free_energy = FreeEnergy(classifier(), N, minibatch_weights="geometric", batch_size=3)
    with pytest.raises(ValueError, match=FORM.format("batch", "FreeEnergy")) as error:
        free_energy(*data(3), batch=batch)
    assert "the number of the minibatch in its epoch, an int in [0, 3)" in str(error.value)
    assert free_energy.step.item() == 0


@pytest.mark.parametrize(("batch", "examples", "right"), [(0, 2, 3), (0, 4, 3), (2, 3, 1), (2, 2, 1)])
def test_minibatches_of_the_wrong_size_are_refused(batch, examples, right):
    free_energy = FreeEnergy(classifier(), N, minibatch_weights="geometric", batch_size=3)
    with pytest.raises(ValueError, match=FORM.format("inputs", "FreeEnergy")) as error:
        free_energy(*data(examples), batch=batch)
    assert f"minibatch {batch} has {right} examples. Got {examples} examples instead." in str(error.value)


@pytest.mark.parametrize(
    ("parameter", "constraint", "values"),
    [
        ("n", "an int in [1, inf)", [0, -1, 1.5, 10.0, True, None, "10", torch.tensor(3)]),
        ("draws", "an int in [1, inf)", [0, -1, 1.5, True, None]),
        ("warmup", "an int in [0, inf)", [-1, 1.5, True, None]),
        ("temperature", "a float in [0, inf)", [-1, math.nan, math.inf, True, False, None, "1"]),
        ("complexity", "one of ['sampled', 'closed']", ["exact", None, True]),
        ("model", "a Bayesian", [None, 3]),
    ],
)
def test_bad_parameters_are_refused(parameter, constraint, values):
    for value in values:
        with pytest.raises(ValueError, match=FORM.format(parameter, "FreeEnergy")) as error:
            FreeEnergy(**{"model": classifier(), "n": 10, parameter: value})
        got = "a tensor of shape [] and type torch.int64" if isinstance(value, torch.Tensor) else repr(value)
        assert f"must be {constraint}. Got {got} instead." in str(error.value)


@pytest.mark.parametrize("likelihood", [Gaussian(0.5), Gaussian("learnt"), Categorical()], ids=repr)
@pytest.mark.parametrize("target", [[[0.0, 1.0]] * 4, None, 1.0], ids=repr)
def test_targets_that_are_no_tensors_are_refused(target, likelihood):
    free_energy = FreeEnergy(Bayesian(nn.Sequential(nn.Linear(3, 2)).double(), likelihood, seed=0), 6)
    with pytest.raises(ValueError, match=FORM.format("target", type(likelihood).__name__)):
        free_energy(X, target)


def test_a_likelihood_of_the_users_own_must_give_a_number_per_example():
    model = classifier()
    model.likelihood = LogLikelihood(lambda output, target: -output.logsumexp(1).mean())
    with pytest.raises(ValueError, match=re.escape("gives one number per example, shape [7]")):
        FreeEnergy(model, N)(*data())
