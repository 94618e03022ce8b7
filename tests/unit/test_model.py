"""What a newcomer tried and found wanting, each so that it cannot come back."""

import threading
import weakref

import pytest
import torch
from torch import Tensor, nn

from bayesbackprop import Bayesian, Categorical, FreeEnergy, Gaussian, Normal, load, save
from bayesbackprop._engine import ops, plain_kernels

pytestmark = pytest.mark.identities

X, Y = torch.randn(16, 3), torch.randn(16, 1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def wrap(**options: object) -> Bayesian:
    return Bayesian(mlp(), Gaussian(0.3), seed=0, **options)  # type: ignore[arg-type]


def test_a_layer_of_another_shape_after_wrapping_is_refused() -> None:
    model = wrap()
    model.net[2] = nn.Linear(8, 2)
    with pytest.raises(ValueError, match=r"'net' parameter of Bayesian .* '2.weight' had shape \[1, 8\]"):
        FreeEnergy(model, 100)(X, Y)


def test_a_layer_of_the_same_shape_after_wrapping_is_used() -> None:
    model = wrap(sigma=1e-8)
    model.draw()(X)
    model.net[0] = nn.Linear(3, 8)
    torch.testing.assert_close(model.draw()(X), model.net(X))


@pytest.mark.parametrize("layer", [nn.Linear(8, 8), nn.LSTM(8, 8)], ids=["linear", "lstm"])
def test_a_module_registered_twice_survives(layer: nn.Module) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = layer, layer

        def forward(self, x: Tensor) -> Tensor:
            for part in (self.a, self.b):
                x = part(x)
                x = x[0] if isinstance(x, tuple) else x
            return x

    net, x = Twice(), torch.randn(6, 8)
    before = net(x)
    model = Bayesian(net, Gaussian(0.5), sigma=0.3, seed=0)
    model.ensemble(4).predict(x), model.predict(x, draws=4), model.draw()(x)
    torch.testing.assert_close(net(x), before)
    assert isinstance(next(layer.parameters()), nn.Parameter)


def test_draws_in_threads_do_not_disturb_each_other() -> None:
    model = wrap(sigma=0.5)
    expected = [model.draw(step)(X).detach() for step in range(1, 4)]
    predicted = model.predict(X, draws=5).mean
    wrong: list[str] = []

    def work(number: int) -> None:
        for _ in range(30):
            if not torch.equal(model.draw(number + 1)(X), expected[number]):
                wrong.append("draw")
            if not torch.allclose(model.predict(X, draws=5).mean, predicted):
                wrong.append("predict")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert isinstance(model.net[0].weight, nn.Parameter)


@pytest.mark.parametrize("frozen", ["net.0.weight", "rho.2.bias"])
def test_what_is_frozen_after_wrapping_stays(frozen: str) -> None:
    model = wrap()
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    parameter = model.get_parameter(frozen).requires_grad_(False)
    before = parameter.clone()
    for _ in range(3):
        optimiser.zero_grad()
        FreeEnergy(model, 100)(X, Y).backward()
        optimiser.step()
    assert torch.equal(parameter, before)
    assert model.get_parameter("net.2.weight").grad is not None


def test_prediction_draws_whole_networks_whatever_the_model_was_trained_with() -> None:
    x = torch.randn(4, 3, 16, 16)
    results = []
    for estimator in ("shared", "local", "flipout"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1))
        model = Bayesian(net, Gaussian(0.1), Normal(1.0), sigma=0.2, estimator=estimator, seed=0)  # type: ignore[arg-type]
        results += [model.predict(x, draws=20).epistemic, model.ensemble(20).predict(x).epistemic]
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


