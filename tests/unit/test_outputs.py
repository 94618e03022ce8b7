"""Outputs as libraries give them: None, dataclasses, caches, losses, dictionaries; and a function that picks."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

import bayesbackprop as bbb
from bayesbackprop._trees import map_tensors, own_objects, tensors_in

pytestmark = pytest.mark.equivalence

_generator = torch.Generator().manual_seed(0)
X, Y = torch.randn(6, 3, generator=_generator), torch.randint(4, (6,), generator=_generator)


@dataclasses.dataclass
class Answer:
    logits: Tensor
    attention: Tensor | None = None
    name: str = "answer"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    logits: Tensor


class Named(NamedTuple):
    logits: Tensor
    loss: Tensor | None


class Cache:
    """As libraries have them: an object with lists of tensors, which holds itself."""

    def __init__(self, keys: Tensor) -> None:
        self.layers = [[keys, None]]
        self.itself = self


class Wraps(nn.Module):
    """A network that returns its logits in some structure."""

    def __init__(self, structure: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.body, self.structure = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 4)), structure

    def forward(self, x: Tensor) -> Any:
        return self.structure(self.body(x))


# What the network returns, and what picks the logits from it.
STRUCTURES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "a tuple with None": (lambda logits: (logits, None), lambda o: o[0]),
    "a dictionary": (lambda logits: {"logits": logits, "mask": None, "name": "x"}, lambda o: o["logits"]),
    "an OrderedDict": (lambda logits: OrderedDict(logits=logits, n=3), lambda o: o["logits"]),
    "a dataclass": (Answer, lambda o: o.logits),
    "a frozen dataclass with slots": (Frozen, lambda o: o.logits),
    "a NamedTuple with a scalar": (lambda logits: Named(logits, logits.square().mean()), lambda o: o.logits),
    "a cache": (lambda logits: {"logits": logits, "cache": Cache(logits * 2)}, lambda o: o["logits"]),
    "a list of dataclasses": (lambda logits: [Answer(logits), Answer(logits, logits)], lambda o: o[1].attention),
}

each_structure = pytest.mark.parametrize("structure", list(STRUCTURES))


def plain() -> bbb.Bayesian:
    torch.manual_seed(1)
    return bbb.Bayesian(Wraps(lambda logits: logits), bbb.Categorical(), seed=0, sigma=0.3)


def picking(structure: str) -> bbb.Bayesian:
    wrap, pick = STRUCTURES[structure]
    torch.manual_seed(1)
    return bbb.Bayesian(Wraps(wrap), bbb.Categorical(), seed=0, sigma=0.3, output=pick)


@pytest.mark.supports("Outputs", "None, dictionaries, dataclasses, caches, scalars", "stacked over draws")
@each_structure
@pytest.mark.parametrize("memory", [2**30, 1], ids=["parallel", "draw by draw"])
def test_outputs_are_stacked_wherever_tensors_are(structure: str, memory: int) -> None:
    wrap, pick = STRUCTURES[structure]
    torch.manual_seed(1)
    model = bbb.Bayesian(Wraps(wrap), bbb.Categorical(), seed=0, sigma=0.3)
    expected = plain().outputs(X, draws=5, memory=memory)
    for found in (model.outputs(X, draws=5, memory=memory), model.ensemble(5)(X, memory=memory)):
        torch.testing.assert_close(pick(found), expected)
        assert type(found) is type(wrap(X))
        for stacked, one in zip(tensors_in(found), tensors_in(wrap(expected[0])), strict=True):
            assert stacked.shape == (5, *one.shape)


@pytest.mark.supports("Outputs", "a function that picks", "`Bayesian(..., output=lambda o: o.logits)`")
@each_structure
def test_a_function_picks_what_the_likelihood_takes(structure: str, tmp_path: Path) -> None:
    model, reference = picking(structure), plain()
    for memory in (2**30, 1):
        expected = reference.predict(X, draws=5, memory=memory).probs
        torch.testing.assert_close(model.predict(X, draws=5, memory=memory).probs, expected)
        torch.testing.assert_close(model.ensemble(5).predict(X, memory=memory).probs, expected)
    torch.testing.assert_close(model.outputs(X, draws=5), reference.outputs(X, draws=5))
    torch.testing.assert_close(model.draw(1)(X), reference.draw(1)(X))
    torch.testing.assert_close(model.predict_mean(X).probs, reference.predict_mean(X).probs)
    assert bbb.evaluate(model, (X, Y), draws=5).scores == bbb.evaluate(reference, (X, Y), draws=5).scores
    assert bbb.diagnose(model, (X, Y), draws=30).free_energy == bbb.diagnose(reference, (X, Y), draws=30).free_energy
    for draws in (1, 3):
        costs = [bbb.FreeEnergy(each, n=6, draws=draws)(X, Y) for each in (model, reference)]
        torch.testing.assert_close(*map(Tensor.clone, costs))
        for cost in costs:
            cost.backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    bbb.save(model, tmp_path / "model")
    with pytest.raises(ValueError, match=r"The 'output' parameter of load must be given, as it was to Bayesian"):
        bbb.load(tmp_path / "model", Wraps(STRUCTURES[structure][0]))
    loaded = bbb.load(tmp_path / "model", Wraps(STRUCTURES[structure][0]), output=STRUCTURES[structure][1])
    assert torch.equal(loaded.predict(X, draws=5).probs, model.predict(X, draws=5).probs)
    assert bbb.prune(model, 0.5).predict(X, draws=5).probs.shape == (6, 4)


@pytest.mark.filterwarnings("ignore:The chains of refine")
def test_a_plain_network_may_be_picked_from_too() -> None:
    """Its fast paths know nothing of the function, and are not taken."""
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 8))
    model = bbb.Bayesian(net, bbb.Categorical(), seed=0, output=lambda o: o[:, :4])
    assert model.predict(X, draws=5).probs.shape == (6, 4)
    bbb.FreeEnergy(model, n=6, draws=2)(X, Y).backward()
    bbb.Adam(model.param_groups(1e-3)).minimise(bbb.FreeEnergy(model, n=6), X, Y)
    refined = bbb.refine(model, (X, Y), draws=4, iterations=8, leapfrogs=1, progress=False)
    assert refined.predict(X).probs.shape == (6, 4)


@pytest.mark.filterwarnings("ignore:The chains of refine")
@pytest.mark.parametrize("structure", ["a dataclass", "a NamedTuple with a scalar"])
def test_refinement_picks(structure: str) -> None:
    options: dict[str, Any] = {"draws": 3, "iterations": 8, "leapfrogs": 1, "progress": False}
    found, expected = (bbb.refine(model, (X, Y), **options) for model in (picking(structure), plain()))
    torch.testing.assert_close(found.predict(X).probs, expected.predict(X).probs)


def test_a_likelihood_of_ones_own_takes_a_structure_with_a_scalar() -> None:
    def log_prob(o: Named, target: Tensor) -> Tensor:
        return o.logits.log_softmax(1).gather(1, target[:, None]).flatten()

    likelihood = bbb.LogLikelihood(log_prob, lambda o: torch.distributions.Categorical(logits=o.logits))
    torch.manual_seed(1)
    model = bbb.Bayesian(Wraps(STRUCTURES["a NamedTuple with a scalar"][0]), likelihood, seed=0, sigma=0.3)
    torch.testing.assert_close(model.predict(X, draws=5).probs, plain().predict(X, draws=5).probs)
    torch.testing.assert_close(*(bbb.FreeEnergy(each, n=6)(X, Y).clone() for each in (model, plain())))


def test_without_a_function_the_error_says_how_to_pick() -> None:
    torch.manual_seed(1)
    model = bbb.Bayesian(Wraps(Answer), bbb.Categorical(), seed=0)
    for call in (lambda: bbb.FreeEnergy(model, n=6)(X, Y), lambda: model.predict(X, draws=3)):
        with pytest.raises(ValueError, match=r"output=lambda o: o.logits\) picks it"):
            call()


@pytest.mark.parametrize("output", [3, "logits", nn.Linear(4, 4)], ids=["int", "text", "module"])
def test_only_a_function_picks(output: Any) -> None:
    with pytest.raises(ValueError, match="The 'output' parameter of Bayesian must be None or a function"):
        bbb.Bayesian(nn.Linear(3, 4), bbb.Categorical(), output=output)


# --- transformers ----------------------------------------------------------------------------------------------------


def language_model() -> nn.Module:
    torch.manual_seed(2)
    size: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 11, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")).eval()


@pytest.mark.supports("Outputs", "ModelOutput with a loss and a DynamicCache", "stacked over draws")
@pytest.mark.parametrize("memory", [2**30, 1], ids=["parallel", "draw by draw"])
def test_a_model_output_with_a_loss_and_a_cache(memory: int) -> None:
    ids = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(3))
    model = bbb.Bayesian(language_model(), bbb.Categorical(), seed=0)
    found = model.outputs(input_ids=ids, labels=ids, use_cache=True, draws=3, memory=memory)
    assert found.loss.shape == (3,)
    assert found.logits.shape == (3, 2, 5, 11)
    assert found.past_key_values.layers[0].keys.shape[:2] == (3, 2)
    for index in range(3):
        one = model.draw(0, index)(input_ids=ids, labels=ids, use_cache=True)
        torch.testing.assert_close(found.loss[index], one.loss)
        torch.testing.assert_close(found.past_key_values.layers[0].keys[index], one.past_key_values.layers[0].keys)


def test_a_language_model_trains_and_predicts_by_its_logits() -> None:
    ids = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(3))
    model = bbb.Bayesian(language_model(), bbb.Categorical(), seed=0, output=lambda o: o.logits.movedim(-1, 1))
    bbb.FreeEnergy(model, n=10)({"input_ids": ids}, ids).backward()
    assert model.predict(input_ids=ids, draws=3).probs.shape == (2, 5, 11)


@pytest.mark.supports("Outputs", "a cache as an argument", "each draw has its own")
def test_each_draw_has_a_cache_of_its_own() -> None:
    """A network appends to the cache that it is given: draws must not see each other's."""
    ids = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(3))
    model = bbb.Bayesian(language_model(), bbb.Categorical(), seed=0, output=lambda o: o.logits)
    with torch.no_grad():
        cache = model.net(input_ids=ids[:, :3], use_cache=True).past_key_values
    assert isinstance(cache, DynamicCache)
    found = model.outputs(input_ids=ids[:, 3:], past_key_values=cache, draws=3)
    assert cache.get_seq_length() == 3
    alone = model.draw(0, 2)(input_ids=ids[:, 3:], past_key_values=own_objects(cache))
    torch.testing.assert_close(found[2], alone)


