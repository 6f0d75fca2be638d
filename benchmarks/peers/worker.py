"""One line of a table, in a process of its own: ``python -m benchmarks.peers.worker FRAMEWORK REQUEST``."""

from __future__ import annotations

import importlib
import json
import sys

import numpy as np


def main() -> None:
    framework, request = sys.argv[1], json.loads(sys.argv[2])
    module = importlib.import_module(f"benchmarks.peers.{framework}_methods")
    earlier = {line["method"]: line for line in request["lines"]}
    line, gradients = module.run(request["method"], request["small"], earlier)
    plain_s = earlier["plain"]["step_s"] if "plain" in earlier else line["step_s"]
    np.savez(request["gradients"], **{str(number): np.asarray(value) for number, value in enumerate(gradients)})
    print(json.dumps({"relative_time": line["step_s"] / plain_s, **line}))


if __name__ == "__main__":
    main()
