"""Agents from their files."""

import inspect
import math
import os
from itertools import pairwise
from typing import Any

from torch import Tensor

from bayesbackprop import likelihoods, priors
from bayesbackprop._errors import check_type, invalid
from bayesbackprop._files import read
from bayesbackprop.bandits.agents import Agent, LinearThompson, Uniform
from bayesbackprop.bandits.network import numbers_of
from bayesbackprop.bandits.neural import EpsilonGreedy, NeuralAgent, ThompsonSampling
from bayesbackprop.likelihoods import Gaussian
from bayesbackprop.priors import Prior

_KINDS: dict[str, type[Agent]] = {
    kind.__name__: kind for kind in (Uniform, LinearThompson, ThompsonSampling, EpsilonGreedy)
}


def load(path: str | os.PathLike[str], *, prior: Prior | None = None) -> Agent:
    """The agent in a file that ``agent.save`` wrote; with its ``prior``, if that is of the user's own."""
    check_type("bandits.load", Prior | None, "None, or the Prior of the agent", prior=prior)
    file = read(path, "agent", "bandits.load")
    with file.understanding():
        kind, arguments = _KINDS[file.contents["agent"]], dict(file.contents["arguments"])
        if issubclass(kind, NeuralAgent) and "likelihood" not in arguments:
            arguments = _without_likelihood(arguments)
        if arguments.keys() != inspect.signature(kind).parameters.keys():
            raise ValueError(f"arguments {sorted(arguments)}")
        if "prior" in arguments:
            arguments["prior"] = prior or priors.from_description(arguments["prior"])
        if arguments.get("likelihood") is not None:
            arguments["likelihood"] = likelihoods.from_description(arguments["likelihood"])
        _check_sizes(kind, arguments, file.tensors)
    if "prior" in arguments and arguments["prior"] is None:
        raise invalid("prior", "bandits.load", "given, since the file has one of your own", None)
    with file.understanding():
        agent = kind(**arguments)
        agent.restore(file.tensors, file.contents["acted"], file.contents["observed"])
    return agent


def _without_likelihood(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an agent of before agents had a likelihood: its reward had a fixed noise."""
    known = dict(arguments)
    # A network without a posterior learnt by the squared error, which is -log P at this noise but for a constant.
    known["likelihood"] = likelihoods.describe(Gaussian(known.pop("noise", math.sqrt(0.5))))
    known |= {"alarm": None, "action_features": None}
    return {**known, "exploration": 1.0, "settling": None} if "prior" in known else known


def _check_sizes(kind: type[Agent], arguments: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Refuse sizes that the tensors of a file do not have, before such an agent is made, and absurd numbers."""
    for name, value in arguments.items():
        most = 2**53 if isinstance(value, int) else 1e30
        if name != "seed" and isinstance(value, int | float) and value and not 1e-30 < abs(value) < most:
            raise ValueError(f"{name} {value!r:.80}")
    each = [arguments[name] for name in ("features", "actions", "replicas")]
    claimed, (features, actions, replicas) = list(each), each
    expected: dict[str, list[int]] = {}
    if kind is LinearThompson:
        expected["matrix"] = [replicas, actions, features + 1, features + 1]
    if issubclass(kind, NeuralAgent):
        hidden, memory = list(arguments["hidden"]), arguments["memory"]
        claimed += [*hidden, memory]
        is_input = arguments["encoding"] == "input"
        codes, numbers = arguments["action_features"], numbers_of(arguments["likelihood"])
        coded = actions if codes is None else len(codes[0])
        sizes = [features + coded if is_input else features, *hidden, numbers * (1 if is_input else actions)]
        expected = {f"parameter.{2 * n}": [replicas, *reversed(pair)] for n, pair in enumerate(pairwise(sizes))}
        expected["contexts"] = [memory, replicas, features]
    if any(type(number) is not int or number < 1 for number in claimed):
        raise ValueError(f"sizes {claimed!r:.80}")
    if any(list(tensors[name].shape) != shape for name, shape in expected.items()):
        raise ValueError(f"sizes {claimed!r:.80} that its tensors do not have")
