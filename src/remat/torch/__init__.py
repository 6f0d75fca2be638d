"""PyTorch: plan a training step within a byte budget and run it in any loop, with the same numbers.

plan = remat.torch.plan(loss_fn, *args, budget="8GiB")
with remat.torch.apply(plan):
    loss = loss_fn(*args)
loss.backward()                            # and the rest of the loop as ever
"""

from remat.running.supported import TORCH, check_version

check_version(TORCH)  # The imports below reach for symbols that move between versions.

from remat.running.measurement import Measurement
from remat.torch import trainers
from remat.torch.api.apply import Applied, apply
from remat.torch.api.compile import Compiled, CompiledPlan, GraphCompiled, compile
from remat.torch.api.limit import limit_memory
from remat.torch.api.plan import StepPlan, plan
from remat.torch.check import check
from remat.torch.cluster.plan import MeshPlan, plan_mesh
from remat.torch.measure import measure
from remat.torch.micro_batches import MicroBatches, micro_batches
from remat.torch.recompute import recompute
from remat.torch.trace.trace import trace

__all__ = [
    "Applied",
    "Compiled",
    "CompiledPlan",
    "GraphCompiled",
    "Measurement",
    "MeshPlan",
    "MicroBatches",
    "StepPlan",
    "apply",
    "check",
    "compile",
    "limit_memory",
    "measure",
    "micro_batches",
    "plan",
    "plan_mesh",
    "recompute",
    "trace",
    "trainers",
]
