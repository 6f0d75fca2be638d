"""``remat plan module:callable``: every way in which naming a model can go wrong, before any framework is needed."""

from __future__ import annotations

import os
import sys

import pytest

MODELS = """
number = 3

class Nested:
    other = "text"

def broken(width):
    raise RuntimeError("no such\\nwidth as %r" % width)

def noisy():
    import os, sys
    os.write(2, b"a line from native code\\n")
    print("a line from Python", file=sys.stderr)
    return number

def chatty():
    print("building")
    return number

def leaves():
    raise SystemExit(3)

def empty():
    return ()

def pretrained(include_top=True, weights="imagenet"):
    raise OSError("downloads " + weights if weights else "needs no download")
"""


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    """A module in the current folder, which is not on the path of an installed script."""
    (tmp_path / "my_models.py").write_text(MODELS)
    (tmp_path / "bad_syntax.py").write_text("def f(:\n")
    (tmp_path / "a_script.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "needs_more.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield
    for name in ("my_models", "bad_syntax", "needs_more"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param("nowhere_to_be_found:build", "'nowhere_to_be_found'", id="no module"),
        pytest.param("my_models.sub:build", "not a package", id="no package"),
        pytest.param("bad_syntax:f", "SyntaxError", id="module with an error"),
        pytest.param("needs_more:f", "a_package_that_nobody_has", id="module with a missing dependency"),
        pytest.param("a_script:main", "raised SystemExit: 3", id="script without a guard"),
        pytest.param("my_models:build", "'my_models' has no attribute 'build'", id="no attribute"),
        pytest.param("my_models:Nested.deep", "'Nested' has no attribute 'deep'", id="no nested attribute"),
        pytest.param("my_models:number", "not callable (its type is int)", id="not callable"),
        pytest.param("my_models:Nested.other", "not callable (its type is str)", id="nested, not callable"),
        pytest.param("my_models:", "no such file", id="no name"),
        pytest.param("my models:build", "no such file", id="not a name"),
    ],
)
def test_callable_that_cannot_be_found(fails, source, expected):
    line = fails("plan", source)

    assert source in line
    assert expected in line


def test_trained_weights_are_not_downloaded(fails):
    assert "(weights=None) raised OSError: needs no download" in fails("plan", "my_models:pretrained")
    assert "downloads noisy" in fails("plan", "my_models:pretrained", "--kwargs", '{"weights": "noisy"}')


@pytest.mark.parametrize("kwargs", ["{", "", "weights=None", "[1]", "3", "null"])
def test_kwargs_that_are_no_json_object(fails, kwargs):
    line = fails("plan", "my_models:broken", "--kwargs", kwargs)

    assert line.startswith(f"remat: --kwargs {kwargs}: ")
    assert '{"weights": null}' in line


def test_callable_that_raises_is_told_with_its_arguments_in_one_line(fails):
    line = fails("plan", "my_models:broken", "--kwargs", '{"width": 3}')

    assert "broken(width=3) raised RuntimeError: no such width as 3" in line


def test_callable_that_ends_the_process(fails):
    assert "calling it as leaves() raised SystemExit: 3" in fails("plan", "my_models:leaves")


def test_callable_that_returns_an_empty_tuple(fails):
    assert "this returned an empty tuple, no training step" in fails("plan", "my_models:empty")


def test_callable_with_wrong_arguments(fails):
    line = fails("plan", "my_models:broken", "--kwargs", '{"height": 3}')

    assert "TypeError" in line
    assert "height" in line


def test_traceback_is_shown_on_request(run, monkeypatch):
    monkeypatch.setenv("REMAT_TRACEBACK", "1")

    result = run("plan", "my_models:broken", "--kwargs", '{"width": 3}')

    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "my_models.py" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("remat: my_models:broken")


@pytest.mark.parametrize("batch_size", ["0", "-3", "many"])
def test_batch_size_that_is_no_count(fails, batch_size):
    assert "--batch-size" in fails("plan", "my_models:broken", f"--batch-size={batch_size}")


def test_callable_that_returns_no_model(run):
    result = run("plan", "my_models:chatty", "--json")

    assert result.exit_code == 2
    assert result.stdout == ""
    # What the callable prints is kept away from stdout, where the JSON goes.
    expected = (
        "remat: my_models:chatty: this returned an int, no training step; return a Keras model, a PyTorch module, a "
        "layer of Paddle, or a tuple of a loss function and its arguments, such as (loss, params, batch)"
    )
    assert result.stderr.splitlines() == ["building", expected]


@pytest.mark.parametrize("traceback", ["", "1"])
def test_native_log_is_shown_on_request_only(run_script, tmp_path, traceback):
    environment = {**os.environ, "REMAT_TRACEBACK": traceback}

    lines = run_script("plan", "my_models:noisy", cwd=tmp_path, env=environment).stderr.splitlines()

    assert ("a line from native code" in lines) == bool(traceback)
    assert "a line from Python" in lines
    assert lines[-1].startswith("remat: my_models:noisy: this returned an int, no training step")
    assert len(lines) == 2 or traceback


def test_file_named_like_a_callable_is_read_as_a_file(fails, tmp_path):
    (tmp_path / "my_models:broken").write_text("{}")

    assert "no remat.graph file" in fails("plan", "my_models:broken")
