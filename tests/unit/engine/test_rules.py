"""One contract for every layer under every estimator: the rows of the table times the properties below it."""

import copy
import itertools
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.checkpoint import checkpoint

from bayesbackprop import Bayesian, Cost, FreeEnergy, Gaussian, LogLikelihood, Normal
from ztests import assert_mean, assert_variance

ESTIMATORS = ["shared", "local", "flipout"]
DRAWS = 4000  # a variance off by 12 % is then 5 standard errors away


class First(nn.Module):
    """The first of what a recurrent layer or an attention layer returns."""

    def __init__(self, core: nn.Module, copies: int = 1) -> None:
        super().__init__()
        self.core = core
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        return self.core(*[x] * self.copies)[0]


class Tied(nn.Module):
    """A language model of one token: the decoder's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.decoder = nn.Linear(3, 5)
        self.decoder.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.embedding(x)))


class Row(NamedTuple):
    """A layer, its inputs, and which of its parameters (patterns) no rule but ``shared`` can treat.

    ``linear``: the output is linear in all the weights together, so that its moments are known exactly.
    ``deterministic``: parameters that are not Bayesian unless asked for.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    linear: bool = True
    fallback: tuple[str, ...] = ()
    deterministic: tuple[str, ...] = ()


def _normal(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*shape, dtype=torch.float64),)


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=5, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


_ATTENTION = ("*self_attn.*",)
_NORMS = ("*norm?.*",)

ROWS = {
    "linear": Row(lambda: nn.Linear(3, 2), _normal(2, 3)),
    "linear, one example": Row(lambda: nn.Linear(3, 2), _normal(3)),
    "linear, sequence": Row(lambda: nn.Linear(3, 2), _normal(2, 3, 3)),
    "linear, no bias": Row(lambda: nn.Linear(3, 2, bias=False), _normal(2, 3)),
    "bilinear": Row(lambda: nn.Bilinear(3, 2, 2), lambda: (*_normal(2, 3)(), *_normal(2, 2)())),
    "bilinear, no bias": Row(
        lambda: nn.Bilinear(3, 2, 2, bias=False), lambda: (*_normal(2, 4, 3)(), *_normal(2, 4, 2)())
    ),
    "conv1d": Row(lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1, dilation=2), _normal(2, 2, 7)),
    "conv1d, one example": Row(lambda: nn.Conv1d(2, 3, 3), _normal(2, 5)),
    "conv1d, circular, groups": Row(
        lambda: nn.Conv1d(4, 2, 3, padding=2, padding_mode="circular", groups=2, bias=False), _normal(2, 4, 4)
    ),
    "conv2d": Row(lambda: nn.Conv2d(2, 2, (2, 3), stride=(1, 2), padding=(1, 0)), _normal(2, 2, 3, 4)),
    "conv2d, channels last": Row(lambda: nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last), _normal(2, 3, 3, 3)),
    "conv2d, reflect, dilation": Row(
        lambda: nn.Conv2d(2, 2, 2, padding=1, padding_mode="reflect", dilation=2), _normal(2, 2, 3, 3)
    ),
    "conv2d, same, depthwise": Row(lambda: nn.Conv2d(2, 4, 3, padding="same", groups=2), _normal(2, 2, 3, 3)),
    "conv3d": Row(lambda: nn.Conv3d(1, 2, 2, stride=(2, 1, 1), padding=(1, 0, 0)), _normal(2, 1, 2, 3, 3)),
    "conv3d, no bias": Row(lambda: nn.Conv3d(2, 2, (1, 2, 2), groups=2, bias=False), _normal(2, 2, 2, 2, 3)),
    "transposed conv1d": Row(
        lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1), _normal(2, 2, 3)
    ),
    "transposed conv1d, holes": Row(  # stride beyond the kernel: some outputs see no weight at all
        lambda: nn.ConvTranspose1d(2, 2, 2, stride=3, bias=False), _normal(2, 2, 2)
    ),
    "transposed conv2d": Row(
        lambda: nn.ConvTranspose2d(2, 2, (2, 3), stride=(2, 1), padding=(0, 1), groups=2, dilation=(1, 2)),
        _normal(2, 2, 2, 3),
    ),
    "transposed conv3d": Row(
        lambda: nn.ConvTranspose3d(1, 2, 2, stride=(1, 2, 1), output_padding=(0, 1, 0)), _normal(2, 1, 1, 2, 2)
    ),
    "embedding": Row(lambda: nn.Embedding(5, 3), lambda: (torch.tensor([[1, 4, 1], [0, 2, 3]]),)),
    "embedding, padding": Row(
        lambda: nn.Embedding(5, 3, padding_idx=0), lambda: (torch.tensor([[1, 0, 2], [3, 4, 0]]),)
    ),
    "embedding, one example": Row(lambda: nn.Embedding(4, 2), lambda: (torch.tensor([1, 3]),)),
    "rnn": Row(lambda: First(nn.RNN(3, 2)), _normal(4, 2, 3), False, ("core.*",)),
    "lstm": Row(
        lambda: First(nn.LSTM(3, 2, num_layers=2, bidirectional=True, batch_first=True)),
        _normal(2, 4, 3),
        False,
        ("core.*",),
    ),
    "gru": Row(lambda: First(nn.GRU(3, 2, bidirectional=True, bias=False)), _normal(4, 2, 3), False, ("core.*",)),
    "attention": Row(
        lambda: First(nn.MultiheadAttention(4, 2, batch_first=True), copies=3), _normal(2, 3, 4), False, ("core.*",)
    ),
    "encoder, training": Row(_encoder, _normal(2, 3, 4), False, _ATTENTION, _NORMS),
    "encoder": Row(lambda: _encoder().eval(), _normal(2, 3, 4), False, _ATTENTION, _NORMS),
    "norms, training": Row(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)),
        _normal(3, 3),
        False,
        (),
        ("1.*", "3.*"),
    ),
    "norms": Row(
        lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.GELU(), nn.Flatten(), nn.Linear(6, 2)).eval(),
        _normal(2, 2, 3),
        False,
        (),
        ("1.*",),
    ),
    "tied": Row(Tied, lambda: (torch.tensor([1, 4, 2]),), False, ("embedding.weight", "decoder.bias")),
}

