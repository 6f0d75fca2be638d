"""The ways to write a traced function: as it is, and with loops that leave less and less behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jax

from remat.core.graph import Graph
from remat.fit.variants import Variants
from remat.jax._private import ClosedJaxpr
from remat.jax.context import Tie, current_tie
from remat.jax.scans.variants import FindReceived, TraceBody, scan_variants
from remat.jax.trace.graph import graph_of_program
from remat.jax.trace.program import Program, has_regions, program_of, trace_jaxpr
from remat.planners.view.problem import Problem
from remat.running.cost_model import DeviceProfile, device_here, get_profile

_CPU: Final = "cpu"

_KERNEL_S: Final = 5e-7
"""What XLA on a CPU needs to begin a kernel, which the usual profile has as 5 us: tiny products took .45 us each.

Too high, loops over many small kernels look dear: the GRU of the zoo by a factor of three.
"""

_TIMES_AS_FAST_IN_CACHES: Final = 1.6
"""How much faster XLA's kernels read and write bytes in caches than the usual profile says of main memory.

Sums of two vectors ran at 59 GB/s up to 4 MiB each, at 24 where each has 16 and at 12 above, on one core of an AMD EPYC
(Zen 4); TensorFlow's ran at 94 in caches, on another one. Too high, plans that hold less are predicted too fast.
"""


@dataclass(frozen=True)
class Variant:
    """One way to write the function: as it is, or with loops that keep less.

    Attributes:
        program: the traced function.
        graph: what planners see of it.
        turning_point: the instruction that ends its forward part.
        held: ops that no plan repeats, because the user asked for their results to be kept.
    """

    program: Program
    graph: Graph
    turning_point: int
    held: frozenset[int] = frozenset()

    @property
    def graph_to_plan(self) -> Graph:
        """The graph in which what is held may not run twice."""
        if not self.held:
            return self.graph
        ops = tuple(
            dataclasses.replace(op, recomputable=op.recomputable and number not in self.held)
            for number, op in enumerate(self.graph.ops)
        )
        return dataclasses.replace(self.graph, ops=ops)


def profile_here() -> DeviceProfile:
    """The figures of the device that a step is planned for."""
    if jax.default_backend() != "cpu":
        return get_profile(device_here("a100"))
    name = device_here(_CPU)
    profile = get_profile(name)
    if name != _CPU:
        return profile
    cached_bytes_per_s = _TIMES_AS_FAST_IN_CACHES * profile.memory_rate
    return dataclasses.replace(profile, overhead_s=_KERNEL_S, cached_bytes_per_s=cached_bytes_per_s)


def variants_of_jaxpr(
    closed: ClosedJaxpr,
    find_received: FindReceived | None = None,
    kept_names: Sequence[str] = (),
    *,
    tie: Tie,
    trace_body: TraceBody | None = None,
    maps: bool = False,
) -> Variants[Variant]:
    """A traced function as it is, then with loops that keep less and less.

    Args:
        closed: the function.
        find_received: as in ``scan_variants``, where the arguments lie on several devices.
        kept_names: as in ``program_of``.
        tie: how recomputations in the bodies of loops over steps are held back.
        trace_body: as in ``scan_variants``, where the function is the body of a ``shard_map``.
        maps: are calls of ``shard_map`` taken apart?

    Raises:
        UnsupportedStep: where a shape is unknown.
    """
    profile = profile_here()

    def variant_of(make: Callable[[], Any], *, keeps_regions: bool = False) -> Variant:
        program = program_of(make(), kept_names, keeps_regions=keeps_regions, takes_maps_apart=maps)
        graph = graph_of_program(program, profile)
        return Variant(program, graph, Problem.of(graph).turning_point)

    of_body = partial(variants_of_jaxpr, tie=tie)
    written = scan_variants(closed, profile, find_received, trace_body, variants_of=of_body, tie=tie, maps=maps)
    makers: list[Callable[[], Any]] = [lambda: closed, *written.makers]
    suggested = () if written.checkpointed is None else (1 + written.checkpointed,)
    # Regions under jax.checkpoint dissolve, and what they compute again is merged with what the forward part computed.
    # A function whose rule JAX has taken by then, as of jax.custom_vjp, is not recognised. So the step is tried as it
    # was written, too.
    written_so = [partial(variant_of, makers[0], keeps_regions=True)] if has_regions(closed.jaxpr) else []
    written_so += [partial(variant_of, make) for make in written.aside]
    ways = [partial(variant_of, make) for make in makers]
    return Variants(ways, suggested, written_so, is_sorted=written.is_sorted)


def variants_of(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    find_received: FindReceived | None = None,
    kept_names: Sequence[str] = (),
) -> tuple[Variants[Variant], Any]:
    """A function as it is, then with loops that keep less and less; and the structure of what it returns.

    Args:
        function: takes the flat arguments.
        arguments: arrays, tracers or shapes.
        find_received: as in ``variants_of_jaxpr``.
        kept_names: likewise.

    Raises:
        UnsupportedStep: where a shape is unknown, or values are offloaded.
    """
    closed, structure = trace_jaxpr(function, arguments)
    return variants_of_jaxpr(closed, find_received, kept_names, tie=current_tie()), structure
