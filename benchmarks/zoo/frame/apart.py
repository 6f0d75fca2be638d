"""Each method of a model in a process of its own, for frameworks whose budgets count what else a process holds."""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import remat
from benchmarks.zoo.frame.subject import PLAIN, Prepared, Subject, models_of

_ASKED_FOR = ("run", "results", "clock")


class Apart(Subject):
    """A model of which every step that is prepared lives in a process of its own until this one ends.

    Args:
        framework: of the zoo.
        name: of the model.
    """

    def __init__(self, framework: str, name: str) -> None:
        self._framework, self._name = framework, name

    def peer(self, method: str) -> Prepared:
        """The step by a peer's method; the plain one, which is the first, tells which peers there are."""
        return self._prepared(method, None)

    def planned(self, budget: int | str) -> Prepared:
        """The step by remat."""
        return self._prepared(PLAIN, budget)

    def _prepared(self, method: str, budget: int | str | None) -> Prepared:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        context.Process(target=_serve, args=(there, self._framework, self._name, method, budget), daemon=True).start()
        there.close()
        try:
            answer = here.recv()
        except EOFError:
            raise RuntimeError("the process ended") from None
        if isinstance(answer, Exception):
            raise answer
        self.peers, self.captures, figures = answer

        def ask(name: str) -> Any:
            here.send(name)
            return here.recv()

        return Prepared(**figures, run=lambda: ask("run"), results=lambda: ask("results"), clock=lambda: ask("clock"))


def _serve(pipe: Connection, framework: str, name: str, method: str, budget: int | str | None) -> None:
    """Prepare a step, say how that went, and do what is asked for until the other side is gone."""
    try:
        subject = models_of(framework)[name]()
        prepared = subject.peer(method) if budget is None else subject.planned(budget)
    except remat.RematError as error:
        return pipe.send(error)
    except Exception as error:  # Frameworks' own errors do not all travel between processes.
        return pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
    values = {one.name: getattr(prepared, one.name) for one in dataclasses.fields(prepared)}
    pipe.send((subject.peers, subject.captures, {key: value for key, value in values.items() if key not in _ASKED_FOR}))
    answers = {"run": prepared.run, "results": prepared.results, "clock": time.process_time}
    while True:
        try:
            pipe.send(answers[pipe.recv()]())
        except EOFError:
            return None
