"""A transformer of Hugging Face's whose words and classifier are Bayesian: words it never met make it unsure."""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification
from transformers.utils import ModelOutput

import bayesbackprop as bbb

GOOD, BAD = ["good", "great", "fine", "superb"], ["bad", "awful", "poor", "dull"]
WORDS = ["[PAD]", "the", "film", "was", "and", *GOOD, *BAD, "splendid", "dreadful"]  # no review has the last two


def encode(sentences: list[str]) -> dict[str, Tensor]:
    """What a tokeniser returns: the arguments of the network by name."""
    rows = [torch.tensor([WORDS.index(word) for word in sentence.split()]) for sentence in sentences]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)  # with 0, which is [PAD]
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def reviews(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Sentences with one, three or five opinions; what most of them say is the label."""
    opinions = [torch.randint(8, (1 + 2 * int(torch.randint(3, ())),)) for _ in range(n)]
    sentences = ["the film was " + " and ".join((GOOD + BAD)[word] for word in words) for words in opinions]
    return encode(sentences), torch.tensor([int((words < 4).float().mean() > 0.5) for words in opinions])


def logits(output: ModelOutput) -> Tensor:
    """What the likelihood takes of the output: these models return several things."""
    return output.logits


def main() -> None:
    """Train, ask about words that it has met and others, and write the posterior and its mean."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    torch.manual_seed(parser.parse_args().seed)
    (inputs, labels), (held_out, truth) = reviews(500), reviews(300)

    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    size |= {"vocab_size": len(WORDS), "max_position_embeddings": 12}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # drawn weights are noise enough
    config = BertConfig(**size, **no_dropout, initializer_range=0.1)
    net = BertForSequenceClassification(config)
    chosen = [name for name, _ in net.named_parameters() if "word_embeddings" in name or "classifier" in name]
    model = bbb.Bayesian(net, bbb.Categorical(), bbb.Normal(0.3), select=lambda name, _: name in chosen, output=logits)
    free_energy = bbb.FreeEnergy(model, n=len(labels))
    # A higher rate for rho, which would hardly move from its start in so few steps.
    groups = [{"params": net.parameters()}, {"params": model.rho.parameters(), "lr": 1.5e-2}]
    optimiser = torch.optim.Adam(groups, lr=3e-3)
    for rows in torch.randint(len(labels), (250, 64)):
        optimiser.zero_grad()
        free_energy({name: values[rows] for name, values in inputs.items()}, labels[rows]).backward()
        optimiser.step()
    print(model.report())
    p = model.predict(**held_out, draws=50)
    print(f"held-out reviews: accuracy {(p.labels == truth).float().mean():.1%}")
    for sentence in ("the film was good and fine", "the film was awful and dull", "the film was splendid and dreadful"):
        p = model.predict(**encode([sentence]), draws=200)
        print(f"{sentence}: {p.probs[0, 1]:.0%} good, not known {p.epistemic[0]:.3f} nats")

    with tempfile.TemporaryDirectory() as folder:
        bbb.save(model, Path(folder) / "posterior.safetensors")
        again = bbb.load(Path(folder) / "posterior.safetensors", BertForSequenceClassification(config), output=logits)
        same = torch.equal(again.predict(**encode([sentence]), draws=200).probs, p.probs)
        net.save_pretrained(folder)  # the means, as a checkpoint like any other
        mean = BertForSequenceClassification.from_pretrained(folder)
        print(
            f"loaded: same posterior {same}, same mean {torch.equal(mean(**held_out).logits, net(**held_out).logits)}"
        )


if __name__ == "__main__":
    main()
