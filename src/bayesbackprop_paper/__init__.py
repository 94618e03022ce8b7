"""The paper's tables and figures, made again by commands: data sets, experiments, benchmarks."""
