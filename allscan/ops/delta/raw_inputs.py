"""Preparation of raw arguments of delta rules: norms of q and k, gates, beta; by shmem_kernels/gates.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...base.autograd import Function, watched
from ...base.caches import Recent
from ...base.checks import described, plain, restored
from ...base.tiling import cdiv, next_power_of_2, power_of_2_below
from ...comm.backwards import saved_tensors
from ...comm.communicator import Communicator, communicator_of
from ...launch.plan import Buffer, Plan, with_places
from ...shmem_kernels.gates import (
    gate_back_kernel,
    gate_kernel,
    normalize_back_kernel,
    normalize_kernel,
    sums_kernel,
)

BLOCK = 2048  # elements that a program processes at a time
PROGRAMS = 1024  # about the number of programs that are resident on a GPU
MOST_KEYS = 256  # channels of q and k
# What an error says about saved tensors, and their names
SAVED = dict(
    normalize=("use_qk_l2norm_in_kernel", "q k factors_of_q factors_of_k"),
    gate=("a gate of a delta rule", "x A_log dt_bias"),
)
FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64


def normalized(q: Tensor, k: Tensor, handle: int) -> Sequence[Tensor]:
    """Return q and k, each divided by sqrt(sum of squares + 1e-6) along the last dimension. ``handle``: the
    communicator's."""
    if _by_kernels(q, k, handle=handle) and q.shape == k.shape and 0 < q.shape[-1] <= MOST_KEYS:
        found: Sequence[Tensor] = _Prepared.apply((handle, "normalize", {}), q, k)
        return found
    return [(x * (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype) for x in (q, k)]


def gate(
    x: Tensor, handle: int, A_log: Tensor | None = None, dt_bias: Tensor | None = None, bound: float | None = None
) -> Tensor:
    """Return the float32 gates of raw gates x [B, T, HV, ...]: -exp(A_log) softplus(x + dt_bias) for each head, or with
    a bound: bound * sigmoid(exp(A_log) (x + dt_bias)). Raw beta is a gate with the bound 1 or 2.

    A_log: [HV]. dt_bias: [HV] or [HV, K], in whatever shape."""
    if _by_kernels(x, A_log, dt_bias, handle=handle) and x.ndim in (3, 4):
        (found,) = _Prepared.apply((handle, "gate", dict(bound=bound)), x, A_log, dt_bias)
        return found  # type: ignore[no-any-return]
    x = x.float()
    if dt_bias is not None:
        x = x + dt_bias.float().view(x.shape[2:])
    rate = None if A_log is None else A_log.float().exp().view(-1, *(1,) * (x.ndim - 3))
    if bound is None:
        assert rate is not None
        return -rate * F.softplus(x)
    return bound * (x if rate is None else rate * x).sigmoid()


def _by_kernels(*tensors: Tensor | None, handle: int) -> bool:
    """Return whether our kernels can process these tensors: the call is eager and the tensors pass the checks that the
    kernels need. Otherwise torch operators compute: under tracing, and for arguments that a later check rejects."""
    if watched(tensors):
        return False
    device = communicator_of(handle).device
    return all(x is None or x.device == device and x.dtype in FLOATS and x.numel() for x in tensors)


class _Prepared(Function):
    """Runs a plan of RECORDS; backward runs the plan of the same name with "_back" on the saved tensors and gradients.
    how: (the communicator's handle, the plan's name, its options)."""

    @staticmethod
    def forward(ctx: Any, how: tuple[int, str, dict[str, Any]], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        handle, name, fixed = ctx.how = how
        tensors = tuple(x if x is None else plain(x) for x in tensors)
        outputs = RawInputs.of(handle).run(name, *tensors, **fixed)
        saved = outputs if name == "normalize" else tensors
        ctx.save_for_backward(*[x for x in saved if x is not None])
        ctx.specs = [x if x is None else described(x) for x in saved]
        return tuple(outputs[:2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        handle, name, fixed = ctx.how
        comm, (what, names) = communicator_of(handle), SAVED[name]
        saved = saved_tensors(ctx, lambda: comm, True)
        given = [(name, spec) for name, spec in zip(names.split(), ctx.specs, strict=True) if spec is not None]
        try:
            found = iter(restored(what, [name for name, _ in given], saved, [spec for _, spec in given]))
        except RuntimeError:
            with comm.call(True):  # the error also reaches the ranks that wait for this rank's next call
                raise
        tensors = [spec if spec is None else next(found) for spec in ctx.specs]
        return None, *RawInputs.of(handle).run(f"{name}_back", *tensors, *map(plain, grads), **fixed)


class RawInputs:
    """Plans of a communicator. Each is recorded once and serves all calls that differ in their tensors only."""

    def __init__(self, comm: Communicator) -> None:
        self._cuda = comm.device.type == "cuda"
        self._plans = Recent()

    @staticmethod
    def of(handle: int) -> RawInputs:
        attributes = communicator_of(handle).attributes
        return attributes.get(RawInputs) or attributes.setdefault(RawInputs, RawInputs(communicator_of(handle)))

    def run(self, name: str, *tensors: Tensor | None, **fixed: Any) -> list[Any]:
        """Run the plan ``name`` of RECORDS on ``tensors``; return the tensors of its output buffers, None for None."""
        key = name, *fixed.values(), *[x if x is None else (x.shape, x.dtype) for x in tensors]
        found = self._plans.get(key)
        if found is None:
            plan = Plan()
            inputs = [x if x is None else plan.input(x) for x in tensors]
            found = self._plans.remember(key, with_places(plan, RECORDS[name](plan, self._cuda, *inputs, **fixed)))
        plan, order = found
        outputs = plan.run(None, *[x for x in tensors if x is not None])
        return [i if i is None else outputs[i] for i in order]


def _rows(cuda: bool, rows: int, width: int) -> int:
    """Return the rows of a block. On GPUs the number does not depend on ``rows``: otherwise the bits of a row's sum
    would. The interpreter's time grows with the number of blocks."""
    return max(1, BLOCK // width) if cuda else min(next_power_of_2(rows), max(1, 128 * BLOCK // width))


def _normalize(plan: Plan, cuda: bool, *tensors: Buffer) -> list[Buffer]:
    outputs = [plan.output_like(x) for x in tensors]
    factors = [plan.output(*x.shape[:-1]) for x in tensors]
    for buffers in zip(tensors, outputs, factors, strict=True):
        _launch_normalize(plan, cuda, normalize_kernel, *buffers)
    return outputs + factors


def _normalize_back(plan: Plan, cuda: bool, q: Buffer, k: Buffer, *others: Buffer) -> list[Buffer]:
    outputs = [plan.output_like(x) for x in (q, k)]
    for buffers in zip((q, k), others[:2], others[2:], outputs, strict=True):
        _launch_normalize(plan, cuda, normalize_back_kernel, *buffers)
    return outputs


def _launch_normalize(plan: Plan, cuda: bool, kernel: Any, x: Buffer, *others: Buffer) -> None:
    rows, D, BD = math.prod(x.shape[:-1]), x.shape[-1], next_power_of_2(x.shape[-1])
    ROWS = _rows(cuda, rows, BD)
    plan.launch(kernel, (cdiv(rows, ROWS),), x, *others, rows=rows, D=D, BD=BD, ROWS=ROWS)


def _gate(plan: Plan, cuda: bool, *tensors: Buffer | None, bound: float | None) -> list[Buffer]:
    x = tensors[0]
    assert x is not None
    g = plan.output(*x.shape)
    rows, columns, fixed = _blocks(cuda, x, bound)
    plan.launch(gate_kernel, (cdiv(rows, fixed["ROWS"]) * columns,), *tensors, g, rows=rows, **fixed)
    return [g]


def _gate_back(
    plan: Plan,
    cuda: bool,
    x: Buffer,
    A_log: Buffer | None,
    dt_bias: Buffer | None,
    dg: Buffer,
    bound: float | None,
) -> list[Buffer | None]:
    parameters = A_log, dt_bias
    outputs = [y if y is None else plan.output_like(y) for y in (x, *parameters)]
    rows, columns, fixed = _blocks(cuda, x, bound)
    BLOCKS = power_of_2_below(min(16, max(1, cdiv(rows, fixed["ROWS"]) * columns // PROGRAMS)))
    number = cdiv(rows, fixed["ROWS"] * BLOCKS)
    parts = None if parameters == (None, None) else plan.scratch(number, 2, fixed["W"])
    arguments = x, *parameters, dg, outputs[0], parts
    plan.launch(gate_back_kernel, (number * columns,), *arguments, rows=rows, BLOCKS=BLOCKS, **fixed)
    if parts is not None:
        W, K, BK = fixed["W"], fixed["K"], next_power_of_2(fixed["K"])
        BN = _rows(cuda, number, BK)
        plan.launch(sums_kernel, (W // K,), parts, *outputs[1:], parts=number, W=W, K=K, BN=BN, BK=BK)
    return outputs


def _blocks(cuda: bool, x: Buffer, bound: float | None) -> tuple[int, int, dict[str, Any]]:
    """Return (rows of x, blocks of columns, parameters of the gate kernels) of x [B, T, HV] or [B, T, HV, K]."""
    rows, W, K = math.prod(x.shape[:2]), math.prod(x.shape[2:]), math.prod(x.shape[3:])
    BW = min(128 if cuda else 2 * BLOCK, next_power_of_2(W))
    bounded = dict(bound=0.0 if bound is None else float(bound), BOUNDED=bound is not None)
    return rows, cdiv(W, BW), dict(W=W, K=K, BW=BW, ROWS=_rows(cuda, rows, BW), **bounded)


RECORDS: dict[str, Callable[..., Sequence[Buffer | None]]] = dict(
    normalize=_normalize, normalize_back=_normalize_back, gate=_gate, gate_back=_gate_back
)
