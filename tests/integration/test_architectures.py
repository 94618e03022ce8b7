"""Networks as people have them train, predict and go through files unchanged: the rows of docs/supported.md."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bayesbackprop as bbb
from architectures import ARCHITECTURES, B
from bayesbackprop._trees import tensors_in

pytestmark = pytest.mark.equivalence


def wrapped(name: str) -> bbb.Bayesian:
    row = ARCHITECTURES[name]
    torch.manual_seed(0)
    options: dict[str, Any] = {"select": row.select, "output": row.output, "sigma": 0.05, "seed": 0}
    return bbb.Bayesian(row.make(), row.likelihood(), **options)


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_it_trains_predicts_and_is_saved(name: str, tmp_path: Path) -> None:
    row, model = ARCHITECTURES[name], wrapped(name)
    torch.manual_seed(1)
    inputs, targets = row.inputs(), row.targets()

    for draws in (1, 2):
        cost = bbb.FreeEnergy(model, n=100, draws=draws)(inputs, targets)
        cost.backward()
    posterior = model.posterior
    assert posterior
    for tensor in (each for q in posterior.values() for each in (q.mu, q.rho)):
        assert tensor.grad is not None
        assert bool(tensor.grad.isfinite().all())
    torch.optim.Adam(model.param_groups(1e-3)).step()

    parallel = model.predict(inputs=inputs, draws=3, estimator="shared")
    one_by_one = model.predict(inputs=inputs, draws=3, estimator="shared", memory=1)
    for mean, expected in zip(tensors_in(parallel.mean), tensors_in(one_by_one.mean), strict=True):
        assert len(mean) == B
        torch.testing.assert_close(mean, expected)
    kept: Any = model.ensemble(3).predict(inputs=inputs).mean
    for mean, expected in zip(tensors_in(kept), tensors_in(one_by_one.mean), strict=True):
        torch.testing.assert_close(mean, expected)

    bbb.save(model, tmp_path / "model")
    torch.manual_seed(5)
    loaded = bbb.load(tmp_path / "model", row.make(), output=row.output)
    again: Any = loaded.predict(inputs=inputs, draws=3, estimator="shared").mean
    for mean, expected in zip(tensors_in(again), tensors_in(parallel.mean), strict=True):
        assert isinstance(mean, Tensor)
        assert torch.equal(mean, expected)
