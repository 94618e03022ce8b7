"""Agents from their files."""

import inspect
import math
import os
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bayesbackprop import likelihoods, priors
from bayesbackprop._errors import check_type, invalid
from bayesbackprop._files import read
from bayesbackprop.bandits.agents import Agent, Uniform
from bayesbackprop.bandits.linear import LinearThompson
from bayesbackprop.bandits.network import numbers_of
from bayesbackprop.bandits.neural import EpsilonGreedy, NeuralAgent, ThompsonSampling
from bayesbackprop.bandits.state import WAITING, completed
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
        arguments = completed(kind, arguments)
        if arguments.keys() != inspect.signature(kind).parameters.keys():
            raise ValueError(f"arguments {sorted(arguments)}")
        if "prior" in arguments:
            arguments["prior"] = prior or priors.from_description(arguments["prior"])
        if arguments.get("likelihood") is not None:
            arguments["likelihood"] = likelihoods.from_description(arguments["likelihood"])
        tensors = _with_codes(arguments, file.tensors)
        _check_sizes(kind, arguments, tensors)
    if "prior" in arguments and arguments["prior"] is None:
        raise invalid("prior", "bandits.load", "given, since the file has one of your own", None)
    with file.understanding():
        agent = kind(**arguments)
        waiting = {name: tensor for name, tensor in tensors.items() if name.startswith(WAITING)}
        known = {name: tensor for name, tensor in tensors.items() if name not in waiting}
        agent.restore(known, file.contents["acted"], file.contents["observed"])
        agent.restore_decisions({name.removeprefix(WAITING): tensor for name, tensor in waiting.items()}, file.contents)
    return agent


def _without_likelihood(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an agent of before agents had a likelihood: its reward had a fixed noise."""
    known = dict(arguments)
    # A network without a posterior learnt by the squared error, which is -log P at this noise but for a constant.
    known["likelihood"] = likelihoods.describe(Gaussian(known.pop("noise", math.sqrt(0.5))))
    known |= {"alarm": None, "action_features": None}
    return {**known, "exploration": 1.0, "settling": None} if "prior" in known else known


def _with_codes(arguments: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an agent that remembers contexts with what describes their actions; older files have it apart."""
    codes, contexts = arguments.get("action_features"), tensors.get("contexts")
    if codes is None or contexts is None or contexts.shape[-1] != arguments["features"]:
        return tensors
    described = torch.tensor(codes)[tensors["actions"]]
    return {**tensors, "contexts": torch.cat([contexts, described], -1)}


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
        expected["contexts"] = [memory, replicas, features if codes is None else features + coded]
    if any(type(number) is not int or number < 1 for number in claimed):
        raise ValueError(f"sizes {claimed!r:.80}")
    if any(list(tensors[name].shape) != shape for name, shape in expected.items()):
        raise ValueError(f"sizes {claimed!r:.80} that its tensors do not have")
