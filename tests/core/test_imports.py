"""Imports point one way: the core loads no framework, knows no front end, and each layer uses those below it only."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
import textwrap
from collections.abc import Set
from functools import cache
from pathlib import Path

import pytest

import remat

PACKAGE = Path(remat.__file__).parent
FRAMEWORKS = ("jax", "keras", "paddle", "tensorflow", "torch")
FRONT_ENDS = ("jax", "keras", "paddle", "tensorflow", "torch")
# Importing these must load no framework either. The command line touches one only when a command needs it.
CORE_IMPORTS = "import remat, remat.cli, remat.running.cost_model, remat.planners, remat.report, remat.testing"


def run(code: str, *, search_path: Path | None = None) -> str:
    """The output of a fresh interpreter that runs ``code``."""
    paths = [str(PACKAGE.parent), *([str(search_path)] if search_path else [])]
    program = f"import sys\nsys.path[:0] = {paths!r}\n{textwrap.dedent(code)}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def frameworks_loaded_by(code: str, *, search_path: Path | None = None) -> str:
    report = f"print(sorted({{name.partition('.')[0] for name in sys.modules}} & set({FRAMEWORKS!r})))"
    return run(f"{textwrap.dedent(code)}\n{report}", search_path=search_path)


def test_core_loads_no_framework() -> None:
    assert frameworks_loaded_by(CORE_IMPORTS) == "[]"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_check_above_can_fail(tmp_path: Path, framework: str) -> None:
    (tmp_path / f"{framework}.py").write_text("")
    assert frameworks_loaded_by(f"import remat, {framework}", search_path=tmp_path) == f"['{framework}']"


def test_core_plans_where_no_framework_can_be_imported() -> None:
    code = f"""
        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {FRAMEWORKS!r}:
                    raise ModuleNotFoundError(f"no module named {{name!r}}", name=name)

        sys.meta_path.insert(0, Refuse())
        import remat
        plan = remat.plan(remat.testing.chain(40), "60%", planner="sqrt_n")
        print(plan.recomputed > 0 and plan.peak_bytes <= plan.budget_bytes)
        try:
            remat.tensorflow
        except ModuleNotFoundError as error:
            print(error.name)
    """
    assert run(code).split() == ["True", "tensorflow"]


def imported_modules(source: str, package: str, modules: Set[str] = frozenset()) -> set[str]:
    """Dotted names of all that a source imports, wherever in it the statement stands.

    A package that is named only to reach some of ``modules``, as in ``from remat.jax import _private``, is not
    among them.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            # "from remat import keras" imports remat.keras.
            named = {f"{base}.{alias.name}" for alias in node.names}
            found |= named if named <= modules else {base, *named}
    return found


def wrong_imports(source: str, package: str, forbidden: tuple[str, ...]) -> set[str]:
    return {
        module
        for module in imported_modules(source, package)
        if any(module == name or module.startswith(f"{name}.") for name in forbidden)
    }


def core_files() -> list[Path]:
    return [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in (*FRONT_ENDS, "cli", "demo")
    ]


FORBIDDEN_IN_CORE = (*FRAMEWORKS, *(f"remat.{name}" for name in FRONT_ENDS), "remat.cli", "remat.demo")


@pytest.mark.parametrize("path", core_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_core_knows_no_front_end(path: Path) -> None:
    package = ".".join(("remat", *path.relative_to(PACKAGE).parts[:-1]))
    assert wrong_imports(path.read_text(), package, FORBIDDEN_IN_CORE) == set()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import tensorflow as tf", {"tensorflow"}),
        ("def f():\n    from keras.layers import Dense", {"keras.layers", "keras.layers.Dense"}),
        ("from remat import keras", {"remat.keras"}),
        ("from . import cli", {"remat.cli"}),
        ("from ..tensorflow.trace import trace", {"remat.tensorflow.trace", "remat.tensorflow.trace.trace"}),
        ("from .registry import register\nimport jaxtyping", set()),
    ],
)
def test_the_direction_check_can_fail(source: str, found: set[str]) -> None:
    package = "remat.planners" if ".." in source or "registry" in source else "remat"
    assert wrong_imports(source, package, FORBIDDEN_IN_CORE) == found


