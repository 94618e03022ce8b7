"""Draws of any network: run as if the weights were its own, in threads, and after its modules were exchanged."""

import copy
import pickle
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from bayesbackprop import Bayesian, Categorical, FreeEnergy, Gaussian, Normal
from layers import Row, each_estimator, each_row, is_any, wrap
from model_threads import train_while_another_reads
from networks import X, Y, classifier, regression_model
from processes import run_apart

# --- every row, every estimator --------------------------------------------------------------------------------------


@pytest.mark.equivalence
@each_row
@each_estimator
def test_without_noise_it_is_the_mean_network(row: Row, estimator: str) -> None:
    model, inputs = wrap(row.make(), estimator, sigma=1e-8), row.inputs()
    torch.testing.assert_close(model.draw()(*inputs), model.net(*inputs), rtol=0, atol=1e-6)


@pytest.mark.identities
@each_row
@each_estimator
def test_a_draw_is_a_function_of_its_key(row: Row, estimator: str) -> None:
    model, inputs = wrap(row.make(), estimator), row.inputs()
    first = model.draw(step=3, index=2)
    output = first(*inputs)
    assert torch.equal(output, first(*inputs))
    assert torch.equal(output, model.draw(step=3, index=2)(*inputs))
    assert torch.equal(output, model.draw(step=3, index=2, seed=7)(*inputs))
    others = [
        model.draw(3, 1),
        model.draw(2, 2),
        model.draw(2, 3),
        model.draw(3, 2, seed=8),
        model.draw(3, 2, 7 + 2**32),
    ]
    for other in others:
        assert not torch.allclose(output, other(*inputs), atol=1e-3)


@pytest.mark.equivalence
@each_row
def test_shared_runs_the_drawn_weights(row: Row) -> None:
    model, inputs = wrap(row.make(), "shared"), row.inputs()
    draw = model.draw()
    assert set(draw.weights) == {n for n, _ in model.net.named_parameters() if not is_any(n, row.deterministic)}
    assert torch.equal(draw(*inputs), functional_call(model.net, draw.weights, inputs))
    with torch.no_grad():  # where torch may take another path, such as the encoder's fused one
        torch.testing.assert_close(model.draw()(*inputs), draw(*inputs).detach())


@pytest.mark.equivalence
@each_row
@each_estimator
def test_predicting_in_parallel_is_drawing_one_by_one(row: Row, estimator: str) -> None:
    net, inputs = row.make(), row.inputs()
    model, training = wrap(net, estimator), net.training
    net.eval()
    expected = torch.stack([model.draw(index=index)(*inputs) for index in range(3)])
    net.train(training)
    predicted = model.predict(*inputs, draws=3, estimator=estimator).components.mean
    torch.testing.assert_close(predicted, expected.detach().flatten(0, 1))
    assert net.training == training


# --- padding and sequences -------------------------------------------------------------------------------------------


class Padded(nn.Module):
    """An embedding with a padding row, tied to a decoder that comes ``before`` or after it, or left alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        embedding = nn.Embedding(4, 3, padding_idx=1)
        if kind == "bag":
            embedding = nn.EmbeddingBag(4, 3, mode="sum", padding_idx=1)
        if kind == "tied, decoder first":
            self.decoder = nn.Linear(3, 4, bias=False)
        self.embedding = embedding
        if kind == "tied":
            self.decoder = nn.Linear(3, 4, bias=False)
        if "tied" in kind:
            self.decoder.weight = embedding.weight
        with torch.no_grad():
            embedding.weight[1] = 0.25  # what it is now, not the zeros torch puts there

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.embedding(x)
        return self.decoder(embedded) if hasattr(self, "decoder") else embedded


@pytest.mark.identities
@each_estimator
@pytest.mark.parametrize("kind", ["embedding", "tied", "tied, decoder first", "bag"])
@pytest.mark.parametrize("complexity", ["sampled", "closed"])
def test_the_padding_row_stays_what_it_is_and_costs_nothing(kind: str, estimator: str, complexity: str) -> None:
    model = Bayesian(Padded(kind).double(), Gaussian(1.0), Normal(2.0), sigma=0.5, estimator=estimator, seed=7)
    free_energy = FreeEnergy(model, n=10, complexity=complexity)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
    (name, q), *_ = model.posterior.items()
    x, padding, others = torch.tensor([[0, 1], [1, 3]]), torch.tensor([1]), torch.tensor([0, 2, 3])
    before = q.mu.detach().clone()
    for step in (1, 2):
        weight = model.draw(step).weights[name]
        assert torch.equal(weight[padding], before[padding])
        assert not (weight == q.mu)[others].any()
        if kind == "embedding":
            assert (model.draw(step)(x)[x == 1] == 0.25).all()
        posterior = torch.distributions.Normal(q.mu[others], q.sigma[others])
        prior = torch.distributions.Normal(torch.zeros_like(q.mu[others]), 2.0)
        at = weight[others]
        expected = {
            "sampled": posterior.log_prob(at) - prior.log_prob(at),
            "closed": torch.distributions.kl_divergence(posterior, prior),
        }[complexity].sum()
        cost = free_energy(x, torch.ones_like(model.net(x)))
        torch.testing.assert_close(cost.complexity, expected)
        optimiser.zero_grad()
        cost.backward()
        for gradient in (q.mu.grad, q.rho.grad):
            assert gradient is not None
            assert not gradient[padding].any()
            assert gradient[others].all()
        optimiser.step()
    assert torch.equal(q.mu[padding], before[padding])
    assert not (q.mu == before)[others].any()


@pytest.mark.identities
@pytest.mark.parametrize("layer", [nn.RNN, nn.LSTM, nn.GRU])
def test_a_network_inside_a_sequence_is_one_draw(layer: type[nn.RNNBase]) -> None:
    model = wrap(layer(3, 2, num_layers=2, batch_first=True), "local")
    x, draw = torch.randn(2, 5, 3, dtype=torch.float64), model.draw()
    whole, _ = draw(x)
    state, steps = None, []
    for t in range(x.shape[1]):
        output, state = draw(x[:, t : t + 1], state)
        steps.append(output)
    torch.testing.assert_close(torch.cat(steps, 1), whole)
    assert not torch.allclose(whole, model.net(x)[0], atol=1e-3)


# --- what other threads see -------------------------------------------------------------------------------------------


class Held(nn.Module):
    """A network that waits in the middle of its forward pass, so that others can look at it meanwhile."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.looked, self.running = inner, threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        if threading.current_thread().name == "runs draws":
            self.running.set()
            assert self.looked.wait(60)
        output = self.inner(x)
        return output[0] if isinstance(output, tuple) else output


