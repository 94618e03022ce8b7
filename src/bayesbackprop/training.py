"""Training: one loop for every model, loader and optimiser.

Everything random is a pure function of the seed: the order of the examples of (seed, epoch), what a loader or dropout
draws of (seed, batch). So a checkpoint holds no state of a generator, and a run that was killed goes on bit for bit.

The loop knows nothing of progress bars, files or averages: those are callbacks (:mod:`bayesbackprop.callbacks`).
"""

import itertools
import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils._pytree import tree_map_only
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from bayesbackprop._batches import hint_for
from bayesbackprop._engine import evaluating, lock
from bayesbackprop._errors import (
    Described,
    check_count,
    check_positive,
    check_seed,
    check_type,
    check_weights,
    check_whole,
    invalid,
    is_list,
    tensors_of,
)
from bayesbackprop._gradients import DivergenceError, check_gradients
from bayesbackprop._ranks import distributed, ending_together, over_ranks, rank_of_ranks
from bayesbackprop._runs import Callback, Record, Run
from bayesbackprop._signals import TerminatedError, interrupt_deferred, terminate
from bayesbackprop.convergence import Convergence, falling
from bayesbackprop.families import Mixture
from bayesbackprop.model import Bayesian
from bayesbackprop.objective import FreeEnergy
from bayesbackprop.optim import IVON, Adam
from bayesbackprop.prediction import ClassPredictive

__all__ = [
    "Batches",
    "Callback",
    "DivergenceError",
    "Record",
    "Run",
    "TerminatedError",
    "check_gradients",
    "distributed",
    "fit",
    "interrupt_deferred",
    "terminate",
]

Validation = Callable[[], Mapping[str, float]]

# Seeds of epochs and batches must not meet those of neighbouring runs.
_STRIDE = 1_000_003
# Three streams of seeds that never meet: for a step (dropout), to fetch a batch, and to begin an epoch.
_STREAM = 2**61
_STEP, _FETCH, _BEGIN = 0, _STREAM, 2 * _STREAM

# Draws of a step of weights that vary together: with one, small networks of 10 tanh units ended 10 to 25 nats higher.
_DRAWS_TOGETHER = 8

# Networks to average in the predictions on held-out data: enough to compare epochs, and quick.
_VALIDATION_DRAWS = 10


