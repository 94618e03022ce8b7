"""What each parameter of a network is to be: Bayesian, with which prior and estimator, or deterministic, and why."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TypeVar, cast

from torch import nn

from bayesbackprop._engine.rules import ESTIMATORS, Estimator, has_rule
from bayesbackprop._engine.statistics import normalising
from bayesbackprop._errors import Described, check_choice, invalid
from bayesbackprop.families import AnyFamily, Conditional, Diagonal, Family
from bayesbackprop.priors import Prior

T = TypeVar("T")

Select = Callable[[str, nn.Module], bool]

# Batch, layer, group, instance and RMS norms, torch's own and those that model libraries define under the same names.
_NORMALISATION = re.compile(r"Norm(\d+d)?$")


@dataclass(frozen=True)
class Specification:
    """What is decided for one parameter; ``prior`` and ``estimator`` are None where it is not Bayesian."""

    name: str
    shape: tuple[int, ...]
    numel: int
    prior: Prior | None
    estimator: Estimator | None
    reason: str = ""


def per_parameter(spec: T | Mapping[str, T], names: list[str], parameter: str) -> dict[str, T]:
    """One value for each name, from one value for all or from a mapping of names and patterns.

    A parameter's own name counts before patterns, and of those the first that matches.

    Examples:
        >>> per_parameter({"*.bias": 1.0, "*": 0.1}, ["0.weight", "0.bias"], "sigma")
        {'0.weight': 0.1, '0.bias': 1.0}
    """
    if not isinstance(spec, Mapping):
        return dict.fromkeys(names, spec)
    for pattern in spec:
        matches = isinstance(pattern, str) and any(fnmatchcase(name, pattern) for name in names)
        if pattern not in names and not matches:
            constraint = f"a mapping whose names or patterns match Bayesian parameters, which are {names}"
            raise invalid(parameter, "Bayesian", constraint, pattern)
    values: dict[str, T] = {}
    for name in names:
        exact = [spec[name]] if name in spec else []  # a name may itself hold the letters of a pattern
        matching = exact + [value for pattern, value in spec.items() if fnmatchcase(name, pattern)]
        if not matching:
            constraint = f"a mapping that covers '{name}' too (add a pattern '*' for the rest)"
            raise invalid(parameter, "Bayesian", constraint, Described(f"only {list(spec)}"))
        values[name] = matching[0]
    return values


def default_estimator(net: nn.Module) -> tuple[Estimator, str]:
    """The estimator of a network for which none was given, and why if it is not the paper's.

    A batch normalisation that trains normalises by the statistics of a batch. Where all examples share one draw these
    are the draw's own, and what it adds to a unit for every example is taken out again. In evaluation the running
    statistics are those of all draws, nothing is taken out, and predictions are blurred. With a draw for each
    example, as ``flipout`` has it, the statistics of a batch are over draws too, and both are the same.
    """
    if any(layer.training for layer in normalising(net)):
        return "flipout", "flipout for batch normalisation"
    return "shared", ""


def specify(
    net: nn.Module,
    prior: Prior | Mapping[str, Prior],
    estimator: Estimator | Mapping[str, Estimator],
    select: Select | None,
    normalisation: bool,
) -> list[Specification]:
    """Decide for every parameter of ``net``, in the order of ``net.named_parameters()``."""
    parameters = dict(net.named_parameters())
    uses = {name: _uses(net, parameter) for name, parameter in parameters.items()}
    excluded = {
        name: reason
        for name, parameter in parameters.items()
        if (reason := _why_not_bayesian(name, parameter, uses[name][0].module, select, normalisation))
    }
    names = [name for name in parameters if name not in excluded]
    if not names:
        reasons = Described(f"a network of which nothing is: {excluded}")
        raise invalid("net", "Bayesian", "a module of which at least one parameter can be Bayesian", reasons)
    priors = per_parameter(prior, names, "prior")
    for name, value in priors.items():
        if not isinstance(value, Prior):
            raise invalid("prior", "Bayesian", f"a Prior for '{name}', such as ScaleMixture()", value)
    wanted: dict[str, Estimator] = per_parameter(estimator, names, "estimator")
    for rule in wanted.values():
        check_choice("Bayesian", ESTIMATORS, estimator=rule)

    entries: list[Specification] = []
    for name, parameter in parameters.items():
        shape, numel = tuple(parameter.shape), parameter.numel()
        if name in excluded:
            entries.append(Specification(name, shape, numel, None, None, excluded[name]))
            continue
        why = "" if wanted[name] == "shared" else _why_shared(net, uses[name], wanted)
        chosen: Estimator = "shared" if why else wanted[name]
        entries.append(Specification(name, shape, numel, priors[name], chosen, why))
    return entries


def grouped(
    net: nn.Module, names: list[str], family: AnyFamily | Mapping[str, AnyFamily]
) -> list[tuple[list[str], Family]]:
    """The parameters that vary together, and how: those for which the same family was given, in one place."""
    groups: dict[int, tuple[list[str], Family]] = {}
    each: dict[str, AnyFamily] = per_parameter(family, names, "family")
    for name, value in each.items():
        if isinstance(value, Family):
            groups.setdefault(id(value), ([], value))[0].append(name)
        elif not isinstance(value, Diagonal):
            raise invalid("family", "Bayesian", f"a family for '{name}', such as Diagonal() or LowRank(8)", value)
    for some, value in groups.values():
        if isinstance(value, Conditional) and some != names:
            rest = Described(f"{sorted(set(names) - set(some))} besides")
            raise invalid("family", "Bayesian", "one Conditional for all parameters that are Bayesian", rest)
        if len(kinds := {(net.get_parameter(name).dtype, net.get_parameter(name).device) for name in some}) > 1:
            constraint = f"one of parameters that have the same type and device, for {value}"
            raise invalid("family", "Bayesian", constraint, Described(f"{some} of {sorted(map(str, kinds))}"))
    return list(groups.values())


def check_shared(
    names: list[str], estimator: Estimator | Mapping[str, Estimator] | None, groups: list[tuple[list[str], Family]]
) -> None:
    """Refuse an estimator that was given for weights which vary together: they have one draw for all examples."""
    wanted = {} if estimator is None else per_parameter(estimator, names, "estimator")
    for some, family in groups:
        if other := [name for name in some if wanted.get(name, "shared") != "shared"]:
            constraint = f"left out, or 'shared' for {other}, whose weights vary together by {family}"
            if len(other) < len(wanted):
                constraint += f" (for the rest alone: {{{other[0]!r}: 'shared', ..., '*': {wanted[other[0]]!r}}})"
            raise invalid("estimator", "Bayesian", constraint, wanted[other[0]])


def in_groups(entries: list[Specification], groups: list[tuple[list[str], Family]]) -> list[Specification]:
    """The same where weights vary together: they have one draw for all examples."""
    remarks = {name: f"{family} of {len(some)} parameters together" for some, family in groups for name in some}
    return [
        replace(entry, estimator="shared", reason=remarks[entry.name])
        if entry.name in remarks and entry.prior is not None
        else entry
        for entry in entries
    ]


def remarked(entries: list[Specification], estimator: Estimator, why: str) -> list[Specification]:
    """The same, with a remark on those that have an estimator for a reason."""
    return [replace(entry, reason=why) if why and entry.estimator == estimator else entry for entry in entries]


def print_specifications(
    entries: list[Specification], extra: Mapping[str, tuple[str, ...]], extra_titles: tuple[str, ...]
) -> str:
    """The specifications as a table of text, with further columns by parameter name."""
    titles = ("parameter", "shape", "weights", "prior", "estimator", *extra_titles, "remark")
    rows = [titles]
    for entry in entries:
        kind = ("deterministic", "-") if entry.prior is None else (_short(entry.prior), str(entry.estimator))
        columns = extra.get(entry.name, ("-",) * len(extra_titles))
        rows.append(
            (entry.name, "x".join(map(str, entry.shape)) or "1", f"{entry.numel:,}", *kind, *columns, entry.reason)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(titles))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    random = sum(entry.numel for entry in entries if entry.prior is not None)
    total = sum(entry.numel for entry in entries)
    lines.append(f"{random:,} of {total:,} weights are Bayesian.")
    return "\n".join(lines)


def _short(prior: Prior) -> str:
    return re.sub(r"\d+\.\d+(e-?\d+)?", lambda number: f"{float(number[0]):.4g}", repr(prior))


@dataclass(frozen=True)
class _Use:
    path: str
    module: nn.Module
    attribute: str


def _uses(net: nn.Module, parameter: nn.Parameter) -> list[_Use]:
    return [
        _Use(path, module, attribute)
        for path, module in net.named_modules()
        for attribute, value in module._parameters.items()
        if value is parameter
    ]


def _why_not_bayesian(
    name: str, parameter: nn.Parameter, module: nn.Module, select: Select | None, normalisation: bool
) -> str:
    if not parameter.is_floating_point():
        return f"type {parameter.dtype}"
    if not parameter.requires_grad:
        return "frozen: requires_grad is False"
    if _NORMALISATION.search(type(module).__name__) and not normalisation:
        return f"{type(module).__name__}: normalisation stays deterministic"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
        return "max_norm rewrites it in place"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
        return "sparse=True: the gradients of a distribution are dense"
    if select is not None and not select(name, module):
        return "not selected"
    return ""


def _why_shared(net: nn.Module, uses: list[_Use], wanted: Mapping[str, Estimator]) -> str:
    use = uses[0]
    rule = wanted[_join(use.path, use.attribute)]
    if len(uses) > 1:
        others = ", ".join(_join(other.path, other.attribute) for other in uses[1:])
        return f"no {rule}: tied to {others}, which must see the same draw"
    parent = net.get_submodule(use.path.rpartition(".")[0]) if use.path else net
    if isinstance(parent, nn.MultiheadAttention):
        return f"no {rule}: MultiheadAttention computes with it in one fused call"
    if not has_rule(use.module):
        return f"no {rule} for {type(use.module).__name__}"
    if use.attribute != "weight":
        weight = _join(use.path, "weight")
        if wanted.get(weight) != rule:
            return f"no {rule}: a bias follows its weight, which has {wanted.get(weight, 'no noise')}"
        if len(_uses(net, cast(nn.Parameter, use.module.weight))) > 1:
            return f"no {rule}: a bias follows its weight, which is tied"
    return ""


def _join(path: str, attribute: str) -> str:
    return f"{path}.{attribute}" if path else attribute
