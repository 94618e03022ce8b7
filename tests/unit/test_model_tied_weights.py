"""Tied weights: one random variable, drawn once and counted once."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal as TorchNormal
from torch.func import functional_call

from bayesbackprop import Bayesian, Gaussian, Normal
from layers import each_estimator
from networks import Tied

pytestmark = pytest.mark.identities


def _wrap(net: nn.Module, prior: Any = None, **options: Any) -> Bayesian:
    return Bayesian(net.double(), Gaussian(1.0), prior, seed=3, **options)


@each_estimator
@pytest.mark.parametrize("decoder_first", [False, True])
def test_tied_weights_are_one_random_variable(estimator: str, decoder_first: bool) -> None:
    net = Tied(decoder_first)
    model = _wrap(net, Normal(1.0), sigma=0.5, estimator=estimator)
    name = "decoder.weight" if decoder_first else "embedding.weight"
    assert list(model.posterior) == [n for n, _ in net.named_parameters()]  # torch names it once, and so do we
    assert set(model.posterior) == {name, "decoder.bias"}
    assert sum(q.numel for q in model.posterior.values()) == 5 * 3 + 5

    draw, x = model.draw(), torch.arange(5)
    embedded, decoded = draw(x)
    w, b = draw.weights[name], draw.weights["decoder.bias"]
    assert torch.equal(embedded, w)
    torch.testing.assert_close(decoded, w.T + b)
    assert not torch.isclose(w, net.embedding.weight, atol=1e-3).all()

    # The complexity is that of one copy, sampled and closed.
    copy = _wrap(nn.Linear(3, 5), Normal(1.0), sigma=0.5)
    copy.net.load_state_dict({"weight": net.embedding.weight, "bias": net.decoder.bias})
    torch.testing.assert_close(model.complexity_closed(), copy.complexity_closed())
    each = {n: (TorchNormal(q.mu, q.sigma), draw.weights[n]) for n, q in model.posterior.items()}
    sampled = sum((q.log_prob(at) - TorchNormal(0.0, 1.0).log_prob(at)).sum() for q, at in each.values())
    torch.testing.assert_close(draw.complexity(), sampled)


def test_the_gradient_of_a_tied_weight_is_the_sum_over_its_uses() -> None:
    torch.manual_seed(1)
    tied, apart = Tied(), Tied(tied=False)
    apart.decoder.load_state_dict(tied.decoder.state_dict())
    apart.embedding.load_state_dict(tied.embedding.state_dict())
    model, x = _wrap(tied, sigma=0.5), torch.arange(5)
    apart.double()
    draw = model.draw()
    w = draw.weights["embedding.weight"].detach()

    def loss(outputs: tuple[Tensor, Tensor]) -> Tensor:
        return outputs[0].square().sum() + outputs[1].square().sum()

    loss(draw(x)).backward()
    copies = {"embedding.weight": w.clone().requires_grad_(), "decoder.weight": w.clone().requires_grad_()}
    bias = draw.weights["decoder.bias"].detach()
    loss(functional_call(apart, {**copies, "decoder.bias": bias}, (x,))).backward()
    gradients = [copy.grad for copy in copies.values()]
    assert all(gradient is not None and gradient.any() for gradient in gradients)
    torch.testing.assert_close(tied.embedding.weight.grad, gradients[0] + gradients[1])


def test_a_tied_weight_answers_to_the_name_torch_gives_it() -> None:
    model = _wrap(Tied(), {"embedding.*": Normal(0.3), "*": Normal(2.0)}, sigma={"embedding.weight": 0.2, "*": 0.1})
    assert {entry.name: entry.prior for entry in model.plan} == {
        "embedding.weight": Normal(0.3),
        "decoder.bias": Normal(2.0),
    }
    torch.testing.assert_close(model.posterior["embedding.weight"].sigma, torch.full((5, 3), 0.2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"must be .*'embedding\.weight'.* Got 'decoder\.weight' instead"):
        _wrap(Tied(), sigma={"decoder.weight": 0.2, "*": 0.1})