@pytest.mark.parametrize("part", ["total", "likelihood", "complexity"])
def test_the_parts_can_be_differentiated_one_by_one_and_again(part: str) -> None:
    model = wrap()
    cost = FreeEnergy(model, 100)(X, Y)
    parameters = list(model.parameters())
    first = torch.autograd.grad(getattr(cost, part), parameters, retain_graph=True)
    again = torch.autograd.grad(getattr(cost, part), parameters, retain_graph=True)
    torch.testing.assert_close(first, again)
    with plain_kernels():
        plain = FreeEnergy(model, 100)(X, Y)
    given = torch.autograd.grad(getattr(plain, part), parameters, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(first, given, rtol=1e-4, atol=1e-4)


def test_second_derivatives_are_refused_by_the_kernels_and_there_without_them() -> None:
    model = wrap()
    parameters = list(model.parameters())
    with pytest.raises(RuntimeError, match="plain_kernels"):
        torch.autograd.grad(FreeEnergy(model, 100)(X, Y).total, parameters, create_graph=True)
    with plain_kernels():
        gradients = torch.autograd.grad(FreeEnergy(model, 100)(X, Y).total, parameters, create_graph=True)
    assert all(gradient.requires_grad for gradient in gradients)


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


def test_predictions_carry_no_gradients() -> None:
    model = Bayesian(mlp(), Gaussian("learnt"), seed=0)
    predicted = model.predict(X, draws=3)
    for value in (
        predicted.mean,
        predicted.stddev,
        predicted.quantiles([0.5]),
        predicted.log_prob(Y),
        predicted.entropy,
    ):
        assert not value.requires_grad


def test_an_ensemble_is_fixed_in_what_is_not_random_too() -> None:
    model = wrap(select=lambda name, module: name.startswith("2."))
    ensemble = model.ensemble(3)
    before = ensemble.predict(X).mean
    with torch.no_grad():
        model.net[0].weight.add_(1.0)
    assert torch.equal(ensemble.predict(X).mean, before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Bayesian(wrap(), Gaussian(0.1)), "'net' parameter of Bayesian"),
        (lambda: wrap(select="0.*"), "'select' parameter of Bayesian"),
        (lambda: wrap().draw(step=2**32), "'step' parameter of Bayesian.draw"),
        (lambda: wrap().draw(step=-1), "'step' parameter of Bayesian.draw"),
        (lambda: wrap().draw(index=1.5), "'index' parameter of Bayesian.draw"),
        (lambda: wrap().predict(X * torch.nan), "'inputs' parameter of Bayesian.predict"),
        (lambda: wrap().predict(X[:0]), "'inputs' parameter of Bayesian.predict"),
        (lambda: wrap().ensemble(2).predict(X[:0]), "'inputs' parameter of Ensemble"),
        (lambda: wrap().predict(X, draws=2).quantiles(0.5), "'q' parameter of quantiles"),
        (lambda: wrap().predict(X, draws=2).quantiles([]), "'q' parameter of quantiles"),
        (lambda: save(mlp(), "nowhere"), "'model' parameter of save"),
        (lambda: load(3, mlp()), "'path' parameter of load"),
        (lambda: load("/", mlp()), "'path' parameter of load"),
        (lambda: FreeEnergy(wrap(), 10, minibatch_weights="geo"), "'minibatch_weights' parameter of FreeEnergy"),
    ],
)
def test_mistakes_are_explained(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


def test_a_cost_is_not_repeated_by_mistake() -> None:
    cost = FreeEnergy(wrap(), 100)(X, Y)
    for multiply in (lambda: cost * 2, lambda: 2 * cost):
        with pytest.raises(TypeError):
            multiply()


def test_classes_of_a_deterministic_head_still_predict() -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
    model = Bayesian(net, Categorical(), select=lambda name, module: name.startswith("0."), seed=0)
    assert model.predict(X, draws=4).probs.shape == (16, 4)


@pytest.mark.parametrize("estimator", ["shared", "local"])
def test_the_cost_has_the_type_of_the_network_in_every_scheme(estimator: str) -> None:
    free_energy = FreeEnergy(wrap(estimator=estimator), 16, minibatch_weights="geometric", batch_size=16, warmup=3)
    cost = free_energy(X, Y, batch=0)
    parts = (cost.total, cost.likelihood, cost.complexity, cost.complexity_weight)
    assert {part.dtype for part in parts} == {torch.float32}


def test_results_of_several_parts_pass_through_the_estimators() -> None:
    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat(torch.split(self.layer(x), 1, dim=1), dim=1) + torch.stack(torch.aminmax(x)).sum()

    assert Bayesian(Stacked(), Gaussian(1.0), estimator="local", seed=0).draw()(X).shape == (16, 2)


# --- what a second newcomer tripped over ------------------------------------------------------------------------------


def stack(function: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), function(), nn.Linear(5, 3))


