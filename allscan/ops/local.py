"""Functions of one rank with a gradient, whose kernels are launched by plans that are recorded once for all calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.autograd import Function, second_derivative_error, watched
from ..base.caches import Recent
from ..base.checks import described, plain_or_traced, restored
from ..comm.communicator import Communicator, communicator_of
from ..launch.plan import Buffer, Plan, with_places

FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
Record = Callable[..., Sequence[Buffer | None]]  # (plan, whether on a GPU, *buffers, **options) -> output buffers


class LocalFunction(NamedTuple):
    """forward, backward: record the launches; backward's buffers are those of the saved tensors and of the gradients.
    what, names: of the function and of its saved tensors, in errors. outputs: how many of forward's outputs are
    results. saves_outputs: whether backward needs all outputs of forward, else its inputs."""

    forward: Record
    backward: Record
    what: str
    names: str
    outputs: int = 1
    saves_outputs: bool = False


def for_kernels(comm: Communicator | int, *tensors: Tensor | None) -> Communicator | None:
    """Return the communicator if our kernels can process these tensors: the call is eager and the tensors pass the
    checks that the kernels need. Otherwise None, and torch operators compute: under tracing, and for arguments that a
    later check rejects. comm: the communicator, or its handle, which torch.compile can trace."""
    if watched(tensors):
        return None
    comm = communicator_of(comm) if isinstance(comm, int) else comm
    for x in tensors:
        if x is not None and not (x.device == comm.device and x.dtype in FLOATS and x.numel()):
            return None
    return comm


class LocalCall(Function):
    """``apply(how, *tensors)`` runs a LocalFunction. how: (the communicator, the LocalFunction, its options, hashable).
    tensors: contiguous and without negative bits, as from ``plain_or_traced``; not checked."""

    @staticmethod
    def forward(ctx: Any, how: tuple[Communicator, LocalFunction, dict], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        comm, function, options = how
        outputs = run_recorded(comm, function.forward, tensors, options)
        saved = outputs if function.saves_outputs else tensors
        save_some(ctx, saved)
        ctx.how = comm.handle, function, options  # not the communicator, which the graph would keep alive
        return tuple(outputs[: function.outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        handle, function, options = ctx.how
        comm = communicator_of(handle)
        if torch.is_grad_enabled():
            with comm.call(True):
                raise second_derivative_error(function.what)
        try:
            tensors = restored_some(ctx, function.what, function.names, ctx.saved_tensors)
        except Exception:
            with comm.call(True):  # the error also reaches the ranks that wait for this rank's next call
                raise
        return None, *run_recorded(comm, function.backward, [*tensors, *plain_or_traced(*grads)], options)


def save_some(ctx: Any, tensors: Sequence[Tensor | None]) -> None:
    """Save tensors for backward, of which some may be None."""
    ctx.save_for_backward(*[x for x in tensors if x is not None])
    ctx.specs = [x if x is None else described(x) for x in tensors]


def restored_some(ctx: Any, what: str, names: str, saved: Sequence[Tensor]) -> list[Any]:
    """``restored`` of what ``save_some`` has saved: a tensor or None for each of ``names``."""
    specs = [spec for spec in ctx.specs if spec is not None]
    named = [name for name, spec in zip(names.split(), ctx.specs, strict=True) if spec is not None]
    found = iter(restored(what, named, saved, specs))
    return [spec if spec is None else next(found) for spec in ctx.specs]


def run_recorded(
    comm: Communicator, record: Record, tensors: Sequence[Tensor | None], options: dict[str, Any]
) -> list[Any]:
    """Run the plan of ``record``, recorded once for all calls that differ in their tensors only. Return the tensors of
    its output buffers, None for None."""
    plans = comm.attributes.get(run_recorded) or comm.attributes.setdefault(run_recorded, Recent())
    key = record, *options.values(), *[x if x is None else (x.shape, x.dtype) for x in tensors]
    found = plans.get(key)
    if found is None:
        plan = Plan()
        inputs = [x if x is None else plan.input(x) for x in tensors]
        outputs = record(plan, comm.device.type == "cuda", *inputs, **options)
        found = plans.remember(key, with_places(plan, outputs))
    plan, order = found
    given = plan.run(None, *[x for x in tensors if x is not None])
    return [i if i is None else given[i] for i in order]
