"""Counts, heavy tails and ordered classes: equal to torch.distributions, with slopes that are theirs, and refusals."""

import inspect
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, distributions

from bayesbackprop import Bernoulli, Likelihood, NegativeBinomial, Ordinal, Poisson, StudentT
from bayesbackprop.prediction import predictive
from engine_parameters import DTYPES

pytestmark = pytest.mark.identities

SHAPES = [(5,), (5, 1), (5, 3), (5, 2, 3)]


class Family(NamedTuple):
    """A likelihood, targets for outputs of a shape, and the same distribution by torch."""

    make: Callable[[], Likelihood]
    target: Callable[[tuple[int, ...]], Tensor]
    of_torch: Callable[[Tensor], distributions.Distribution]


def counts(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(9, shape)


def negative_binomial(output: Tensor, dispersion: float) -> distributions.NegativeBinomial:
    return distributions.NegativeBinomial(1 / dispersion, logits=output + math.log(dispersion))


FAMILIES: dict[str, Family] = {
    "Poisson": Family(Poisson, counts, lambda output: distributions.Poisson(output.exp())),
    "NegativeBinomial, fixed": Family(
        lambda: NegativeBinomial(0.3), counts, lambda output: negative_binomial(output, 0.3)
    ),
    "NegativeBinomial, learnt": Family(
        lambda: NegativeBinomial(initial=2.0), counts, lambda output: negative_binomial(output, 2.0)
    ),
    "StudentT, fixed": Family(
        lambda: StudentT(0.5, 3.0), torch.randn, lambda output: distributions.StudentT(3.0, output, 0.5)
    ),
    "StudentT, learnt": Family(
        lambda: StudentT(initial_scale=0.7, initial_df=5.0),
        torch.randn,
        lambda output: distributions.StudentT(5.0, output, 0.7),
    ),
    "Ordinal": Family(lambda: Ordinal(4), lambda shape: torch.randint(4, shape), lambda output: ordered(output, 4)),
}
families = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def ordered(score: Tensor, classes: int) -> distributions.Categorical:
    """Differences of distribution functions, as a textbook has them."""
    cuts = (torch.arange(1, classes) / classes).double().logit()
    below = torch.sigmoid(cuts - score.double().unsqueeze(-1))
    ends = torch.zeros_like(below[..., :1]), torch.ones_like(below[..., :1])
    return distributions.Categorical(torch.cat([ends[0], below, ends[1]], -1).diff(dim=-1))


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@families
def test_values_are_those_of_torch(family: Family, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    likelihood, output, target = family.make(), torch.randn(shape, dtype=dtype), family.target(shape)
    target = target.to(dtype) if target.is_floating_point() else target
    value = likelihood.log_prob(output, target)
    assert value.dtype == dtype
    expected = family.of_torch(output).log_prob(target).reshape(5, -1).sum(1)
    torch.testing.assert_close(value.double(), expected.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(likelihood.costs(output, target), -value)
    torch.testing.assert_close(likelihood.cost(output, target), -value.mean())
    given = likelihood.distribution(output)
    assert given.batch_shape == shape
    torch.testing.assert_close(given.log_prob(target).reshape(5, -1).sum(1), value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64, torch.bool])
@pytest.mark.parametrize("make", [Poisson, NegativeBinomial])
def test_counts_may_be_of_any_type(make: Callable[[], Likelihood], dtype: torch.dtype) -> None:
    output, target = torch.randn(5, 2), torch.randint(2, (5, 2))
    assert torch.equal(make().log_prob(output, target.to(dtype)), make().log_prob(output, target))


@pytest.mark.parametrize("classes", [2, 3, 7, 100])
def test_cut_points_divide_the_line(classes: int) -> None:
    """In order, and at first so that all classes have the same share where the score is 0."""
    likelihood = Ordinal(classes).double()
    even = torch.full((1, classes), 1 / classes).double()
    torch.testing.assert_close(likelihood.distribution(torch.zeros(1).double()).probs, even, rtol=1e-5, atol=0)
    with torch.no_grad():
        likelihood.raw_cuts.copy_(5 * torch.randn(classes - 1))
    cuts = likelihood.cuts
    assert cuts.shape == (classes - 1,)
    assert (cuts.diff() > 0).all()
    score = 3 * torch.randn(6).double()
    probs = likelihood.distribution(score).probs
    torch.testing.assert_close(probs.sum(-1), torch.ones(6).double())
    torch.testing.assert_close(probs.cumsum(-1)[:, :-1], torch.sigmoid(cuts - score[:, None]))


def test_a_higher_score_is_a_higher_class() -> None:
    probs = Ordinal(5).distribution(torch.linspace(-6, 6, 50)).probs
    assert (probs.cumsum(-1)[:, :-1].diff(dim=0) < 0).all()
    assert (probs.argmax(-1).diff() >= 0).all()


def test_two_ordered_classes_are_a_bernoulli() -> None:
    score, target = torch.randn(6), torch.randint(2, (6,))
    expected = distributions.Bernoulli(logits=score).log_prob(target.float())
    torch.testing.assert_close(Ordinal(2).log_prob(score, target), expected)


@pytest.mark.equivalence
@families
def test_a_compiled_cost_is_the_eager_cost(family: Family) -> None:
    """In one graph: nothing depends on what the numbers are."""
    likelihood, output, target = family.make(), torch.randn(5, 2), family.target((5, 2))
    torch._dynamo.reset()
    compiled = torch.compile(likelihood.cost, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(output, target), likelihood.cost(output, target))


# --- slopes ----------------------------------------------------------------------------------------------------------


@families
def test_slopes_are_those_of_the_values(family: Family) -> None:
    """By finite differences, also by what is learnt."""
    likelihood = family.make().double()
    output, target = torch.randn(5, 3, dtype=torch.float64, requires_grad=True), family.target((5, 3))
    target = target.double() if target.is_floating_point() else target
    parameters = list(likelihood.parameters())

    def log_prob(output: Tensor, *values: Tensor) -> Tensor:
        names = [f"likelihood.{name}" for name, _ in likelihood.named_parameters()]
        found: Tensor = torch.func.functional_call(
            _LogProb(likelihood, target), dict(zip(names, values, strict=True)), (output,)
        )
        return found

    assert torch.autograd.gradcheck(log_prob, (output, *parameters))


class _LogProb(torch.nn.Module):
    def __init__(self, likelihood: Likelihood, target: Tensor) -> None:
        super().__init__()
        self.likelihood, self.target = likelihood, target

    def forward(self, output: Tensor) -> Tensor:
        return self.likelihood.log_prob(output, self.target)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("far", [-1e6, -300.0, 300.0, 1e6])
@families
def test_far_outputs_have_finite_costs_and_slopes(family: Family, far: float, dtype: torch.dtype) -> None:
    likelihood = family.make().to(dtype)
    output = torch.full((4, 2), far, dtype=dtype, requires_grad=True)
    target = family.target((4, 2))
    cost = likelihood.cost(output, target.to(dtype) if target.is_floating_point() else target)
    slopes = torch.autograd.grad(cost, [output, *likelihood.parameters()])
    assert cost.isfinite()
    assert all(slope.isfinite().all() for slope in slopes)
    given = likelihood.distribution(output.detach())
    assert given.mean.isfinite().all() or isinstance(given, distributions.Categorical)  # which has no mean


@pytest.mark.parametrize("raw", [-1e4, -30.0, 30.0])
def test_cut_points_however_close_or_far(raw: float) -> None:
    likelihood = Ordinal(4)
    with torch.no_grad():
        likelihood.raw_cuts[0], likelihood.raw_cuts[1:] = 0.0, raw
    score = torch.zeros(4, requires_grad=True)
    log_prob = likelihood.log_prob(score, torch.arange(4))
    slopes = torch.autograd.grad(log_prob.sum(), [score, likelihood.raw_cuts])
    assert log_prob.isfinite().all()
    assert all(slope.isfinite().all() for slope in slopes)
    if raw < -20:  # nearly nothing is in between: sigmoid(0)^2 e^raw
        torch.testing.assert_close(log_prob[1], torch.tensor(2 * math.log(0.5) + raw))


def test_what_is_learnt_is_a_parameter_and_what_is_fixed_is_not() -> None:
    for likelihood, names in (
        (Poisson(), []),
        (NegativeBinomial(), ["log_dispersion"]),
        (NegativeBinomial(0.5), []),
        (StudentT(), ["log_scale", "log_df"]),
        (StudentT(1.0), ["log_df"]),
        (StudentT(df=3.0), ["log_scale"]),
        (StudentT(1.0, 3.0), []),
        (Ordinal(5), ["raw_cuts"]),
    ):
        assert [name for name, _ in likelihood.named_parameters()] == names
    assert repr(StudentT(0.5)) == "StudentT(scale=0.5, df='learnt', now 4)"
    assert repr(NegativeBinomial(initial=0.25)) == "NegativeBinomial(dispersion='learnt', now 0.25)"
    assert repr(Ordinal(3)) == "Ordinal(classes=3)"


# --- errors ----------------------------------------------------------------------------------------------------------

B1, B, B2 = torch.zeros(4, 1), torch.zeros(4), torch.zeros(4, 2)


@pytest.mark.parametrize("make", [Poisson, NegativeBinomial, StudentT, lambda: Ordinal(3)])
@pytest.mark.parametrize(
    ("output", "target"),
    [(B1, B), (B, B1), (B2, B), (B2, B1), (B1, B2), (B, B[:1]), (B[:1], B), (B, torch.tensor(0.0))],
    ids=lambda tensor: str(list(tensor.shape)),
)
def test_nothing_is_broadcast(make: Callable[[], Likelihood], output: Tensor, target: Tensor) -> None:
    if isinstance(make(), Ordinal) and output is B1 and target is B:
        return  # which it takes
    constraint = f"must be a tensor of shape {list(output.shape)}, as the output has it. Got a tensor of shape "
    with pytest.raises(ValueError, match=re.escape(f"{constraint}{list(target.shape)}")):
        make().log_prob(output, target.long() if isinstance(make(), Ordinal) else target)


@pytest.mark.parametrize(
    ("likelihood", "output", "target", "message"),
    [
        *(
            (
                made,
                B,
                target,
                f"The 'target' parameter of {type(made).__name__} must be made of whole numbers from 0 on.",
            )
            for made in (Poisson(), NegativeBinomial())
            for target in (B + 0.5, B - 1, B.long() - 3, B + math.inf, B + math.nan, B.to(torch.complex64))
        ),
        (Poisson(), B.long(), B, "The 'output' parameter of Poisson must be a float tensor of shape [B, ...]"),
        (Poisson(), (B, B), B, "picks it). Got a tuple instead."),
        (NegativeBinomial(), B, [0, 0, 0, 0], "Got a list instead."),
        (StudentT(), B, B.long(), "The 'target' parameter of StudentT must be a tensor of floats."),
        (StudentT(), None, B, "The 'output' parameter of StudentT must be a float tensor of shape [B, ...]"),
        (Ordinal(3), B, B, "The 'target' parameter of Ordinal must be a tensor of class indices of type torch.int64."),
        (Ordinal(3), B, B.long() + 3, "must be class indices in [0, 2]. Got indices from 3 to 3 instead."),
        (Ordinal(3), B, B.long() - 1, "must be class indices in [0, 2]. Got indices from -1 to -1 instead."),
        (Ordinal(3), B.long(), B.long(), "The 'output' parameter of Ordinal must be a float tensor"),
    ],
)
def test_bad_outputs_and_targets_are_refused(likelihood: Likelihood, output: Any, target: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"^The '\w+' parameter of .* must be .* Got .* instead\.$") as error:
        likelihood.log_prob(output, target)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *(
            (make, f"'{name}' parameter of {kind} must be a float in (0, inf). Got {value!r}")
            for value in (0, -0.1, math.nan, math.inf, True, None)
            for kind, name, make in (
                ("NegativeBinomial", "dispersion", lambda value=value: NegativeBinomial(value)),
                ("NegativeBinomial", "initial", lambda value=value: NegativeBinomial(initial=value)),
                ("StudentT", "scale", lambda value=value: StudentT(value)),
                ("StudentT", "df", lambda value=value: StudentT(df=value)),
                ("StudentT", "initial_scale", lambda value=value: StudentT(initial_scale=value)),
                ("StudentT", "initial_df", lambda value=value: StudentT(initial_df=value)),
            )
        ),
        (lambda: StudentT("per-input"), "must be a float in (0, inf) or 'learnt'. Got 'per-input' instead."),
        *(
            (
                lambda classes=classes: Ordinal(classes),
                "The 'classes' parameter of Ordinal must be an int in [2, 65537)",
            )
            for classes in (1, 0, -3, 2.0, True, None, "3", 2**16 + 1, 10**400)
        ),
    ],
)
def test_bad_parameters_are_refused(make: Callable[[], Likelihood], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_ordered_classes_may_be_a_row_where_scores_are_a_column() -> None:
    likelihood, scores, target = Ordinal(4), torch.randn(7, 1), torch.randint(4, (7,))
    expected = likelihood.log_prob(scores, target[:, None])
    torch.testing.assert_close(likelihood.log_prob(scores, target), expected)
    prediction = predictive(likelihood, scores.expand(3, 7, 1), 3)
    torch.testing.assert_close(prediction.log_prob(target), prediction.log_prob(target[:, None]))
    for wrong in (target[:6], target[None]):
        with pytest.raises(ValueError, match=r"of shape \[7, 1\]"):
            likelihood.log_prob(scores, wrong)
    with pytest.raises(ValueError, match=r"of shape \[7, 2\]"):
        likelihood.log_prob(torch.randn(7, 2), target)


@pytest.mark.parametrize(("kind", "arguments"), [(Poisson, "()"), (Bernoulli, "()"), (Ordinal, "(classes: int)")])
def test_help_shows_what_a_likelihood_takes(kind: type[Likelihood], arguments: str) -> None:
    assert str(inspect.signature(kind)) == f"{arguments} -> None"
    with pytest.raises(TypeError):
        kind(1, 2)  # type: ignore[call-arg]
