"""``remat plan --mesh``: what each device of a cluster needs for a step of PyTorch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remat.cli.console import CommandError, print_json, print_line, progress
from remat.cli.options import Source, check_output_path
from remat.cli.source import builder_from_source, is_file
from remat.core.errors import RematError
from remat.running.network import Mesh, Network, UnknownMesh


@dataclass(frozen=True)
class MeshRequest:
    """What the command line says about a mesh.

    Attributes:
        mesh: axes and sizes, as written.
        network: between nodes.
        mixed_precision: the dtype that parameters are gathered in.
        tensor_styles: a JSON file.
        budget: of each device.
        planner: its name.
        time_limit_s: for each plan.
        max_batch: look for the largest batch, too?
    """

    mesh: str
    network: str | None
    mixed_precision: str | None
    tensor_styles: Path | None
    budget: str | None
    planner: str
    time_limit_s: float | None
    max_batch: bool


def plan_on_mesh(
    source: Source, request: MeshRequest, out: Path | None, save_graph: Path | None, *, as_json: bool
) -> None:
    """Plan, and print the answer.

    Raises:
        CommandError: where the request cannot be read, or the step cannot be traced or distributed.
    """
    check_output_path(out, "--out", keep=[save_graph])
    check_output_path(save_graph, "--save-graph")
    if source.device is None:
        raise CommandError("--mesh needs --device: the profile of each device, such as h100")
    try:
        mesh = Mesh.parse(request.mesh)
        Network.of(mesh, source.device, request.network)
    except UnknownMesh as error:
        raise CommandError(f"--mesh: {error}") from None
    if is_file(source):
        raise CommandError(f"{source.name} is a graph file, of one device: --mesh needs a model (module:callable)")
    build, styles = builder_from_source(source), _styles(request.tensor_styles)
    from remat.torch.cluster.plan import plan_mesh

    given: dict[str, Any] = {} if request.time_limit_s is None else {"time_limit_s": request.time_limit_s}
    with progress(f"Planning {source.name} on {mesh.devices} devices"):
        try:
            found = plan_mesh(
                build,
                mesh,
                device=source.device,
                batch_size=source.batch_size,
                budget=request.budget,
                optimizer=source.optimizer or "AdamW",
                mixed_precision=request.mixed_precision,
                styles=styles,
                network=request.network,
                max_batch=request.max_batch,
                planner=request.planner,
                **given,
            )
        except RematError as error:
            raise CommandError(f"{source.name}: {error}") from error
    if save_graph is not None:
        found.graph.save(save_graph)
    if out is not None and found.plan is not None:
        found.plan.save(out, found.graph)
    if as_json:
        print_json({"source": source.name, **found.to_json()})
        return
    for line in found.lines():
        print_line(line)


def _styles(path: Path | None) -> dict[str, str] | None:
    if path is None:
        return None
    try:
        styles = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"--tensor-styles {path}: {error}") from None
    if not isinstance(styles, dict) or not all(isinstance(value, str) for value in styles.values()):
        raise CommandError(
            f'--tensor-styles {path}: write a JSON object of patterns and styles, such as {{"*.query": "colwise"}}'
        )
    return styles