each_row = pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
each_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)
quiet_vmap = pytest.mark.filterwarnings("ignore:There is a performance drop")  # what torch says of this file's own vmap


def _wrap(net: nn.Module, estimator: Any, sigma: Any = 0.5) -> Bayesian:
    return Bayesian(net.double(), Gaussian(1.0), sigma=sigma, estimator=estimator, seed=7)


def _uneven(mu: Tensor) -> Tensor:
    """A sigma that differs from weight to weight, so that no permutation of them goes unnoticed."""
    return torch.linspace(0.2, 1.0, mu.numel(), dtype=mu.dtype).reshape(mu.shape)


def _is_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _draws(model: Bayesian, inputs: tuple[Tensor, ...], first: int = 0, draws: int = DRAWS) -> Tensor:
    with torch.no_grad():
        return vmap(lambda index: model.draw(index=index)(*inputs))(torch.arange(first, first + draws))


def _assert_moments(samples: Tensor, mean: Tensor, variance: Tensor, what: str) -> None:
    """Outputs that no random weight reaches are the mean to the last bit or so; the others agree by z-test."""
    random = variance > 0
    assert random.any(), what
    torch.testing.assert_close(samples[:, ~random], mean[~random].expand(len(samples), -1))
    assert_mean(samples[:, random], mean[random], f"mean, {what}")
    assert_variance(samples[:, random], variance[random], f"variance, {what}")


