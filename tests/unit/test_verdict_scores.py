"""Measures of uncertainty are the divergences they are said to be."""

import pytest
import torch
from torch import Tensor, distributions

from bayesbackprop.prediction import ClassPredictive
from bayesbackprop.verdict import _uncertainty

pytestmark = pytest.mark.identities

DRAWS, EXAMPLES, CLASSES = 5, 7, 4


def logits(scale: float = 2.0) -> Tensor:
    return scale * torch.randn(DRAWS, EXAMPLES, CLASSES, generator=torch.Generator().manual_seed(3)).double()


def of_classes(outputs: Tensor) -> ClassPredictive:
    return ClassPredictive(distributions.Categorical(logits=outputs.flatten(0, 1)), len(outputs))


def kl(p: Tensor, q: Tensor) -> Tensor:
    return distributions.kl_divergence(distributions.Categorical(probs=p), distributions.Categorical(probs=q))


def test_the_information_and_its_reverse_are_divergences_between_the_mixture_and_the_draws() -> None:
    found = _uncertainty(of_classes(logits()))
    by_draw = logits().softmax(-1)
    mixture = by_draw.mean(0)
    assert torch.allclose(found["epistemic"], kl(by_draw, mixture.expand_as(by_draw)).mean(0))
    assert torch.allclose(found["reverse information"], kl(mixture.expand_as(by_draw), by_draw).mean(0))


def test_the_two_add_up_to_the_divergence_between_two_draws() -> None:
    found = _uncertainty(of_classes(logits()))
    by_draw = logits().softmax(-1)
    pairs = torch.stack([kl(one, other) for one in by_draw for other in by_draw]).mean(0)
    assert torch.allclose(found["epistemic"] + found["reverse information"], pairs)


def test_draws_that_agree_have_none() -> None:
    same = logits()[:1].expand(DRAWS, -1, -1)
    assert _uncertainty(of_classes(same))["reverse information"].max() < 1e-12
    assert torch.equal(_uncertainty(of_classes(logits()[:1]))["reverse information"], torch.zeros(EXAMPLES).double())


def test_a_constant_added_to_the_logits_of_a_draw_changes_nothing() -> None:
    shift = torch.arange(DRAWS)[:, None, None]
    found, expected = (_uncertainty(of_classes(each)) for each in (logits() + shift, logits()))
    for by, scores in expected.items():
        assert torch.allclose(found[by], scores), by


def test_yes_and_no_are_two_classes() -> None:
    yes = logits()[..., 0]
    binary = ClassPredictive(distributions.Bernoulli(logits=yes.flatten(0, 1)), DRAWS)
    two = of_classes(torch.stack([torch.zeros_like(yes), yes], -1))
    found, expected = _uncertainty(binary), _uncertainty(two)
    assert set(found) == set(expected)
    for by, scores in expected.items():
        assert torch.allclose(found[by], scores), by


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certain_and_contrary_draws_have_a_finite_one_that_grows(dtype: torch.dtype) -> None:
    """Of two draws that exclude each other's class the information is log 2, however sure they are."""
    outputs = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]], dtype=dtype)
    near, far = (_uncertainty(of_classes(scale * outputs)) for scale in (50, 1000))
    for found in (near, far):
        assert found["epistemic"].item() == pytest.approx(torch.tensor(2.0).log().item(), rel=1e-5)
    # The mean of the logarithms of 1 and of exp(-scale), beside that of 1/2.
    for found, scale in ((near, 50), (far, 1000)):
        assert found["reverse information"].item() == pytest.approx(
            scale / 2 - torch.tensor(2.0).log().item(), rel=1e-5
        )
