"""Adam: the same numbers as torch's, with as little memory traffic as possible.

With g the gradient of a parameter x at step t, lr its learning rate and d its weight decay:

m <- beta1 m + (1 - beta1) g,    v <- beta2 v + (1 - beta2) g^2
x <- (1 - lr d) x - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

A network with a distribution on every weight has twice the parameters, and all that an optimiser does is to read and
write them. Here one call of a kernel updates them all; and where nobody looks at the gradients of mu and rho, the
kernel that computes them updates mu and rho at once, so that these gradients are never written.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from itertools import chain
from typing import Any, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from torch.optim.adamw import AdamW, adamw

from bayesbackprop._decay import check_decay
from bayesbackprop._engine import cpu, lock
from bayesbackprop._engine.mlp import runs_only_forward
from bayesbackprop._engine.parameters import Parameters
from bayesbackprop._errors import (
    Described,
    check_betas,
    check_flag,
    check_not_negative,
    check_type,
    invalid,
    tensor_shape,
)
from bayesbackprop._gradients import Postponing, check_gradients
from bayesbackprop.objective import Cost, FreeEnergy

__all__ = ["Adam"]


# What is kept of each parameter, by torch's names: the steps taken, m and v.
_STATE = ("step", "exp_avg", "exp_avg_sq")
_kept = operator.itemgetter(*_STATE)


class _Entry(NamedTuple):
    """A parameter, its group, and what is kept of it."""

    parameter: Tensor
    group: dict[str, Any]
    state: dict[str, Tensor]


class _Plan:
    """Some parameters and what is kept of them, as it was when the kernels were asked whether they can update it."""

    def __init__(self, entries: list[_Entry], groups: list[tuple[int, int]], each_updatable: list[bool]) -> None:
        self.entries, self.groups, self.each_updatable = entries, groups, each_updatable
        self.updatable = all(each_updatable)  # by the kernels
        self.parameters, self.states = [each.parameter for each in entries], [each.state for each in entries]
        self.kept = [state[name] for state in self.states for name in _STATE]
        self.addresses = self._addresses()
        self._groups = list({id(each.group): each.group for each in entries}.values())
        self._settings: list[tuple[float, ...]] = []
        self._moments: cpu.Moments | None = None

    def is_of(self, state: Mapping[Tensor, Any], groups: list[tuple[int, int]]) -> bool:
        """Whether all parameters, groups, and what is kept are still these, in the same memory."""
        # All loops are in C: a small network's step has no time for others.
        if self.groups != groups or not all(map(operator.is_, map(state.get, self.parameters), self.states)):
            return False
        try:
            now = chain.from_iterable(map(_kept, self.states))
            return all(map(operator.is_, now, self.kept)) and self.addresses == self._addresses()
        except KeyError:  # something is no longer kept
            return False

    def moments(self) -> cpu.Moments:
        """What the kernels need for the next step: the same object until a setting is changed."""
        settings = [_numbers(group) for group in self._groups]
        if self._moments is None or settings != self._settings:
            known = dict(zip(map(id, self._groups), settings, strict=True))
            of_kept, count = self.addresses[len(self.entries) :], len(_STATE)
            addresses = [tuple(of_kept[count * i : count * (i + 1)]) for i in range(len(self.entries))]
            self._moments = cpu.Moments(addresses, [known[id(each.group)] for each in self.entries])
            self._settings = settings
        return self._moments

    def _addresses(self) -> list[int]:
        """Of the parameters, and of what is kept."""
        return list(map(Tensor.data_ptr, (*self.parameters, *self.kept)))


def _numbers(group: dict[str, Any]) -> tuple[float, ...]:
    """The settings of a group as the kernels take them."""
    lr = float(group["lr"])
    return lr, 0.0, *group["betas"], group["eps"], 1 - lr * group["weight_decay"]


# Hooks of the steps of all optimisers. Torch has no public name for them.
_BEFORE, _AFTER = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks

# Plans to keep: for all parameters, and for those that :meth:`Adam.backward` leaves over.
_PLANS = 4

# Settings of torch's Adam that change what it computes, and their values here.
_FIXED = {"amsgrad": False, "maximize": False, "differentiable": False}

# The settings of a group that is trained by :func:`step_by_torch`, but for its rate.
ADAM_DEFAULTS: dict[str, Any] = {
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "foreach": None,
    "fused": None,
    "capturable": False,
    **_FIXED,
}

_PARAMS = "an iterable of tensors, or of groups such as model.param_groups() gives"


class Adam(AdamW, Postponing):
    """Adam, made for means and spreads; with weight decay, AdamW.

    It is ``torch.optim.AdamW`` with other kernels, and takes its place anywhere: gradients may have been clipped,
    accumulated, scaled or changed by hooks, and a ``state_dict`` of either is one of the other. Parameters in float32
    and float64 on the CPU are updated by one call of a kernel, all others by torch's own functions. The numbers are
    torch's to rounding.

    Two things differ. :meth:`backward` is a second, faster way to take a step. And weight decay, which is 0 by default,
    is given in groups, so that it cannot reach rho by accident:
    ``model.param_groups(weight_decay=1e-2)`` has it for the network alone.

    Args:
        params: Tensors, or groups of them with settings of their own, as from :meth:`Bayesian.param_groups`.
        lr: The learning rate.
        betas: What the running means of the gradient and of its square keep at each step.
        eps: What is added to the root of the mean square.
        fused: Whether torch's own functions are its fused ones, for what the kernel does not update.

    Examples:
        >>> from torch import nn
        >>> from bayesbackprop import Bayesian, FreeEnergy, Gaussian
        >>> free_energy = FreeEnergy(Bayesian(nn.Linear(3, 1), Gaussian(0.1), seed=0), n=20)
        >>> optimiser = Adam(free_energy.param_groups(1e-3, rho_lr=1e-2, weight_decay=1e-4))
        >>> for _ in range(2):
        ...     optimiser.zero_grad()
        ...     cost = free_energy(torch.zeros(20, 3), torch.zeros(20, 1))
        ...     optimiser.backward(cost)  # or cost.backward(), to see the gradients
        ...     optimiser.step()
    """

    # What step() is to compute gradients from, and the plan of the parameters.
    _postponed: tuple[cpu.Backward, _Plan] | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        fused: bool | None = None,
    ) -> None:
        if fused is not None:
            fused = check_flag("Adam", fused=fused)["fused"]
        listed = _listed(params)
        known = all(isinstance(each, Mapping) or _is_parameter(each) for each in listed)
        if isinstance(params, Tensor) or not listed or not known:
            raise invalid("params", "Adam", _PARAMS, params)
        settings = _checked({"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        super().__init__(listed, **settings, fused=fused)
        self._plans: dict[tuple[int, ...], _Plan] = {}
        self._step_supports_amp_scaling = False  # a GradScaler is to scale the gradients itself

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._plans = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own, as fine-tuning needs it that unfreezes layer by layer."""
        params = _listed(param_group.get("params") if isinstance(param_group, Mapping) else param_group)
        if not isinstance(param_group, Mapping) or not all(map(_is_parameter, params)):
            raise invalid("params", "Adam", _PARAMS, param_group)
        if len(set(params)) < len(params):
            raise invalid("params", "Adam", "different tensors", Described("one of them twice"))
        super().add_param_group({**param_group, **_checked({**self.defaults, **param_group}), "params": params})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of this class or of torch's Adam, but for options that this one does not have."""
        for group in state_dict["param_groups"]:
            _checked(group)
            if group["weight_decay"] and not group.get("decoupled_weight_decay", True):
                got = Described("one that adds it to the gradient")
                raise invalid("state_dict", "Adam.load_state_dict", "of an optimiser with decoupled weight decay", got)
        self._postponed = None
        super().load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also those that :meth:`backward` left to :meth:`step`."""
        self._postponed = None
        super().zero_grad(set_to_none)

    def backward(self, cost: Tensor) -> None:
        """``cost.backward()``, but for the gradients of mu and rho, which :meth:`step` computes when it uses them.

        Until then, and after it, these are None: they can be neither read nor clipped, nor unscaled by a
        ``GradScaler``. For that, call ``cost.backward()``, or :meth:`materialise` before. They can be accumulated: what
        came to ``.grad`` before :meth:`step` is part of it. Only :meth:`zero_grad` of the optimiser forgets them, not
        that of the model. Where hooks or other ranks wait for gradients, and for
        parameters that are not drawn by the kernels in C, this is ``cost.backward()`` itself.
        """
        if not isinstance(cost, Tensor) or cost.numel() != 1 or not cost.requires_grad:
            got = tensor_shape(cost) if isinstance(cost, Tensor) else cost
            raise invalid("cost", "Adam.backward", "a tensor of one number that requires a gradient", got)
        before = self._postponed
        try:
            with cpu.postponing(self._postpone):
                cost.backward()
        except BaseException:
            self._postponed = before
            raise

    def materialise(self) -> None:
        """Compute the gradients that :meth:`backward` left to :meth:`step`; from now on they are in ``.grad``."""
        if self._postponed is not None:
            (given, _), self._postponed = self._postponed, None
            with torch.no_grad():
                for parameter, gradient in zip(given.parameters.trained, given.compute(), strict=True):
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    @property
    def postponed(self) -> list[Tensor]:
        """The derivatives by drawn weights, means and variances from which :meth:`step` will compute gradients."""
        return [] if self._postponed is None else self._postponed[0].sources

    @property
    def postponed_squares(self) -> float:
        """The sum of squares of the :attr:`postponed`."""
        return 0.0 if self._postponed is None else self._postponed[0].sum_of_squares()

    def minimise(self, objective: nn.Module, inputs: Any, targets: Any, **options: Any) -> Tensor:
        """A whole training step: the cost of a minibatch, its gradients, a check that they are finite, and the update.

        It does the same as these lines in less time::

            optimiser.zero_grad()
            cost = objective(inputs, targets, **options)
            optimiser.backward(cost)
            optimiser.step()

        Gradients that are not finite are refused with :class:`~bayesbackprop.training.DivergenceError` before anything
        changes. Where the objective is a :class:`FreeEnergy` of a fully connected network, whose likelihood knows its
        slope, all is done without autograd; the numbers, and the noise, are the same. What hooks, other ranks and
        whatever else looks at gradients need is done as ever, in these lines.

        Args:
            objective: A :class:`FreeEnergy`, or another module whose call with ``(inputs, targets)`` gives the cost.
            inputs: What the objective takes.
            targets: What the objective takes.
            **options: What else the objective takes, such as ``n``.

        Returns:
            The cost, which has no gradient any more.

        Examples:
            >>> from bayesbackprop import Bayesian, FreeEnergy, Gaussian
            >>> free_energy = FreeEnergy(Bayesian(nn.Linear(3, 1), Gaussian(0.1), seed=0), n=20)
            >>> optimiser = Adam(free_energy.param_groups())
            >>> costs = [optimiser.minimise(free_energy, torch.ones(20, 3), torch.ones(20, 1)) for _ in range(300)]
            >>> bool(costs[-1] < costs[0])
            True
        """
        check_type("Adam.minimise", nn.Module, "a FreeEnergy, or a module whose call gives a cost", objective=objective)
        self._forget()
        if type(objective) is FreeEnergy and runs_only_forward((objective,)):
            try:
                cost: Tensor = objective.cost_at_once(self._postpone, inputs, targets, **options)
            except BaseException:
                self._postponed = None
                raise
        else:
            cost = objective(inputs, targets, **options)
        if self._postponed is None:
            self.backward(cost)
        check_gradients(objective, self)
        # Another thread that saves the model, or copies it, does so before a step or after it.
        with lock(objective.model.net) if isinstance(objective, FreeEnergy) else nullcontext():
            if cost.requires_grad or self._postponed is None or self._is_watched():
                self.step()
            else:  # all there is to do; the step of torch takes as long to begin and end as this
                check_decay(self)
                (given, plan), self._postponed = self._postponed, None
                with torch.no_grad():
                    cpu.backward_adam(given, plan.moments())
        return _without_gradient(cost)

    def _forget(self) -> None:
        """:meth:`zero_grad`, if there is anything to forget: to ask takes less time."""
        self._postponed = None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.zero_grad()
                    return

    def _is_watched(self) -> bool:
        """Whether someone wants to know of each :meth:`step`: hooks, a scheduler, a subclass, whoever exchanged it."""
        if self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks or _AFTER:
            return True
        own = getattr(type(self).step, "__wrapped__", None)  # torch wraps it in what calls the hooks
        others = any(hook is not check_decay for hook in _BEFORE.values())
        return others or "step" in vars(self) or own not in (_STEP, _STEP.__wrapped__)

    def _postpone(self, parameters: Parameters, drawn: cpu.Table) -> Callable[[cpu.Backward], None] | None:
        """What takes a way back to :meth:`step`, if that can do it and nobody else waits for its gradients."""
        if self._postponed is not None or drawn.odd or dist.is_initialized():
            return None
        for parameter in parameters.trained:
            if not parameter.requires_grad or parameter.grad is not None:
                return None
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                return None
        plan = self._plan(parameters.trained)
        if plan is None or not plan.updatable:
            return None

        def take(given: cpu.Backward) -> None:
            self._postponed = given, plan

        return take

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take a step with the gradients computed so far.

        Args:
            closure: A function that computes them and returns the cost, for those who let the optimiser call it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_postponed()
        given = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        if not given:
            return loss
        if any(parameter.grad.layout is not torch.strided for parameter in given):
            raise RuntimeError("Adam takes no sparse gradients: take torch.optim.SparseAdam for what has them.")
        ours = self._readable(given)
        if ours:
            cpu.adam([each.parameter for each in ours.entries], ours.moments())
        if ours is None or len(ours.entries) < len(given):
            done = {each.parameter for each in ours.entries} if ours else set()
            for group in self.param_groups:
                left = [p for p in group["params"] if p.grad is not None and p not in done]
                step_by_torch([self._entry(parameter, group) for parameter in left], group)
        return loss

    def _step_postponed(self) -> None:
        if self._postponed is None:
            return
        given, plan = self._postponed
        came = any(parameter.grad is not None for parameter in given.parameters.trained)  # another way since
        if came or not self._valid(plan):
            self.materialise()
        else:
            self._postponed = None
            cpu.backward_adam(given, plan.moments())

    def _readable(self, given: list[Tensor]) -> _Plan | None:
        """A plan of those that the kernel can update."""
        if not cpu.available() or not cpu.kernels_wanted() or cpu.traced():
            return None
        plan = self._plan(given)
        if plan is None or (plan.updatable and cpu.gradients_readable(given)):
            return plan
        pairs = zip(given, plan.each_updatable, strict=True)
        some = [parameter for parameter, can in pairs if can and cpu.gradients_readable([parameter])]
        return self._plan(some) if some else None

    def _plan(self, parameters: list[Tensor]) -> _Plan | None:
        """The plan of parameters, made once and revalidated at each use; None if not all are the optimiser's."""
        known = self._plans.get(key := tuple(map(id, parameters)))
        if known is not None and self._valid(known):
            return known
        groups = {parameter: group for group in self.param_groups for parameter in group["params"]}
        if not groups.keys() >= set(parameters):
            return None
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        entries = [self._entry(parameter, groups[parameter]) for parameter in parameters]
        each_updatable = [cpu.updatable([p], [state["exp_avg"]], [state["exp_avg_sq"]]) for p, _, state in entries]
        for can, entry in zip(each_updatable, entries, strict=True):
            if can:  # for the kernel, which counts the steps
                entry.state["step"] = entry.state["step"].to("cpu", torch.float32)
        self._plans[key] = _Plan(entries, self._group_sizes(), each_updatable)
        return self._plans[key]

    def _valid(self, plan: _Plan) -> bool:
        return plan.is_of(self.state, self._group_sizes())

    def _group_sizes(self) -> list[tuple[int, int]]:
        """The groups, and how many parameters each has."""
        return [(id(group), len(group["params"])) for group in self.param_groups]

    def _entry(self, parameter: Tensor, group: dict[str, Any]) -> _Entry:
        return entry(self.state, parameter, group)


