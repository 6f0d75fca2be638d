"""What every test runs under: quiet frameworks on the CPU, with counters that work."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# TensorFlow counts CPU memory only while oneDNN is on, which is the default on some CPUs only.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