def _exact_moments(model: Bayesian, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The mean net(x) and the variance sum_i (d output / d w_i)^2 sigma_i^2 of an output that is linear in w.

    By brute force: each weight in turn is 1 more, the constant ones (padding) never.
    """
    posterior, mean = model.posterior, model.net(*inputs).detach()
    change, variance = torch.zeros_like(mean), torch.zeros_like(mean)
    for name, q in posterior.items():
        for at in q.random.nonzero().tolist():
            shifted = q.mu.detach().clone()
            shifted[tuple(at)] += 1.0
            column = functional_call(model.net, {name: shifted}, inputs).detach() - mean
            change += column
            variance += column.square() * q.sigma[tuple(at)].item() ** 2
    together = {name: q.mu.detach() + q.random for name, q in posterior.items()}
    torch.testing.assert_close(functional_call(model.net, together, inputs) - mean, change)  # linear indeed
    return mean, variance


# --- every row, every estimator -------------------------------------------------------------------------------------


@pytest.mark.equivalence
@each_row
@each_estimator
def test_without_noise_it_is_the_mean_network(row: Row, estimator: str) -> None:
    model, inputs = _wrap(row.make(), estimator, sigma=1e-8), row.inputs()
    torch.testing.assert_close(model.draw()(*inputs), model.net(*inputs), rtol=0, atol=1e-6)


@pytest.mark.identities
@each_row
@each_estimator
def test_a_draw_is_a_function_of_its_key(row: Row, estimator: str) -> None:
    model, inputs = _wrap(row.make(), estimator), row.inputs()
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
    model, inputs = _wrap(row.make(), "shared"), row.inputs()
    draw = model.draw()
    assert set(draw.weights) == {n for n, _ in model.net.named_parameters() if not _is_any(n, row.deterministic)}
    assert torch.equal(draw(*inputs), functional_call(model.net, draw.weights, inputs))
    with torch.no_grad():  # where torch may take another path, such as the encoder's fused one
        torch.testing.assert_close(model.draw()(*inputs), draw(*inputs).detach())


@pytest.mark.equivalence
@each_row
@each_estimator
def test_predicting_in_parallel_is_drawing_one_by_one(row: Row, estimator: str) -> None:
    net, inputs = row.make(), row.inputs()
    model, training = _wrap(net, estimator), net.training
    net.eval()
    expected = torch.stack([model.draw(index=index)(*inputs) for index in range(3)])
    net.train(training)
    predicted = model.predict(*inputs, draws=3, estimator=estimator).components.mean
    torch.testing.assert_close(predicted, expected.detach().flatten(0, 1))
    assert net.training == training


@pytest.mark.identities
@each_row
@each_estimator
@pytest.mark.parametrize("zero", [False, True], ids=["", "zero input"])
def test_gradients_reach_every_mu_and_rho(row: Row, estimator: str, zero: bool) -> None:
    model, inputs = _wrap(row.make(), estimator), row.inputs()
    if zero:
        inputs = tuple(torch.zeros_like(x) for x in inputs)
    target = torch.randn_like(model.net(*inputs))
    # The likelihood alone has to reach the weights, except where a zero input hides them; with the complexity, all do.
    for temperature in (1.0,) if zero else (0.0, 1.0):
        model.zero_grad()
        FreeEnergy(model, n=20, temperature=temperature)(inputs, target).backward()
        for name, q in model.posterior.items():
            for gradient in (q.mu.grad, q.rho.grad):
                assert gradient is not None, name
                assert gradient.isfinite().all(), name
                assert gradient.any(), name


@pytest.mark.equivalence
@each_row
@each_estimator
@pytest.mark.parametrize("complexity", ["sampled", "closed"])
def test_every_way_back_gives_the_gradient_of_the_equation(row: Row, estimator: str, complexity: str) -> None:
    """``cost.backward()``, ``cost.total.backward()`` and the free energy written out with autograd."""
    net, inputs = row.make().double(), row.inputs()
    model = Bayesian(net, Gaussian("learnt"), Normal(0.5), sigma=0.5, estimator=estimator, seed=7).double()
    target = torch.randn_like(net(*inputs))

    def by_hand() -> Tensor:
        draw = model.draw(step=1)
        cost = draw.complexity() if complexity == "sampled" else model.complexity_closed()
        return cost / 20 - model.likelihood.log_prob(draw(*inputs), target).mean()

    def of_free_energy() -> Cost:
        return FreeEnergy(model, n=20, complexity=complexity)(inputs, target)

    gradients = []
    for start in (by_hand, of_free_energy, lambda: of_free_energy().total):
        model.zero_grad()
        start().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(gradients[2], gradients[0])


@pytest.mark.statistical
@quiet_vmap
@each_estimator
@pytest.mark.parametrize("row", [r for r in ROWS.values() if r.linear], ids=[n for n, r in ROWS.items() if r.linear])
def test_moments_of_a_linear_layer_are_exact(row: Row, estimator: str) -> None:
    model, inputs = _wrap(row.make(), estimator, sigma=_uneven), row.inputs()
    _assert_moments(_draws(model, inputs), *_exact_moments(model, inputs), estimator)


@pytest.mark.statistical
@quiet_vmap
@pytest.mark.parametrize("name", ["encoder", "norms"])
def test_flipout_has_the_moments_of_shared_in_a_deep_network(name: str) -> None:
    """The weights an example sees under flipout have the posterior as their law, whatever the network."""
    net, inputs = ROWS[name].make(), ROWS[name].inputs()
    pair = [_draws(_wrap(net, rule), inputs, first) for first, rule in ((0, "shared"), (DRAWS, "flipout"))]
    assert_mean(pair[0] - pair[1], 0.0, "mean")
    squares = [(each - each.mean(0)).square() for each in pair]
    assert_mean(squares[0] - squares[1], 0.0, "variance")


@pytest.mark.identities
@each_row
@each_estimator
def test_the_report_names_the_estimator_and_the_reason(row: Row, estimator: str) -> None:
    model = _wrap(row.make(), estimator)
    lines = {line.split()[0]: line for line in model.report().splitlines()}
    for entry in model.plan:
        deterministic, fallback = _is_any(entry.name, row.deterministic), _is_any(entry.name, row.fallback)
        expected = None if deterministic else "shared" if fallback else estimator
        assert entry.estimator == expected, entry.name
        assert (entry.prior is None) == deterministic
        assert bool(entry.reason) == (deterministic or (fallback and estimator != "shared")), entry.name
        assert f" {expected or 'deterministic'} " in lines[entry.name]
        assert not entry.reason or lines[entry.name].endswith(f"  {entry.reason}")


# --- padding, sequences, examples ------------------------------------------------------------------------------------


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
    model = _wrap(layer(3, 2, num_layers=2, batch_first=True), "local")
    x, draw = torch.randn(2, 5, 3, dtype=torch.float64), model.draw()
    whole, _ = draw(x)
    state, steps = None, []
    for t in range(x.shape[1]):
        output, state = draw(x[:, t : t + 1], state)
        steps.append(output)
    torch.testing.assert_close(torch.cat(steps, 1), whole)
    assert not torch.allclose(whole, model.net(x)[0], atol=1e-3)


class Twice(nn.Module):
    """One layer, called for each half of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[1] // 2
        return torch.cat([self.layer(x[:, :half]), self.layer(x[:, half:])], 1)


@pytest.mark.identities
@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 2), Twice], ids=["one call", "two calls"])
def test_flipout_is_one_network_inside_an_example_and_another_in_the_next(make: Callable[[], nn.Module]) -> None:
    model = _wrap(make(), "flipout")
    probe = torch.cat([torch.zeros(1, 3), torch.eye(3), torch.randn(2, 3)]).double()  # reads off b, then b + W
    output = model.draw()(probe.expand(4, -1, -1))
    b, w = output[:, :1], output[:, 1:4] - output[:, :1]
    torch.testing.assert_close(output[:, 4:], probe[4:] @ w + b)
    mu = next(iter(model.posterior.values())).mu
    for one, other in itertools.combinations([*w, mu.T], 2):
        assert not torch.allclose(one, other, atol=1e-3)


