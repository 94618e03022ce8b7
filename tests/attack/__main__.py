"""``python -m attack [PART ...] [--seconds N] [--seed N]``: see the package."""

import argparse
import random
import sys

from attack import PARTS, harness

SHOWN = 20  # of each part, what was bad


def main() -> int:
    parser = argparse.ArgumentParser(prog="attack", description="Try to break the library; exit with 1 if it broke.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"Of {', '.join(PARTS)}; all unless given.")
    parser.add_argument("--seconds", type=float, default=600.0, help="For all parts together.")
    parser.add_argument("--seed", type=int, default=None, help="Of everything that is random; printed.")
    parser.add_argument("--megabytes", type=int, default=harness.MEGABYTES, help="Memory that a child may have.")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    seed = random.randrange(10**6) if options.seed is None else options.seed
    parts = options.parts or [*PARTS]
    print(f"seed {seed}, {options.seconds:.0f} seconds", flush=True)
    reports = {}
    for part in parts:
        print(f"{part} ...", file=sys.stderr, flush=True)
        seconds = options.seconds / len(parts)
        reports[part] = harness.run(part, PARTS[part], seed, seconds, megabytes=options.megabytes)
    print(harness.table(reports))
    for part, report in reports.items():
        for each, times in report.bad.most_common(SHOWN):
            print(f"\n{part}: {each} ({times} times)")
    return int(any(report.bad for report in reports.values()))


if __name__ == "__main__":
    sys.exit(main())
