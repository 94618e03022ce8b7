"""A log of decisions: what was known, what was done, with which probability, and what came of it."""

import csv
import io
import os
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bayesbackprop._errors import Described, check_list, check_path, check_type, invalid
from bayesbackprop._files import write_atomically
from bayesbackprop.bandits.decisions import Decision

# Probabilities of single precision add up to 1 within this.
ROUNDING = 1e-4

# How the columns of a CSV file are called: those with several numbers a decision have one column for each.
_CONTEXT, _PROBABILITY, _ALLOWED, _FEATURE = "context_", "probability_", "allowed_", "feature_"


class Log:
    """Decisions and their rewards, one row each, in the order in which they were taken.

    All arguments may be tensors, arrays, lists, or columns of a table of pandas.

    Args:
        contexts: ``[n, features]``.
        actions: What was done, ints ``[n]``.
        rewards: ``[n]``. Leave out the rows of decisions whose reward is not known.
        propensities: The probability with which the action was chosen, in (0, 1], ``[n]``; or, better, that of every
            action, ``[n, actions]``, which also says what could not have been chosen.
        masks: Which actions were allowed, booleans ``[n, actions]``; None: all of them.
        features: Numbers that described each action in the request, ``[n, actions, numbers]``, if requests had any;
            None in place of a row whose request had none.

    Attributes:
        contexts: ``[n, features]``, in single precision, as agents see them.
        actions: ``[n]``.
        rewards: ``[n]``, in double precision, as all that follows.
        propensities: Of the actions that were taken, ``[n]``.
        probabilities: Of every action, ``[n, actions]``, or None where these are not known.
        masks: ``[n, actions]``, or None.
        features: ``[n, actions, numbers]``, in single precision, with NaN in rows whose request had none; or None.

    Examples:
        >>> log = Log([[0.0], [1.0]], actions=[0, 1], rewards=[1.0, 0.0], propensities=[0.5, 0.25])
        >>> len(log), log[:1].rewards.tolist()
        (2, [1.0])
    """

    def __init__(
        self, contexts: Any, actions: Any, rewards: Any, propensities: Any, masks: Any = None, features: Any = None
    ) -> None:
        self.contexts = numbers("contexts", "Log", contexts, (None, None)).float()
        n = len(self.contexts)
        if not n or not self.contexts.isfinite().all():
            raise invalid("contexts", "Log", "finite numbers in single precision, at least one row", contexts)
        self.actions = whole("actions", "Log", actions, n)
        self.rewards = numbers("rewards", "Log", rewards, (n,))
        if not self.rewards.isfinite().all():
            row = int((~self.rewards.isfinite()).nonzero()[0])
            got = Described(f"{float(self.rewards[row])} in row {row}")
            raise invalid("rewards", "Log", "finite; leave out the rows of decisions whose reward is not known", got)
        given = numbers("propensities", "Log", propensities, (n,), (n, None))
        self.probabilities = given if given.dim() == 2 else None
        self.masks = None if masks is None else _booleans(masks, n)
        self.features = None if features is None else _described(features, n)
        for name, rows in (
            ("propensities", self.probabilities),
            ("masks", self.masks),
            ("features", self.features),
        ):
            check_covers(name, "Log", rows, self.actions)
        if self.features is not None and self.features.shape[1] != self._count:
            got = Described(f"{self.features.shape[1]}")
            raise invalid("features", "Log", f"those of {self._count} actions, as there are", got)
        if self.probabilities is not None:
            check_distributions("propensities", "Log", self.probabilities, self.masks)
            given = self.probabilities.gather(1, self.actions[:, None])[:, 0]
        self.propensities = given
        if bad := (~((given > 0) & (given <= 1))).nonzero().flatten().tolist():
            got = Described(f"{float(given[bad[0]])} in row {bad[0]}")
            raise invalid("propensities", "Log", "in (0, 1] for the actions that were taken", got)
        if self.masks is not None and not (taken := self.masks.gather(1, self.actions[:, None])[:, 0]).all():
            row = int((~taken).nonzero()[0])
            got = Described(f"action {int(self.actions[row])} in row {row}, which its mask forbids")
            raise invalid("actions", "Log", "allowed by the masks", got)

    @classmethod
    def of(
        cls,
        decisions: Sequence[Decision],
        contexts: Any,
        rewards: Mapping[str, float] | Sequence[float],
        masks: Any = None,
        features: Any = None,
    ) -> "Log":
        """The log of what :meth:`Agent.decide` or :meth:`Agent.decide_many` returned, with what was allowed then.

        Decisions also say by which features of the actions they were made, where their requests had some.

        Some may have been made before ``add_arms`` and some after: an action that was not there had the probability 0
        and was not allowed.

        Args:
            decisions: Those decisions.
            contexts: The context of each, ``[n, features]``.
            rewards: Of each; or a mapping from ids to rewards, in which those that never came are missing: their
                decisions are left out of the log.
            masks: What was allowed in each, ``[n, actions]``, in place of what the decisions say: for those of older
                versions, which do not say it.
            features: Those of each request, ``[n, actions, numbers]``, in place of what the decisions say, likewise.
        """
        for each in check_list("Log.of", decisions=decisions):
            check_type("Log.of", Decision, "a list of decisions, as decide() returns them", decisions=each)
        if len(decisions) == 0:
            raise invalid("decisions", "Log.of", "at least one", decisions)
        contexts = numbers("contexts", "Log.of", contexts, (len(decisions), None))
        masks = _allowed(decisions) if masks is None else _booleans(masks, len(decisions))
        kept, most = list(range(len(decisions))), max(len(each.probabilities) for each in decisions)
        codes = _described(_features_of(decisions, most) if features is None else features, len(decisions))
        if isinstance(rewards, Mapping):
            kept = [row for row in kept if decisions[row].id in rewards]
            rewards = [rewards[decisions[row].id] for row in kept]
        return cls(
            contexts[kept],
            [decisions[row].action for row in kept],
            rewards,
            _together([each.probabilities for each in decisions], most)[kept],
            None if masks is None else masks[kept],
            None if codes is None else codes[kept],
        )

    def __len__(self) -> int:
        return len(self.rewards)

    def __getitem__(self, rows: slice | Sequence[int] | Tensor) -> "Log":
        """The log of some rows: a slice, their numbers, or a boolean for each."""
        try:
            chosen = torch.arange(len(self))[rows]
        except (TypeError, IndexError, ValueError) as error:
            raise invalid("rows", "Log", "a slice, or a list of the numbers of rows", rows) from error
        if chosen.dim() != 1:
            raise invalid("rows", "Log", "a slice, or a list of the numbers of rows", rows)
        if not len(chosen):
            raise invalid("rows", "Log", f"at least one of the {len(self)} rows", rows)
        given = self.propensities if self.probabilities is None else self.probabilities
        masks, features = (None if each is None else each[chosen] for each in (self.masks, self.features))
        return Log(self.contexts[chosen], self.actions[chosen], self.rewards[chosen], given[chosen], masks, features)

    def __add__(self, other: "Log") -> "Log":
        """The rows of this log, and then those of another.

        Where one has more actions, these were added in between: in the rows of the other they had the probability 0 and
        were not allowed.

        Examples:
            >>> before = Log([[0.0]], actions=[0], rewards=[1.0], propensities=[[0.5, 0.5]])
            >>> after = Log([[1.0]], actions=[2], rewards=[0.0], propensities=[[0.25, 0.25, 0.5]])
            >>> (before + after).masks.tolist()
            [[True, True, False], [True, True, True]]
        """
        if not isinstance(other, Log):
            return NotImplemented
        if other.contexts.shape[1] != self.contexts.shape[1]:
            constraint = f"of contexts of {self.contexts.shape[1]} numbers, as those that it is added to"
            raise invalid("other", "Log.__add__", constraint, Described(f"{other.contexts.shape[1]}"))
        logs = (self, other)
        if len({(log.probabilities is None, log._count is None) for log in logs}) > 1:
            constraint = (
                "a log with the same columns: probabilities of every action or of the one taken, and masks or none"
            )
            raise invalid("other", "Log.__add__", constraint, Described("one that knows more, or less"))
        given = [log.propensities if log.probabilities is None else log.probabilities for log in logs]
        masks = features = None
        if self._count is not None and other._count is not None:
            most = max(self._count, other._count)
            counts = (self._count, other._count)
            allowed = [
                torch.ones(len(log), count) if log.masks is None else log.masks
                for log, count in zip(logs, counts, strict=True)
            ]
            masks = torch.cat([_widened(each, most) for each in allowed])
            given = [each if each.dim() == 1 else _widened(each, most) for each in given]
            features = _joined(logs, most)
        everything = masks is None or bool(masks.all())
        contexts, actions, rewards = (
            torch.cat([getattr(log, name) for log in logs]) for name in ("contexts", "actions", "rewards")
        )
        return Log(contexts, actions, rewards, torch.cat(given), None if everything else masks, features)

    @property
    def _count(self) -> int | None:
        """How many actions there were, if the log knows it."""
        known = (self.probabilities, self.masks, self.features)
        return next((rows.shape[1] for rows in known if rows is not None), None)

    @property
    def requested(self) -> list[Tensor | None] | None:
        """The features of each request, ``[actions, numbers]``, as agents take them: None where it had none."""
        if self.features is None:
            return None
        return [None if bool(row.isnan().any()) else row for row in self.features]

    def write_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the log as a table with a header, atomically.

        The columns: ``context_0`` and so on, ``action``, ``reward``, ``propensity`` (or ``probability_0`` and so on),
        ``allowed_0`` and so on if there are masks, and ``feature_0_1`` and so on for the second number of the first
        action, if requests had features: empty in the rows of those that had none.
        """
        place = check_path("Log.write_csv", path=path)
        columns: dict[str, Any] = _columns(_CONTEXT, self.contexts.numpy())  # as text, shortest in single precision
        columns |= {"action": self.actions.tolist(), "reward": self.rewards.tolist()}
        if self.probabilities is None:
            columns["propensity"] = self.propensities.tolist()
        else:
            columns |= {name: each.tolist() for name, each in _columns(_PROBABILITY, self.probabilities).items()}
        if self.masks is not None:
            columns |= {name: each.tolist() for name, each in _columns(_ALLOWED, self.masks.int()).items()}
        for action, rows in enumerate(() if self.features is None else self.features.numpy().swapaxes(0, 1)):
            described = _columns(f"{_FEATURE}{action}_", rows)
            columns |= {name: ["" if np.isnan(each) else each for each in row] for name, row in described.items()}
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
        write_atomically(place, text.getvalue().encode())

    @classmethod
    def read_csv(cls, path: str | os.PathLike[str]) -> "Log":
        """The log in a file with the columns of :meth:`write_csv`; others, such as a time, are ignored."""
        place = check_path("Log.read_csv", path=path)
        try:
            with place.open(encoding="utf-8-sig", newline="") as stream:
                return cls(**_parsed(csv.reader(stream)))
        except (ValueError, UnicodeError, csv.Error) as error:
            got = Described(f"{place}: {error}")
            raise invalid("path", "Log.read_csv", "a CSV file with the columns of a log", got) from error


def _allowed(decisions: Sequence[Decision]) -> Tensor | None:
    """What decisions say was allowed, ``[n, actions]``; None where that was everything."""
    known = [each.allowed or (True,) * len(each.probabilities) for each in decisions]
    rows = _together(known, max(map(len, known))).bool()
    return None if bool(rows.all()) else rows


def _features_of(decisions: Sequence[Decision], actions: int) -> list[Any]:
    """By which features decisions of so many actions were made, None for those without; 0 where an action was not."""
    found = []
    for each in decisions:
        rows = each.features
        found.append(rows and [*rows, *[(0.0,) * len(rows[0])] * (actions - len(rows))])
    return found


def _joined(logs: Sequence[Log], actions: int) -> Tensor | None:
    """The features of several logs for so many actions."""
    widths = {log.features.shape[2] for log in logs if log.features is not None}
    if not widths:
        return None
    if len(widths) > 1:
        got = Described(" and ".join(map(str, sorted(widths))))
        raise invalid("other", "Log.__add__", "a log whose features are as many numbers for each action", got)
    parts = []
    for log in logs:
        if log.features is None:
            parts.append(torch.full((len(log), actions, *widths), torch.nan))
        else:
            padded = F.pad(log.features, (0, 0, 0, actions - log.features.shape[1]))
            parts.append(padded.where(~log.features[:, :1, :1].isnan(), torch.nan))
    return torch.cat(parts)


def _together(rows: Sequence[Sequence[float]], actions: int) -> Tensor:
    """Rows about actions as one table of so many: those that a row does not have were not there, and get 0."""
    return torch.tensor([[*row, *[0] * (actions - len(row))] for row in rows], dtype=torch.float64)


def _widened(rows: Tensor, actions: int) -> Tensor:
    return F.pad(rows.double(), (0, actions - rows.shape[-1]))


def _columns(start: str, rows: Any) -> dict[str, Any]:
    return {f"{start}{number}": column for number, column in enumerate(rows.T)}


# --- tables ----------------------------------------------------------------------------------------------------------


def _parsed(reader: Any) -> dict[str, Any]:
    """The arguments of a log from the lines of a CSV file."""
    lines = [(reader.line_num, row) for row in reader if row]
    if not lines:
        raise ValueError("it is empty")
    (_, names), *table = lines
    contexts = _numbered(names, _CONTEXT) or [f"{_CONTEXT}0"]
    probabilities, allowed, features = _numbered(names, _PROBABILITY), _numbered(names, _ALLOWED), _described_in(names)
    columns = [*contexts, "action", "reward", *(probabilities or ["propensity"]), *allowed, *chain(*features)]
    known = set(names)
    if absent := [name for name in columns if name not in known]:
        raise ValueError(f"it has no column {absent[0]}")
    if not table:
        raise ValueError("it has no row below its header")
    if uneven := [line for line, row in table if len(row) != len(names)]:
        raise ValueError(f"line {uneven[0]} has not as many cells as the header")

    def read(*which: str, kind: type = float) -> Any:
        return np.array([_cells(names, table, name, kind) for name in which]).T

    return {
        "contexts": read(*contexts),
        "actions": read("action", kind=int)[:, 0],
        "rewards": read("reward")[:, 0],
        "propensities": read(*probabilities) if probabilities else read("propensity")[:, 0],
        "masks": read(*allowed, kind=int) if allowed else None,
        "features": np.stack([read(*each) for each in features], 1) if features else None,
    }


def _cells(names: Sequence[str], table: Sequence[tuple[int, Sequence[str]]], name: str, kind: type) -> Any:
    """The numbers of a column; features of a request that had none are NaN."""
    place = names.index(name)
    texts = [row[place].strip() or ("nan" if name.startswith(_FEATURE) else "") for _, row in table]
    try:
        return np.array(texts, dtype=kind)
    except (ValueError, OverflowError):
        number = next(n for n, text in enumerate(texts) if not _is(kind, text))
    line = table[number][0]
    if name == "reward" and not texts[number]:
        hint = "leave out decisions whose reward is not known, as bbb serve export does without --waiting"
        raise ValueError(f"line {line} has no reward: {hint}")
    raise ValueError(f"line {line} has {texts[number]!r:.80} in the column {name}, which is no {kind.__name__}")


def _is(kind: type, text: str) -> bool:
    try:
        np.array([text], dtype=kind)
    except (ValueError, OverflowError):
        return False
    return True


def _numbered(names: Sequence[str], start: str) -> list[str]:
    """``start``0, ``start``1 and so on: as many as there are columns of such names."""
    count = sum(name.startswith(start) and name.removeprefix(start).isdecimal() for name in names)
    return [f"{start}{number}" for number in range(count)]


def _described_in(names: Sequence[str]) -> list[list[str]]:
    """feature_0_0 and so on, by action: of as many actions and numbers as columns of such names have."""
    found = [match.groups() for match in map(re.compile(rf"{_FEATURE}(\d+)_(\d+)").fullmatch, names) if match]
    actions, numbers = (len({each[part] for each in found}) for part in (0, 1))
    return [[f"{_FEATURE}{action}_{number}" for number in range(numbers)] for action in range(actions)]


# --- what users give -------------------------------------------------------------------------------------------------


def numbers(name: str, owner: str, given: Any, *shapes: tuple[int | None, ...]) -> Tensor:
    """What was given as a tensor in double precision, of one of ``shapes``, in which None is any size above 0."""
    text = " or ".join(f"[{', '.join('any' if size is None else str(size) for size in shape)}]" for shape in shapes)
    found = _tensor(given)
    if found is None or found.is_complex() or not any(_fits(found, shape) for shape in shapes):
        empty = ", and not empty" if found is not None and not found.numel() else ""
        raise invalid(name, owner, f"numbers of shape {text}{empty}", given)
    return found.double()


def whole(name: str, owner: str, given: Any, n: int) -> Tensor:
    """The numbers of actions, ints ``[n]``."""
    found = _tensor(given)
    is_whole = found is not None and not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
    if found is None or not is_whole or found.shape != (n,) or bool((found < 0).any()):
        raise invalid(name, owner, f"the numbers of actions, ints from 0 on of shape [{n}]", given)
    return found.long()


def _booleans(given: Any, n: int) -> Tensor:
    found = numbers("masks", "Log", given, (n, None))
    if not ((found == 0) | (found == 1)).all():
        raise invalid("masks", "Log", "booleans", given)
    return found.bool()


def _described(given: Any, n: int) -> Tensor | None:
    """Features of actions in each row, ``[n, actions, numbers]``, with NaN in rows without; None if no row has any."""
    if isinstance(given, list | tuple) and any(each is None for each in given):
        known = _tensor([each for each in given if each is not None])
        if len(given) == n and known is not None and not known.numel():
            return None
        nothing = np.full(() if known is None else known.shape[1:], np.nan)
        given = [nothing if each is None else each for each in given]
    found = numbers("features", "Log", given, (n, None, None)).float()
    missing = found.isnan().flatten(1).all(1)
    if not bool(found[~missing].isfinite().all()):
        raise invalid("features", "Log", "finite in single precision, or None for a whole row", Described("others"))
    return None if bool(missing.all()) else found


def _tensor(given: Any) -> Tensor | None:
    if isinstance(given, Tensor):
        usual = given.layout is torch.strided and not given.is_meta
        return given.detach().cpu() if usual else None
    try:
        array = np.asarray(given)
        # Writable, which a column of pandas is not, and native.
        return torch.from_numpy(array.copy()) if array.dtype != object else None
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _fits(found: Tensor, shape: tuple[int | None, ...]) -> bool:
    sizes = zip(found.shape, shape, strict=False)
    return found.dim() == len(shape) and all(size == (want or size) and size for size, want in sizes)


def check_covers(name: str, owner: str, rows: Tensor | None, actions: Tensor) -> None:
    """Refuse ``rows`` of fewer actions than were taken."""
    if rows is not None and rows.shape[1] <= (most := int(actions.max())):
        raise invalid(name, owner, f"of at least {most + 1} actions, as were taken", rows)


def check_distributions(name: str, owner: str, rows: Tensor, masks: Tensor | None) -> None:
    """Refuse rows that are no probabilities, or that give some to an action which a mask forbids."""
    if not bool((rows >= 0).all()) or not bool(((rows.sum(1) - 1).abs() < ROUNDING).all()):
        sums = rows.sum(1)
        got = Described(
            f"rows that add up to {float(sums.min()):g} to {float(sums.max()):g}, from {float(rows.min()):g}"
        )
        raise invalid(name, owner, "probabilities, of which each row adds up to 1", got)
    if masks is None:
        return
    if masks.shape != rows.shape:
        got = Described(f"{rows.shape[1]} actions, and masks of {masks.shape[1]}")
        raise invalid(name, owner, "of as many actions as the masks", got)
    if bool((wrong := rows.masked_fill(masks, 0) > 0).any()):
        row, action = wrong.nonzero()[0].tolist()
        constraint = (
            "0 for actions that a mask forbids; log[log.masks[:, action]] has the rows in which one was allowed"
        )
        raise invalid(name, owner, constraint, Described(f"more for action {action} in row {row}"))
