"""The data sets of the experiments: fetched once, checked by hash, parsed into tensors.

``fetch`` gets the files, the functions named after the data sets give tensors and fetch what is missing. Everything
looks into a folder of yours first, given as ``folder`` or by the environment variable ``BAYESBACKPROP_DATA``.
"""

from bayesbackprop_paper.data.fetching import FetchError, fetch, find, root
from bayesbackprop_paper.data.loading import (
    Classification,
    Images,
    Mushrooms,
    Regression,
    Split,
    adult,
    covertype,
    fashion_mnist,
    mnist,
    mushroom,
    regression,
)
from bayesbackprop_paper.data.sources import DATA_SETS, DataSet

__all__ = [
    "DATA_SETS",
    "Classification",
    "DataSet",
    "FetchError",
    "Images",
    "Mushrooms",
    "Regression",
    "Split",
    "adult",
    "covertype",
    "fashion_mnist",
    "fetch",
    "find",
    "mnist",
    "mushroom",
    "regression",
    "root",
]
