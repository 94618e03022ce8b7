"""The bandits of the experiments: environments that need a data set."""

import torch

from bayesbackprop.bandits import Table, classification
from bayesbackprop_paper import data


def mushroom(seed: int = 0) -> Table:
    """The paper's: action 0 leaves the mushroom; action 1 eats it: +5 if edible, else +5 or -35 at even odds."""
    contexts, edible = data.mushroom()
    eaten = torch.where(edible, 5.0, torch.tensor([[5.0], [-35.0]]))
    return Table(contexts, torch.stack([torch.zeros_like(eaten), eaten], dim=-1), seed)


def adult(seed: int = 0) -> Table:
    """Adult: which of 14 occupations a person has."""
    return classification(*data.adult(label="occupation"), seed=seed)


def covertype(seed: int = 0) -> Table:
    """Covertype: which of 7 kinds of forest grows somewhere."""
    return classification(*data.covertype(), seed=seed)