@pytest.mark.parametrize("where", ["root", "nested"])
@pytest.mark.parametrize("how", ["hook", "forward"])
def test_prediction_honours_hooks_and_replaced_forwards_of_containers(where: str, how: str) -> None:
    net = nn.Sequential(stack())
    model = Bayesian(net, Categorical(), seed=0)
    module = net if where == "root" else net[0]
    if how == "hook":
        module.register_forward_hook(lambda _module, _inputs, output: output * 0)
    else:
        own = module.forward
        module.forward = lambda x: own(x) * 0
    torch.testing.assert_close(model.predict(torch.randn(4, 3), draws=2).mean, torch.full((4, 3), 1 / 3))


@pytest.mark.parametrize("function", [nn.ReLU, nn.GELU])
def test_evaluating_in_inference_mode_first_does_not_stop_training(function: type[nn.Module]) -> None:
    free_energy = FreeEnergy(Bayesian(stack(function), Categorical(), seed=0), 10)
    x, y = torch.randn(4, 3), torch.randint(3, (4,))
    with torch.inference_mode():
        assert free_energy(x, y).total.isfinite()
    free_energy(x, y).backward()


@pytest.mark.parametrize("function", [nn.ReLU, nn.GELU])
@pytest.mark.parametrize("way", ["cost", "total"])
def test_a_second_backward_needs_the_graph_kept(function: type[nn.Module], way: str) -> None:
    model = Bayesian(stack(function), Categorical(), seed=0)
    free_energy = FreeEnergy(model, 10)
    x, y = torch.randn(4, 3), torch.randint(3, (4,))
    cost = free_energy(x, y)
    back = cost.backward if way == "cost" else cost.total.backward
    back(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.parameters()]
    back()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], [2 * g for g in once])
    with pytest.raises(RuntimeError, match="second time"):
        back()


@pytest.mark.parametrize("way", ["cost", "total"])
def test_a_kept_cost_holds_no_weights_after_backward(way: str) -> None:
    free_energy = FreeEnergy(Bayesian(stack(), Categorical(), seed=0), 10)
    cost = free_energy(torch.randn(4, 3), torch.randint(3, (4,)))
    kept = cost._graph.draws[0].ws[0]
    alive = weakref.ref(kept)
    del kept
    (cost.backward if way == "cost" else cost.total.backward)()
    assert alive() is None
    assert cost.total.isfinite()


def test_half_precision_predicts_with_drawn_networks() -> None:
    model = Bayesian(stack(), Gaussian(0.1), sigma=1e-4, seed=0).half()
    x = 30 * torch.ones(2, 3).half()
    assert torch.equal(model.predict(x, draws=5).mean, model.predict(x, draws=5, estimator="shared").mean)


def test_another_network_put_in_place_is_used() -> None:
    model = Bayesian(stack(), Categorical(), seed=0)
    free_energy = FreeEnergy(model, 10)
    x, y = torch.randn(4, 3), torch.randint(3, (4,))
    free_energy(x, y).backward()
    model.net = stack()
    free_energy(x, y).backward()
    assert all(parameter.grad is not None for parameter in model.net.parameters())


def test_plain_equations_are_a_matter_of_the_thread() -> None:
    inside, leave, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        with plain_kernels():
            inside.set()
            leave.wait()
            seen.append(ops._enabled.get())

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    seen.append(ops._enabled.get())
    leave.set()
    thread.join()
    assert seen == [ops._enabled.get(), False]
