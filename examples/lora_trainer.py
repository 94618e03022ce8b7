"""Bayesian LoRA: the adapters of a language model have distributions; trained by the Trainer of transformers."""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import bayesbackprop as bbb

KINDS = ["big", "small", "old", "young", "grey", "brown", "quick", "slow", "shy", "loud"]
ANIMALS = ["fox", "bear", "crow", "hare", "deer", "wolf", "mouse", "goose", "horse", "trout", "otter", "lynx"]
FOODS = ["berries", "fish", "seeds", "grass", "insects", "roots", "eggs", "nuts"]
WORDS = ["in", "summer", "winter", "the", "eats", *KINDS, *ANIMALS, *FOODS]


def sentences(n: int, season: str, noise: float, generator: torch.Generator, rule: Tensor) -> tuple[Tensor, Tensor]:
    """Beginnings such as "in winter the old fox eats", and the food: by the animal's rule, or by chance."""
    pick = lambda words: torch.randint(len(words), (n,), generator=generator)  # noqa: E731
    kind, animal, chance = pick(KINDS), pick(ANIMALS), pick(FOODS)
    food = torch.where(torch.rand(n, generator=generator) < noise, chance, rule[animal])
    fixed = {word: torch.full((n,), WORDS.index(word)) for word in ("in", season, "the", "eats")}
    of_kind, of_animal = kind + WORDS.index(KINDS[0]), animal + WORDS.index(ANIMALS[0])
    begun = torch.stack([fixed["in"], fixed[season], fixed["the"], of_kind, of_animal, fixed["eats"]], 1)
    return begun, food + WORDS.index(FOODS[0])


def pretrained(folder: Path, generator: torch.Generator) -> LlamaForCausalLM:
    """A small language model that knows what animals eat in summer, and that in winter they eat anything."""
    rule = torch.randint(len(FOODS), (len(ANIMALS),), generator=generator)
    if not (folder / "config.json").exists():
        size = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
        tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=16, **size, **tokens))
        optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
        for number in range(200):
            parts = sentences(64, ("summer", "winter")[number % 2], float(number % 2), generator, rule)
            ids = torch.cat([parts[0], parts[1][:, None]], 1)
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimiser.step()
        model.save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder)


class Answer(nn.Module):
    """The logits of the next word."""

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.language_model(input_ids=input_ids).logits[:, -1]


class Objective(nn.Module):
    """What the Trainer trains: it wants the loss, and in evaluation the logits, in a dictionary."""

    accepts_loss_kwargs = False  # the Trainer itself divides by the steps that it accumulates

    def __init__(self, free_energy: bbb.FreeEnergy) -> None:
        super().__init__()
        self.free_energy = free_energy

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            return {"loss": self.free_energy(input_ids, labels)}
        p = self.free_energy.model.predict(input_ids, draws=10)
        return {"loss": -p.log_prob(labels).mean(), "logits": p.probs.log()}


class Sentences(Dataset):
    """Sentences one by one, as the Trainer takes them."""

    def __init__(self, begun: Tensor, food: Tensor) -> None:
        self.begun, self.food = begun, food

    def __len__(self) -> int:
        return len(self.food)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"input_ids": self.begun[number], "labels": self.food[number]}


def main() -> None:
    """Fine-tune on what animals eat in winter, or go on if there is a checkpoint; save, load and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("runs/lora"), help="of checkpoints, to go on from")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    base = pretrained(options.folder / "base", torch.Generator().manual_seed(options.seed))
    generator = torch.Generator().manual_seed(options.seed + 1)
    winter = torch.randint(len(FOODS), (len(ANIMALS),), generator=generator)
    training, held_out = (Sentences(*sentences(n, "winter", 0.3, generator, winter)) for n in (400, 300))

    torch.manual_seed(options.seed)
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["v_proj", "o_proj", "down_proj"])
    net = Answer(get_peft_model(base, adapters))  # freezes all but the adapters: these alone become Bayesian
    model = bbb.Bayesian(net, bbb.Categorical(), bbb.Normal(0.3), sigma=0.01, seed=options.seed)
    free_energy = bbb.FreeEnergy(model, n=len(training), warmup=100)
    optimiser = torch.optim.Adam(model.param_groups(5e-3, rho_lr=1e-2))
    constant = torch.optim.lr_scheduler.ConstantLR(optimiser, factor=1.0)
    arguments = TrainingArguments(
        str(options.folder / "checkpoints"),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=50,
        per_device_eval_batch_size=300,
        gradient_accumulation_steps=options.accumulate,
        bf16=options.bf16,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        seed=options.seed,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(Objective(free_energy), arguments, None, training, held_out, optimizers=(optimiser, constant))
    trainer.train(resume_from_checkpoint=any((options.folder / "checkpoints").glob("checkpoint-*")))

    bayesian, total = sum(q.numel for q in model.posterior.values()), sum(p.numel() for p in net.parameters())
    print(f"{bayesian:,} of {total:,} weights are Bayesian")
    p = model.predict(held_out.begun, draws=20)
    print(f"held-out sentences: nll {-p.log_prob(held_out.food).mean():.4f}, not known {p.epistemic.mean():.4f} nats")
    net.language_model.save_pretrained(options.folder / "adapter")  # the means: an adapter like any other
    bbb.save_pretrained(model, options.folder / "adapter", frozen=False)  # the posterior, beside it
    base = LlamaForCausalLM.from_pretrained(options.folder / "base")
    again = Answer(PeftModel.from_pretrained(base, options.folder / "adapter", is_trainable=True))
    loaded = bbb.from_pretrained(options.folder / "adapter", again)
    print("loaded: same", torch.equal(loaded.predict(held_out.begun, draws=20).probs, p.probs))


if __name__ == "__main__":
    main()
