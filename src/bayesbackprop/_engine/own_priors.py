"""Priors that only Python knows, in pieces that stay in the processor's cache.

-log P(w) is a sum over weights, and each of its slopes depends on one weight. So neither needs what autograd would keep
of a whole parameter for the way back: each piece is forgotten before the next, and the way back computes its density
again. Small parameters share a piece, since the density of each would take longer to call than to compute.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bayesbackprop._engine import cpu
from bayesbackprop._engine.parameters import Parameters
from bayesbackprop.complexity import prior_cost
from bayesbackprop.posterior import WeightPosterior
from bayesbackprop.priors import Prior

# Weights of a piece. In smaller ones two threads of torch do not share an operation; larger ones leave the cache.
PIECE = 2**17

# Whether a tensor in a density is trained is asked at each step, of these.
_NUMBERS = torch.linspace(-1.5, 1.0, 15).view(3, 5)

# Operations on each number by itself that torch does not call so; and a check, of a distribution on its argument, whose
# result is no part of the density.
_aten = torch.ops.aten
_ELEMENTWISE = {_aten.detach.default, _aten.alias.default, _aten._to_copy.default, _aten.log_sigmoid_forward.default}
_ELEMENTWISE |= {_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default}
_CHECK = _aten._is_all_true.default


class _Piece(NamedTuple):
    """Weights of one prior: each part has the number of a parameter, and which of its weights, flat, they are."""

    prior: Prior
    parts: list[tuple[int, slice]]


def divisible(parameters: Parameters) -> bool:
    """Whether the priors of ``parameters`` that only Python knows, if there are any, may be computed in pieces.

    Not if a density mixes weights or depends on their shape, which it should not, or if a tensor in it is trained.
    """
    if not parameters.own_priors:
        return True
    if not parameters.mus[0].is_cpu:
        return False
    if "constants" not in parameters.cache:
        parameters.cache["constants"] = _constants(parameters)
    constants: list[Tensor] | None = parameters.cache["constants"]
    if constants is None or any(tensor.requires_grad for tensor in constants):
        return False
    priors = {id(parameters.each[number].prior): parameters.each[number].prior for number in parameters.own_priors}
    numbers = _NUMBERS.to(parameters.mus[0].dtype)
    return not any(_is_trained(prior, numbers.clone()) for prior in priors.values())


def _constants(parameters: Parameters) -> list[Tensor] | None:
    """The tensors in the densities, besides the weights; None where a density may not be computed in pieces.

    It may if its operations, and all numbers in them, are the same for whole parameters as for pieces, and if each is
    on every weight by itself. They are watched on tensors without memory.
    """
    found: list[Tensor] = []
    try:
        for piece in _pieces(parameters):
            dtype = parameters.mus[piece.parts[0][0]].dtype
            of_piece = _watch(piece.prior, (sum(which.stop - which.start for _, which in piece.parts),), dtype)
            for number, _ in piece.parts:
                whole = _watch(piece.prior, parameters.mus[number].shape, dtype)
                if not whole.elementwise or whole.steps != of_piece.steps:
                    return None
                found += whole.others
    except Exception:  # whatever a user's function raises, on such tensors or on all
        return None
    return found


def _watch(prior: Prior, shape: Sequence[int], dtype: torch.dtype) -> "_Operations":
    w = torch.empty(shape, dtype=dtype, device="meta")
    operations = _Operations(w)
    with torch.no_grad(), operations:
        prior.log_density(w)
    return operations


class _Operations(TorchDispatchMode):
    """Watches what is computed from ``w``.

    ``steps`` are the operations and the numbers in them, ``elementwise`` tells whether each is on every weight by
    itself, and ``others`` are tensors besides.
    """

    def __init__(self, w: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._w = w
        self._derived = {id(w): w}  # held, so that no other comes to have the same id
        self.steps: list[tuple[Any, list[Any]]] = []
        self.elementwise = True
        self.others: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = [tensor for tensor in given if id(tensor) not in self._derived]
        self.others += others
        if len(others) == len(given):  # nothing of w
            return func(*args, **(kwargs or {}))
        self.steps.append((func, [self._named(leaf) for leaf in leaves]))
        if func is _CHECK:
            return torch.tensor(True)
        changes_w = func._schema.is_mutable and args[0] is self._w
        known = torch.Tag.pointwise in func.tags or func in _ELEMENTWISE
        self.elementwise = self.elementwise and known and not changes_w
        result = func(*args, **(kwargs or {}))
        self._derived |= {id(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        return result

    def _named(self, leaf: Any) -> Any:
        """An argument, comparable with that of another call."""
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in self._derived:
            return "derived"
        return (leaf.dtype, leaf.item()) if leaf.numel() == 1 else id(leaf)


def _is_trained(prior: Prior, numbers: Tensor) -> bool:
    with torch.enable_grad():
        return prior.log_density(numbers).requires_grad


@torch.no_grad()
def costs(parameters: Parameters, ws: Sequence[Tensor]) -> float:
    """-log P(w), summed over the random weights of all parameters whose prior only Python knows."""
    total = 0.0
    for piece in _pieces(parameters):
        v = _joined(parameters, ws, piece)
        rho = _cat([_flat(parameters.rhos[number])[which] for number, which in piece.parts])
        total += float(prior_cost(WeightPosterior(v, rho), piece.prior, None, v))
    return total


def slopes(parameters: Parameters, ws: Sequence[Tensor], places: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """The slopes of :func:`costs` by the weights, part by part, each with its part of ``places``.

    Those of constant weights are among them, for nobody to use.
    """
    for piece in _pieces(parameters):
        v = _joined(parameters, ws, piece).requires_grad_()
        with torch.enable_grad():
            density = piece.prior.log_density(v)
        slope = torch.zeros_like(v)
        if density.requires_grad:  # else it is flat
            (slope,) = torch.autograd.grad(density, v, density.new_tensor(-1.0).expand_as(density))
        to = [places[number].view(-1)[which] for number, which in piece.parts]
        yield from zip(to, slope.split([len(part) for part in to]), strict=True)


def put_slopes(parameters: Parameters, ws: Sequence[Tensor]) -> tuple[list[Tensor | None], list[Tensor]]:
    """The :func:`slopes` by parameter, None where there are none, and the memory that they are in: for Delta_rho."""
    places = cpu.buffers_for_rho(parameters)
    for part, slope in slopes(parameters, ws, places):
        part.copy_(slope)
    return [place if number in parameters.own_priors else None for number, place in enumerate(places)], places


def _pieces(parameters: Parameters) -> list[_Piece]:
    """All weights whose prior only Python knows: each piece, but the last of a prior, has as many."""
    known: list[_Piece] | None = parameters.cache.get("pieces")
    if known is not None:
        return known
    kinds: dict[tuple[int, torch.dtype], list[int]] = {}
    for number in parameters.own_priors:
        kinds.setdefault((id(parameters.each[number].prior), parameters.mus[number].dtype), []).append(number)
    made: list[_Piece] = []
    for numbers in kinds.values():
        room = 0
        for number in numbers:
            begin, n = 0, parameters.mus[number].numel()
            while begin < n:
                if not room:
                    made.append(_Piece(parameters.each[number].prior, []))
                    room = PIECE
                end = min(n, begin + room)
                made[-1].parts.append((number, slice(begin, end)))
                room -= end - begin
                begin = end
    parameters.cache["pieces"] = made
    return made


def _joined(parameters: Parameters, ws: Sequence[Tensor], piece: _Piece) -> Tensor:
    """Where the prior is met: at the weights, less what it is centred on."""
    found: list[Tensor] = []
    for number, which in piece.parts:
        v, centre = _flat(ws[number])[which], parameters.each[number].centre
        if parameters.deviates[number]:
            v = v + _flat(parameters.mus[number])[which]
        found.append(v if centre is None else v - _flat(centre)[which])
    return _cat(found).detach()


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten()


def _cat(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