LAYERS: tuple[tuple[str, ...], ...] = (
    ("core",),
    ("testing",),
    ("transform",),
    ("planners",),
    ("planning",),
    ("",),
    ("fit",),
    ("running",),
    ("micro_batches",),
    ("jax", "paddle", "tensorflow", "torch"),
    ("keras",),
    ("report",),
    ("demo",),
    ("cli",),
)
"""The folders of ``src/remat``, lowest first; "" is ``remat`` itself. A folder uses itself and those of lower layers.

``planners`` (methods and what they are made of) is below ``planning`` (a budget to a plan), which calls them.
"""

ALLOWED_UPWARDS = {
    # A Keras layer that is decorated with remat.tensorflow.recompute is Keras' to handle, when one comes.
    ("remat.tensorflow.recompute.decorator", "remat.keras.recompute"),
}


def module_name(path: Path) -> str:
    parts = ("remat", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def import_graph() -> dict[str, set[str]]:
    """For each module of remat, the modules of remat that it imports, wherever in it the statement stands."""
    files = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    found = {}
    for name, path in files.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found[name] = (imported_modules(path.read_text(), package, files.keys()) & files.keys()) - {name}
    return found


def folder(module: str) -> str:
    """The folder of ``src/remat`` that a module belongs to, "" for ``remat`` itself."""
    return module.partition(".")[2].partition(".")[0]


def upward_imports(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    """The imports that lead from a folder to another one of the same layer, or to a higher one."""
    layer = {name: level for level, names in enumerate(LAYERS) for name in names}
    return {
        (module, used)
        for module, imports in graph.items()
        for used in imports
        if folder(module) != folder(used) and layer[folder(module)] <= layer[folder(used)]
    }


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that lead to one another, empty where there are none; an import inside of a function counts too."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_every_folder_has_a_layer() -> None:
    assert sorted(name for names in LAYERS for name in names) == sorted({folder(name) for name in import_graph()})


def test_layers_use_only_lower_layers() -> None:
    assert upward_imports(import_graph()) <= ALLOWED_UPWARDS


def test_no_two_modules_lead_to_each_other() -> None:
    assert circle(import_graph()) == []


@pytest.mark.parametrize(
    ("module", "used", "makes_a_circle"),
    [
        ("remat.core.graph", "remat.core.plan", True),
        ("remat.core.plan", "remat.planning.find", True),
        ("remat.planners.search", "remat.planners.methods.dtr", True),
        ("remat.planners.registry", "remat.planning.plan", True),
        ("remat.fit.request", "remat.running.machine", False),
        ("remat.running.machine", "remat.torch.measure", False),
        ("remat.jax.peak", "remat.torch.measure", False),
        ("remat.torch.measure", "remat.keras.limit", False),
        ("remat.tensorflow.trace.func_graph", "remat.tensorflow.trace.trace", True),
        ("remat.report.text", "remat.cli.app", True),
    ],
)
def test_one_wrong_import_is_found(module: str, used: str, makes_a_circle: bool) -> None:
    graph = import_graph()
    assert {module, used} <= graph.keys()
    graph = {**graph, module: graph[module] | {used}}
    assert bool(circle(graph)) == makes_a_circle
    assert ((module, used) in upward_imports(graph)) == (folder(module) != folder(used))


def test_core_files_are_found() -> None:
    names = {str(path.relative_to(PACKAGE)) for path in core_files()}
    assert {"core/graph.py", "core/simulator.py", "core/validator.py", "planners/registry.py"} <= names


@pytest.mark.parametrize(
    "imports",
    [
        "import remat",
        "import remat.core.plan",
        "import remat; import remat.core.plan",
        "from remat.core.plan import Plan; import remat",
        "import remat.planners; import remat.core.plan; from remat import plan; assert plan is remat.plan",
    ],
)
def test_plan_is_the_function_whatever_was_imported(imports: str) -> None:
    assert run(f"{imports}\nprint(type(remat.plan).__name__, remat.plan.__name__)") == "function plan"


def test_all_names_exist_and_are_listed() -> None:
    assert remat.__all__ == sorted(remat.__all__)
    assert all(hasattr(remat, name) for name in remat.__all__)
    assert {*remat.__all__, "jax", "keras", "paddle", "tensorflow", "torch"} <= set(dir(remat))
    assert remat.__version__ == "0.1.0"


def test_submodules_load_when_touched() -> None:
    code = """
        import remat
        before = "remat.testing" in sys.modules
        print(before, remat.testing.__name__, "remat.testing" in sys.modules)
    """
    assert run(code) == "False remat.testing True"


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'remat' has no attribute 'plann'"):
        remat.plann  # type: ignore[attr-defined]  # noqa: B018
