"""What agents lost in bandits: statistics over the seeds, as JSON, for the terminal and as a section of the page."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, median, stdev

import rich.box
import rich.console
import rich.table

from bayesbackprop._files import write_atomically
from bayesbackprop_paper.bench.bandits import AGENTS, Found
from bayesbackprop_paper.bench.report import Picture, Run, figure, markdown

# The agent that is compared with the best of all, and how much more it may lose.
OURS, NEAR = "ThompsonSampling", 1.05


@dataclass(frozen=True)
class Row:
    """The runs of an agent in an environment, by seed: regrets after ``done`` steps, and seconds of a core."""

    environment: str
    agent: str
    version: str
    steps: int
    seeds: list[int]
    done: list[int]
    regrets: list[float]
    seconds: list[float]
    errors: list[str]
    options: str = ""
    tuned: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether every run took all its steps; else what was lost is not to be compared."""
        return all(done == self.steps for done in self.done)

    @property
    def mean(self) -> float:
        """Of the regrets."""
        return fmean(self.regrets)

    @property
    def standard_error(self) -> float:
        """Of the mean; not a number for a single seed."""
        return stdev(self.regrets) / math.sqrt(len(self.regrets)) if len(self.regrets) > 1 else math.nan

    @property
    def note(self) -> str:
        """By which options; and how many runs did not reach the end, why, and how far they came."""
        options = f"`{self.options}`" if self.options else ""
        short = [number for number, done in enumerate(self.done) if done < self.steps]
        if not short:
            return options
        errors = sorted({self.errors[number] for number in short if self.errors[number]})
        why = "; ".join(errors) or f"stopped after {min(self.seconds[number] for number in short):.0f} s"
        said = f"{len(short)} of {len(self.done)} {why}; on average {fmean(self.done):.0f} steps"
        return "; ".join(filter(None, [options, said]))


@dataclass(frozen=True)
class Comparison:
    """All rows of a comparison, environment by environment."""

    run: Run
    rows: list[Row]

    def by_environment(self) -> Iterator[tuple[str, list[Row]]]:
        """The rows of each environment."""
        for name, rows in groupby(self.rows, key=lambda row: row.environment):
            yield name, list(rows)


def rows_of(found: Iterable[Found], environments: Sequence[str], agents: Sequence[str], steps: int) -> list[Row]:
    """The rows of runs of so many steps, in this order, as far as there are any."""
    runs: dict[tuple[str, str], list[Found]] = {}
    for each in found:
        if each.steps == steps:
            runs.setdefault((each.environment, each.agent), []).append(each)
    rows: list[Row] = []
    for environment in environments:
        for agent in agents:
            if some := sorted(runs.get((environment, agent), []), key=lambda each: each.seed):
                seeds, done = [each.seed for each in some], [each.done for each in some]
                regrets, seconds = [each.regret for each in some], [each.seconds for each in some]
                errors = [each.error for each in some]
                entry, version = AGENTS[agent], some[-1].version
                how = (entry.options, entry.tuned)
                rows.append(Row(environment, agent, version, steps, seeds, done, regrets, seconds, errors, *how))
    return rows


def best_of(rows: Iterable[Row]) -> Row | None:
    """The row of the lowest mean regret of those that are whole."""
    return min((row for row in rows if row.is_whole), key=lambda row: row.mean, default=None)


def within(row: Row, best: Row) -> bool:
    """Whether a row is as good as the best, or nearly so."""
    return row.is_whole and row.mean <= best.mean * (NEAR if best.mean > 0 else 1)


def versions(rows: Iterable[Row]) -> dict[str, str]:
    """Of the libraries that the agents are of."""
    return {AGENTS[row.agent].package: row.version for row in rows}


# --- JSON ------------------------------------------------------------------------------------------------------------


def write_json(comparison: Comparison, path: Path) -> None:
    """Write a comparison to ``path``, whole or not at all: an object with a line for each row."""
    rows = ",\n".join(f"  {json.dumps(asdict(row))}" for row in comparison.rows)
    text = f'{{"run": {json.dumps(asdict(comparison.run))},\n "rows": [\n{rows}\n ]}}\n'
    write_atomically(path, text.encode())


def read_json(path: Path) -> Comparison | None:
    """What :func:`write_json` wrote, or None if the file is of another kind."""
    try:
        content = json.loads(path.read_text())
        return Comparison(Run(**content["run"]), [Row(**row) for row in content["rows"]])
    except (ValueError, TypeError, KeyError):
        return None


# --- tables ----------------------------------------------------------------------------------------------------------