# --- arguments with the names of options -----------------------------------------------------------------------------


class Seeded(nn.Module):
    """A network whose arguments have the names of options of ``predict``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor, seed: Tensor, draws: Tensor | None = None, memory: float = 0.0) -> Tensor:
        output: Tensor = self.layer(x + seed + memory)
        return output if draws is None else output + draws


@pytest.mark.supports("Outputs", "arguments named seed, draws, memory", "`model.predict(inputs={...})`")
def test_arguments_may_have_the_names_of_options() -> None:
    torch.manual_seed(1)
    model = bbb.Bayesian(Seeded(), bbb.Categorical(), seed=0)
    inputs = {"x": X, "seed": torch.ones(6, 1), "draws": torch.ones(6, 4), "memory": 2.0}
    found = model.outputs(inputs=inputs, draws=3)
    torch.testing.assert_close(found[1], model.draw(0, 1)(**inputs))
    torch.testing.assert_close(model.predict(inputs=inputs, draws=3).probs, found.softmax(-1).mean(0))
    torch.testing.assert_close(model.ensemble(3)(inputs=inputs), found)
    torch.testing.assert_close(model.ensemble(3).predict(inputs=inputs).probs, found.softmax(-1).mean(0))
    assert model.predict_mean(inputs=inputs).probs.shape == (6, 4)
    bbb.FreeEnergy(model, n=6)(inputs, Y).backward()
    assert bbb.evaluate(model, [(inputs, Y)], draws=3).examples == 6
    positional = model.outputs(inputs=(X, torch.ones(6, 1)), draws=3)
    torch.testing.assert_close(positional[0], model.draw(0, 0)(X, torch.ones(6, 1)))


def test_inputs_are_given_alone() -> None:
    model = bbb.Bayesian(nn.Linear(3, 4), bbb.Categorical())
    with pytest.raises(ValueError, match=r"The 'inputs' parameter of .* must be given alone"):
        model.predict(X, inputs=X)


# --- the walk --------------------------------------------------------------------------------------------------------


def test_mapping_leaves_the_original_as_it_was() -> None:
    cache = Cache(torch.ones(2))
    made = map_tensors(lambda tensor: tensor + 1, cache)
    assert made is not cache
    assert torch.equal(cache.layers[0][0], torch.ones(2))
    assert torch.equal(made.layers[0][0], torch.full((2,), 2.0))
    config = Answer(torch.ones(1), None, "kept")
    assert map_tensors(lambda tensor: tensor, {"a": "text", "b": config})["a"] == "text"
