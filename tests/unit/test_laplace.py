"""The Laplace approximation: its Hessian, its draws and its predictions are what the equations say."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import ztests
from bayesbackprop import Bernoulli, Categorical, Gaussian, Likelihood, NegativeBinomial, Poisson, StudentT
from bayesbackprop import _laplace as laplace
from bayesbackprop._laplace import Laplace

RANDOM = torch.Generator().manual_seed(0)
X = torch.randn(40, 3, generator=RANDOM)
Y = torch.randint(4, (40,), generator=RANDOM)
NUMBERS = torch.randn(40, 2, generator=RANDOM)


def mlp(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5, bias=bias), nn.Tanh(), nn.Linear(5, 4, bias=bias))


def blocks(found: Laplace) -> dict[str, Tensor]:
    """H of each layer, ``[inputs * outputs, inputs * outputs]`` with the weights of an output beside each other."""
    made = {}
    for block in found._blocks:
        vectors = torch.kron(block.of_outputs, block.of_inputs)
        made[block.weight] = vectors @ block.curvature.flatten().diag() @ vectors.T
    return made


@pytest.mark.equivalence
@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), Gaussian(0.3), Gaussian("learnt")])
def test_the_information_of_an_output_is_the_hessian_of_its_cost(likelihood: Likelihood) -> None:
    """Which does not depend on the target for these."""
    output = torch.randn(1, 4, generator=RANDOM).double()
    target: Tensor = torch.tensor([2])
    if not isinstance(likelihood, Categorical):
        target = torch.ones(1, 4).double()
    expected = jacrev(jacrev(lambda o: -likelihood.log_prob(o, target).sum()))(output).view(4, 4)
    columns = torch.stack([each.flatten() for each in laplace._columns(likelihood, output, target)])
    torch.testing.assert_close(columns.T @ columns, expected.detach())


@pytest.mark.statistical
def test_random_signs_and_sampled_targets_estimate_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    output, target = torch.tensor([[0.5, -1.0, 1.5]]).double(), torch.tensor([1])
    exact = torch.stack([each.flatten() for each in laplace._columns(Categorical(), output, target)])
    monkeypatch.setattr(laplace, "_COLUMNS", 2)

    def estimates(likelihood: Likelihood) -> Tensor:
        found = []
        for _ in range(2000):
            columns = torch.cat([each.detach() for each in laplace._columns(likelihood, output.clone(), target)])
            found.append(columns.T @ columns)
        return torch.stack(found)

    upper = torch.ones(3, 3).triu().bool()
    ztests.assert_mean(estimates(Categorical())[:, upper], (exact.T @ exact)[upper], "signs")
    ztests.assert_mean(estimates(Poisson())[:, upper], output[0].exp().diag()[upper], "samples")


@pytest.mark.identities
def test_targets_that_are_ignored_say_nothing() -> None:
    output, target = torch.randn(2, 4, generator=RANDOM), torch.tensor([-1, 2])
    columns = torch.stack(list(laplace._columns(Categorical(ignore_index=-1), output, target)))
    assert columns[:, 0].abs().max() == 0
    torch.testing.assert_close(columns[:, 1:], torch.stack(list(laplace._columns(Categorical(), output[1:], target))))


@pytest.mark.identities
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(3, 2), (4, 5, 3)),
        (nn.Conv1d(2, 3, 2, stride=2), (4, 2, 9)),
        (nn.Conv2d(2, 3, (2, 3), padding=1, dilation=2), (4, 2, 7, 8)),
        (nn.Conv2d(2, 3, 3, padding="same", padding_mode="circular"), (4, 2, 5, 5)),
        (nn.Conv3d(1, 2, 2, bias=False), (4, 1, 3, 3, 3)),
    ],
)
def test_a_layer_multiplies_the_rows_that_are_recorded(layer: Any, shape: tuple[int, ...]) -> None:
    inputs = torch.randn(shape, generator=RANDOM)
    weight = layer.weight.flatten(1)
    if layer.bias is not None:
        weight = torch.cat([weight, layer.bias[:, None]], 1)
    output = laplace._output_rows(layer, layer(inputs))
    torch.testing.assert_close(laplace._input_rows(layer, inputs) @ weight.T, output, rtol=1e-4, atol=1e-5)


@pytest.mark.equivalence
def test_of_a_linear_regression_it_is_the_exact_posterior() -> None:
    """And of batches the same as of all rows at once."""
    net, noise, precision = nn.Linear(3, 2), 0.5, 0.7
    found = Laplace(net, Gaussian(noise), [(X[:10], NUMBERS[:10]), (X[10:], NUMBERS[10:])], precision)
    rows = torch.cat([X, torch.ones(40, 1)], 1).double()
    exact = rows.T @ rows / noise**2
    torch.testing.assert_close(blocks(found)["weight"], torch.kron(torch.eye(2).double(), exact), rtol=1e-4, atol=1e-3)
    covariance = torch.linalg.inv(exact + precision * torch.eye(4).double())
    new = torch.cat([torch.tensor([[0.3, -2.0, 1.0]]), torch.ones(1, 1)], 1).double()
    outputs = found.outputs(new[:, :-1].float(), draws=4000, seed=1)[:, 0]
    ztests.assert_mean(outputs, net(new[:, :-1].float())[0].detach().double(), "mean")
    ztests.assert_variance(outputs, (new @ covariance @ new.T).flatten().expand(2), "variance")


@pytest.mark.equivalence
def test_of_one_example_it_is_the_gauss_newton_matrix() -> None:
    """Of one example the Kronecker product is exact, in every layer."""
    net = mlp().double()
    x = X[:1].double()
    found = blocks(Laplace(net, Categorical(), [(x, Y[:1])]))
    output = net(x).detach()
    information = jacrev(jacrev(lambda o: -Categorical().log_prob(o, Y[:1]).sum()))(output).view(4, 4)
    for layer in ("0", "2"):
        names = f"{layer}.weight", f"{layer}.bias"
        parts = {name: value.detach() for name, value in net.named_parameters() if name in names}
        slopes = jacrev(lambda some: functional_call(net, some, (x,)))(parts)
        jacobian = torch.cat([slopes[names[0]][0], slopes[names[1]][0].unsqueeze(-1)], -1).flatten(1)
        torch.testing.assert_close(found[names[0]], jacobian.T @ information @ jacobian, rtol=1e-6, atol=1e-9)


@pytest.mark.equivalence
def test_outputs_are_linear_in_the_weights() -> None:
    net = mlp().double()
    found = Laplace(net, Categorical(), [(X.double(), Y)], precision=2.0)
    drawn = found._drawn(torch.Generator().manual_seed(3))
    parameters = {name: value.detach() for name, value in net.named_parameters()}
    slopes = jacrev(lambda some: functional_call(net, some, (X.double(),)))(parameters)
    change = sum((slopes[name].flatten(2) @ drawn[name].flatten()) for name in drawn)
    torch.testing.assert_close(found.outputs(X.double(), draws=1, seed=3)[0], net(X.double()).detach() + change)
    both = found.outputs(X.double(), draws=3, seed=3)
    torch.testing.assert_close(both[:, :7], found.outputs(X[:7].double(), draws=3, seed=3))  # of the same weights
    found.precision = 1e14
    torch.testing.assert_close(found.outputs(X.double(), draws=1)[0], net(X.double()).detach(), atol=1e-5, rtol=0)


@pytest.mark.equivalence
def test_it_is_that_of_the_package_of_its_authors() -> None:
    package = pytest.importorskip("laplace")
    net = mlp(bias=False)  # where there is one, they give it a block of its own
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 10)
    theirs = package.Laplace(copy.deepcopy(net), "classification", "all", "kron", prior_precision=0.7)
    theirs.fit(loader)
    _, variance = theirs._glm_predictive_distribution(X)
    outputs = Laplace(net, Categorical(), loader, 0.7).outputs(X, draws=4000)
    ztests.assert_variance(outputs, variance.diagonal(dim1=1, dim2=2).double(), "variance")


class Tied(nn.Module):
    """Layers that share their weight, one that nobody calls, one in groups, a norm, and a write in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.unused = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.again.weight = self.first.weight
        self.grouped, self.norm, self.last = nn.Conv1d(3, 3, 1, groups=3), nn.BatchNorm1d(3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.again(self.first(x).relu_()))
        return self.last(self.grouped(x.unsqueeze(-1)).squeeze(-1))


