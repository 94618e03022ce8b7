"""Bad calls of the whole public API: each gets a clear answer, and none passes in silence.

Every value of ``bad_values`` that is not right for a parameter is tried in its place, for all parameters of
``bad_call_table``; ``bad_call_mistakes`` holds calls that are wrong in other ways. An answer is one of these:

* clear: an error that names the parameter, or one of torch, scikit-learn or Python that says what is wrong.
* legitimate: the call is right after all, for the reason given in ``LEGITIMATE``.
* silent: accepted although wrong.
* obscure: any other exception, or none within a few seconds.

``python tests/bad_calls.py`` prints how many there are of each, with ``-v`` those that are silent or obscure, and with
``-l`` those that are legitimate.
"""

import contextlib
import io
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from bad_call_mistakes import MISTAKES
from bad_call_table import TABLE, Entry
from bad_values import VALUES

VERDICTS = ("clear", "legitimate", "silent", "obscure")

# Seconds for an answer.
PATIENCE = 10.0

# Calls that look wrong and are right, as regular expressions, and why.
LEGITIMATE: dict[str, str] = {
    r"(Draw|Bayesian.forward)\(inputs=(empty rows|nan tensor)\)": "a call of the network itself, as net(x)",
    r".*\(inputs=(sparse|csr)\)": "torch multiplies sparse matrices",
    r".*\.log_prob\((output|target)=double\)": "another precision",
    r".*\.log_prob\((output|target)=nan tensor\)": "NaN gives NaN, as in torch; the objective refuses it",
    r"Bernoulli.log_prob\(target=(ints \[8, 3\]|booleans)\)": "0 and 1 may be of any type",
    r"(Poisson|NegativeBinomial).log_prob\(target=(ints \[8, 3\]|booleans)\)": "counts may be of any type",
    r"Predictive.log_prob, counts\(target=(booleans|double)\)": "counts may be of any type",
    r"Categorical.(log_prob|distribution)\(output=tensor \[8, 7\]\)": "seven classes",
    r"Categorical.distribution\(output=(tensor \[5, 3\]|tensor \[8, 1, 1, 1\]|double)\)": "other logits",
    r"Bayesian.seed\(seed=(module|likelihood|model)\)": "torch itself takes a module that is assigned, unasked",
    r"Bayesian\(select=function of text\)": "what a pattern found may stand for yes",
    r"Bayesian\(centre of ints\)": "ints are numbers",
    r"Batches\(order of half the rows\)": "an epoch may leave rows out",
    r"Agent.(observe|reward)\(reward=(-3|Decimal|(float )?tensor of one)\)": "a number, however it comes",
    r"Agent.(observe|reward)\(reward=(True|np.bool)\)": "a click is True",
    r"(Agent.observe|Agent.retire|Table.step)\(action=tensor of one\)": "an integer, however it comes",
    r"(Table|classification)\(\w+=(ints \[8, 3\]|booleans)\)": "ints are numbers, and so are yes and no",
    r"BayesianMLPRegressor.predict\(quantiles=tensor \[2\]\)": "levels, however they come",
    r"an ensemble of a scalar": "one number of each network can be stacked; only predict needs rows",
}

# What files, torch, scikit-learn and Python themselves say clearly.
CLEAR = re.compile(
    "|".join(
        (
            r"which is damaged or of another run",
            r"mat1 and mat2 shapes cannot be multiplied|must have the same dtype|to have the same dtype",
            r"both arguments to linear need to be at least 1D|argument 'input' .*must be Tensor, not",
            r"within the support|to satisfy the constraint|cannot be called on meta tensors|on the expected device",
            r"Could not run 'aten::|unsupported tensor layout|Error\(s\) in loading state_dict|a second time",
            r"modified by an inplace operation|required \"forward\" function|can't convert .* to numpy",
            r"missing \d+ required|unexpected keyword|positional arguments? |abstract|No such file or directory",
            r"expected str, bytes or os.PathLike object|os.PathLike object returning str",
            r"Expected 2D array|Found array with|inconsistent numbers of samples|should be a 1d array|[Cc]omplex data",
            r"contains (NaN|infinity)|Unknown label type|have at least 1 dimension|not fitted yet|but .* is expecting",
            r"requires y to be passed|Exceeds the limit \(4300 digits\)",
            r"must be a string or a real number, not|setting an array element|could not convert string to float",
        )
    )
)

# Exceptions that are never an answer.
OBSCURE = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RecursionError, TimeoutError)


class Answer(NamedTuple):
    """How a call was answered, and the error or the reason."""

    call: str
    verdict: str
    said: str = ""


def calls() -> Iterator[tuple[str, Callable[[], Any], Sequence[str]]]:
    """All calls: what it is, the call, and the words one of which a clear error has."""
    for name, entry in TABLE.items():
        for parameter, kind in entry.kinds.items():
            words = [f"'{word.replace('_cost', ' cost')}'" for word in (parameter, *entry.says)]
            for value in kind.tried:
                if value not in kind.right:
                    yield f"{name}({parameter}={value})", _spoilt(entry, parameter, value), words
    for name, (call, word) in MISTAKES.items():
        yield name, call, [word]


def _spoilt(entry: Entry, parameter: str, value: str) -> Callable[[], Any]:
    return lambda: entry.call(**{**entry.good(), parameter: VALUES[value]()})


def answer(name: str, call: Callable[[], Any], words: Sequence[str]) -> Answer:
    """How one call is answered."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            call()
    except Exception as error:
        said = str(error)
        is_answer = isinstance(error, ValueError) or not isinstance(error, OBSCURE)
        clear = is_answer and (any(word in said for word in words) or CLEAR.search(said))
        return Answer(name, "clear" if clear else "obscure", f"{type(error).__name__}: {said}")
    for pattern, reason in LEGITIMATE.items():
        if re.fullmatch(pattern, name):
            return Answer(name, "legitimate", reason)
    return Answer(name, "silent")


def answers() -> list[Answer]:
    """How all calls are answered."""
    previous = signal.signal(signal.SIGALRM, _give_up)
    found: list[Answer] = []
    try:
        with torch.random.fork_rng():
            for call in calls():
                signal.setitimer(signal.ITIMER_REAL, PATIENCE)
                found.append(answer(*call))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    return found


def _give_up(*_: Any) -> None:
    raise TimeoutError(f"no answer within {PATIENCE} s")


def table(found: Sequence[Answer]) -> str:
    """How many calls were answered in each way."""
    counts = Counter(each.verdict for each in found)
    return "\n".join(
        f"{name:<12}{count:>6}" for name, count in [("calls", len(found)), *((v, counts[v]) for v in VERDICTS)]
    )


def main(arguments: Sequence[str]) -> int:
    """Print the table, and those answers that are asked for."""
    found = answers()
    shown = (("silent", "obscure") if "-v" in arguments else ()) + (("legitimate",) if "-l" in arguments else ())
    for each in found:
        if each.verdict in shown:
            print(f"{each.verdict:<10} {each.call}  {each.said[:200]!r}")
    print(table(found))
    return int(any(each.verdict in ("silent", "obscure") for each in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
