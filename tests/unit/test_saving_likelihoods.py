"""Likelihoods in files: what they were made with and what they have learnt; what cannot be understood is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bayesbackprop import (
    Bayesian,
    Bernoulli,
    Categorical,
    FreeEnergy,
    Gaussian,
    Joint,
    Likelihood,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
    load,
    save,
)
from bayesbackprop.likelihoods import describe, from_description
from rewriting import header_of, rewrite

pytestmark = pytest.mark.identities


def numbers() -> Tensor:
    return torch.randn(6, 2)


def counts() -> Tensor:
    return torch.randint(5, (6, 2))


LIKELIHOODS: dict[str, tuple[Callable[[], Likelihood], Callable[[], Tensor], dict[str, Any]]] = {
    "Categorical": (Categorical, lambda: torch.randint(2, (6,)), {"kind": "Categorical"}),
    "Categorical with options": (
        lambda: Categorical(weight=[1 / 3, 2], label_smoothing=0.1, ignore_index=-1),
        lambda: torch.tensor([0, 1, -1, 0, 1, 1]),
        {"kind": "Categorical", "weight": [1 / 3, 2.0], "label_smoothing": 0.1, "ignore_index": -1},
    ),
    "Bernoulli": (Bernoulli, lambda: torch.randint(2, (6, 2)), {"kind": "Bernoulli"}),
    "Ordinal": (lambda: Ordinal(5), counts, {"kind": "Ordinal", "classes": 5}),
    "Gaussian": (Gaussian, numbers, {"kind": "Gaussian", "noise": "learnt"}),
    "Gaussian with beta": (
        lambda: Gaussian("per-input", beta=0.7),
        lambda: torch.randn(6, 1),
        {"kind": "Gaussian", "noise": "per-input", "beta": 0.7},
    ),
    "StudentT": (StudentT, numbers, {"kind": "StudentT", "scale": "learnt", "df": "learnt"}),
    "StudentT, fixed": (lambda: StudentT(1 / 3, 3), numbers, {"kind": "StudentT", "scale": 1 / 3, "df": 3.0}),
    "Poisson": (Poisson, counts, {"kind": "Poisson"}),
    "NegativeBinomial": (NegativeBinomial, counts, {"kind": "NegativeBinomial", "dispersion": "learnt"}),
    "NegativeBinomial, fixed": (
        lambda: NegativeBinomial(0.25),
        counts,
        {"kind": "NegativeBinomial", "dispersion": 0.25},
    ),
}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_round_trip_is_exact(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make, targets, description = LIKELIHOODS[name]
    model, x, y = Bayesian(net(), make(), seed=3).to(dtype), torch.randn(6, 3, dtype=dtype), targets()
    y = y.to(dtype) if y.is_floating_point() else y
    free_energy, optimiser = FreeEnergy(model, n=50), torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(3):
        optimiser.zero_grad()
        free_energy(x, y).backward()
        optimiser.step()
    save(model, tmp_path / "model")
    assert header_of(tmp_path / "model")["contents"]["likelihood"] == description == describe(model.likelihood)
    loaded = load(tmp_path / "model", net().to(dtype))
    assert type(loaded.likelihood) is type(model.likelihood)
    assert repr(loaded.likelihood) == repr(model.likelihood)
    for ours, theirs in zip(model.likelihood.parameters(), loaded.likelihood.parameters(), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert torch.equal(loaded.likelihood.costs(loaded.net(x), y), model.likelihood.costs(model.net(x), y))
    if dtype != torch.bfloat16:  # in which torch has no lgamma
        assert torch.equal(loaded.predict(x, draws=3).mean, model.predict(x, draws=3).mean)
    save(loaded, tmp_path / "again")
    assert (tmp_path / "model").read_bytes() == (tmp_path / "again").read_bytes()


@pytest.mark.parametrize("heads", [[Poisson(), Gaussian(0.5)], {"a": Ordinal(3), "kind": Categorical(ignore_index=0)}])
def test_heads_are_described_one_by_one(heads: Any) -> None:
    described = describe(Joint(heads))
    made = from_description(described)
    assert isinstance(made, Joint)
    assert describe(made) == described
    assert made.names == (tuple(heads) if isinstance(heads, dict) else None)


ODD: dict[str, Any] = {
    "of no known kind": {"kind": "Normal"},
    "that is abstract": {"kind": "Likelihood"},
    "with weights of examples": {"kind": "Weighted"},
    "with an odd argument": {"kind": "Poisson", "rate": 1.0},
    "without what it needs": {"kind": "Ordinal"},
    "without what was always said": {"kind": "NegativeBinomial"},
    "of a billion classes": {"kind": "Ordinal", "classes": 10**9},
    "of classes in text": {"kind": "Ordinal", "classes": "3"},
    "of no dispersion": {"kind": "NegativeBinomial", "dispersion": 0},
    "of an infinite scale": {"kind": "StudentT", "scale": 1e999, "df": 3.0},
    "of a word": {"kind": "StudentT", "scale": "large", "df": 3.0},
    "of weights in text": {"kind": "Categorical", "weight": "11"},
    "of weights in a mapping": {"kind": "Categorical", "weight": {"0": 1.0}},
    "of negative weights": {"kind": "Categorical", "weight": [-1.0, 1.0]},
    "of an odd beta": {"kind": "Gaussian", "noise": 0.5, "beta": 0.5},
    "without heads": {"kind": "Joint"},
    "of no heads": {"kind": "Joint", "heads": []},
    "of a number of heads": {"kind": "Joint", "heads": 3},
    "of heads that are numbers": {"kind": "Joint", "heads": [3]},
    "of a head of no known kind": {"kind": "Joint", "heads": {"a": {"kind": "X"}}},
    "of heads that do not say all": {"kind": "Joint", "heads": [{"kind": "Gaussian"}]},
}


@pytest.mark.parametrize("name", ODD)
def test_what_cannot_be_understood_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    save(Bayesian(net(), Poisson(), seed=3), tmp_path / "model")
    rewrite(tmp_path / "model", lambda header, _: header["contents"].update(likelihood=ODD[name]))
    other = net()
    before = [parameter.clone() for parameter in other.parameters()]
    with pytest.raises(ValueError, match="which is damaged or has metadata that cannot be understood"):
        load(tmp_path / "model", other)
    assert all(map(torch.equal, before, other.parameters()))


def test_a_file_of_another_likelihood_says_so(tmp_path: Path) -> None:
    """What has been learnt is compared with what the description says is learnt."""
    save(Bayesian(net(), NegativeBinomial(), seed=3), tmp_path / "model")
    rewrite(
        tmp_path / "model", lambda header, _: header["contents"].update(likelihood={"kind": "Ordinal", "classes": 3})
    )
    more = r"also has \['likelihood\.log_dispersion'\], which the network has not"
    with pytest.raises(ValueError, match=rf"{more}, and the file lacks \['likelihood\.raw_cuts'\]"):
        load(tmp_path / "model", net())
    save(Bayesian(net(), Ordinal(4), seed=3), tmp_path / "model")
    rewrite(
        tmp_path / "model", lambda header, _: header["contents"].update(likelihood={"kind": "Ordinal", "classes": 3})
    )
    with pytest.raises(ValueError, match=r"'likelihood\.raw_cuts' is a tensor of shape \[2\]"):
        load(tmp_path / "model", net())
