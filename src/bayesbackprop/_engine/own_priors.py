"""Priors that only Python knows, in pieces that stay in the processor's cache.

-log P(w) is a sum over weights, and each of its slopes depends on one weight. So neither needs what autograd would keep
of a whole parameter for the way back: each piece is forgotten before the next, and the way back computes its density
again. Small parameters share a piece, since the density of each would take longer to call than to compute.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bayesbackprop._engine import cpu
from bayesbackprop._engine.parameters import Parameters
from bayesbackprop.complexity import prior_cost
from bayesbackprop.posterior import WeightPosterior
from bayesbackprop.priors import Prior

# Weights of a piece. In smaller ones two threads of torch do not share an operation; larger ones leave the cache.
PIECE = 2**17

# A density is tried on these, in a table and in two pieces of another shape.
_NUMBERS = torch.linspace(-1.5, 1.0, 15).view(3, 5)


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
    priors = {id(parameters.each[number].prior): parameters.each[number].prior for number in parameters.own_priors}
    numbers = _NUMBERS.to(parameters.mus[0].dtype)
    if "divisible" not in parameters.cache:
        parameters.cache["divisible"] = all(_is_elementwise(prior, numbers) for prior in priors.values())
    # Whether something is trained may change.
    return bool(parameters.cache["divisible"]) and not any(_is_trained(prior, numbers) for prior in priors.values())


def _is_elementwise(prior: Prior, numbers: Tensor) -> bool:
    try:
        with torch.no_grad():
            whole = prior.log_density(numbers)
            pieces = [prior.log_density(piece) for piece in numbers.flatten().split(8)]
    except Exception:  # whatever a user's function raises, it will raise again at the weights
        return False
    return torch.allclose(whole.flatten(), torch.cat(pieces), rtol=1e-5, atol=1e-5, equal_nan=True)


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