_STEP: Any = Adam.step


def _without_gradient(cost: Tensor) -> Tensor:
    if not cost.requires_grad:
        return cost
    if isinstance(cost, Cost):
        return Cost(cost.likelihood.detach(), cost.complexity.detach(), cost.complexity_weight)
    return cost.detach()


def entry(states: Mapping[Tensor, dict[str, Tensor]], parameter: Tensor, group: dict[str, Any]) -> _Entry:
    """A parameter with what is kept of it, which is made at its first step."""
    state = states[parameter]
    if not state:
        device = parameter.device if group["fused"] or group["capturable"] else "cpu"  # as torch has it
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    return _Entry(parameter, group, state)


def step_by_torch(entries: list[_Entry], group: dict[str, Any]) -> None:
    """A step on parameters of one group by the functions of torch."""
    steps, m, v = ([each.state[name] for each in entries] for name in _STATE)
    beta1, beta2 = group["betas"]
    adamw(
        [each.parameter for each in entries],
        [each.parameter.grad for each in entries],  # type: ignore[misc]
        m,
        v,
        [],
        steps,
        has_complex=any(each.parameter.is_complex() for each in entries),
        beta1=beta1,
        beta2=beta2,
        **{name: group[name] for name in ("lr", "weight_decay", "eps", "foreach", "fused", "capturable", *_FIXED)},
    )


def _listed(params: Any) -> list[Any]:
    """What it consists of, or itself."""
    if not isinstance(params, Tensor | Mapping | str):
        with suppress(TypeError):
            return list(params)
    return [params]


def _is_parameter(value: object) -> bool:
    """Whether it is a tensor, or a pair of its name and it, as from ``named_parameters``."""
    return isinstance(value[1] if isinstance(value, tuple) and len(value) == 2 else value, Tensor)


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group as Python's own numbers, after a look at each."""
    for name, known in _FIXED.items():
        if settings.get(name, known) is not known:
            raise invalid(name, "Adam", f"{known}: take torch.optim.AdamW for it", settings[name])
    betas = check_betas("Adam", settings.get("betas"))
    numbers = check_not_negative("Adam", **{name: settings.get(name) for name in ("lr", "eps", "weight_decay")})
    return {**numbers, "betas": betas}