# The title, and whether the column holds numbers.
_COLUMNS = [
    *(("agent", False), ("mean regret", True), ("± s.e.", True), ("median", True), ("worst", True)),
    *(("seeds", True), ("seconds", True), ("", False)),
]
_VERDICTS = [
    *(("environment", False), (OURS, True)),
    *(("best of all", False), ("mean regret", True), ("ratio", True)),
    *(("best with defaults", False), ("mean regret", True), ("ratio", True)),
]


def _cells(row: Row) -> list[str]:
    error = "" if math.isnan(row.standard_error) else f"{row.standard_error:.0f}"
    mean, middle, worst = (f"{value:.0f}" for value in (row.mean, median(row.regrets), max(row.regrets)))
    return [row.agent, mean, error, middle, worst, str(len(row.seeds)), figure(fmean(row.seconds)) or "", row.note]


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """All agents, and those with their defaults."""
    return [list(rows), [row for row in rows if not row.tuned]]


def _verdicts(comparison: Comparison) -> Iterator[list[str]]:
    for name, rows in comparison.by_environment():
        ours, line = _ours(rows), list[str]()
        for group in _groups(rows):
            best = best_of(group)
            line += (
                ["none took all steps", "", ""]
                if best is None
                else [best.agent, f"{best.mean:.0f}", _ratio(ours, best)]
            )
        yield [name, "not run" if ours is None else f"{ours.mean:.0f}", *line]


def _ours(rows: Iterable[Row]) -> Row | None:
    return next((row for row in rows if row.agent == OURS), None)


def _ratio(ours: Row | None, best: Row) -> str:
    if ours is None or not ours.is_whole or best.mean <= 0:
        return ""
    return f"{ours.mean / best.mean:.2f}" + (" ✓" if within(ours, best) else "")


def _conclusion(comparison: Comparison) -> str:
    """In how many environments ours is the best, or nearly so."""
    if _ours(comparison.rows) is None:
        return f"{OURS} was not run."
    counts, environments = [0, 0], list(comparison.by_environment())
    for _, rows in environments:
        ours = _ours(rows)
        for number, group in enumerate(_groups(rows)):
            best = best_of(group)
            counts[number] += ours is not None and best is not None and within(ours, best)
    total = f"of {len(environments)} environments"
    return (
        f"{OURS}, with its defaults, loses least or at most {NEAR - 1:.0%} more than the best (✓) in {counts[0]} "
        f"{total}; among agents with their defaults, in {counts[1]}."
    )


def terminal(comparison: Comparison) -> rich.console.Group:
    """For the terminal: a table for each environment, and who is best."""

    def table(title: str, columns: Sequence[tuple[str, bool]], lines: Iterable[Sequence[str]]) -> rich.table.Table:
        made = rich.table.Table(title=title, title_justify="left", box=rich.box.SIMPLE_HEAD)
        for name, numbers in columns:
            made.add_column(name, justify="right" if numbers else "left", no_wrap=numbers)
        for line in lines:
            made.add_row(*line, style="bold" if line[0] == OURS else None)
        return made

    tables = [table(name, _COLUMNS, map(_cells, rows)) for name, rows in comparison.by_environment()]
    return rich.console.Group(*tables, table("Who is best", _VERDICTS, _verdicts(comparison)), _conclusion(comparison))


_TEXT = (
    "Our agents and those of other libraries in contextual bandits. All of them meet the same contexts and coins. The "
    "environments are mushrooms, as in the paper; occupations (adult) and forests (covertype) to be named; the wheel, "
    "whose rare large rewards are found only by exploring; digits to be named; the same digits with rewards that come "
    "100 steps late (delayed); clicks, with 10 actions and rewards of 0 and 1; items, 100 actions with features; and "
    "digits whose actions exchange their meaning half-way (switched). Regret is what the oracle expects less what was "
    "received, so it contains luck. All agents have their defaults, except those marked as tuned, which were tuned on "
    "other seeds. Only our agents with a network and those of vowpalwabbit can use the features of items. "
    "Seconds are those of one run on one core. A run that exceeds the limit is stopped. Its agent does not count among "
    "the best, and the table shows its regret up to then."
)


def section(comparison: Comparison, pictures: Sequence[Picture]) -> str:
    """The section of the page on a comparison, with pictures of it."""
    run = comparison.run
    known = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    parts = ["## Bandits", _TEXT, f"`{run.command}`", f"{run.date}; {run.machine}; {known}."]
    parts += [f"![{picture.caption}]({picture.file})" for picture in pictures]
    parts += [_conclusion(comparison), markdown(_VERDICTS, _verdicts(comparison))]
    for name, rows in comparison.by_environment():
        parts += [f"### {name}, {rows[0].steps:,} steps", markdown(_COLUMNS, map(_cells, rows))]
    return "\n\n".join(parts)
