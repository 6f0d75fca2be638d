"""PaddlePaddle: train static programs, ``to_static`` layers and ``paddle.Model`` within a byte budget.

plan = remat.paddle.plan_program(main, "60%", batch_size=64)          # after minimize, before the first exe.run
optimizer = remat.paddle.RecomputeOptimizer(paddle.optimizer.Adam())  # the same in one line, as it was in Paddle 1
remat.paddle.limit_memory(model, "60%")                               # a layer, or a paddle.Model, in any loop
"""

from remat.running.supported import PADDLE, TENSORFLOW, check_import_order, check_version

check_import_order(PADDLE, TENSORFLOW)
check_version(PADDLE)  # The imports below reach for symbols that move between versions.

from remat.paddle.api import fleet
from remat.paddle.api.limit import limit_memory, plan_of
from remat.paddle.api.plan_program import named, plan_program
from remat.paddle.api.recompute_optimizer import RecomputeOptimizer
from remat.paddle.candidate import ProgramPlan
from remat.paddle.check import check
from remat.paddle.measure import measure
from remat.paddle.micro_batches import ValueAndGrad, value_and_grad
from remat.paddle.recompute import recompute
from remat.paddle.trace.trace import trace
from remat.running.measurement import Measurement

__all__ = [
    "Measurement",
    "ProgramPlan",
    "RecomputeOptimizer",
    "ValueAndGrad",
    "check",
    "fleet",
    "limit_memory",
    "measure",
    "named",
    "plan_of",
    "plan_program",
    "recompute",
    "trace",
    "value_and_grad",
]
