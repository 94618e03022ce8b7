"""fit: any loader, optimiser and objective; the numbers of an epoch; and what it leaves alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import bayesbackprop as bbb
from bayesbackprop import training
from bayesbackprop.callbacks import Callback, Checkpoint
from bayesbackprop.training import Batches, DivergenceError, Run, fit
from complexities import CAUCHY

pytestmark = pytest.mark.equivalence


def points(n: int = 50) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, generator=random)
    return x, x[:, :1] - 2 * x[:, 1:2]


def bayesian(seed: int = 0, **options: Any) -> bbb.Bayesian:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return bbb.Bayesian(nn.Linear(3, 1), bbb.Gaussian(0.5), seed=seed, **options)


def weights(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, weights(one), weights(other)))


class Mean(nn.Module):
    """A plain network with its mean squared error as the cost: what a user may have."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.net(inputs), targets)


def linear() -> Mean:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Mean(nn.Linear(3, 1))


# --- what it takes ---------------------------------------------------------------------------------------------------


@pytest.mark.learning
def test_three_lines() -> None:
    x, y = torch.randn(300, 2), torch.randint(2, (300,))
    net, loader = (
        nn.Sequential(nn.Linear(2, 20), nn.ReLU(), nn.Linear(20, 2)),
        DataLoader(TensorDataset(x + 3 * y[:, None], y), batch_size=30, shuffle=True),
    )
    model = bbb.Bayesian(net, bbb.Categorical())
    history = bbb.fit(model, loader, epochs=20)
    assert [record["epoch"] for record in history] == list(range(1, 21))
    assert history[0].keys() == {"epoch", "cost", "likelihood", "complexity", "seconds"}
    assert history[-1]["cost"] < history[0]["cost"]
    assert bbb.evaluation.error(model.predict(x + 3 * y[:, None], draws=20), y) < 0.1


@pytest.mark.parametrize("prior", [None, bbb.ScaleMixture(), CAUCHY], ids=["closed", "closed mixture", "sampled"])
def test_it_is_the_loop_one_would_write(prior: bbb.Prior | None) -> None:
    x, y = points()
    model, twin = bayesian(prior=prior), bayesian(prior=prior, estimator="local")
    fit(model, Batches(x, y, 8, seed=3), epochs=2)
    free_energy = bbb.FreeEnergy(twin, 50, complexity="sampled" if prior is CAUCHY else "closed")
    optimiser = bbb.Adam([{"params": twin.net.parameters()}, {"params": twin.rho.parameters()}], lr=3e-3)
    steps = [rows for epoch in range(2) for rows in _order(3, epoch).split(8)]
    for number, rows in enumerate(steps):
        for group in optimiser.param_groups:
            group["lr"] = 3e-3 * min(1, 2 * (1 - number / len(steps)))
        optimiser.zero_grad()
        free_energy(x[rows], y[rows]).backward()
        optimiser.step()
    assert same(model, twin)


def _order(seed: int, epoch: int) -> Tensor:
    return torch.randperm(50, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def test_it_chooses_the_same_estimator_when_all_was_done_before(tmp_path: Path) -> None:
    """A process that was killed between the last checkpoint and the file of the model writes the same file."""
    for _ in range(2):
        model = bayesian()
        fit(model, Batches(*points(), 10), epochs=1, callbacks=[Checkpoint(tmp_path / "run")])
        assert [entry.estimator for entry in model.plan] == ["local", "local"]


@pytest.mark.parametrize(
    ("family", "given", "converging"),
    [(bbb.Diagonal(), 1, 1), (bbb.LowRank(1), 1, 8), (bbb.FullCovariance(), 1, 8), (bbb.Mixture(3), 3, 9)],
    ids=lambda value: str(value),
)
def test_it_draws_as_often_as_the_family_needs(family: Any, given: int, converging: int) -> None:
    drawn = []

    class Look(Callback):
        def on_start(self, run: Run) -> None:
            drawn.append(run.objective.draws)
            run.stop()

    for epochs in (1, None):
        fit(bayesian(family=family), Batches(*points(), 10), epochs=epochs, callbacks=[Look()])
    assert drawn == [given, converging]


def test_it_chooses_the_estimator_unless_one_was_given() -> None:
    x, y = points()
    for options, inputs, expected in (
        ({}, x, "local"),
        ({"estimator": "shared"}, x, "shared"),
        ({"estimator": "flipout"}, x, "flipout"),
        ({"family": bbb.LowRank(1)}, x, "shared"),
        ({}, x[:, None], "shared"),  # a sequence of one step
    ):
        model = bayesian(**options)
        assert model.plan[0].estimator == ("flipout" if expected == "flipout" else "shared")
        fit(model, [(inputs, y[:, None] if inputs.dim() == 3 else y)], epochs=1, n=50)
        assert [entry.estimator for entry in model.plan] == [expected] * 2
        assert all(f"  {expected}  " in line for line in model.report().splitlines()[1:3])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*points(), strict=True))