class Batches:
    """Minibatches of tensors in memory, in a new order each epoch: a pure function of (seed, epoch).

    Ranks share each minibatch: rank r has the rows r, r + ranks, ... of it.

    Args:
        inputs: A tensor, or a tuple or mapping of tensors, one row for each example.
        targets: The same for the targets.
        batch_size: Examples of a minibatch, over all ranks.
        seed: Of the order.
        order: The order of an epoch, by its number from 0, instead of a random permutation by ``seed``.
        weights: What each example counts, ``[N]``; a minibatch is then ``(inputs, targets, weights)``.

    Examples:
        >>> batches = Batches(torch.arange(5.0)[:, None], torch.arange(5), batch_size=2)
        >>> [len(targets) for _, targets in batches]
        [2, 2, 1]
    """

    def __init__(
        self,
        inputs: Any,
        targets: Any,
        batch_size: int,
        seed: int = 0,
        *,
        order: Callable[[int], Tensor] | None = None,
        weights: Tensor | None = None,
    ) -> None:
        self.batch_size = check_count("Batches", batch_size=batch_size)["batch_size"]
        seed = check_seed("Batches", seed=seed)["seed"]
        check_type("Batches", Callable | None, "None or a function", order=order)
        for name, values in (("inputs", inputs), ("targets", targets)):
            tensors = tensors_of(values)
            if not tensors or not all(tensor.dim() and len(tensor) for tensor in tensors):
                constraint = "a tensor, or a tuple or mapping of tensors, with a row for each example"
                raise invalid(name, "Batches", constraint, values)
        lengths = {len(tensor) for tensor in tensors_of((inputs, targets))}
        if len(lengths) != 1:
            constraint = "tensors, or tuples or mappings of them, of as many rows as the inputs"
            raise invalid("targets", "Batches", constraint, Described(f"lengths {sorted(lengths)}"))
        (self.examples,) = lengths
        if weights is not None:
            check_weights("Batches", weights, self.examples)
        self.inputs, self.targets, self.weights = inputs, targets, weights
        random, n = torch.Generator(), self.examples
        self._order = order or (lambda epoch: torch.randperm(n, generator=random.manual_seed(_number(seed, epoch))))
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The next pass is that of ``epoch``, from 0."""
        self._epoch = check_count("Batches.set_epoch", least=0, epoch=epoch)["epoch"]

    def __len__(self) -> int:
        return math.ceil(self.examples / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        rank, ranks = rank_of_ranks()
        if self.batch_size % ranks or self.examples % self.batch_size % ranks:
            constraint = f"such that {ranks} ranks can share each minibatch evenly, the last of an epoch too"
            raise invalid("batch_size", "Batches", constraint, self.batch_size)
        order = self._order(self._epoch)
        fits = isinstance(order, Tensor) and order.dtype == torch.int64 and order.dim() == 1
        if not fits or not len(order) or bool(((order < 0) | (order >= self.examples)).any()):
            constraint = f"a function that gives the numbers of rows, a tensor of int64 in [0, {self.examples})"
            raise invalid("order", "Batches", constraint, order)
        parts = (self.inputs, self.targets) if self.weights is None else (self.inputs, self.targets, self.weights)
        for rows in order.split(self.batch_size):
            own = operator.itemgetter(rows[rank::ranks])
            yield tuple(_of_each(part, own) for part in parts)


def fit(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    epochs: int | None = None,
    n: int | None = None,
    optimiser: Optimizer | None = None,
    scheduler: LRScheduler | None = None,
    validation: Iterable[Any] | Validation | None = None,
    device: str | torch.device | None = None,
    autocast: torch.dtype | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
) -> list[Record]:
    """Train ``model``, from wherever a checkpoint left it, and return a record for each epoch.

    No module is put into training mode: what you froze with ``eval()`` stays as it is. Torch's generators are after it
    as they were before.

    Ctrl-C and SIGTERM end the run, on all ranks, after the step that is being taken, and a second one at once. Then
    ``KeyboardInterrupt`` is raised, or :class:`TerminatedError`, with which the process exits with 143. Where a handler
    of your own waits for the signal, it is left alone.

    Args:
        model: A :class:`Bayesian`, trained on its :class:`FreeEnergy`, in closed form where there is one; or an
            objective: a module whose call with ``(inputs, targets)`` gives the cost of a minibatch as a mean over its
            examples.
        batches: A ``DataLoader``, :class:`Batches` or any iterable of pairs ``(inputs, targets)``, or of triples
            ``(inputs, targets, weights)`` where examples have weights, which the objective gets as ``weights=``. Its
            ``set_epoch``, or that of its sampler, is called before each epoch.
        epochs: Passes over ``batches``; None for as many as it takes until the cost has stopped falling
            (:class:`~bayesbackprop.callbacks.Convergence`, which may also be given, with settings of its own).
        n: The number of examples in the whole training set, which a :class:`Bayesian` needs. Known of a loader.
        optimiser: Any whose ``step`` needs no closure; :class:`Adam` unless given, with a rate of 3e-3, or of
            0.5 / sqrt(n) where the run is to converge. Of that one, the gradients of mu and rho are never in
            ``.grad``, unless they are clipped or accumulated. :class:`IVON` is made for an objective, which is then
            the one that is minimised.
        scheduler: Of the learning rate, moved on after every step of the optimiser. Unless given, the rate of our own
            optimiser falls linearly to 0 over the second half of the run; that of any, at the end of one that
            converges.
        validation: Held-out batches; or a function that measures what it likes, for the record of the epoch. Of
            batches it is ``validation_nll``, the mean -log p(y|x), and ``validation_error``, the fraction of wrong
            classes, where each example has one class; both by weight, where examples have weights. Of an objective
            that is no :class:`FreeEnergy` it is ``validation_cost``.
        device: Where to train; where the model is unless given.
        autocast: ``torch.bfloat16`` for mixed precision.
        accumulate: Batches whose gradients make one step, each weighted by its number of examples: as one large batch.
        clip: The largest norm of the gradient of a step.
        callbacks: What else to do, from :mod:`bayesbackprop.callbacks` or your own.
        seed: Of dropout, and of what a loader draws from torch's generator: its order, and augmentations.

    Examples:
        >>> from bayesbackprop import Gaussian
        >>> x = torch.linspace(-1, 1, 50)[:, None]
        >>> model = Bayesian(nn.Linear(1, 1), Gaussian(0.1), seed=0)
        >>> history = fit(model, Batches(x, 2 * x, batch_size=10), epochs=20)
        >>> history[-1]["cost"] < history[0]["cost"]
        True
    """
    accumulate = check_count("fit", accumulate=accumulate)["accumulate"]
    if epochs is not None:
        epochs = check_count("fit", epochs=epochs)["epochs"]
    seed = check_seed("fit", seed=seed)["seed"]
    if clip is not None:
        clip = check_positive("fit", clip=clip)["clip"]
    _check_parts(batches, optimiser, scheduler, validation, device, callbacks)
    if autocast is not None and autocast is not torch.bfloat16:
        raise invalid("autocast", "fit", "None or torch.bfloat16, which needs no scaling of the loss", autocast)
    converging = next((callback for callback in callbacks if isinstance(callback, Convergence)), None)
    if epochs is None and converging is None:
        callbacks = [converging := Convergence(), *callbacks]
    objective = _objective(model, batches, n, optimiser, converges=converging is not None)
    _check_optimiser(objective, optimiser, scheduler, clip)
    if device is not None:
        objective.to(device)
    place = next((parameter.device for parameter in objective.parameters()), torch.device("cpu"))
    measure = partial(_measure, objective, validation, place) if isinstance(validation, Iterable) else validation
    weighs_minibatches = isinstance(objective, FreeEnergy) and objective.weighs_minibatches
    steps = None
    with suppress(TypeError):  # a loader of a stream has a __len__ that refuses
        steps = math.ceil(len(batches) / accumulate)  # type: ignore[arg-type]
    own = optimiser is None
    if optimiser is None:
        trained = objective.param_groups() if isinstance(objective, FreeEnergy) else objective.parameters()
        optimiser = Adam(trained, *_rate_and_betas(objective, converging), fused=True)
    run = Run(objective, optimiser, scheduler, epochs or math.inf, steps, callbacks, seed, accumulate)
    falls = scheduler is None and (own or converging is not None)
    if falls:
        rate = partial(_rate, run) if converging is None else converging.rate
        run.scheduler = scheduler = LambdaLR(optimiser, rate)
    backward: Callable[[Tensor], None] = Tensor.backward
    minimise: Callable[..., Tensor] | None = None
    if isinstance(optimiser, Adam) and clip is None and accumulate == 1:
        backward = optimiser.backward
        if isinstance(objective, FreeEnergy) and run.ranks == 1 and autocast is None:
            minimise = partial(optimiser.minimise, objective)

    devices, kind = ([], "cuda") if place.type == "cpu" else ([place], place.type)
    generators = torch.random.fork_rng(devices, device_type=kind)
    with generators, ending_together() as interrupted, ExitStack() as ending:
        for callback in callbacks:
            ending.callback(callback.on_end, run)  # however the run ends; the last is told first
        for callback in callbacks:
            callback.restore(run)
        for callback in callbacks:
            callback.on_start(run)
        forward: Any = objective
        if run.ranks > 1:
            forward = DistributedDataParallel(objective, find_unused_parameters=_has_unused_parameters(model))
        # Another thread that saves the model, or copies it, does so before a step or after it.
        whole = lock(objective.model.net) if isinstance(objective, FreeEnergy) else nullcontext()

        choose: Callable[[Any], None] = model.choose_estimator if isinstance(model, Bayesian) else _ignore
        if isinstance(model, Bayesian) and not run.goes_on:  # the checkpoint is of a run that is over
            for inputs, *_ in itertools.islice(batches, 1):
                choose(inputs)
        while run.goes_on:
            if run.steps is None and run.epoch:  # of a stream it is known when it has been seen
                run.steps = (run.step - math.ceil(run.taken / accumulate)) // run.epoch
            started = time.perf_counter() - run.seconds
            left = _batches_left(batches, run, place, choose)
            while group := list(itertools.islice(left, accumulate)):
                if interrupted():
                    run.interrupted = True
                    break

                # The gradient of the mean cost of all examples of the group.
                examples = sum(size for *_, size in group)
                cost_before, examples_before = run.sums.get("cost", 0.0), run.examples
                if minimise is None:
                    optimiser.zero_grad()
                for number, (inputs, targets, weights, size) in enumerate(group):
                    _seed(place, seed, _STEP, (run.step * accumulate + number) * run.ranks + run.rank)
                    is_last = number == len(group) - 1
                    options = {**weights, **({"batch": run.taken} if weighs_minibatches else {})}
                    if minimise is not None:  # the whole step: there is nothing else in the group
                        cost = minimise(inputs, targets, **options)
                    else:
                        with nullcontext() if is_last or run.ranks == 1 else forward.no_sync():
                            with torch.autocast(place.type, autocast) if autocast else nullcontext():
                                cost = forward(inputs, targets, **options)
                            backward(cost / (examples / size))
                    _add(run, cost, size)
                if minimise is None:
                    _check_step(run, clip)
                    with whole:
                        optimiser.step()
                if scheduler is not None:
                    scheduler.step()
                run.step += 1
                run.cost = (run.sums["cost"] - cost_before) / (run.examples - examples_before)
                run.seconds = time.perf_counter() - started
                for callback in callbacks:
                    callback.on_step(run)

            if run.interrupted:
                break
            _end_epoch(run, measure)
            for callback in callbacks:
                callback.on_epoch(run)
        run.complete = not run.interrupted
    if falls:  # so that a given optimiser can go on
        for settings in optimiser.param_groups:
            settings["lr"] = settings["initial_lr"]
    return run.history


# --- the parts of the loop -------------------------------------------------------------------------------------------


def _check_parts(
    batches: object, optimiser: object, scheduler: object, validation: object, device: Any, callbacks: Any
) -> None:
    """Refuse whatever is of another type than :func:`fit` can use."""
    if not _is_iterable(batches):
        raise invalid("batches", "fit", "a DataLoader, Batches or another iterable of pairs", batches)
    known = "None, or an optimiser of torch.optim, made with the model's parameters"
    check_type("fit", Optimizer | None, known, optimiser=optimiser)
    check_type("fit", LRScheduler | None, "None, or a scheduler of torch.optim", scheduler=scheduler)
    if validation is not None and not callable(validation) and not _is_iterable(validation):
        raise invalid("validation", "fit", "None, an iterable of pairs (inputs, targets), or a function", validation)
    if not is_list(callbacks) or not all(isinstance(each, Callback) for each in callbacks):
        raise invalid("callbacks", "fit", "a list of callbacks", callbacks)
    if device is not None:
        try:
            torch.device(device)
        except (RuntimeError, TypeError, ValueError) as error:
            raise invalid("device", "fit", "None, or a device that torch knows", device) from error


def _is_iterable(value: object) -> bool:
    """Whether there is more than one thing in it, and no letters."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes) and getattr(value, "ndim", 1) > 0


