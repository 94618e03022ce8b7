"""Bayes by Backprop: neural networks that know what they do not know.

Wrap any module, train it on the variational free energy, and ask for a predictive distribution.
"""

from bayesbackprop import callbacks, pruning
from bayesbackprop._engine import Draw, plain_kernels, unsharded
from bayesbackprop._version import __version__
from bayesbackprop.calibration import calibrate_temperature, conformal_intervals
from bayesbackprop.comparison import compare
from bayesbackprop.diagnostics import agreement, diagnose
from bayesbackprop.export import load_sparse, save_sparse, sparse
from bayesbackprop.families import Conditional, Diagonal, FullCovariance, LowRank, Mixture
from bayesbackprop.hub import from_pretrained, push_to_hub, save_pretrained
from bayesbackprop.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    Joint,
    Likelihood,
    LogLikelihood,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
)
from bayesbackprop.model import Bayesian
from bayesbackprop.normalisation import update_batchnorm
from bayesbackprop.objective import Cost, FreeEnergy
from bayesbackprop.optim import IVON, Adam
from bayesbackprop.portable import DrawnNetwork, EnsembleNetwork, mean_network, save_onnx
from bayesbackprop.posterior import Relative
from bayesbackprop.prediction import Ensemble, Predictive
from bayesbackprop.priors import Laplace, LogDensity, Normal, Prior, ScaleMixture
from bayesbackprop.pruning import prune
from bayesbackprop.refinement import refine
from bayesbackprop.saving import load, save
from bayesbackprop.training import Batches, distributed, fit
from bayesbackprop.verdict import evaluate

__all__ = [
    "IVON",
    "Adam",
    "Batches",
    "Bayesian",
    "Bernoulli",
    "Categorical",
    "Conditional",
    "Cost",
    "Diagonal",
    "Draw",
    "DrawnNetwork",
    "Ensemble",
    "EnsembleNetwork",
    "FreeEnergy",
    "FullCovariance",
    "Gaussian",
    "Joint",
    "Laplace",
    "Likelihood",
    "LogDensity",
    "LogLikelihood",
    "LowRank",
    "Mixture",
    "NegativeBinomial",
    "Normal",
    "Ordinal",
    "Poisson",
    "Predictive",
    "Prior",
    "Relative",
    "ScaleMixture",
    "StudentT",
    "__version__",
    "agreement",
    "calibrate_temperature",
    "callbacks",
    "compare",
    "conformal_intervals",
    "diagnose",
    "distributed",
    "evaluate",
    "fit",
    "from_pretrained",
    "load",
    "load_sparse",
    "mean_network",
    "plain_kernels",
    "prune",
    "pruning",
    "push_to_hub",
    "refine",
    "save",
    "save_onnx",
    "save_pretrained",
    "save_sparse",
    "sparse",
    "unsharded",
    "update_batchnorm",
]
