"""The core imports no framework, works with none installed, and knows no front end."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import remat

PACKAGE = Path(remat.__file__).parent
FRAMEWORKS = ("jax", "keras", "paddle", "tensorflow", "torch")
FRONT_ENDS = ("jax", "keras", "tensorflow", "torch")
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


def imported_modules(source: str, package: str) -> set[str]:
    """Dotted names of all that a source imports, wherever in it the statement stands."""
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
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
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
    assert {*remat.__all__, "jax", "keras", "tensorflow", "torch"} <= set(dir(remat))
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
