"""A training step of a small fully connected network, in C.

Of a step of 119-100-100-1 arithmetic is a third; the rest is calls. So the weights, their gradients and what is between
the layers stay where they are from step to step, and so do the tables that tell the kernels of them. Nobody else sees
this memory: a step takes it, and gives it back at its end.
"""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bayesbackprop._engine import cpu
from bayesbackprop._engine.parameters import Parameters
from bayesbackprop.likelihoods import Likelihood
from bayesbackprop.noise import Key

kernels = cpu._cpu  # type: ignore[attr-defined]

# Multiplications of a forward pass up to which the kernels beat torch's products: more want several threads, and blocks
# that fit the caches. And weights: twice as many numbers are kept between two steps.
_MOST, _LARGEST = 2**22, 2**18

# Where a network's parameters keep the memory of a step.
_SPACE = "space"

if cpu.available():
    _NAMES = [field.split(":")[0] for field in kernels.LAYER.split()]
    _ROW = struct.Struct(f"={len(_NAMES)}q")
    _FUNCTIONS = kernels.FUNCTIONS.split()
    _X, _Y, _GY = map(_NAMES.index, ("x", "y", "gy"))
    _COST = struct.Struct("=" + "".join(field.split(":")[1] for field in kernels.COST.split()))
    _LIKELIHOODS = kernels.LIKELIHOODS.split()


class Linear(NamedTuple):
    """A linear layer and the function after it: its weight and bias by their numbers, and the function by its name."""

    weight: int
    bias: int | None
    function: str = "IDENTITY"


class Space:
    """The memory of a step on ``batch`` examples, and the tables that tell the kernels of it."""

    def __init__(self, layers: Sequence[Linear], parameters: Parameters, table: cpu.Table, batch: int) -> None:
        self.table, self.batch, self._parameters = table, batch, parameters
        self._wide = parameters.mus[0].dtype is torch.float64
        self.ws, self.gradients = (list(map(torch.empty_like, parameters.mus)) for _ in range(2))
        # The rows of the parameters, for the draw and for the update.
        self.rows = cpu.rows_of(table, self.ws, self.gradients)
        self.moments: cpu.Moments | None = None  # of Adam, as they are in the rows
        shapes = [parameters.mus[layer.weight].shape for layer in layers]
        self._inputs = shapes[0][1]
        # Between the layers: their outputs, and the gradients by these.
        self._between = [parameters.mus[0].new_empty(2, batch, outputs) for outputs, _ in shapes[:-1]]
        self._output = (batch, shapes[-1][0])
        self._layers = bytearray()
        for number, (layer, (outputs, inputs)) in enumerate(zip(layers, shapes, strict=True)):
            row = dict.fromkeys(_NAMES, 0) | {"inputs": inputs, "outputs": outputs}
            row |= {"function": _FUNCTIONS.index(layer.function)}
            row |= {"w": self.ws[layer.weight].data_ptr(), "gw": self.gradients[layer.weight].data_ptr()}
            if layer.bias is not None:
                row |= {"b": self.ws[layer.bias].data_ptr(), "gb": self.gradients[layer.bias].data_ptr()}
            if number:
                row |= dict(zip(("x", "gx"), map(Tensor.data_ptr, self._between[number - 1]), strict=True))
            if number < len(shapes) - 1:
                row |= dict(zip(("y", "gy"), map(Tensor.data_ptr, self._between[number]), strict=True))
            self._layers += _ROW.pack(*row.values())
        self._words = memoryview(self._layers).cast("q")
        self._last = (len(shapes) - 1) * len(_NAMES)

    @staticmethod
    def taken(layers: Sequence[Linear], parameters: Parameters, table: cpu.Table, x: Tensor) -> "Space | None":
        """The memory of a step on ``x``, to be given back; None if the kernels would be slower, or cannot read it."""
        batch, inputs = x.shape
        if batch * parameters.numel > _MOST or parameters.numel > _LARGEST or table.odd or not kernels.QUICK_PRODUCTS:
            return None
        space: Space | None = parameters.cache.pop(_SPACE, None)  # another thread that trains it has its own
        if space is None or space.table is not table or space.batch != batch:
            if len({mu.dtype for mu in parameters.mus}) > 1 or not batch:
                return None
            space = Space(layers, parameters, table, batch)
        return space if inputs == space._inputs else None

    def give_back(self) -> None:
        """Leave it to the next step."""
        self._parameters.cache[_SPACE] = self

    def draw(self, key: Key) -> float:
        """Draw the weights; gives log q(w|theta) - log P(w)."""
        threads = torch.get_num_threads()
        complexity: float = kernels.draw(self.rows, threads, key.seed, int(key.step), int(key.draw), 0.0)
        return complexity

    def run_and_go_back(self, x: Tensor, likelihood: Likelihood, targets: Tensor) -> tuple[Tensor, float]:
        """The likelihood cost; the gradients by the weights are put in their places, and this is the sum of squares."""
        x, output = cpu.readable(x), x.new_empty(self._output)
        self._words[_X], self._words[self._last + _Y] = x.data_ptr(), output.data_ptr()
        kernels.layers_forward(self._layers, self.batch, self._wide)
        cost, slope = self._cost_and_slope(likelihood, output, targets)
        self._words[self._last + _GY] = slope.data_ptr()
        squares: float = kernels.layers_backward(self._layers, self.batch, self._wide)
        return cost, squares

    def _cost_and_slope(self, likelihood: Likelihood, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The likelihood cost and its gradient by the output, which the kernels may read and change."""
        (batch, width), own = self._output, vars(likelihood)
        form = None if "cost" in own or "slope" in own else likelihood.form()  # of the class, not of this one alone
        if form is not None and targets.dtype is output.dtype and targets.is_cpu:
            per_target = form.numbers * (form.actions or 1)
            columns = width // per_target
            if targets.shape == (batch, columns + bool(form.actions)) and width == columns * per_target:
                slope, targets = torch.empty_like(output), cpu.readable(targets)
                kind = _LIKELIHOODS.index(form.kind)
                numbers = (self._wide, batch, width, kind, columns, form.actions, form.number)
                cost = kernels.cost(_COST.pack(*numbers, *map(Tensor.data_ptr, (output, targets, slope))))
                if math.isfinite(cost):
                    return output.new_full((), cost), slope
        cost, slope = likelihood.cost(output, targets), likelihood.slope(output, targets)  # which say what is wrong
        if slope.shape != output.shape or slope.dtype is not output.dtype:
            raise RuntimeError(f"A slope like the output is wanted, of {list(output.shape)} and {output.dtype}.")
        return cost, slope.clone(memory_format=torch.contiguous_format)
