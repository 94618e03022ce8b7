"""The columns of Table 1, and a row of it."""

from dataclasses import replace
from typing import Any

from bayesbackprop_paper.experiments.mnist import Result

COLUMNS = "method,units,temperature,seed,epochs,selected_epoch,validation_error,test_error,test_nll,test_ece,seconds,prediction"  # noqa: E501


def row(**changes: Any) -> Result:
    return replace(Result("sgd", 400, 1.0, 0, 40, 17, 1.25, 1.83, 0.0625, 0.5, 12345.678, "mean"), **changes)
