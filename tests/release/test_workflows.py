"""GitHub's workflows and forms call what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from snippets import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands_of(workflow: Path) -> list[str]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


def test_there_are_workflows_for_checks_documentation_and_release() -> None:
    assert [path.stem for path in WORKFLOWS] == ["checks", "docs", "release"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_each_make_target_of_a_workflow_exists(workflow: Path) -> None:
    called = {name for command in commands_of(workflow) for name in re.findall(r"make ([a-z-]+)", command)}
    assert called, "a workflow that checks nothing of ours"
    assert called <= TARGETS


def test_the_checks_are_those_of_ci() -> None:
    checks = " ".join(commands_of(ROOT / ".github" / "workflows" / "checks.yml"))
    here = (ROOT / ".ci" / "run").read_text()
    assert set(re.findall(r"make ([a-z-]+)", checks)) == set(re.findall(r"^make ([a-z-]+)", here, re.MULTILINE))


def test_a_release_refuses_a_tag_that_is_not_the_version() -> None:
    (check,) = [one for one in commands_of(ROOT / ".github" / "workflows" / "release.yml") if "GITHUB_REF_NAME" in one]
    assert re.search(r'^version = "\d+\.\d+\.\d+"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert 'version = \\"${GITHUB_REF_NAME#v}\\"' in check


def test_a_bug_report_asks_for_the_doctor() -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    required = [one["attributes"]["label"] for one in form["body"] if one["validations"]["required"]]
    assert any("remat doctor --json" in label for label in required)
