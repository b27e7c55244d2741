"""Preparation of raw arguments of delta rules: norms of q and k, gates, beta; by shmem_kernels/gates.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...base.tiling import cdiv, next_power_of_2, power_of_2_below
from ...launch.plan import Buffer, Plan
from ...shmem_kernels.gates import (
    gate_back_kernel,
    gate_kernel,
    normalize_back_kernel,
    normalize_kernel,
    sums_kernel,
)
from ..local import LocalCall, LocalFunction, for_kernels

BLOCK = 2048  # elements that a program processes at a time
PROGRAMS = 1024  # about the number of programs that are resident on a GPU
MOST_KEYS = 256  # channels of q and k


def normalized(q: Tensor, k: Tensor, handle: int) -> Sequence[Tensor]:
    """Return q and k, each divided by sqrt(sum of squares + 1e-6) along the last dimension. q, k: as from
    ``plain_or_traced``. ``handle``: the communicator's."""
    if (comm := for_kernels(handle, q, k)) and q.shape == k.shape and 0 < q.shape[-1] <= MOST_KEYS:
        return LocalCall.apply((comm, NORMALIZE, {}), q, k)
    return [(x * (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype) for x in (q, k)]


def gate(
    x: Tensor, handle: int, A_log: Tensor | None = None, dt_bias: Tensor | None = None, bound: float | None = None
) -> Tensor:
    """Return the float32 gates of raw gates x [B, T, HV, ...]: -exp(A_log) softplus(x + dt_bias) for each head, or with
    a bound: bound * sigmoid(exp(A_log) (x + dt_bias)). Raw beta is a gate with the bound 1 or 2.

    A_log: [HV]. dt_bias: [HV] or [HV, K], in whatever shape. All tensors as from ``plain_or_traced``."""
    if (comm := for_kernels(handle, x, A_log, dt_bias)) and x.ndim in (3, 4):
        return LocalCall.apply((comm, GATE, dict(bound=bound)), x, A_log, dt_bias)[0]
    x = x.float()
    if dt_bias is not None:
        x = x + dt_bias.float().view(x.shape[2:])
    rate = None if A_log is None else A_log.float().exp().view(-1, *(1,) * (x.ndim - 3))
    if bound is None:
        assert rate is not None
        return -rate * F.softplus(x)
    return bound * (x if rate is None else rate * x).sigmoid()


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


NORMALIZE = LocalFunction(
    _normalize,
    _normalize_back,
    what="use_qk_l2norm_in_kernel",
    names="q k factors_of_q factors_of_k",
    outputs=2,
    saves_outputs=True,
)
GATE = LocalFunction(_gate, _gate_back, what="a gate of a delta rule", names="x A_log dt_bias")
