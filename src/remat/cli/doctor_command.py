"""``remat doctor``: this machine, the frameworks on it, and what will not work here."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from rich.console import Console
from rich.table import Table

from remat.cli.console import print_json, print_line, progress
from remat.cli.options import AsJson
from remat.cli.probe_job import probe_in_a_process
from remat.core.budget import format_bytes
from remat.running.examination import DeviceFacts, Examination, FrameworkFacts, examine

_WIDTH_IN_FILES: Final = 110  # Columns that the table needs where stdout is no terminal.


def doctor_command(as_json: AsJson = False) -> None:
    """Show this machine, its frameworks and their counters, and what will not work here. A bug report quotes it."""
    with progress("Asking the frameworks"):
        found = examine(probe_in_a_process)
    if as_json:
        print_json(asdict(found))
        return
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH_IN_FILES)
    console.print(_table(found))
    if not found.problems:
        print_line("Everything works here.")
        return
    print_line("What will not work here:")
    for problem in found.problems:
        print_line(f"  - {problem.what}\n    {problem.remedy}")


def _table(found: Examination) -> Table:
    table = Table(title="remat doctor", title_justify="left", title_style="bold", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    rows = [("Versions", ", ".join(f"{name} {version}" for name, version in found.packages.items()))]
    rows.append(("System", str(found.system["release"])))
    rows.append(("Processor", _processor(found)))
    if found.environment:
        rows.append(("Environment", " ".join(f"{name}={value}" for name, value in found.environment.items())))
    for name, value in rows:
        table.add_row(name, value)
    table.add_section()
    for framework in found.frameworks:
        table.add_row(framework.name, _framework(framework))
    table.add_section()
    table.add_row("Compilers", ", ".join(found.compilers.found) or "none")
    table.add_row("Calibration", found.calibration.name if found.calibration.found else "none")
    return table


def _processor(found: Examination) -> str:
    memory = found.system["memory_bytes"]
    parts = [str(found.system["model"] or found.system["processor"]), f"{found.system['cores']} cores"]
    if isinstance(memory, int):
        parts.append(format_bytes(memory))
    if found.instructions is not None:
        parts.append(" ".join(found.instructions) or "none of the instruction sets that matter")
    if found.has_nvidia_gpu:
        parts.append("an NVIDIA driver")
    return ", ".join(parts)


def _framework(facts: FrameworkFacts) -> str:
    if facts.version is None:
        return f"not installed (supported: {facts.supported})"
    said = f"{facts.version} ({'supported' if facts.in_range else 'NOT SUPPORTED'}: {facts.supported})"
    if facts.backend:
        said += f", backend {facts.backend}"
    if facts.onednn is not None:
        said += f", oneDNN {'on' if facts.onednn else 'off'}"
    if facts.works is False:
        said += "; cannot be imported"
    return "\n".join([said, *(f"  {_device(device)}" for device in facts.devices)])


def _device(device: DeviceFacts) -> str:
    parts = [f"{device.name} ({device.description})" if device.description else device.name]
    if device.memory_bytes is not None:
        parts.append(format_bytes(device.memory_bytes))
    parts.append(f"peaks by {device.counter}" if device.counter else "no counter of peaks")
    return ", ".join(parts)
