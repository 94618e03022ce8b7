"""``plain_kernels``: the equations in place of the kernels, in one thread, and differentiable twice."""

import threading

import pytest
import torch

from bayesbackprop import FreeEnergy, plain_kernels
from bayesbackprop._engine import cpu
from networks import X, Y, regression_model

pytestmark = pytest.mark.identities


def test_second_derivatives_are_refused_by_the_kernels_and_there_without_them() -> None:
    model = regression_model()
    parameters = list(model.parameters())
    with pytest.raises(RuntimeError, match="plain_kernels"):
        torch.autograd.grad(FreeEnergy(model, 100)(X, Y).total, parameters, create_graph=True)
    with plain_kernels():
        gradients = torch.autograd.grad(FreeEnergy(model, 100)(X, Y).total, parameters, create_graph=True)
    assert all(gradient.requires_grad for gradient in gradients)


def test_plain_equations_are_a_matter_of_the_thread() -> None:
    inside, leave, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        with plain_kernels():
            inside.set()
            leave.wait()
            seen.append(cpu._enabled.get())

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    seen.append(cpu._enabled.get())
    leave.set()
    thread.join()
    assert seen == [cpu._enabled.get(), False]
