"""One model in a process of its own: ``python -m benchmarks.zoo.frame.worker FRAMEWORK MODEL``; prints its record."""

from __future__ import annotations

import json
import sys
import time

from benchmarks.one_core import stay_on_one_core
from benchmarks.zoo.frame.apart import Apart
from benchmarks.zoo.frame.measure import measured
from benchmarks.zoo.frame.subject import is_apart, models_of


def main() -> None:
    """Measure one model. What happens goes to standard error, the record to standard output."""
    framework, name = sys.argv[1:3]
    stay_on_one_core()
    started = time.process_time()
    subject = Apart(framework, name) if is_apart(framework) else models_of(framework)[name]()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    lines = measured(subject, say)
    print(json.dumps({"model": name, "lines": lines, "processor_s": time.process_time() - started}))


if __name__ == "__main__":
    main()
