"""The commands of ``bbb`` that reproduce the paper."""
