"""Bayesian LoRA beside plain LoRA: the text is as it says, and each method is judged by the same figures."""

import pytest
import torch

from bayesbackprop.evaluation import score
from bayesbackprop_paper.experiments import lora
from bayesbackprop_paper.experiments.truth import Run

pytestmark = pytest.mark.identities

SIZE = lora.Size(pretraining=3, steps=12, draws=3)


def figures(method: str, seed: int) -> dict[str, float]:
    lora.world.cache_clear()
    lora.bayesian.cache_clear()
    return dict(lora.measure(Run(lora.TASK, method, seed), SIZE))


@pytest.mark.parametrize("method", lora.METHODS)
def test_every_method_is_judged_alike_and_by_its_seed(method: str) -> None:
    found = figures(method, 0)
    assert found == figures(method, 0) != figures(method, 1)
    assert found.keys() == figures("before", 0).keys()


def test_only_the_adapters_are_trained() -> None:
    of = lora.world(0, SIZE)
    before = {name: weight.clone() for name, weight in of.base.named_parameters()}
    lora.bayesian.cache_clear()
    model = lora.bayesian(of, 0, SIZE)
    assert all("lora_" in name for name in model.posterior)
    lora.plain(of, 0, SIZE)
    for name, weight in of.base.named_parameters():
        assert torch.equal(weight, before[name])


def test_text_is_made_by_the_habits() -> None:
    generator = torch.Generator().manual_seed(0)
    habits = lora.habits(generator)
    torch.testing.assert_close(habits.sum(1), torch.ones(len(lora.ANIMALS)))
    beginnings, foods = lora.sentences(20_000, "winter", habits[:4], generator)
    text = " ".join(lora.WORDS[word] for word in beginnings[0])
    assert text.split()[:2] == ["in", "winter"]
    assert text.split()[2] in lora.KINDS
    for animal in range(4):
        eaten = foods[beginnings[:, 3] == lora.WORDS.index(lora.ANIMALS[animal])]
        often = eaten.bincount(minlength=len(lora.FOODS)) / len(eaten)
        # Of some 5,000 sentences each frequency is within 5 standard errors, which are at most .007.
        assert (often - habits[animal]).abs().max() < 0.036
    assert len(beginnings[:, 3].unique()) == 4


def test_scores_are_those_of_endless_data() -> None:
    generator = torch.Generator().manual_seed(0)
    truth, probs = (torch.rand(5, 8, generator=generator).softmax(1) for _ in range(2))
    expected = lora.scores(probs, truth)
    # A hundred thousand answers to each question, in proportions that are rounded to whole numbers.
    counts = (truth * 100_000).round().long().flatten()
    labels = torch.arange(8).repeat(5).repeat_interleave(counts)
    found = score(probs.repeat_interleave(counts.view(5, 8).sum(1), 0), labels)
    assert expected["error %"] == pytest.approx(100 * found.error, abs=0.01)
    assert expected["NLL"] == pytest.approx(found.nll, abs=1e-4)
    assert expected["ECE %"] == pytest.approx(100 * found.ece, abs=0.01)
    itself = lora.scores(truth, truth)
    assert itself["KL from truth"] == pytest.approx(0, abs=1e-12)
    assert expected["KL from truth"] == pytest.approx(expected["NLL"] - itself["NLL"])
