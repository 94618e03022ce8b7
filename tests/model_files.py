"""Files of one small network of digits: dense, pruned and sparse."""

from pathlib import Path

from bayesbackprop import Bayesian, Categorical, prune, save, save_sparse, sparse
from bayesbackprop._networks import mlp

SIZES = [784, 6, 10]


def model_files(folder: Path) -> dict[str, Path]:
    """Write them; gives their paths by name."""
    model = Bayesian(mlp(SIZES), Categorical(), sigma=0.05, seed=1)
    pruned = prune(model, 0.9)
    files = {name: folder / f"{name}.safetensors" for name in ("dense", "pruned", "sparse")}
    save(model, files["dense"])
    save(pruned, files["pruned"])
    save_sparse(sparse(pruned), files["sparse"])
    return files
