"""One backend of Keras in a process of its own, which answers the common checks; ``KERAS_BACKEND`` says which."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import keras

sys.path.append(str(Path(__file__).parent.parent))

import checks
from keras_front_end import Keras

from worker_process import serve


def check(name: str, folder: str) -> None:
    """Run a check; it raises AssertionError where Keras does not do what every front end must."""
    # What an earlier check left on the device would count as resident beside the step.
    keras.backend.clear_session()
    gc.collect()
    getattr(checks, name)(Keras(), Path(folder))


serve({"check": check})
