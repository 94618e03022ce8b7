"""Answers of a fine-tuned language model beside the true ones: plain and Bayesian LoRA on text that is made here.

A small GPT-2 has read what animals eat in summer; a few hundred sentences tell it of winter. How often an animal eats
what is known, so answers are compared with their true probabilities. Settings were chosen on seeds from 100 on
(docs/decisions/lora.md); those from 0 on are only looked at to report.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesbackprop import Bayesian, Categorical, FreeEnergy, Normal
from bayesbackprop.evaluation import BINS, auroc
from bayesbackprop.prediction import ClassPredictive, Predictive, predictive
from bayesbackprop_paper.experiments.recipe import Examples, seeded
from bayesbackprop_paper.experiments.truth import Figures, Run

TASK = "what animals eat in winter"

KINDS = ["big", "old", "young", "grey", "quick", "shy"]
BEASTS = ["foxes", "bears", "hares", "deer", "wolves", "mice", "otters", "lynxes", "badgers", "moles", "bats"]
BIRDS = ["crows", "geese", "owls", "robins", "sparrows", "finches", "swans", "ducks", "eagles", "herons", "storks"]
TAME = ["horses", "goats", "sheep", "cows", "pigs", "hens", "cats", "dogs"]
OTHERS = ["frogs", "toads", "newts", "snails", "trout", "boars", "squirrels", "beavers", "rats", "voles"]
ANIMALS = [*BEASTS, *BIRDS, *TAME, *OTHERS]
FOODS = ["berries", "fish", "seeds", "grass", "insects", "roots", "eggs", "nuts"]
WORDS = ["in", "summer", "winter", "eat", *KINDS, *ANIMALS, *FOODS]

# No sentence is about the last animals in winter.
_TOLD = 32
# How often an animal that eats one of its two foods eats the first: from nearly always to every other time.
_SHARES = (0.95, 0.8, 0.65, 0.5)
# How often it eats each of the other foods.
_RARE = 0.02

# Of every fine-tuning: the examples of a minibatch, the rate of Adam at the start, and the steps between two looks at
# the validation sentences.
_BATCH, _RATE, _LOOK = 40, 1e-2, 10
# Of the posterior, chosen by the validation sentences of seeds 100 and 101.
_TEMPERATURE, _PRIOR, _RHO_RATE = 0.03, 0.3, 2e-2


class Size(NamedTuple):
    """Steps of both trainings, and the networks to average; tests have a smaller one."""

    pretraining: int = 400
    steps: int = 600
    draws: int = 100


class World(NamedTuple):
    """A language model that has read of summer, what is true in winter, and sentences that tell of it."""

    base: nn.Module
    habits: Tensor
    training: Examples
    validation: Examples


class Answer(nn.Module):
    """The logits of the next word, among the foods."""

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(self, input_ids: Tensor) -> Tensor:
        """Of each beginning of a sentence, ``[B, foods]``."""
        logits: Tensor = self.language_model(input_ids=input_ids).logits
        return logits[:, -1, -len(FOODS) :]


def questions(season: str) -> tuple[Tensor, Tensor]:
    """All beginnings such as "in winter grey foxes eat", as words ``[Q, 5]``, and the animal of each ``[Q]``."""
    animal = torch.arange(len(ANIMALS)).repeat_interleave(len(KINDS))
    kind = torch.arange(len(KINDS)).repeat(len(ANIMALS))
    fixed = {word: torch.full_like(animal, WORDS.index(word)) for word in ("in", season, "eat")}
    named = kind + WORDS.index(KINDS[0]), animal + WORDS.index(ANIMALS[0])
    return torch.stack([fixed["in"], fixed[season], *named, fixed["eat"]], 1), animal


def habits(generator: torch.Generator) -> Tensor:
    """How often each animal eats each food, ``[animals, foods]``; its kind plays no role."""
    probabilities = torch.full((len(ANIMALS), len(FOODS)), _RARE)
    usual = 1 - _RARE * (len(FOODS) - 2)
    for animal, row in enumerate(probabilities):
        first, second = torch.randperm(len(FOODS), generator=generator)[:2].tolist()
        share = _SHARES[animal % len(_SHARES)]
        row[first], row[second] = usual * share, usual * (1 - share)
    return probabilities


def sentences(n: int, season: str, of: Tensor, generator: torch.Generator) -> Examples:
    """``n`` beginnings and the foods that complete them, as the habits ``of`` the first animals say."""
    beginnings, animal = questions(season)
    number = torch.randint(len(KINDS) * len(of), (n,), generator=generator)
    return Examples(beginnings[number], torch.multinomial(of[animal[number]], 1, generator=generator)[:, 0])


@functools.lru_cache(maxsize=1)
def world(seed: int, size: Size) -> World:
    """The language model of a seed, and what it is to learn. In its text, animals eat anything in winter."""
    from transformers import GPT2Config, GPT2LMHeadModel

    options: dict[str, Any] = {"vocab_size": len(WORDS), "n_positions": 8, "n_embd": 32, "n_layer": 1, "n_head": 4}
    options |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.1}
    options |= {"bos_token_id": None, "eos_token_id": None}
    generator = torch.Generator().manual_seed(seed)
    with seeded(seed):
        base: nn.Module = GPT2LMHeadModel(GPT2Config(**options))  # type: ignore[no-untyped-call]
    anything = torch.full((len(ANIMALS), len(FOODS)), 1 / len(FOODS))
    known = {"summer": habits(generator), "winter": anything}
    for _ in _steps(size.pretraining, base.parameters(), 5e-3):
        parts = [sentences(64, season, of, generator) for season, of in known.items()]
        ids = torch.cat([torch.cat([x, y[:, None] + WORDS.index(FOODS[0])], 1) for x, y in parts])
        logits = base(input_ids=ids).logits[:, :-1]
        nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    winter = habits(generator)
    return World(base, winter, *(sentences(n, "winter", winter[:_TOLD], generator) for n in (240, 100)))


def _steps(number: int, groups: Any, lr: float) -> Iterator[int]:
    """Steps of Adam with a rate that falls to 0; each is taken after what stands in the loop."""
    optimiser = torch.optim.Adam(groups, lr)
    falling = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, number)
    for step in range(number):
        optimiser.zero_grad()
        yield step
        optimiser.step()
        falling.step()


def _adapted(of: World, seed: int) -> Answer:
    """The language model with new adapters, which alone are trained."""
    from peft import LoraConfig, get_peft_model

    options: dict[str, Any] = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
    with seeded(seed):
        return Answer(get_peft_model(copy.deepcopy(of.base), LoraConfig(r=4, lora_alpha=8, **options)))


def _batches(of: World, seed: int) -> Iterator[Examples]:
    """Without an end: passes over the training set, each in an order of its own."""
    generator, (x, y) = torch.Generator().manual_seed(seed), of.training
    while True:
        for rows in torch.randperm(len(x), generator=generator).split(_BATCH):
            yield Examples(x[rows], y[rows])


@torch.no_grad()
def _answers(net: nn.Module) -> Predictive:
    return predictive(Categorical(), net(questions("winter")[0])[None], 1)


def untouched(of: World, seed: int, size: Size) -> Predictive:  # noqa: ARG001
    """The language model before it is fine-tuned."""
    return _answers(Answer(of.base))


def plain(of: World, seed: int, size: Size, *, stopped: bool = False) -> Predictive:
    """Plain adapters, at the end of the training or where the validation sentences were the most probable."""
    net, batches = _adapted(of, seed), _batches(of, seed)
    least, best = torch.inf, _answers(net)
    for step in _steps(size.steps, [p for p in net.parameters() if p.requires_grad], _RATE):
        if stopped and step % _LOOK == 0:
            with torch.no_grad():
                found = float(nn.functional.cross_entropy(net(of.validation.inputs), of.validation.targets))
            if found < least:
                least, best = found, _answers(net)
        x, y = next(batches)
        nn.functional.cross_entropy(net(x), y).backward()
    return best if stopped else _answers(net)


@functools.lru_cache(maxsize=1)
def bayesian(of: World, seed: int, size: Size, temperature: float = _TEMPERATURE) -> Bayesian:
    """Adapters with a posterior. Two methods have them."""
    batches, n = _batches(of, seed), len(of.training.targets)
    model = Bayesian(_adapted(of, seed), Categorical(), Normal(_PRIOR), seed=seed)
    free_energy = FreeEnergy(model, n, complexity="closed", temperature=temperature)
    for _ in _steps(size.steps, model.param_groups(_RATE, rho_lr=_RHO_RATE), _RATE):
        free_energy(*next(batches)).backward()
    return model


# Those that share a model stand beside each other.
METHODS: dict[str, Callable[[World, int, Size], Predictive]] = {
    "before": untouched,
    "plain": plain,
    "plain, stopped early": functools.partial(plain, stopped=True),
    "Bayesian": lambda of, seed, size: bayesian(of, seed, size).predict(questions("winter")[0], draws=size.draws),
    "Bayesian, its mean": lambda of, seed, size: bayesian(of, seed, size).predict_mean(questions("winter")[0]),
    "Bayesian, temperature 1": lambda of, seed, size: bayesian(of, seed, size, 1.0).predict(
        questions("winter")[0], draws=size.draws
    ),
}


def measure(run: Run, size: Size = Size()) -> Figures:  # noqa: B008 (it cannot be changed)
    """How far the answers are from the truth, and whether animals that no sentence was about are noticed."""
    of = world(run.seed, size)
    predicted, animal = METHODS[run.method](of, run.seed, size), questions("winter")[1]
    assert isinstance(predicted, ClassPredictive), "foods are classes"
    told = animal < _TOLD
    return {
        **scores(predicted.probs[told], of.habits[animal[told]]),
        "AUROC new animals": auroc(predicted.entropy[told], predicted.entropy[~told]),
    }


def scores(probs: Tensor, truth: Tensor) -> Figures:
    """Expected scores of answers ``[Q, foods]`` whose true probabilities are known: no labels are drawn.

    KL is that from the truth, mean over questions, which is 0 for true answers alone; the NLL is this and the entropy
    of the truth. The calibration error is that of :func:`~bayesbackprop.evaluation.calibration` for endless data.
    """
    probs, truth = probs.double(), truth.double()
    nll = -(truth * probs.log()).sum(1).mean()
    confidence, answer = probs.max(1)
    right = truth.gather(1, answer[:, None])[:, 0]
    bin_of = (confidence * BINS).ceil().long().sub(1).clamp(0, BINS - 1)
    gaps = (confidence - right).new_zeros(BINS).index_add_(0, bin_of, confidence - right)
    return {
        "error %": float(100 * (1 - right.mean())),
        "NLL": float(nll),
        "KL from truth": float(nll + (truth * truth.log()).sum(1).mean()),
        "ECE %": float(100 * gaps.abs().sum() / len(probs)),
        "confidence - accuracy %": float(100 * (confidence - right).mean()),
    }