LOADERS = {
    "a list": lambda x, y: list(zip(x.split(10), y.split(10), strict=True)),
    "a loader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=10),
    "a loader of a stream": lambda x, y: DataLoader(Stream(), batch_size=10),
    "a loader with workers": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=10, num_workers=1),
    "tensors": lambda x, y: Batches(x, y, 10, order=lambda _: torch.arange(50)),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_any_iterable_of_batches(kind: str) -> None:
    x, y = points()
    found, expected = linear(), linear()
    history = fit(found, LOADERS[kind](x, y), epochs=2)
    assert fit(expected, LOADERS["a list"](x, y), epochs=2)[-1]["cost"] == history[-1]["cost"]
    assert same(found, expected)


def test_a_generator_serves_one_epoch() -> None:
    x, y = points()
    batches = LOADERS["a list"](x, y)
    assert len(fit(linear(), iter(batches), epochs=1)) == 1
    with pytest.raises(ValueError, match=r"an iterable that has batches in each of 2 epochs\. Got none in epoch 2"):
        fit(linear(), iter(batches), epochs=2)


def test_nested_inputs() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.layer(a + b)

    x, y = points()
    models = [bbb.Bayesian(Sum(), bbb.Gaussian(0.5), seed=0) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    history = [
        fit(model, batches, epochs=2, validation=batches)
        for model, batches in zip(models, (Batches((x, x), y, 10), Batches({"a": x, "b": x}, y, 10)), strict=True)
    ]
    assert same(*models)
    assert history[0][-1]["validation_nll"] == history[1][-1]["validation_nll"]


class Epochs:
    """A loader, or its sampler, that is told the epoch."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(LOADERS["a list"](*points()))


@pytest.mark.parametrize("where", [None, "sampler", "batch_sampler"])
def test_the_epoch_is_told(where: str | None) -> None:
    told = loader = Epochs()
    if where is not None:
        told = Epochs()
        setattr(loader, where, told)
    fit(linear(), loader, epochs=3)
    assert told.epochs == [0, 1, 2]


def test_any_optimiser_and_scheduler() -> None:
    x, y = points()
    found, twin = linear(), linear()

    def of(module: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        return optimiser, torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.2, total_steps=10)

    optimiser, scheduler = of(found)
    fit(found, LOADERS["a list"](x, y), epochs=2, optimiser=optimiser, scheduler=scheduler)
    optimiser, scheduler = of(twin)
    for _ in range(2):
        for inputs, targets in LOADERS["a list"](x, y):
            optimiser.zero_grad()
            twin(inputs, targets).backward()
            optimiser.step()
            scheduler.step()
    assert same(found, twin)


def test_groups_of_parameters() -> None:
    model = bayesian()
    mu, rho = bbb.FreeEnergy(model, 50).param_groups(0.1, rho_lr=0.2, weight_decay=0.3)
    assert [id(p) for p in mu["params"]] == [id(p) for p in model.net.parameters()]
    assert [id(p) for p in rho["params"]] == [id(p) for p in model.rho.parameters()]
    assert (mu["lr"], mu["weight_decay"], rho["lr"], rho["weight_decay"]) == (0.1, 0.3, 0.2, 0.0)


# --- accumulation, clipping, precision -------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "parts"), [(5, 4), (10, 3), (7, 2)])
def test_accumulated_batches_are_one_large_batch(size: int, parts: int) -> None:
    """The last group of an epoch is short, and so may be the last batch in it."""
    x, y = points()
    found, expected = linear(), linear()
    order = {"order": lambda epoch: torch.arange(50)}
    one = fit(found, Batches(x, y, size, **order), epochs=3, accumulate=parts)
    other = fit(expected, Batches(x, y, size * parts, **order), epochs=3)
    torch.testing.assert_close(weights(found), weights(expected), rtol=1e-4, atol=1e-6)
    assert [each["cost"] for each in one] == pytest.approx([each["cost"] for each in other], rel=1e-5)


def test_the_gradient_is_clipped() -> None:
    x, y = points()
    norms: list[float] = []

    class Norms(Callback):
        def on_step(self, run: Run) -> None:
            norms.append(float(torch.stack([p.grad.norm() for p in run.objective.parameters()]).norm()))

    fit(linear(), Batches(x, 100 * y, 10), epochs=2, clip=0.5, callbacks=[Norms()])
    assert norms == pytest.approx([0.5] * 10, rel=1e-4)


@pytest.mark.parametrize("kind", ["bayesian", "plain"])
def test_mixed_precision(kind: str) -> None:
    x, y = points(200)
    model = bayesian() if kind == "bayesian" else linear()
    types: set[torch.dtype] = set()
    layer: nn.Module = model.net
    layer.register_forward_hook(lambda *arguments: types.add(arguments[-1].dtype))
    history = fit(model, Batches(x, y, 20), epochs=15, autocast=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert history[-1]["cost"] < history[0]["cost"]
    if kind == "plain":
        assert types == {torch.bfloat16}


def test_the_model_is_moved_to_the_device() -> None:
    places: list[str] = []

    class Place(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))

        def forward(self, inputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
            places.extend(t.device.type for t in (self.w, inputs, targets["y"]))
            return self.w.sum()

    class EnoughError(Exception):
        pass

    class Stop(Callback):
        def on_start(self, run: Run) -> None:
            places.append(next(run.objective.parameters()).device.type)
            raise EnoughError

    x, y = points()
    fit(Place(), Batches(x, {"y": y}, 10), epochs=1, device="cpu")
    assert set(places) == {"cpu"}
    with pytest.raises(EnoughError):
        fit(Place(), Batches(x, {"y": y}, 10), epochs=1, device="meta", callbacks=[Stop()])
    assert places[-1] == "meta"


# --- the numbers of an epoch -----------------------------------------------------------------------------------------


def test_an_epoch_is_averaged_over_its_examples_not_its_batches() -> None:
    x, y = torch.zeros(5, 1), torch.tensor([[0.0], [0.0], [0.0], [0.0], [10.0]])
    objective = Mean(nn.Linear(1, 1))
    nn.init.zeros_(objective.net.bias)
    optimiser = torch.optim.SGD(objective.parameters(), lr=0.0)
    (record,) = fit(objective, [(x[:4], y[:4]), (x[4:], y[4:])], epochs=1, optimiser=optimiser)
    assert record["cost"] == pytest.approx(100 / 5)  # and not (0 + 100) / 2


def test_the_cost_is_that_of_its_parts() -> None:
    model = bayesian()
    (record,) = fit(model, Batches(*points(), 8), epochs=1)
    assert record["cost"] == pytest.approx(record["likelihood"] + record["complexity"] / 50, rel=1e-6)


def test_weighted_held_out_batches_have_weighted_means() -> None:
    x, _ = points()
    labels = torch.arange(50) % 4
    weights = torch.cat([torch.full((20,), 3.0), torch.full((30,), 0.5)])
    parts = [(x[:20], labels[:20], weights[:20]), (x[20:], labels[20:], weights[20:])]
    model = bbb.Bayesian(nn.Linear(3, 4), bbb.Categorical(), seed=0)
    (record,) = fit(model, Batches(x, labels, 10), epochs=1, validation=parts)
    predictions = [model.predict(part[0], draws=10) for part in parts]
    pairs = list(zip(predictions, parts, strict=True))
    total = sum(-float((p.log_prob(y) * w).sum()) for p, (_, y, w) in pairs)
    wrong = sum(float(((p.labels != y) * w).sum()) for p, (_, y, w) in pairs)  # type: ignore[attr-defined]
    assert record["validation_nll"] == pytest.approx(total / (20 * 3 + 30 * 0.5), rel=1e-5)
    assert record["validation_error"] == pytest.approx(wrong / (20 * 3 + 30 * 0.5), rel=1e-5)
    with pytest.raises(ValueError, match=r"The 'validation' parameter of fit.*weights that are all 0"):
        fit(model, Batches(x, labels, 10), epochs=1, validation=[(x, labels, torch.zeros(50))])


@pytest.mark.parametrize(
    ("likelihood", "outputs", "of_column"),
    [(bbb.Ordinal(3), 1, False), (bbb.Ordinal(3), 1, True), (bbb.Bernoulli(), 1, True)],
    ids=["ordered", "ordered, as a column", "yes or no"],
)
def test_the_error_is_that_of_one_class_for_each_example(
    likelihood: bbb.Likelihood, outputs: int, of_column: bool
) -> None:
    x, _ = points()
    labels = (x[:, 0] > 0).long()[:, None] if of_column else (x[:, 0] > 0).long()
    model = bbb.Bayesian(nn.Linear(3, outputs), likelihood, seed=0)
    (record,) = fit(model, Batches(x, labels, 10), epochs=1, validation=[(x, labels)])
    predicted: Any = model.predict(x, draws=10)
    assert record["validation_error"] == float((predicted.labels.flatten() != labels.flatten()).double().mean())


def test_ignored_classes_are_neither_right_nor_wrong() -> None:
    x, _ = points()
    labels = torch.where(torch.arange(50) < 30, torch.arange(50) % 4, -100)
    model = bbb.Bayesian(nn.Linear(3, 4), bbb.Categorical(ignore_index=-100), seed=0)
    (record,) = fit(model, Batches(x, labels, 10), epochs=1, validation=[(x, labels)])
    predicted: Any = model.predict(x, draws=10)
    assert record["validation_error"] == pytest.approx(float((predicted.labels != labels)[:30].float().mean()))


def test_held_out_batches_are_measured() -> None:
    x, y = points()
    model, (a, b) = bayesian(), points(30)
    history = fit(model, Batches(x, y, 10), epochs=2, validation=DataLoader(TensorDataset(a, b), batch_size=7))
    parts = zip(a.split(7), b.split(7), strict=True)
    expected = sum(-float(model.predict(x, draws=10).log_prob(y).sum()) for x, y in parts) / 30
    assert history[-1]["validation_nll"] == pytest.approx(expected, rel=1e-6)
    assert "validation_error" not in history[-1]
    classifier = bbb.Bayesian(nn.Linear(3, 4), bbb.Categorical(), seed=0)
    labels = torch.arange(50) % 4
    (record,) = fit(
        classifier, Batches(x, labels, 10), epochs=1, validation=[(x[:30], labels[:30]), (x[30:], labels[30:])]
    )
    assert 0 < record["validation_error"] <= 1  # a fraction
    assert record["validation_error"] * 50 == pytest.approx(round(record["validation_error"] * 50))
    plain = linear()
    (record,) = fit(plain, Batches(x, y, 10), epochs=1, validation=[(a[:20], b[:20]), (a[20:], b[20:])])
    assert record["validation_cost"] == pytest.approx(plain(a, b).item(), rel=1e-5)
    (record,) = fit(plain, Batches(x, y, 10), epochs=1, validation=lambda: {"mine": 3.0})
    assert record["mine"] == 3.0


@pytest.mark.parametrize("make", [bayesian, linear])
def test_validation_changes_nothing_of_the_training(make: Any) -> None:
    x, y = points()
    with_it, without = make(), make()
    fit(with_it, Batches(x, y, 10), epochs=3, validation=[(x, y)])
    fit(without, Batches(x, y, 10), epochs=3)
    assert same(with_it, without)


def test_a_cost_that_is_no_number_ends_the_run() -> None:
    x, y = points()
    objective = linear()
    optimiser = torch.optim.SGD(objective.parameters(), lr=1e30)
    with pytest.raises(DivergenceError, match=r"epoch 1 is not a number: choose a learning rate below 1e\+30"):
        fit(objective, Batches(x, y, 10), epochs=3, optimiser=optimiser)


# --- what it leaves alone --------------------------------------------------------------------------------------------


def test_the_generator_is_as_if_nothing_had_been() -> None:
    x, y = points()
    objective = Mean(nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1)))
    before = torch.get_rng_state()
    fit(objective, DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True), epochs=2)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match="pairs"):
        fit(objective, [x], epochs=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_random_is_by_the_seed_of_the_run() -> None:
    x, y = points()
    seen: list[Tensor] = []

    def run(seed: int, disturb: int) -> list[Tensor]:
        torch.manual_seed(0)
        objective = Mean(nn.Sequential(nn.Linear(3, 1)))
        seen.clear()
        objective.net.register_forward_pre_hook(
            lambda _, inputs: seen.append(inputs[0] * torch.rand(len(inputs[0]), 1))
        )
        torch.rand(disturb)
        fit(objective, DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True), epochs=2, seed=seed)
        return list(seen)

    first = run(0, 0)
    torch.testing.assert_close(run(0, 7), first, rtol=0, atol=0)  # whatever torch's generator has done before
    assert not any(torch.equal(one, other) for one, other in zip(first, run(1, 0), strict=True))
    assert len({float(each.sum()) for each in first}) == 10  # anew in every batch of every epoch


def test_frozen_modules_stay_as_they_are() -> None:
    x, y = points()
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    net[1].eval()
    modes: list[list[bool]] = []
    net.register_forward_hook(lambda module, *_: modes.append([each.training for each in module.modules()]))
    mean = net[1].running_mean.clone()
    objective = Mean(net)
    fit(objective, Batches(x, y, 10), epochs=2, validation=[(x, y)])
    trained, frozen = [True, True, False, True, True], [False] * 5
    assert modes == ([trained] * 5 + [frozen]) * 2
    assert [each.training for each in net.modules()] == trained
    assert torch.equal(net[1].running_mean, mean)
    with pytest.raises(ValueError, match=r"must be in training mode: call its train\(\). Got one in evaluation mode"):
        fit(objective.eval(), Batches(x, y, 10), epochs=1)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"epochs": 0}, "'epochs' parameter of fit must be an int"),
        ({"accumulate": 0}, "'accumulate' parameter of fit must be an int"),
        ({"clip": 0.0}, "'clip' parameter of fit must be a float"),
        ({"seed": -1}, "'seed' parameter of fit must be an int"),
        ({"autocast": torch.float16}, "'autocast' parameter of fit must be None or torch.bfloat16"),
        ({"n": 5}, "'n' parameter of fit must be left out where the objective is given"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        fit(linear(), Batches(*points(), 10), **{"epochs": 1, **options})


def test_bad_batches_are_refused() -> None:
    x, y = points()
    with pytest.raises(
        ValueError, match=r"'batches' parameter of fit must be an iterable of pairs \(inputs, targets\)"
    ):
        fit(linear(), DataLoader(TensorDataset(x), batch_size=10), epochs=1)
    with pytest.raises(ValueError, match="'n' parameter of fit must be given where the batches do not say"):
        fit(bayesian(), [(x, y)], epochs=1)
    with pytest.raises(ValueError, match="'targets' parameter of Batches must be tensors"):
        Batches(x, y[:-1], 10)
    with pytest.raises(ValueError, match="'model' parameter of fit must be a Bayesian"):
        fit(lambda x, y: x, [(x, y)], epochs=1)  # type: ignore[arg-type]


def test_a_loader_that_ranks_cannot_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "rank_of_ranks", lambda: (0, 2))
    for shuffle in (False, True):
        loader = DataLoader(TensorDataset(*points()), batch_size=10, shuffle=shuffle)
        with pytest.raises(ValueError, match="a DataLoader that gives every rank the same"):
            fit(linear(), loader, epochs=1)
