"""The likelihoods: equal to torch.distributions, summed per example, and nothing is ever broadcast."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import distributions

from bayesbackprop import Bernoulli, Categorical, Gaussian, LogLikelihood

pytestmark = pytest.mark.identities


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("positions", [(), (4,), (2, 3)])
def test_categorical(positions, dtype):
    logits = 3 * torch.randn(5, 6, *positions, dtype=dtype)
    target = torch.randint(6, (5, *positions))
    expected = distributions.Categorical(logits=logits.movedim(1, -1)).log_prob(target).reshape(5, -1).sum(1)
    torch.testing.assert_close(Categorical().log_prob(logits, target), expected)
    given = Categorical().distribution(logits)
    torch.testing.assert_close(given.probs, logits.softmax(1).movedim(1, -1))
    assert given.batch_shape == target.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 3), (5, 2, 3)])
def test_bernoulli(shape, dtype):
    logits = 3 * torch.randn(*shape)
    target = torch.rand(*shape) < 0.5
    expected = distributions.Bernoulli(logits=logits).log_prob(target.float()).reshape(5, -1).sum(1)
    torch.testing.assert_close(Bernoulli().log_prob(logits, target.to(dtype)), expected)
    torch.testing.assert_close(Bernoulli().distribution(logits).probs, logits.sigmoid())


def test_logits_of_a_thousand_stay_finite():
    logits = torch.tensor([[1000.0, -1000.0]], requires_grad=True)
    for value in (
        Categorical().log_prob(logits, torch.tensor([1])),
        Bernoulli().log_prob(logits, 1 - logits.gt(0.0).float()),
    ):
        assert value.item() == pytest.approx(-2000)
        assert torch.autograd.grad(value.sum(), logits)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 3), (5, 2, 3)])
@pytest.mark.parametrize("noise", [0.1, 3, "learnt"])
def test_gaussian(noise, shape, dtype):
    likelihood = Gaussian(noise, initial=0.7)
    scale = 0.7 if noise == "learnt" else noise
    output, target = torch.randn(2, *shape, dtype=dtype)
    expected = distributions.Normal(output, scale).log_prob(target).reshape(5, -1).sum(1)
    value = likelihood.log_prob(output, target)
    assert value.dtype == dtype
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
    given = likelihood.distribution(output)
    assert torch.equal(given.mean, output)
    torch.testing.assert_close(given.stddev, torch.full_like(output, scale))


@pytest.mark.parametrize("shape", [(5, 1), (5, 3), (5, 2, 3)])
def test_gaussian_with_noise_per_input(shape):
    mean, raw, target = torch.randn(3, *shape, dtype=torch.float64)
    output = torch.cat([mean, 5 * raw], -1)
    reference = distributions.Normal(mean, F.softplus(5 * raw))
    value = Gaussian("per-input").log_prob(output, target)
    torch.testing.assert_close(value, reference.log_prob(target).reshape(5, -1).sum(1))
    given = Gaussian("per-input").distribution(output)
    assert torch.equal(given.mean, mean)
    torch.testing.assert_close(given.stddev, reference.stddev)


@pytest.mark.parametrize("raw", [-100.0, -20.0, 0.0, 80.0])
def test_noise_per_input_keeps_its_gradient(raw):
    """Where the target is met exactly, less noise is always better, however little there is."""
    at = torch.tensor([[0.5, raw]], requires_grad=True)
    value = Gaussian("per-input").log_prob(at, torch.tensor([[0.5]]))
    gradient = torch.autograd.grad(value.sum(), at)[0][0, 1].item()
    assert value.isfinite().all()
    assert gradient == pytest.approx(-1 if raw < -10 else -1 / (1 + math.exp(-raw)) / max(raw, math.log(2)), rel=1e-5)


def test_learnt_noise_is_a_parameter_and_fixed_noise_is_not():
    assert [name for name, _ in Gaussian("learnt", initial=0.1).named_parameters()] == ["log_noise"]
    assert not list(Gaussian(0.1).parameters())
    assert not list(Gaussian("per-input").parameters())
    likelihood = Gaussian()
    (gradient,) = torch.autograd.grad(
        likelihood.log_prob(torch.zeros(4), torch.tensor([0.0, 1.0, 2.0, 3.0])).sum(), likelihood.log_noise
    )
    assert gradient.item() == pytest.approx(14 - 4)  # sum of (z^2 - 1)


def test_log_likelihood_is_the_function():
    likelihood = LogLikelihood(
        lambda output, target: distributions.Poisson(output.exp()).log_prob(target).sum(1),
        lambda output: distributions.Poisson(output.exp()),
        name="Poisson",
    )
    output, target = torch.randn(4, 2), torch.randint(5, (4, 2)).float()
    expected = (target * output - output.exp() - torch.lgamma(target + 1)).sum(1)
    torch.testing.assert_close(likelihood.log_prob(output, target), expected)
    torch.testing.assert_close(likelihood.distribution(output).mean, output.exp())


# --- errors -----------------------------------------------------------------------------------------------------------

B1, B, B2 = torch.zeros(4, 1), torch.zeros(4), torch.zeros(4, 2)
CLASSES = torch.zeros(4, dtype=torch.int64)


def shown(value: torch.Tensor) -> str:
    return f"a tensor of shape {list(value.shape)} and type {value.dtype}"


@pytest.mark.parametrize("likelihood", [Gaussian(0.1), Gaussian(), Bernoulli()], ids=repr)
@pytest.mark.parametrize(
    ("output", "target"),
    [(B1, B), (B, B1), (B2, B), (B2, B1), (B1, B2), (B, B[:1]), (B[:1], B), (B, torch.tensor(0.0))],
    ids=lambda tensor: str(list(tensor.shape)),
)
def test_nothing_is_broadcast(likelihood, output, target):
    constraint = f"must be a tensor of shape {list(output.shape)}, as the output has it. Got {shown(target)} instead."
    with pytest.raises(ValueError, match=re.escape(constraint)):
        likelihood.log_prob(output, target)


@pytest.mark.parametrize(
    ("likelihood", "output", "target", "message"),
    [
        (
            Categorical(),
            B2,
            CLASSES.unsqueeze(1),
            "The 'target' parameter of Categorical must be a tensor of shape [4]",
        ),
        (Categorical(), B2, CLASSES[:3], "The 'target' parameter of Categorical must be a tensor of shape [4]"),
        (
            Categorical(),
            B2,
            F.one_hot(CLASSES, 2),
            "The 'target' parameter of Categorical must be a tensor of shape [4]",
        ),
        (Categorical(), B2, B, f"class indices of type torch.int64. Got {shown(B)} instead."),
        (Categorical(), B2, CLASSES.int(), f"class indices of type torch.int64. Got {shown(CLASSES.int())} instead."),
        (Categorical(), B2, CLASSES + 2, "class indices in [0, 1]. Got indices from 2 to 2 instead."),
        (Categorical(), B2, CLASSES - 100, "class indices in [0, 1]. Got indices from -100 to -100 instead."),
        (
            Categorical(),
            B,
            CLASSES,
            "The 'output' parameter of Categorical must be a float tensor of shape [B, C, ...]",
        ),
        (Categorical(), (B2, B2), CLASSES, "picks it). Got a tuple instead."),
        (Categorical(), B2.long(), CLASSES, f"shape [B, C, ...]. Got {shown(B2.long())} instead."),
        (Categorical(), B2, [0, 0, 0, 0], "Got a list instead."),
        (Bernoulli(), B, B + 0.5, "The 'target' parameter of Bernoulli must be made of 0 and 1."),
        (Bernoulli(), B, B - 1, "The 'target' parameter of Bernoulli must be made of 0 and 1."),
        (
            Bernoulli(),
            torch.tensor(0.0),
            torch.tensor(0.0),
            "a float tensor of shape [B, ...]. Got a tensor of shape []",
        ),
        (Bernoulli(), {"logits": B}, B, "picks it). Got a dict instead."),
        (Gaussian(0.1), B, B.long(), f"a tensor of floats. Got {shown(B.long())} instead."),
        (Gaussian(0.1), None, B, "The 'output' parameter of Gaussian must be a float tensor of shape [B, ...]"),
        (Gaussian(0.1), B, 0.0, "Got a float instead."),
        (Gaussian("per-input"), B2, B, "a tensor of shape [4, 1], as the output has it"),
        (Gaussian("per-input"), B2, B2, "a tensor of shape [4, 1], as the output has it"),
        (Gaussian("per-input"), B1, B1, "last dimension holds means and noises, so is even"),
        (Gaussian("per-input"), B, B, "last dimension holds means and noises, so is even"),
        (LogLikelihood(lambda o, y: o.sum()), B, B, "one number per example, shape [4]. Got a tensor of shape []"),
        (LogLikelihood(lambda o, y: o), B1, B1, "one number per example, shape [4]. Got a tensor of shape [4, 1]"),
        (LogLikelihood(lambda o, y: 0.0), B, B, "one number per example, shape [4]. Got 0.0 instead."),
    ],
)
def test_bad_outputs_and_targets_are_refused(likelihood, output, target, message):
    with pytest.raises(ValueError, match=r"^The '\w+' parameter of .* must be .* Got .* instead\.$") as error:
        likelihood.log_prob(output, target)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *(
            (
                lambda noise=noise: Gaussian(noise),
                f"'noise' parameter of Gaussian must be a float in (0, inf). Got {noise!r}",
            )
            for noise in (0, -0.1, math.nan, math.inf, True, None)
        ),
        (lambda: Gaussian("learned"), "must be a float in (0, inf), 'learnt' or 'per-input'. Got 'learned' instead."),
        *(
            (
                lambda initial=initial: Gaussian(initial=initial),
                "'initial' parameter of Gaussian must be a float in (0, inf)",
            )
            for initial in (0, -1, math.nan, True, None)
        ),
        (lambda: LogLikelihood(None), "The 'function' parameter of LogLikelihood must be"),
        (lambda: LogLikelihood(lambda o, y: y, predictive=3), "The 'predictive' parameter of LogLikelihood must be"),
        (lambda: LogLikelihood(lambda o, y: y).distribution(B), "a function from the output to a torch.distributions"),
    ],
)
def test_bad_parameters_are_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
