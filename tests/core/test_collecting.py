"""Python's collector while a step is planned."""

from __future__ import annotations

import gc

import pytest

from remat.core.collecting import collecting_rarely


@pytest.fixture
def _as_it_was():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("_as_it_was")
def test_garbage_is_looked_for_rarely_inside_and_as_before_outside():
    gc.set_threshold(700, 10, 10)
    with collecting_rarely():
        inside = gc.get_threshold()

    assert inside[0] > 100 * 700
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.usefixtures("_as_it_was")
@pytest.mark.parametrize("own", [(0, 10, 10), (10_000_000, 5, 5)])
def test_what_the_user_chose_stays(own):
    """No collector, or a rarer one."""
    gc.set_threshold(*own)
    with collecting_rarely():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


@pytest.mark.usefixtures("_as_it_was")
def test_an_error_leaves_the_collector_as_it_was():
    gc.set_threshold(700, 10, 10)
    with pytest.raises(ValueError, match="on purpose"), collecting_rarely():
        raise ValueError("on purpose")

    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.usefixtures("_as_it_was")
def test_blocks_of_two_threads_may_end_in_any_order():
    """Replicas are traced in threads of their own, which take turns."""
    gc.set_threshold(700, 10, 10)
    first, second = collecting_rarely(), collecting_rarely()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    inside = gc.get_threshold()
    second.__exit__(None, None, None)

    assert inside[0] > 100 * 700
    assert gc.get_threshold() == (700, 10, 10)
