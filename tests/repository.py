"""Where the repository stands: tests of the README, the docs, the examples and the results start here."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