def _objective(
    model: object, batches: Iterable[Any], n: int | None, optimiser: Optimizer | None, converges: bool
) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise invalid("model", "fit", "a Bayesian, or a module whose call gives a cost", model)
    if not model.training:
        raise invalid("model", "fit", "in training mode: call its train()", Described("one in evaluation mode"))
    check_whole("model", "fit", model)
    sampler: Any = getattr(batches, "sampler", None)
    _, ranks = rank_of_ranks()
    if (
        ranks > 1
        and isinstance(batches, DataLoader)
        and isinstance(sampler, RandomSampler | SequentialSampler)
        and type(batches.batch_sampler) is BatchSampler  # one of the user's own may know of ranks
    ):
        constraint = "Batches, or a DataLoader with a DistributedSampler, where several ranks share the work"
        raise invalid("batches", "fit", constraint, Described("a DataLoader that gives every rank the same"))
    if not isinstance(model, Bayesian):
        if n is not None:
            raise invalid("n", "fit", "left out where the objective is given, which knows it", n)
        if not any(True for _ in model.parameters()):
            raise invalid("model", "fit", "a module with parameters to train", model)
        return model
    if n is None:
        n = getattr(batches, "examples", None)
    if n is None:
        try:
            n = len(batches.dataset)  # type: ignore[attr-defined]
        except (AttributeError, TypeError):
            constraint = "given where the batches do not say how many examples the training set has"
            if isinstance(batches, tuple):
                constraint += " (Batches(x, y, batch_size) makes batches of two tensors, and torch.as_tensor tensors)"
            raise invalid("n", "fit", constraint, None) from None
        takes_all = isinstance(sampler, DistributedSampler) or type(sampler) in (RandomSampler, SequentialSampler)
        if isinstance(batches, DataLoader) and not (takes_all and len(sampler) >= n // ranks):
            constraint = "given where a sampler decides which examples belong to the training set"
            raise invalid("n", "fit", constraint, None)
    if isinstance(optimiser, IVON) and optimiser.objective.model is model and optimiser.objective.n == n:
        return optimiser.objective
    draws = _draws(model, converges)
    try:
        return FreeEnergy(model, n, draws=draws, complexity="closed")  # with less noise, where there is a closed form
    except ValueError:
        return FreeEnergy(model, n, draws=draws)


def _draws(model: Bayesian, converges: bool) -> int:
    """The draws of a step: one, but of weights that vary together, and so are the same for all examples, several.

    They are so many only in a run that is to converge, and of a mixture in any as many from each component.
    """
    least = _DRAWS_TOGETHER if converges and model.families else 1
    components = math.lcm(*(family.components for _, family in model.families if isinstance(family, Mixture)))
    return components * math.ceil(least / components)


def _check_optimiser(objective: nn.Module, optimiser: Optimizer | None, scheduler: object, clip: float | None) -> None:
    if isinstance(optimiser, IVON):  # it reads sigma off the gradients
        if objective is not optimiser.objective:
            got = Described("an IVON of another")
            raise invalid("optimiser", "fit", "one for this objective, or for this model and n", got)
        if clip is not None:
            raise invalid("clip", "fit", "None with IVON, for which the size of a gradient counts", clip)
    if isinstance(optimiser, torch.optim.LBFGS):
        raise invalid("optimiser", "fit", "one whose step needs no closure", Described("LBFGS"))
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        got = Described("ReduceLROnPlateau: step it in a callback")
        raise invalid("scheduler", "fit", "one that needs no measurement to step", got)
    if optimiser is None:
        if scheduler is not None:
            raise invalid("optimiser", "fit", "given where a scheduler is, which moves the rates of its own", None)
    elif set(objective.parameters()).isdisjoint(p for group in optimiser.param_groups for p in group["params"]):
        raise invalid("optimiser", "fit", "one of the model's parameters", Described("one of none of them"))


def _has_unused_parameters(model: nn.Module) -> bool:
    """Whether there are families that only start at mu and rho."""
    return isinstance(model, Bayesian) and not all(family.about_mu for _, family in model.families)


def _rate_and_betas(objective: nn.Module, converging: Convergence | None) -> tuple[float, tuple[float, float]]:
    """Of our own optimiser: the best that were found over many tasks (docs/decisions/fitting.md).

    To converge, a step is to be about as long as the posterior is wide, which n examples make as 1 / sqrt(n).
    """
    if converging is None or not isinstance(objective, FreeEnergy):
        return 3e-3, (0.9, 0.999)
    return min(0.1, 0.5 / math.sqrt(objective.n)), (0.9, 0.99)


def _rate(run: Run, step: int) -> float:
    """The learning rate after so many steps, as a fraction of that at the start: it falls over the second half."""
    return 1.0 if run.steps is None else falling(step, run.epochs * run.steps / 2, run.epochs * run.steps)


def _ignore(inputs: Any) -> None:
    """What there is to do with the inputs of a model that has nothing to choose."""


def _batches_left(
    batches: Iterable[Any], run: Run, device: torch.device, look: Callable[[Any], None]
) -> Iterator["_Batch"]:
    """The batches of the running epoch without those that it had before it was resumed.

    ``look`` gets the inputs of the epoch's first batch even so: a run may be resumed when none is left.
    """
    owners: list[Any] = [batches, getattr(batches, "sampler", None), getattr(batches, "batch_sampler", None)]
    for owner in owners:
        if hasattr(owner, "set_epoch"):
            owner.set_epoch(run.epoch)
    had, first = run.taken, run.step * run.accumulate - run.taken
    _seed(device, run.seed, _BEGIN, run.epoch)  # the same for all ranks, so that they can share an order
    iterator = iter(batches)
    for number in itertools.count():
        _seed(device, run.seed, _FETCH, (first + number) * run.ranks + run.rank)
        try:
            batch = next(iterator)
        except StopIteration:
            break
        if number and number < had:
            continue
        prepared = _prepared(batch, device)
        if number == 0:
            look(prepared[0])
        if number >= had:
            yield prepared
    if number == 0:
        constraint = f"an iterable that has batches in each of {run.epochs} epochs"
        raise invalid("batches", "fit", constraint, Described(f"none in epoch {run.epoch + 1}"))


# Inputs, targets, the weights of the examples (if there are any, as an argument of the objective) and their number.
_Batch = tuple[Any, Any, dict[str, Any], int]


def _prepared(batch: Any, device: torch.device, name: str = "batches") -> _Batch:
    """A batch on ``device``."""
    if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
        got, hint = Described(f"a {type(batch).__name__}"), hint_for(batch)
        if isinstance(batch, Tensor) or hint is not None:
            hint = "Batches(x, y, batch_size) makes one of two tensors" + (f"; {hint}" if hint else "")
        pairs = "an iterable of pairs (inputs, targets), or of (inputs, targets, weights)"
        raise invalid(name, "fit", pairs + (f" ({hint})" if hint else ""), got)
    inputs, targets, *weights = (_of_each(part, lambda tensor: tensor.to(device, non_blocking=True)) for part in batch)
    for tensor in (*tensors_of(targets), *tensors_of(inputs)):
        if tensor.dim():
            return inputs, targets, {"weights": weights[0]} if weights else {}, len(tensor)
    hint = next(filter(None, map(hint_for, batch)), None)
    pairs = "an iterable of pairs (inputs, targets) of tensors"
    raise invalid(name, "fit", pairs + (f" ({hint})" if hint else ""), Described("none"))


def _of_each(values: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same structure as ``values``, with ``function`` of each tensor in it."""
    # A lone tensor, as most inputs are, is quicker without the tree.
    return function(values) if isinstance(values, Tensor) else tree_map_only(Tensor, function, values)


def _add(run: Run, cost: Tensor, size: int) -> None:
    """Add the cost of a batch to those of its epoch, so that each example counts once: the last batch may be short."""
    parts = {name: getattr(cost, name) for name in ("likelihood", "complexity") if hasattr(cost, name)}
    values = {"cost": cost, **parts}
    sums = over_ranks([size, *(size * float(value.detach()) for value in values.values())])
    for name, total in zip(values, sums[1:], strict=True):
        run.sums[name] = run.sums.get(name, 0.0) + total
    run.examples += int(sums[0])
    run.taken += 1


def _check_step(run: Run, clip: float | None) -> None:
    """Refuse a step whose gradient is not finite, before the parameters change; clip the norm of any other."""
    try:
        norm = check_gradients(run.objective, run.optimiser, norm=clip is not None)
    except DivergenceError:
        _check_costs(run)  # which may have been the first to diverge
        raise
    if clip is not None and norm is not None:
        nn.utils.clip_grads_with_norm_(run.objective.parameters(), clip, norm)


def _check_costs(run: Run) -> None:
    if not all(map(math.isfinite, run.means.values())):
        rate = max(float(group.get("initial_lr", group["lr"])) for group in run.optimiser.param_groups)
        which = f"The cost of epoch {run.epoch + 1}"
        raise DivergenceError(f"{which} is not a number: choose a learning rate below {rate:g}.")


def _end_epoch(run: Run, measure: Validation | None) -> None:
    means, epoch = run.means, run.epoch + 1
    _check_costs(run)
    measured: Mapping[str, float] = {}
    if measure is not None:
        with run.evaluating():
            measured = measure()
        known = isinstance(measured, Mapping) and all(isinstance(value, Real) for value in measured.values())
        if not known:
            constraint = "batches, or a function that gives a mapping of names to floats"
            raise invalid("validation", "fit", constraint, Described(f"a function that gives {measured!r}"))
    run.history.append({"epoch": epoch, **means, **measured, "seconds": run.seconds})
    run.taken = run.examples = 0
    run.sums, run.seconds = {}, 0.0


def _measure(objective: nn.Module, batches: Iterable[Any], device: torch.device) -> dict[str, float]:
    """How well held-out batches are predicted, as means over their examples."""
    sums: dict[str, tuple[float, float]] = {}
    for batch in batches:
        for name, found in _held_out(objective, *_prepared(batch, device, "validation")).items():
            sums[name] = tuple(map(sum, zip(sums.get(name, (0.0, 0.0)), found, strict=True)))  # type: ignore[assignment]
    if not any(count for _, count in sums.values()):
        got = Described("weights that are all 0" if sums else "none")
        raise invalid("validation", "fit", "an iterable that has batches after each epoch", got)
    return {f"validation_{name}": total / count for name, (total, count) in sums.items() if count}


def _held_out(
    objective: nn.Module, inputs: Any, targets: Any, weights: dict[str, Any], size: int
) -> dict[str, tuple[float, float]]:
    """How well a batch is predicted, as sums over its examples and what they count together: by weight, if any."""
    if not isinstance(objective, FreeEnergy):
        with evaluating(objective):
            return {"cost": (size * float(objective(inputs, targets, **weights)), size)}
    predicted = objective.model.predict(inputs=inputs, draws=_VALIDATION_DRAWS)
    log_prob = predicted.log_prob(targets)  # of each element of a target; an example may have many
    log_prob = log_prob.reshape(len(log_prob), -1).sum(1)
    counts = torch.ones_like(log_prob)
    for each in weights.values():
        check_weights("fit", each, len(log_prob))
        counts = each.to(log_prob)
    measured = {"nll": (-log_prob, counts)}
    if isinstance(predicted, ClassPredictive) and targets.numel() == len(log_prob):
        truth = targets.flatten()
        known = truth != getattr(predicted.components, "ignore_index", -1)
        measured["error"] = (predicted.labels.flatten() != truth, counts * known)
    return {name: (float((value * count).sum()), float(count.sum())) for name, (value, count) in measured.items()}


# --- seeds -----------------------------------------------------------------------------------------------------------


def _number(seed: int, number: int, stream: int = 0) -> int:
    folded = seed + seed // _STREAM * _STRIDE  # or seeds beyond a stream would begin again
    return (folded * _STRIDE + number) % _STREAM + stream


def _seed(device: torch.device, seed: int, stream: int, number: int) -> None:
    """Seed what dropout and loaders draw from."""
    value = _number(seed, number, stream)
    torch.default_generator.manual_seed(value)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(value)
