"""Networks as people have them, in small: one row for each. Tests train them, and docs/supported.md lists them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence

import bayesbackprop as bbb

# Examples of a batch.
B = 4


class Architecture(NamedTuple):
    """A network, a batch for it, and what it is wrapped with.

    ``note`` is what the page of the docs says besides the name.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    targets: Callable[[], Any]
    note: str
    likelihood: Callable[[], bbb.Likelihood] = bbb.Categorical
    output: Callable[[Any], Any] | None = None
    select: Callable[[str, nn.Module], bool] | None = None


def _classes(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(3, (B, *shape))


def _numbers(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(B, *shape)


def _tokens() -> Tensor:
    return torch.randint(1, 7, (B, 5))


def _gaussian() -> bbb.Likelihood:
    return bbb.Gaussian(0.5)


# --- images ----------------------------------------------------------------------------------------------------------


def _cnn() -> nn.Module:
    layers = nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(16, 3))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4, 3)
        self.first, self.second = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        inner = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        logits: Tensor = self.head(F.relu(x + inner).mean((2, 3)))
        return logits


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.bottom = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.up, self.head = nn.ConvTranspose2d(4, 4, 2, stride=2), nn.Conv2d(8, 3, 1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.norm(self.down(x)))
        inner = F.relu(self.bottom(F.avg_pool2d(skip, 2)))
        logits: Tensor = self.head(torch.cat([skip, self.up(inner)], 1))
        return logits


def _depthwise() -> nn.Module:
    layers = nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 3, groups=4), nn.SiLU(), nn.Conv2d(4, 6, 1), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(6, 3))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 4, stride=4)
        self.token, self.positions = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8) / 10)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).mT
        whole = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + self.positions
        logits: Tensor = self.head(self.encoder(whole)[:, 0])
        return logits


# --- sequences -------------------------------------------------------------------------------------------------------


class TiedGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(7, 8), nn.Embedding(5, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.embedding(ids) + self.positions(torch.arange(length))
        logits: Tensor = self.head(self.body(x, mask=mask, is_causal=True))
        return logits.movedim(-1, 1)


class PackedGRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=0)
        self.layer, self.head = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, ids: Tensor, lengths: list[int]) -> Tensor:
        packed = pack_padded_sequence(
            self.embedding(ids), torch.tensor(lengths), batch_first=True, enforce_sorted=False
        )
        logits: Tensor = self.head(self.layer(packed)[1][-1])
        return logits


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(2, 4, 2, batch_first=True, bidirectional=True), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.layer(x)[0][:, -1])
        return output


class Bags(nn.Module):
    """A sum over a set of words, as of EmbeddingBag."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(7, 5, mode="sum"), nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.words(ids))
        return logits


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    size: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    size |= {"vocab_size": 7, "max_position_embeddings": 8, "num_labels": 3}
    return BertForSequenceClassification(BertConfig(**size, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    size: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 7, "n_positions": 8}
    size |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))


def _lora() -> nn.Module:
    import peft

    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))
    return peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["0", "2"]))  # type: ignore[arg-type]


# --- others ----------------------------------------------------------------------------------------------------------


class Graph(nn.Module):
    """Two rounds of messages along the edges of one graph, with a class for each node."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            source, target = edges
            x = x + torch.zeros_like(x).index_add(0, target, x[source])
            x = layer(torch.tanh(x))
        return x


def _weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 5)), nn.Tanh(), nn.Linear(5, 3))


class Complex(nn.Module):
    """A complex layer between real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.Linear(3, 4), nn.Linear(4, 4, dtype=torch.complex64)
        self.after = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.after(self.between(self.before(x).to(torch.complex64)).abs())
        return logits


class Int8(nn.Module):
    """A layer whose weights are stored as int8, before an ordinary one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("stored", torch.randint(-128, 128, (5, 3), dtype=torch.int8))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(x @ (self.get_buffer("stored").float() / 128).T))
        return logits


