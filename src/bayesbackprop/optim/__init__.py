"""Optimisers made for means and spreads: Adam, with torch's numbers, and IVON, a natural gradient."""

from bayesbackprop.optim.adam import Adam
from bayesbackprop.optim.ivon import IVON

__all__ = ["IVON", "Adam"]
