"""Values to try in place of good ones, and for which kinds of parameters each of them is right."""

import math
import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesbackprop as bbb

X, Y = torch.linspace(-1, 1, 24).reshape(8, 3), torch.linspace(-1, 1, 8)[:, None]
CLASSES = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
PROBS = torch.full((8, 3), 1 / 3)


class Thing:
    """An object that is nothing in particular."""


def quiet(make: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def small_net(outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, outputs))


def small_model(**options: Any) -> bbb.Bayesian:
    return bbb.Bayesian(small_net(), bbb.Gaussian(0.5), bbb.Normal(1.0), **{"seed": 0, **options})


def small_batches() -> bbb.Batches:
    return bbb.Batches(X, Y, batch_size=4)


SCALARS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "text": lambda: "x",
    "digits": lambda: "3",
    "[]": list,
    "[1]": lambda: [1],
    "['x']": lambda: ["x"],
    "{}": dict,
    "{1: 2}": lambda: {1: 2},
    "True": lambda: True,
    "1j": lambda: 1j,
    "0": lambda: 0,
    "1": lambda: 1,
    "-3": lambda: -3,
    "0.5": lambda: 0.5,
    "1.5": lambda: 1.5,
    "1e-200": lambda: 1e-200,
    "1e200": lambda: 1e200,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "-1e400": lambda: -1e400,
    "2**63": lambda: 2**63,
    "2**64+5": lambda: 2**64 + 5,
    "10**400": lambda: 10**400,
    "-10**400": lambda: -(10**400),
    "10**5000": lambda: 10**5000,  # of which Python refuses to print the digits
    "Decimal": lambda: Decimal("0.5"),
    "Fraction": lambda: Fraction(1, 2),
    "np.int64": lambda: np.int64(2),
    "np.float32": lambda: np.float32(0.5),
    "np.nan": lambda: np.float32(np.nan),
    "np.bool": lambda: np.bool_(True),
    "array of one": lambda: np.array(1),
    "array": lambda: np.ones((8, 3), dtype=np.float32),
    "loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=4),
    "module": lambda: nn.Linear(3, 1),
    "class": lambda: nn.Linear,
    "function": lambda: lambda: None,
    "prior": lambda: bbb.Normal(1.0),
    "likelihood": lambda: bbb.Gaussian(0.1),
    "model": small_model,
    "thing": Thing,
    "tensor of one": lambda: torch.tensor(1),
    "tensor [2]": lambda: torch.ones(2),
}

TENSORS: dict[str, Callable[[], Tensor]] = {
    "float tensor of one": lambda: torch.tensor(0.5),
    "empty tensor": lambda: torch.ones(0),
    "empty rows": lambda: torch.ones(0, 3),
    "no columns": lambda: torch.ones(8, 0),
    "tensor [8, 7]": lambda: torch.ones(8, 7),
    "tensor [5, 3]": lambda: torch.ones(5, 3),
    "tensor [8, 1, 1, 1]": lambda: torch.ones(8, 1, 1, 1),
    "ints [8, 3]": lambda: torch.ones(8, 3, dtype=torch.int64),
    "ints [8]": lambda: torch.full((8,), 7),
    "double": lambda: torch.ones(8, 3, dtype=torch.float64),
    "complex": lambda: torch.ones(8, 3, dtype=torch.complex64),
    "booleans": lambda: torch.ones(8, 3, dtype=torch.bool),
    "nan tensor": lambda: torch.full((8, 3), torch.nan),
    "nan targets": lambda: torch.full((8, 1), torch.nan),
    "meta": lambda: torch.ones(8, 3, device="meta"),
    "sparse": lambda: torch.ones(8, 3).to_sparse(),
    "csr": lambda: quiet(lambda: torch.ones(8, 3).to_sparse_csr()),
}

VALUES: dict[str, Callable[[], Any]] = {**SCALARS, **TENSORS}


class Kind(NamedTuple):
    """A kind of parameter: the values that are right for it, and all that are worth trying."""

    right: tuple[str, ...] = ()
    tried: tuple[str, ...] = tuple(SCALARS)

    def __or__(self, others: "str | Kind") -> "Kind":
        """The same kind, but for which other values are right too."""
        more = (others,) if isinstance(others, str) else others.right
        return Kind((*self.right, *more), self.tried)


ANY = Kind()  # of which nothing in the list is right
FLAG = Kind(("True", "np.bool"))
TEXT = Kind(("text", "digits"))
COUNT = Kind(("1", "np.int64"))
WHOLE = COUNT | "0"
POSITIVE = Kind(("0.5", "1.5", "1", "1e-200", "1e200", "2**63", "2**64+5", "Fraction", "np.int64", "np.float32"))
NOT_NEGATIVE = POSITIVE | "0"
PROBABILITY = Kind(("0", "0.5", "1", "1e-200", "Fraction", "np.float32"))
FUNCTION = Kind(("function", "class", "module", "likelihood", "model"))
PRIOR = Kind(("prior", "None"))
MODEL = Kind(("model",))
DATA = Kind((), tuple(VALUES))
INPUTS = DATA | "tensor [5, 3]"
ROWS = DATA | Kind(tuple(name for name in TENSORS if name not in ("float tensor of one", "empty tensor", "empty rows")))
# What scikit-learn takes for X.
ARRAYS = DATA | Kind(("tensor [5, 3]", "double", "array", "ints [8, 3]", "booleans", "tensor [8, 7]"))