@pytest.mark.identities
def test_flipout_sees_one_kernel_at_every_position() -> None:
    model = _wrap(nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), "flipout")
    x = torch.randn(2, 2, 6, dtype=torch.float64)
    torch.testing.assert_close(model.draw()(x.roll(2, -1)), model.draw()(x).roll(2, -1))


@pytest.mark.identities
def test_local_refuses_a_second_call_and_says_what_to_do() -> None:
    model, x = _wrap(Twice(), "local"), torch.randn(2, 4, 3, dtype=torch.float64)
    draw = model.draw()
    for _ in range(2):  # the refusal leaves nothing behind: the next pass is refused at its second call again
        with pytest.raises(RuntimeError, match=r"'layer\.weight' is called twice .* give this parameter 'shared' or"):
            draw(x)
    assert model.net(x).isfinite().all()
    once = _wrap(nn.Linear(3, 2), "local").draw()
    assert torch.equal(once(x), once(x))  # one call in each of two passes is no second call


# --- weights used by hand --------------------------------------------------------------------------------------------


class ByHand(nn.Module):
    """A layer whose weights are used in another way than its own forward."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor], layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.layer, x)


def _add_in_place(layer: nn.Linear, x: Tensor) -> Tensor:
    y = x @ layer.weight.T
    y += layer.bias
    return y


def _write_into(layer: nn.Linear, x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(3).copy_(layer.bias)[None], x.new_zeros(3, 3).addmm_(x[:3], layer.weight)])


USES: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "operator": lambda layer, x: x @ layer.weight.T + layer.bias,
    "in place": _add_in_place,
    "into a tensor": _write_into,
    "list": lambda layer, x: torch.cat([x, layer.weight, layer.bias[None]]),
    "nested list": lambda layer, x: torch.einsum("bi,oi->bo", [x, layer.weight]) + torch.stack((layer.bias,)),
    "multi_dot": lambda layer, x: torch.linalg.multi_dot([x, layer.weight, layer.weight.T]) + layer.bias,
    "size": lambda layer, x: x @ layer.weight.view(layer.weight.shape) + layer.bias.expand(torch.Size((4, 3))),
    "several results": lambda layer, x: x * layer.weight.max(0).values + layer.bias,
    "rows": lambda layer, x: x * sum(iter(layer.weight)) + layer.bias,
    "detached": lambda layer, x: x @ layer.weight.detach() + layer.bias.data,
    "numbers": lambda layer, x: x * layer.weight.tolist()[0][0] + layer.bias.tolist()[1],
    "array": lambda layer, x: x * float(layer.weight.numpy(force=True)[0, 0]) + float(layer.bias.numpy(force=True)[0]),
    "bias of another": lambda layer, x: F.linear(x, x[:3] + 1, layer.bias) + F.linear(x, layer.weight.T),
}


@pytest.mark.equivalence
@each_estimator
@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
def test_a_weight_used_by_hand_is_drawn(use: Callable[[nn.Linear, Tensor], Tensor], estimator: str) -> None:
    model, x = _wrap(ByHand(use, nn.Linear(3, 3)), estimator), torch.randn(4, 3, dtype=torch.float64)
    draw = model.draw()
    expected = functional_call(model.net, draw.weights, (x,))
    torch.testing.assert_close(draw(x), expected)
    for name in draw.weights:  # the reference sees every weight, so that a mean in its place would show
        shifted = functional_call(model.net, {**draw.weights, name: draw.weights[name] + 1}, (x,))
        assert not torch.allclose(shifted, expected, atol=1e-3)


Use = Callable[[Any, Tensor], Tensor]

OPERATIONS: dict[str, tuple[Callable[[], nn.Module], Use]] = {
    "linear": (lambda: nn.Linear(3, 3), lambda layer, x: F.linear(x, layer.weight, layer.bias)),
    "linear, bias by name": (lambda: nn.Linear(3, 3), lambda layer, x: F.linear(x, layer.weight, bias=layer.bias)),
    "linear, all by name": (
        lambda: nn.Linear(3, 3),
        lambda layer, x: F.linear(bias=layer.bias, weight=layer.weight, input=x),
    ),
    "linear, another bias": (lambda: nn.Linear(3, 3, bias=False), lambda layer, x: F.linear(x, layer.weight, x[0])),
    "bilinear, weight by name": (
        lambda: nn.Bilinear(3, 3, 2),
        lambda layer, x: F.bilinear(x, x, weight=layer.weight, bias=layer.bias),
    ),
    "convolution, options by name": (
        lambda: nn.Conv1d(3, 2, 2),
        lambda layer, x: F.conv1d(x[..., None], layer.weight, bias=layer.bias, stride=2, padding=1),
    ),
    "convolution, options by place": (
        lambda: nn.Conv1d(3, 2, 2, bias=False),
        lambda layer, x: F.conv1d(x[..., None], layer.weight, None, 1, padding=2),
    ),
    "transposed convolution": (
        lambda: nn.ConvTranspose1d(3, 2, 2),
        lambda layer, x: F.conv_transpose1d(x[..., None], layer.weight, layer.bias, 2, output_padding=1),
    ),
    "embedding, by name": (
        lambda: nn.Embedding(3, 2),
        lambda layer, x: F.embedding(weight=layer.weight, input=x.argsort()),
    ),
}


@pytest.mark.statistical
@quiet_vmap
@each_estimator
@pytest.mark.parametrize(("make", "use"), OPERATIONS.values(), ids=list(OPERATIONS))
def test_an_operation_is_itself_however_its_arguments_are_given(
    make: Callable[[], nn.Module], use: Use, estimator: str
) -> None:
    model, x = _wrap(ByHand(use, make()), estimator, sigma=_uneven), torch.randn(2, 3, dtype=torch.float64)
    _assert_moments(_draws(model, (x,)), *_exact_moments(model, (x,)), estimator)
    # The rule of the estimator is at work: other outputs than those of the drawn weights, unless it is 'shared'.
    draw = model.draw()
    drawn = functional_call(model.net, draw.weights, (x,))
    assert torch.allclose(draw(x), drawn) == (estimator == "shared")


class Plain(nn.Module):
    """Parameters of the module's own: no layer of the table at all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))
        self.pair = nn.ParameterList([torch.randn(2), torch.randn(2)])

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.pair[0]) * torch.stack(list(self.pair)).sum(0)


