"""A PyTorch module or function as a training step that ``remat plan``, ``measure`` and ``check`` can use."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from remat.core.graph import Graph
from remat.running.workload import Array, NotAStep, StepOptions, Training, Workload, nudge
from remat.torch.api.apply import apply
from remat.torch.api.compile import compile
from remat.torch.api.limit import Mode, check_mode
from remat.torch.api.plan import plan
from remat.torch.measure import measure
from remat.torch.trace.trace import trace
from remat.torch.used_modules import used_modules

_SEED: Final = 11  # Any number does: plain and planned steps start from the same random state.


def make_workload(made: Any, options: StepOptions) -> Workload:
    """The training step of a module, or of ``(loss function, *arguments)``.

    A module takes inputs of the shapes in ``options.inputs``, and ``options.loss`` names a function of
    ``torch.nn.functional``; "mse_loss" against zeros if None. ``options.optimizer`` names a class of ``torch.optim``,
    whose state and update are then part of the step.

    Raises:
        NotAStep: for a module without shapes, or a loss or an optimizer that PyTorch does not have.
    """
    if isinstance(made, torch.nn.Module):
        made = _loss_of_module(made, options)
    else:
        options.refuse("PyTorch", "inputs", "loss")
    function, *args = made
    return TorchFunction(function, args, options, check_mode(options.mode or "auto"))


@dataclass(frozen=True)
class _Limited:
    """A loss to be called without arguments, and its plan, which may not be known before the first call."""

    run: Callable[[], Any]
    plan: Callable[[], Any]

    def __call__(self) -> Any:
        return self.run()


class TorchFunction:
    """See ``remat.running.workload.Workload``; a step is the loss, its gradients and, with an optimizer, the update.

    Args:
        function: returns the loss.
        args: its arguments.
        options: batch size and name of the optimizer.
        mode: how a budget is kept: "eager", by ``apply``, or "graph" and "auto", by ``compile(backend="aten")``.
    """

    framework = "torch"

    def __init__(
        self,
        function: Callable[..., Any],
        args: list[Any],
        options: StepOptions,
        mode: Mode = "auto",
    ) -> None:
        self._mode = mode
        self._function = function
        self._args = args
        self._options = options
        self._parameters = _parameters(function, args)
        self._buffers = _buffers(function, args)
        self._first = [p.detach().clone() for p in (*self._parameters.values(), *self._buffers.values())]

    @property
    def batch_size(self) -> int | None:
        """What the user said; arguments alone know otherwise."""
        return self._options.batch_size

    def graph(self, device: str) -> Graph:
        """The step, traced."""
        return trace(self._function, *self._args, optimizer=self._optimizer(), device=device)

    def train(self, budget: int | str | None, steps: int, *, nudged: bool = False) -> Training:
        """Run some steps on the same batch."""
        self._set_back(nudged)
        optimizer = self._optimizer()
        step_loss = self._limited(budget, optimizer)
        losses: list[float] = []
        times: list[float] = []

        def step() -> None:
            started = time.perf_counter()
            loss = step_loss()
            loss.backward()
            if optimizer is not None:
                optimizer.step()
            for parameter in self._parameters.values():
                parameter.grad = None
            losses.append(float(loss.detach()))
            times.append(time.perf_counter() - started)

        torch.manual_seed(_SEED)
        for _ in range(steps):
            step()
        values = self._values(optimizer)
        kept = losses[:steps], times[1:steps] or times[:1]
        self._set_back(nudged)
        peak_bytes = measure(step, repeats=1).peak_bytes
        planned = step_loss.plan()
        graph = None if planned is None else planned.graph
        return Training(peak_bytes, float(np.median(kept[1])), tuple(kept[0]), values, planned, graph)

    def gradients(self, budget: int | str | None, *, nudged: bool = False) -> Mapping[str, Array]:
        """The gradients of the first step."""
        self._set_back(nudged)
        step_loss = self._limited(budget, None)
        torch.manual_seed(_SEED)
        step_loss().backward()
        found = {f"gradient/{n}": _array(p.grad) for n, p in self._parameters.items() if p.grad is not None}
        for parameter in self._parameters.values():
            parameter.grad = None
        return found

    def restore(self) -> None:
        """Give parameters and buffers their first values."""
        self._set_back(nudged=False)

    def _limited(self, budget: int | str | None, optimizer: torch.optim.Optimizer | None) -> _Limited:
        """The loss, plain or within a budget."""
        if budget is None:
            return _Limited(self._plain_loss, lambda: None)
        if self._mode != "eager":
            captured: Any = compile(self._function, budget=budget, backend="aten", optimizer=optimizer)
            return _Limited(lambda: captured(*self._args), lambda: captured.plan)
        planned = plan(self._function, *self._args, budget=budget, optimizer=optimizer)

        def run() -> Any:
            with apply(planned):
                return self._function(*self._args)

        return _Limited(run, lambda: planned)

    def _plain_loss(self) -> torch.Tensor:
        loss: torch.Tensor = _checked(self._function, self._function(*self._args))
        if loss.requires_grad and not self._parameters:
            raise NotAStep(
                f"no module was found in the function {_name(self._function)!r}, so that no gradient would be "
                "compared: give it its module as an argument, or by a name that its own code reads"
            )
        return loss

    def _optimizer(self) -> torch.optim.Optimizer | None:
        name = self._options.optimizer
        if name is None:
            return None
        found = next((kind for known, kind in vars(torch.optim).items() if known.lower() == name.lower()), None)
        if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer):
            raise NotAStep(f"--optimizer {name}: torch.optim has none of this name; such as AdamW or SGD")
        make: Any = found
        optimizer: torch.optim.Optimizer = make(list(self._parameters.values()), lr=1e-3)
        return optimizer

    def _set_back(self, nudged: bool) -> None:
        random = np.random.default_rng(_SEED)
        tensors = (*self._parameters.values(), *self._buffers.values())
        with torch.no_grad():
            for number, (tensor, first) in enumerate(zip(tensors, self._first, strict=True)):
                moved = nudged and number < len(self._parameters) and tensor.dtype in (torch.float32, torch.float64)
                tensor.copy_(torch.from_numpy(nudge(first.cpu().numpy(), random)) if moved else first)
                tensor.grad = None

    def _values(self, optimizer: torch.optim.Optimizer | None) -> dict[str, Array]:
        found = {f"weight/{name}": _array(value) for name, value in self._parameters.items()}
        for name, value in self._buffers.items():
            found[f"{'statistic' if value.is_floating_point() else 'state'}/{name}"] = _array(value)
        slots = {} if optimizer is None else optimizer.state
        for number, of_parameter in enumerate(slots.values()):
            for name, value in of_parameter.items():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    found[f"slot/{number}/{name}"] = _array(value)
        found["state/random"] = torch.get_rng_state().numpy().copy()
        return found


def _loss_of_module(module: torch.nn.Module, options: StepOptions) -> tuple[Any, ...]:
    if not options.inputs:
        raise NotAStep(
            f"the module {type(module).__name__} does not say what it takes; give its input's shape (--input "
            "3,224,224), or return (loss function, *arguments)"
        )
    name = options.loss or "mse_loss"
    loss = getattr(torch.nn.functional, name, None)
    if not callable(loss):
        raise NotAStep(f"--loss {name}: torch.nn.functional has no such loss; such as cross_entropy or mse_loss")
    generator = torch.Generator().manual_seed(_SEED)
    inputs = [_random((options.samples, *i.shape), i.dtype or "float32", generator) for i in options.inputs]
    with torch.no_grad():
        output = _output_shape(module, inputs)
    shape = output.shape
    target = (
        torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=generator)
        if name in ("cross_entropy", "nll_loss")
        else torch.zeros(shape, dtype=output.dtype)
    )

    def loss_fn(*args: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = loss(module(*args[:-1]), args[-1])
        return result

    loss_fn.remat_module = module  # type: ignore[attr-defined]
    return (loss_fn, *inputs, target)


def _output_shape(module: torch.nn.Module, inputs: list[torch.Tensor]) -> Any:
    """The output for fake tensors: nothing is computed or allocated."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return module(*[mode.from_tensor(t) for t in inputs])


