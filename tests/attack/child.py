"""One part, in a process of its own: ``python -m attack.child MODULE SEED SECONDS MEGABYTES``.

Each attempt is a line of JSON on the standard output, so that nothing is lost when the process dies.
"""

import importlib
import json
import os
import resource
import sys


def main(module: str, seed: str, seconds: str, megabytes: str) -> None:
    memory = int(megabytes) * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Whatever else prints, prints to the standard error.
    with os.fdopen(os.dup(1), "w", buffering=1) as output:
        os.dup2(2, 1)
        try:
            for attempt in importlib.import_module(module).run(int(seed), float(seconds)):
                print(json.dumps(attempt), file=output)
        except ModuleNotFoundError as error:
            print(json.dumps(["not available", str(error)]), file=output)


if __name__ == "__main__":
    main(*sys.argv[1:])