@pytest.mark.equivalence
@each_estimator
def test_a_module_without_a_rule_is_drawn_as_shared(estimator: str) -> None:
    model, x = _wrap(Plain(), estimator), torch.randn(4, 3, dtype=torch.float64)
    assert {entry.estimator for entry in model.plan} == {"shared"}
    assert all(bool(entry.reason) == (estimator != "shared") for entry in model.plan)
    assert torch.equal(model.draw()(x), functional_call(model.net, model.draw().weights, (x,)))


class Checkpointed(nn.Module):
    """Activations of the first layer are computed a second time in the backward pass, if ``active``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.outer = nn.Linear(4, 2)
        self.active = True

    def forward(self, x: Tensor) -> Tensor:
        def first(x: Tensor) -> Tensor:
            return torch.tanh(self.inner(x))

        return self.outer(checkpoint(first, x, use_reentrant=False) if self.active else first(x))


@pytest.mark.equivalence
@each_estimator
def test_checkpointed_activations_are_right_or_refused(estimator: str) -> None:
    """The second computation must see the draw as well: gradients at the mean, without a word, would be the worst."""
    start, x, y = Checkpointed(), torch.randn(4, 3).double(), torch.randn(4, 2).double()

    def gradients(active: bool) -> list[Tensor | None]:
        net = copy.deepcopy(start)
        net.active = active
        model = _wrap(net, estimator)
        FreeEnergy(model, n=20)(x, y).backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(active=False)
    try:
        got = gradients(active=True)
    except RuntimeError:
        return
    torch.testing.assert_close(got, expected)


# --- the way back ----------------------------------------------------------------------------------------------------

WAYS: dict[str, Callable[[Cost], None]] = {"cost": lambda cost: cost.backward(), "total": lambda c: c.total.backward()}

each_way = pytest.mark.parametrize("back", WAYS.values(), ids=list(WAYS))


@pytest.mark.identities
@each_way
@each_estimator
@pytest.mark.parametrize("own", [False, True], ids=["Gaussian", "own likelihood"])
def test_gradients_reach_whatever_else_the_cost_depends_on(
    own: bool, estimator: str, back: Callable[[Cost], None]
) -> None:
    scale = torch.ones(2, dtype=torch.float64, requires_grad=True)  # nobody's parameter
    likelihood = LogLikelihood(lambda output, target: -(scale * (output - target)).square().sum(1))
    net = nn.Linear(3, 2).double()
    model = Bayesian(net, likelihood if own else Gaussian(1.0), sigma=0.5, estimator=estimator, seed=7)
    for wanted in ("x", "y", "xy", ""):
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad="x" in wanted)
        y = torch.randn(4, 2, dtype=torch.float64, requires_grad="y" in wanted)
        scale.grad = None
        back(FreeEnergy(model, n=20)(x, y))
        assert (scale.grad is not None) == own, wanted
        for value in (value for value in (x, y) if value.requires_grad):
            assert value.grad is not None, wanted
            assert value.grad.any()


@pytest.mark.identities
@each_way
@each_estimator
@pytest.mark.parametrize("which", ["mu", "rho"])
def test_weights_changed_between_the_passes_do_no_harm(
    estimator: str, back: Callable[[Cost], None], which: str
) -> None:
    """As everywhere in torch: a step of an optimiser in between leaves the gradients right, or is refused."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model, x, y = _wrap(net, estimator), torch.randn(4, 3).double(), torch.randn(4, 2).double()
    back(FreeEnergy(model, n=20)(x, y))
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    cost = FreeEnergy(model, n=20)(x, y)
    with torch.no_grad():
        for q in model.posterior.values():
            getattr(q, which).add_(1.0)
    try:
        back(cost)
    except RuntimeError:
        return
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)
