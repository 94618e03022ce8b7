"""Lists, arrays, tables and loaders given by mistake: the error says what to do."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesbackprop as bbb

pytestmark = pytest.mark.identities

X, Y = np.zeros((4, 3), np.float32), np.zeros((4, 1), np.float32)
TX, TY = torch.from_numpy(X), torch.from_numpy(Y)
LOADER: Any = DataLoader(TensorDataset(TX, TY), 2)
ARRAY, LIST, ONE = "torch.as_tensor", "torch.tensor(x) makes one of a list", "give one batch at a time"


def model() -> bbb.Bayesian:
    return bbb.Bayesian(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)), bbb.Gaussian(1.0), seed=0)


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "predict, array": (lambda: model().predict(X), ARRAY),
    "predict, list": (lambda: model().predict(X.tolist()), LIST),
    "predict, table": (lambda: model().predict(pandas.DataFrame(X)), "x.to_numpy()"),
    "predict, loader": (lambda: model().predict(LOADER), ONE),
    "predict, data set": (lambda: model().predict(LOADER.dataset), ONE),
    "predict_mean, array": (lambda: model().predict_mean(X), ARRAY),
    "ensemble, array": (lambda: model().ensemble(2)(X), ARRAY),
    "log_prob, array": (lambda: model().predict(TX, draws=2).log_prob(Y), ARRAY),  # type: ignore[arg-type]
    "save_onnx, array": (lambda: bbb.save_onnx(model(), "never.onnx", X), ARRAY),
    "save_onnx, list": (lambda: bbb.save_onnx(model(), "never.onnx", X.tolist()), LIST),
    "predict, a tensor called as an option": (lambda: model().predict(TX, memory=TX), "goes into inputs="),  # type: ignore[arg-type]
    "objective, array": (lambda: bbb.FreeEnergy(model(), 4)(X, TY), ARRAY),
    "objective, list": (lambda: bbb.FreeEnergy(model(), 4)(X.tolist(), TY), LIST),
    "objective, loader": (lambda: bbb.FreeEnergy(model(), 4)(LOADER, TY), ONE),
    "objective, targets in an array": (lambda: bbb.FreeEnergy(model(), 4)(TX, Y), ARRAY),
    "objective, targets in a list": (lambda: bbb.FreeEnergy(model(), 4)(TX, Y.tolist()), LIST),
    "evaluate, arrays": (lambda: bbb.evaluate(model(), (X, Y)), ARRAY),
    "evaluate, lists": (lambda: bbb.evaluate(model(), (X.tolist(), Y.tolist())), LIST),
    "evaluate, one array": (lambda: bbb.evaluate(model(), X), ARRAY),
    "evaluate, outside in an array": (lambda: bbb.evaluate(model(), (TX, TY), outside=X, draws=2), ARRAY),
    "fit, arrays": (lambda: bbb.fit(model(), (X, Y)), "Batches(x, y, batch_size)"),
    "fit, arrays and n": (lambda: bbb.fit(model(), (X, Y), n=4, epochs=1), "Batches(x, y, batch_size)"),
    "fit, batches of arrays": (lambda: bbb.fit(model(), [(X, Y)], n=4, epochs=1), ARRAY),
}


@pytest.mark.parametrize("call", list(CALLS))
def test_the_error_says_what_to_do(call: str) -> None:
    function, hint = CALLS[call]
    with pytest.raises(ValueError, match=r"The '.*' parameter of ") as error:
        function()
    assert hint in str(error.value)


class Lengths(nn.Module):
    """A network that takes a list beside a tensor, or text alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Any, lengths: list[int] | None = None) -> Tensor:
        if isinstance(x, list):
            x = torch.tensor([[len(text), 0.0, 0.0] for text in x])
        output: Tensor = self.layer(x)
        return output if lengths is None else output + torch.tensor(lengths)[:, None]


def test_what_a_network_wants_is_its_own_matter() -> None:
    odd = bbb.Bayesian(Lengths(), bbb.Gaussian(1.0), seed=0)
    assert odd.predict(TX, lengths=[1, 2, 3, 4], draws=2).mean.shape == (4, 1)
    assert odd.predict(["a", "text"], draws=2).mean.shape == (2, 1)
    bbb.FreeEnergy(odd, 4)((TX, [1, 2, 3, 4]), TY).backward()
