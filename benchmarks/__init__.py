"""What remat's documentation claims, measured. Each benchmark makes its plans itself, none is of an earlier run."""

import os

os.environ["REMAT_PLAN_CACHE"] = "off"