def _random(shape: tuple[int, ...], dtype: str, generator: torch.Generator) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if kind.is_floating_point:
        return torch.randn(shape, generator=generator).to(kind)
    return torch.randint(0, 2, shape, generator=generator).to(kind)


def _parameters(function: Any, args: list[Any]) -> dict[str, torch.Tensor]:
    found = {
        f"{number}.{name}": parameter
        for number, module in enumerate(used_modules(function, args))
        for name, parameter in module.named_parameters()
    }
    leaves = {f"argument.{n}": a for n, a in enumerate(args) if isinstance(a, torch.Tensor) and a.requires_grad}
    unique = {id(tensor): name for name, tensor in reversed([*found.items(), *leaves.items()])}
    return {name: tensor for name, tensor in (found | leaves).items() if unique[id(tensor)] == name}


def _buffers(function: Any, args: list[Any]) -> dict[str, torch.Tensor]:
    return {
        f"{number}.{name}": buffer
        for number, module in enumerate(used_modules(function, args))
        for name, buffer in module.named_buffers()
    }


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", function))


def _checked(function: Callable[..., Any], loss: Any) -> Any:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss
    found = f"{loss.dtype}{list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
    raise NotAStep(
        f"the function {_name(function)!r} returns {found}, no loss: a loss is one "
        "floating-point number. Return the mean or the sum of it"
    )


def _array(tensor: Any) -> Array:
    detached = tensor.detach().cpu()
    return np.array((detached.float() if detached.dtype == torch.bfloat16 else detached).numpy())