@pytest.mark.identities
@each_estimator
@pytest.mark.parametrize("inner", [nn.Linear(3, 2), nn.LSTM(3, 2), nn.GRU(3, 2)], ids=["linear", "lstm", "gru"])
def test_other_threads_see_the_means_while_a_draw_runs(inner: nn.Module, estimator: str) -> None:
    net, x = Held(copy.deepcopy(inner)), torch.randn(5, 3)
    model = Bayesian(net, Gaussian(0.5), sigma=0.5, estimator=estimator, seed=0)
    means, expected = {name: value.clone() for name, value in net.state_dict().items()}, net(x).detach()
    outputs: list[Tensor] = []
    thread = threading.Thread(target=lambda: outputs.append(model.draw(1)(x)), name="runs draws")
    thread.start()
    assert net.running.wait(60)
    try:
        for look in (model, net):
            torch.testing.assert_close(look(x), expected, rtol=0, atol=0)
        assert all(torch.equal(value, means[name]) for name, value in net.state_dict().items())
        assert all(isinstance(parameter, nn.Parameter) for parameter in net.parameters())
        assert pickle.loads(pickle.dumps(net.inner._parameters)).keys() == inner._parameters.keys()
    finally:
        net.looked.set()
        thread.join()
    torch.testing.assert_close(outputs[0], model.draw(1)(x), rtol=0, atol=0)  # it saw its weights, and no others'
    assert not torch.allclose(outputs[0], expected, atol=1e-3)
    assert all(type(module._parameters) is dict for module in net.modules())


@pytest.mark.identities
def test_networks_that_share_a_layer_run_in_threads() -> None:
    """The one that is entered first is left first: the other still sees its own weights."""
    layer, x = nn.Linear(3, 2), torch.randn(5, 3)
    nets = [Held(layer), Held(layer)]
    models = [Bayesian(net, Gaussian(0.5), sigma=0.5, seed=seed) for seed, net in enumerate(nets)]
    outputs: dict[int, Tensor] = {}

    def run(number: int) -> None:
        outputs[number] = models[number].draw(1)(x)

    threads = [threading.Thread(target=run, args=(number,), name="runs draws") for number in (0, 1)]
    for net, thread in zip(nets, threads, strict=True):
        thread.start()
        assert net.running.wait(60)
    for net, thread in zip(nets, threads, strict=True):
        net.looked.set()
        thread.join()
    for number, model in enumerate(models):
        torch.testing.assert_close(outputs[number], model.draw(1)(x), rtol=0, atol=0)
    assert type(layer._parameters) is dict
    assert isinstance(layer.weight, nn.Parameter)


@pytest.mark.identities
def test_a_recurrent_model_is_copied_while_it_trains() -> None:
    model, x, stop = Bayesian(nn.LSTM(3, 2), Gaussian(0.5), seed=0), torch.randn(5, 3), threading.Event()

    def run() -> None:
        while not stop.is_set():
            model.draw(1)(x)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(20):
            twin = copy.deepcopy(model)
            torch.testing.assert_close(twin.net(x)[0], model.net(x)[0])
    finally:
        stop.set()
        thread.join()


# --- modules that change or are shared -------------------------------------------------------------------------------


@pytest.mark.identities
def test_a_layer_of_another_shape_after_wrapping_is_refused() -> None:
    model = regression_model()
    model.net[2] = nn.Linear(8, 2)
    with pytest.raises(ValueError, match=r"'net' parameter of Bayesian .* '2.weight' had shape \[1, 8\]"):
        FreeEnergy(model, 100)(X, Y)


@pytest.mark.identities
def test_a_layer_of_the_same_shape_after_wrapping_is_used() -> None:
    model = regression_model(sigma=1e-8)
    model.draw()(X)
    model.net[0] = nn.Linear(3, 8)
    torch.testing.assert_close(model.draw()(X), model.net(X))


@pytest.mark.identities
def test_another_network_put_in_place_is_used() -> None:
    model = Bayesian(classifier(), Categorical(), seed=0)
    free_energy = FreeEnergy(model, 10)
    x, y = torch.randn(4, 3), torch.randint(3, (4,))
    free_energy(x, y).backward()
    model.net = classifier()
    free_energy(x, y).backward()
    assert all(parameter.grad is not None for parameter in model.net.parameters())


@pytest.mark.identities
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


@pytest.mark.identities
def test_draws_in_threads_do_not_disturb_each_other() -> None:
    model = regression_model(sigma=0.5)
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


@pytest.mark.identities
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_who_trains_and_who_reads_with_gradients_never_wait_for_each_other(dtype: str) -> None:
    """Of torch 2.13 both would hold what the other needs, the lock of Python and the mutex of a parameter."""
    assert "both ended" in run_apart(train_while_another_reads, dtype, timeout=100)