class Experts(nn.Module):
    """A soft mixture of experts, which returns its gates beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(3, 2), nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])

    def forward(self, x: Tensor) -> dict[str, Any]:
        gates = self.gate(x).softmax(-1)
        logits = sum(gates[:, [k]] * expert(x) for k, expert in enumerate(self.experts))
        return {"logits": logits, "gates": gates, "cache": None}


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.price, self.kind = nn.Linear(3, 5), nn.Linear(5, 1), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(x))
        return {"price": self.price(hidden), "kind": self.kind(hidden)}


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return (self.body(left) - self.body(right)).square().sum(1, keepdim=True)


def _autoencoder() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3), nn.GELU(), nn.LayerNorm(3), nn.Linear(3, 6))


def _frozen_backbone() -> nn.Module:
    backbone = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU()).requires_grad_(False).eval()
    return nn.Sequential(backbone, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))


def _images() -> Tensor:
    return torch.randn(B, 1, 8, 8)


def _joint() -> bbb.Likelihood:
    return bbb.Joint({"price": bbb.Gaussian(1.0), "kind": bbb.Categorical()})


ARCHITECTURES: dict[str, Architecture] = {
    "fully connected": Architecture(
        lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3)), _numbers(3), _classes(), "with fast paths"
    ),
    "convolutional": Architecture(_cnn, _images, _classes(), "as LeNet-5"),
    "residual": Architecture(Residual, _images, _classes(), "as ResNet, with batch normalisation"),
    "UNet": Architecture(UNet, _images, _classes(8, 8), "a class for each pixel"),
    "depthwise": Architecture(_depthwise, _images, _classes(), "as MobileNet"),
    "ViT": Architecture(ViT, _images, _classes(), "a vision transformer"),
    "tied GPT": Architecture(TiedGPT, _tokens, _tokens, "the head shares the weight of the embedding"),
    "GPT-2 of transformers": Architecture(
        _gpt2,
        lambda: {"input_ids": _tokens()},
        _tokens,
        "a ModelOutput with a cache",
        output=lambda o: o.logits.movedim(-1, 1),
    ),
    "BERT of transformers": Architecture(
        _bert,
        lambda: {"input_ids": _tokens(), "attention_mask": torch.ones(B, 5)},
        _classes(),
        "inputs by name",
        output=lambda o: o.logits,
    ),
    "LoRA by peft": Architecture(
        _lora, _numbers(3), _classes(), "only the adapters", select=lambda name, _: "lora_" in name
    ),
    "packed GRU": Architecture(PackedGRU, lambda: (_tokens(), [5, 3, 2, 4]), _classes(), "sequences of any length"),
    "LSTM": Architecture(LSTM, _numbers(6, 2), _numbers(1), "two layers, both directions", _gaussian),
    "EmbeddingBag": Architecture(Bags, _tokens, _classes(), "a bag of words"),
    "graph network": Architecture(
        Graph, lambda: (torch.randn(B, 3), torch.tensor([[0, 1, 2], [1, 2, 3]])), _classes(), "messages along edges"
    ),
    "weight normalisation": Architecture(_weight_norm, _numbers(3), _classes(), "torch.nn.utils.parametrizations"),
    "complex layers": Architecture(Complex, _numbers(3), _classes(), "complex weights stay deterministic"),
    "int8 parts": Architecture(Int8, _numbers(3), _classes(), "stored integers stay deterministic"),
    "mixture of experts": Architecture(
        Experts, _numbers(3), _classes(), "a dictionary, with None in it", output=lambda o: o["logits"]
    ),
    "several heads": Architecture(
        Heads, _numbers(3), lambda: {"price": torch.randn(B, 1), "kind": _classes()()}, "a Joint likelihood", _joint
    ),
    "siamese": Architecture(Siamese, lambda: (torch.randn(B, 3), torch.randn(B, 3)), _numbers(1), "", _gaussian),
    "autoencoder": Architecture(_autoencoder, _numbers(6), _numbers(6), "with layer normalisation", _gaussian),
    "frozen backbone": Architecture(_frozen_backbone, _images, _classes(), "only the head is trained"),
}
