"""Bayes by Backprop: neural networks that know what they do not know.

Wrap any module, train it on the variational free energy, and ask for a predictive distribution.
"""

from bayesbackprop import callbacks
from bayesbackprop._engine import Draw, plain_kernels
from bayesbackprop._version import __version__
from bayesbackprop.export import load_sparse, save_sparse, sparse
from bayesbackprop.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, LogLikelihood
from bayesbackprop.model import Bayesian
from bayesbackprop.objective import Cost, FreeEnergy
from bayesbackprop.optim import Adam
from bayesbackprop.posterior import Relative
from bayesbackprop.prediction import Ensemble, Predictive
from bayesbackprop.priors import Laplace, LogDensity, Normal, Prior, ScaleMixture
from bayesbackprop.pruning import prune
from bayesbackprop.saving import load, save
from bayesbackprop.training import Batches, fit

__all__ = [
    "Adam",
    "Batches",
    "Bayesian",
    "Bernoulli",
    "Categorical",
    "Cost",
    "Draw",
    "Ensemble",
    "FreeEnergy",
    "Gaussian",
    "Laplace",
    "Likelihood",
    "LogDensity",
    "LogLikelihood",
    "Normal",
    "Predictive",
    "Prior",
    "Relative",
    "ScaleMixture",
    "__version__",
    "callbacks",
    "fit",
    "load",
    "load_sparse",
    "plain_kernels",
    "prune",
    "save",
    "save_sparse",
    "sparse",
]
