"""The menus of loops: what each option costs, and how the menus of several pairs become one list."""

from __future__ import annotations

import itertools

from remat.fit.loop_menu import Option, best_of, merged
from remat.jax.scans.loops import Choice


def option(name, held_bytes, again_s):
    return Option(Choice(frozenset({name})), held_bytes, again_s)


def test_options_that_others_beat_are_left_out():
    best, worse = option(1, 10, 1.0), option(2, 12, 1.5)
    assert best_of([worse, option(3, 20, 0.0), best, option(4, 10, 2.0)]) == [option(3, 20, 0.0), best]


def test_the_step_that_saves_most_for_its_time_comes_first():
    cheap = [option(1, 100, 0.0), option(2, 50, 1.0), option(3, 0, 10.0)]
    dear = [option(4, 100, 0.0), option(5, 50, 5.0), option(6, 0, 20.0)]
    rows = merged([cheap, dear])

    names = [tuple(next(iter(choice.stacked)) for choice in row) for row in rows]
    assert names == [(1, 4), (2, 4), (2, 5), (3, 5), (3, 6)]


def test_what_is_off_the_hull_comes_in_between():
    """Option 2 saves little for its time, yet a budget may allow it and not option 1."""
    menu = [option(1, 100, 0.0), option(2, 90, 5.0), option(3, 0, 6.0)]
    other = [option(4, 10, 0.0)]
    rows = merged([menu, other])

    assert [next(iter(row[0].stacked)) for row in rows] == [1, 2, 3]
    held = {1: 100, 2: 90, 3: 0}
    left = [held[next(iter(row[0].stacked))] for row in rows]
    assert all(before > after for before, after in itertools.pairwise(left))


def test_the_pieces_of_a_loop_cover_it():
    whole = Choice(frozenset(), 0).pieces(10)
    assert [(piece.start, piece.stop, piece.chunks) for piece in whole] == [(0, 10, ())]
    parts = Choice(frozenset(), 6, (3,)).pieces(10)
    assert [(piece.start, piece.stop, piece.chunks) for piece in parts] == [(0, 6, (3,)), (6, 10, ())]
    everything = Choice(frozenset(), 10, (5,)).pieces(10)
    assert [(piece.start, piece.stop) for piece in everything] == [(0, 10)]
    # In a loop that runs backwards, the first iterations read the last slices.
    assert parts[0].of(list(range(10)), True) == [4, 5, 6, 7, 8, 9]
    assert parts[1].of(list(range(10)), True) == [0, 1, 2, 3]
    assert parts[1].of(list(range(10)), False) == [6, 7, 8, 9]
