"""One case in a process of its own, a line of JSON a result: ``python -m benchmarks.gpu.worker CASE DEVICE SIZE``."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile

from benchmarks.gpu.cases import Case


def main() -> None:
    case, device, small = Case(**json.loads(sys.argv[1])), sys.argv[2], sys.argv[3] == "small"
    if device == "cpu":
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # JAX takes three quarters of a GPU at its start, unless it is told not to; cases follow one another quickly.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if case.engine == "expandable":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if case.part in ("exact", "library", "training"):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true".strip()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        module = importlib.import_module(f"benchmarks.gpu.{case.framework}_cases")
        for line in module.run(case, device, small):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