@pytest.mark.identities
def test_what_has_no_block_stays_as_it_is() -> None:
    torch.manual_seed(0)
    net = Tied()
    before = copy.deepcopy(net.state_dict())
    found = Laplace(net, Categorical(), [(X, Y)])
    assert [block.weight for block in found._blocks] == ["first.weight", "last.weight"]
    assert found.weights == 3 * 4 + 4 * 4
    assert found.outputs(X, draws=2).shape == (2, 40, 4)
    assert net.training
    assert not net.first._forward_hooks
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.last = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor, *, times: float) -> Tensor:
        return self.last(self.encoder(times * x).mean(1))


@pytest.mark.identities
def test_attention_and_arguments_by_name() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 5, 8)
    found = Laplace(Attention(), Categorical(), [({"x": x, "times": 0.5}, Y[:6])])
    assert {block.weight for block in found._blocks} >= {"encoder.linear1.weight", "encoder.linear2.weight"}
    outputs = found.outputs(x, times=0.5, draws=3)
    assert outputs.shape == (3, 6, 4)
    assert bool((outputs.std(0) > 0).all())
    assert torch.backends.mha.get_fastpath_enabled()  # as it was


@pytest.mark.identities
@pytest.mark.parametrize(
    ("likelihood", "outputs", "target"),
    [
        (Gaussian("per-input"), 4, NUMBERS),
        (StudentT(), 2, NUMBERS),
        (Poisson(), 2, NUMBERS.abs().round()),
        (NegativeBinomial(), 2, NUMBERS.abs().round()),
        (Bernoulli(), 2, (NUMBERS > 0).float()),
        (Categorical(), 40, Y),
    ],
)
def test_every_likelihood_will_do(likelihood: Likelihood, outputs: int, target: Tensor) -> None:
    torch.manual_seed(0)
    net: Callable[..., Any] = nn.Linear(3, outputs)
    found = Laplace(net, likelihood, [(X, target)])  # type: ignore[arg-type]
    prediction = found.predict(X, draws=4)
    assert bool((prediction.epistemic > 0).any())
    cost = -prediction.log_prob(target).double().sum() / 40
    assert found.cost([(X[:9], target[:9]), (X[9:], target[9:])], draws=4) == pytest.approx(float(cost), rel=1e-5)
