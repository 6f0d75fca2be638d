"""``recompute``: a function or a layer whose activations are dropped and made again in the backward pass."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import paddle

from remat.paddle import _private
from remat.paddle.tensors import closed_over
from remat.running.recompute_switch import is_switched_off

_F = TypeVar("_F", bound=Callable[..., Any])


def recompute(f: _F) -> _F:
    """Drop what autograd saves inside of ``f`` and make it again when the backward pass needs it.

    Eagerly ``f`` runs a second time in the backward pass, with the random state and the autocast of its first run, so
    that dropout draws the same numbers. A batch normalisation moves its statistics once: the second run is given copies
    of them, and other buffers of the layers that ``f`` uses are put back. A region inside another one is part of the
    outer one. In static programs and inside of ``paddle.jit.to_static`` ``f`` runs as it is, and nothing is saved:
    there ``plan_program`` and ``limit_memory`` see every operator. ``REMAT_RECOMPUTE=0`` in the environment switches it
    off.

    Args:
        f: a function, a layer (its ``forward`` is replaced on the instance), or a class of layers. It takes any
            arguments, by position and by name.

    Returns:
        The function, or the same layer or class.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(f, paddle.nn.Layer) or (isinstance(f, type) and issubclass(f, paddle.nn.Layer)):
        layer: Any = f
        layer.forward = _wrapped(layer.forward)
        return f
    if isinstance(f, type) or not callable(f):
        raise TypeError(f"recompute takes a function or a paddle.nn.Layer, not {f!r}")
    return cast(_F, _wrapped(f))


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if is_switched_off() or not paddle.in_dynamic_mode() or not paddle.is_grad_enabled() or _private.has_hooks():
            return function(*args, **kwargs)
        return _Region(function, args, kwargs).run()

    return run


class _Slot:
    """What stands in autograd's graph for a tensor that is made again."""

    __slots__ = ("__weakref__", "number", "region")

    def __init__(self, region: _Region, number: int) -> None:
        self.region = region
        self.number = number


class _Region:
    """One call of a function whose activations are dropped.

    Args:
        function: what is called.
        args: its arguments, which are kept.
        kwargs: those by name.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        _private.watch_backward_passes()
        self._function = function
        self._is_over = False
        self._args = tuple(args)
        self._kwargs = dict(kwargs)
        self._random = paddle.get_rng_state()
        self._autocast = _private.autocast_state()
        self._slots: list[weakref.ref[_Slot]] = []
        self._made: dict[int, Any] = {}

    def run(self) -> Any:
        """The first run: what autograd saves is a slot."""
        with _private.saved_tensors_hooks(self._pack, _unpack):
            return self._function(*self._args, **self._kwargs)

    def _pack(self, tensor: Any) -> Any:
        slot = _Slot(self, len(self._slots))
        self._slots.append(weakref.ref(slot))
        return slot

    def value(self, number: int) -> Any:
        """What the first run saved under a number; the first call runs the function again.

        With the last of them the arguments go, where no other backward pass can follow: Paddle's graph, which holds
        this, lives until the loss is gone.
        """
        if number not in self._made:
            if self._is_over:
                raise RuntimeError(
                    f"recompute: {getattr(self._function, '__name__', self._function)!r} was differentiated already; "
                    "call backward(retain_graph=True) where another backward pass follows"
                )
            self._run_again()
        found = self._made.pop(number)
        if not self._made and not _private.graph_is_kept():
            self._is_over, self._args, self._kwargs = True, (), {}
        return found

    def _run_again(self) -> None:
        saved = 0

        def note(tensor: Any) -> Any:
            nonlocal saved
            slots = self._slots
            if saved < len(slots) and slots[saved]() is not None:
                self._made[saved] = tensor.detach() if not tensor.stop_gradient else tensor
            saved += 1
            return None

        now = paddle.get_rng_state()
        try:
            paddle.set_rng_state(self._random)
            with (
                paddle.enable_grad(),
                _private.autocast_like(self._autocast),
                statistics_kept(self._function, self._args),
                _private.saved_tensors_hooks(note, _not_read),
            ):
                self._function(*self._args, **self._kwargs)
        finally:
            paddle.set_rng_state(now)
        if saved != len(self._slots):
            raise RuntimeError(
                f"recompute: the second run of {getattr(self._function, '__name__', self._function)!r} saved {saved} "
                f"tensors where the first saved {len(self._slots)}; it took another branch. Make the branch depend on "
                "the function's arguments only"
            )


def _unpack(slot: _Slot) -> Any:
    try:
        return slot.region.value(slot.number)
    except BaseException:
        # Paddle turns gradients off for a backward pass, and does not turn them on again when it fails.
        paddle.set_grad_enabled(True)
        raise


def _not_read(_: Any) -> Any:
    raise AssertionError("the second run of a recomputed function is never differentiated itself")


@contextlib.contextmanager
def side_effects_left_alone(function: Callable[..., Any], args: Sequence[Any]) -> Iterator[None]:
    """A run inside moves no statistics, and the random state afterwards is that of before."""
    before = paddle.get_rng_state()
    try:
        with statistics_kept(function, args):
            yield
    finally:
        paddle.set_rng_state(before)


@contextlib.contextmanager
def statistics_kept(function: Callable[..., Any], args: Sequence[Any]) -> Iterator[None]:
    """A run inside moves no statistics of batch normalisations, and no buffer of the layers that it uses."""
    with _private.statistics_left_alone(), _buffers_left_alone(function, args):
        yield


@contextlib.contextmanager
def _buffers_left_alone(function: Callable[..., Any], args: Sequence[Any]) -> Iterator[None]:
    """Give the buffers of all layers that a function can be seen to use their values back."""
    layers = layers_of(function, args)
    kept_by = [t for layer in layers for t in (*layer.buffers(), *(p for p in layer.parameters() if p.stop_gradient))]
    buffers = {id(buffer): buffer for buffer in kept_by if buffer is not None}
    with paddle.no_grad():
        kept = [(buffer, buffer.clone()) for buffer in buffers.values()]
    try:
        yield
    finally:
        with paddle.no_grad():
            for buffer, value in kept:
                buffer.copy_(value, False)


def layers_of(function: Any, args: Sequence[Any] = ()) -> list[Any]:
    """The layers that a function is a method of, closes over, or is given."""
    function = getattr(function, "__wrapped__", function)
    known = [function, getattr(function, "__self__", None), *closed_over(function), *args]
    flat = [item for one in known for item in (one if isinstance(one, list | tuple) else (one,))]
    return [item for item in flat if isinstance(item, paddle.nn.Layer)]
