"""Short causal convolutions over a sharded sequence: the tokens before a shard boundary by ``halo``'s scan, and kernels
that read them in place of tokens of the row."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..base.autograd import Function, second_derivative_error
from ..base.checks import has_tangents, plain_or_traced, signature_of
from ..base.tiling import cdiv, next_power_of_2
from ..bindings.torch_compat import num_dispatch_modes, runs_next
from ..comm.backwards import FWD_EPOCHS, new_fwd_epochs, pending_backward, saved_tensors
from ..comm.calls import call_key
from ..comm.communicator import Communicator, communicator_of
from ..launch.compiled_kernel import dynamo_disabled
from ..launch.plan import Buffer, Plan
from ..scan.agreement import get_or_create_scan
from ..scan.collective import AllScan
from ..scan.launcher import ChannelUse, ScanBuffers
from ..scan.zigzag_scan import record_two_way
from ..shmem_kernels.short_convolution import (
    TAPS,
    ConvSizes,
    conv_back_kernel,
    conv_edges_kernel,
    conv_kernel,
    conv_sums_kernel,
)
from .halo import Options as HaloOptions
from .halo import checked_options
from .local import for_kernels, restored_some, run_recorded, save_some

SILU = "silu", "swish"
# On an H200, of 14 variants, for 16,384 tokens of 6,144 channels: 130 and 249 us, a copy of x takes 100
CHANNELS = 256  # of a program
OF_THREAD = 4  # channels
MOST = 16  # blocks of 8 tokens of a program
PROGRAMS = 2048  # about the number from which on a program has several blocks: each reads the 3 or 6 tokens before it
NAMES = "x weight bias tokens_before tokens_before_second_piece"
INTERPRETED = 1 << 16  # numbers of x on CPUs: Triton's interpreter takes seconds for more
MOST_ROWS = 65535  # of a CUDA grid


def supports(n: int, activation: str | None) -> bool:
    """Whether the kernels compute a convolution of n earlier tokens and its own, with this activation."""
    return 0 < n < TAPS and (activation is None or activation in SILU)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    *,
    comm: Communicator,
    layout: str = "contiguous",
    state: Tensor | None = None,
) -> Tensor | None:
    """y[t] = f(bias + sum_i weight[:, i] x[t - n + i]), i = 0 .. n, over this rank's part of a sequence, as if on one
    rank. Differentiable, but for ``state``. Return None, and communicate nothing, if the kernels cannot compute it or
    a check fails that the layer's function makes. Ranks may decide differently: the exchange is that of ``halo``.

    x: [B, T, C]; each of the rank's pieces has at least n tokens. weight: [C, n + 1]. bias: [C]. activation: "silu",
    "swish" or None, for f. state: [B, n, C], the n tokens before the sequence, on the rank of its first token.
    """
    own, pieces = (x, weight, bias), 1 + (layout == "zigzag")
    if torch.compiler.is_compiling() or num_dispatch_modes() or has_tangents(own):
        return None
    if comm.debug or (x.dtype == torch.float32 and torch.is_autocast_enabled(comm.device.type)):
        return None  # the layer's function casts x; in debug mode ``halo`` compares its launches and looks for NaN
    of_state = None if state is None else signature_of(state)
    key = "a convolution", activation, layout, of_state, *call_key(own)
    wanted = key[-1]
    if wanted == 2 or (wanted and state is not None and state.is_inference()):  # 2: see ``call_key``
        return None
    prepared = comm.calls.get(key)  # (the call's stamp, options of ``_convolve``)
    if prepared is None and not _fits(own, state, activation, pieces, comm):
        return None
    with comm.call(False, "a convolution", x):
        if prepared is None:
            n = weight.shape[1] - 1
            checked_options((x,), comm, HaloOptions(n, layout=layout))
            scan = get_or_create_scan(comm, (x.shape[0], n, x.shape[2]))
            options = dict(scan=scan, pieces=pieces, silu=activation is not None)
            prepared = comm.calls.remember(key, (comm.order.stamp, options))
        comm.order.stamp, options = prepared
        if wanted:
            found: Tensor = _Convolution.apply((comm, options), *own, state)
            return found
        tensors = plain_or_traced(*own, None if state is None else state.float(), None)
        return run_recorded(comm, _convolve, tensors, options)[0]


def _fits(
    own: tuple[Tensor, Tensor, Tensor | None],
    state: Tensor | None,
    activation: str | None,
    pieces: int,
    comm: Communicator,
) -> bool:
    """Whether the kernels compute a call of ``convolution``. own: x, weight, bias. Reads shapes, types and devices
    only: an equal call needs no check."""
    (B, T, C), n, bias = own[0].shape, own[1].shape[-1] - 1, own[2]
    if not supports(n, activation) or T < pieces * n or B * pieces > MOST_ROWS or own[1].shape != (C, n + 1):
        return False
    if (bias is not None and bias.shape != (C,)) or (state is not None and state.shape != (B, n, C)):
        return False
    small = comm.device.type != "cpu" or own[0].numel() <= INTERPRETED
    return small and for_kernels(comm, *own, state) is not None


class _Convolution(Function):
    """how: (the communicator, options of ``_convolve``)."""

    @staticmethod
    def forward(ctx: Any, how: tuple[Communicator, dict], *tensors: Tensor | None) -> Tensor:
        comm, options = how
        *own, state = plain_or_traced(*tensors)
        state, fwd_epoch = None if state is None else state.float(), new_fwd_epochs(comm, FWD_EPOCHS)
        y, first, second = run_recorded(comm, _convolve, (*own, state, fwd_epoch), options)
        save_some(ctx, (*own, first if state is None else state, second))
        exchanges = ctx.needs_input_grad[1]  # the gradient of x has that of the tokens that other ranks have got
        looks = None if options["pieces"] == 2 else False  # see PendingBackward
        ctx.pending = pending_backward(options["scan"], looks) if exchanges else None
        ctx.how = comm.handle, comm.order.stamp, fwd_epoch if exchanges else None, options["pieces"], options["silu"]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.compiler.is_compiling():  # autograd's graph: torch must not trace this backward
            return _backward_not_traced(ctx, dy)
        handle, stamp_of_call, fwd_epoch, pieces, silu = ctx.how
        comm = communicator_of(handle)
        call: AbstractContextManager[None] = contextlib.nullcontext()
        # without an exchange no call: ranks that leave the convolution to the layer's function make none, either
        if fwd_epoch is not None and runs_next(ctx, 0):
            if ctx.pending is not None:
                ctx.pending.run()
            saved = saved_tensors(ctx, lambda: comm, pieces == 1)
            call = comm.call(pieces == 1, "the backward of a convolution", dy)  # the direction of its first scan
        else:
            comm.check()
            saved, fwd_epoch = ctx.saved_tensors, None
        with call:
            if torch.is_grad_enabled():
                raise second_derivative_error("a convolution")
            if fwd_epoch is not None:
                comm.order.stamp = stamp_of_call
            tensors = restored_some(ctx, "a convolution", NAMES, saved)
            given, options = (*tensors, *plain_or_traced(dy), fwd_epoch), dict(comm=comm, pieces=pieces, silu=silu)
            return None, *run_recorded(comm, _convolve_back, given, options), None


_backward_not_traced = dynamo_disabled(_Convolution.backward)


def _convolve(
    plan: Plan, cuda: bool, *tensors: Buffer | None, scan: AllScan, pieces: int, silu: bool
) -> list[Buffer | None]:
    """tensors: x, weight, bias, state, the forward epochs. Returns y, the tokens before first and second pieces."""
    *own, state, fwd_epoch = tensors
    x, d, L, (columns, rows) = _sizes(own, cuda, pieces, silu)
    edges = [plan.scratch(*scan.shape) for _ in range(pieces)]
    before = [plan.output(*scan.shape) for _ in range(pieces)]
    plan.launch(conv_edges_kernel, (columns, rows), x, *_two(edges), L=L, BACK=False, d=d)
    _record_scans(plan, scan, edges, before, fwd_epoch)
    first, second = _two(before)
    y, (programs, each) = plan.output_like(x), _cut(L, d, columns * rows)
    given = *own, state or first, second, y
    plan.launch(conv_kernel, (programs, columns, rows), *given, L=L, blocks=each, d=d, num_warps=_warps(d))
    return [y, first, second]


def _convolve_back(
    plan: Plan, cuda: bool, *tensors: Buffer | None, comm: Communicator, pieces: int, silu: bool
) -> list[Buffer | None]:
    """tensors: x, weight, bias, the tokens before pieces, the gradient of y, the forward epochs, or None if x needs no
    gradient. Returns the gradients of x, weight and bias."""
    *inputs, fwd_epoch = tensors
    x, d, L, (columns, rows) = _sizes(inputs, cuda, pieces, silu)
    dx, dweight, dbias = (y if y is None else plan.output_like(y) for y in inputs[:3])
    shape = x.shape[0], d.N, d.C
    dbefore, dedges = ([plan.scratch(*shape) for _ in range(pieces)] for _ in range(2))
    programs, each = _cut(L + d.N, d, columns * rows)
    parts = plan.scratch(rows, programs, d.N + 2, d.C)
    grid, arguments = (programs, columns, rows), (*inputs, dx, *_two(dbefore), parts)
    plan.launch(conv_back_kernel, grid, *arguments, L=L, blocks=each, d=d, num_warps=_warps(d))
    if fwd_epoch is not None:
        scan = get_or_create_scan(comm, shape)
        _record_scans(plan, scan, dbefore, dedges, fwd_epoch, True)
        plan.launch(conv_edges_kernel, (columns, rows), dx, *_two(dedges), L=L, BACK=True, d=d)
    BN = 32 if cuda else min(256, next_power_of_2(rows * programs))
    plan.launch(conv_sums_kernel, (columns, d.N + 2), parts, dweight, dbias, parts=rows * programs, BN=BN, d=d)
    return [dx, dweight, dbias]


def _record_scans(
    plan: Plan, scan: AllScan, sent: list[Buffer], got: list[Buffer], fwd_epoch: Buffer | None, adjoint: bool = False
) -> None:
    """Record ``halo``'s exchange of [B, n, C] beside each piece; adjoint: of their gradients."""
    words = fwd_epoch or plan.scratch(FWD_EPOCHS, dtype=torch.int64)
    first, *second = (ScanBuffers(*pair, plan.view(words, 2 * i, 1)) for i, pair in enumerate(zip(sent, got)))
    if second:
        ascending, descending = (second[0], first) if adjoint else (first, second[0])
        record_two_way(plan, scan, ascending, descending, adjoint, None)
    else:
        scan.launcher.record_scan(plan, first, ChannelUse(adjoint, adjoint, None))


def _two(buffers: list[Buffer]) -> Sequence[Buffer | None]:
    """Those of first and of second pieces, or None."""
    return *buffers, *[None] * (2 - len(buffers))


def _sizes(
    tensors: Sequence[Buffer | None], cuda: bool, pieces: int, silu: bool
) -> tuple[Buffer, ConvSizes, int, tuple[int, int]]:
    """(x, the kernels' constants, tokens of a piece, (blocks of channels, pieces of all rows)). tensors: x, weight,
    bias, and more. The interpreter's time grows with the number of blocks."""
    x, weight = tensors[:2]
    assert x is not None and weight is not None
    (B, T, C), n = x.shape, weight.shape[1] - 1
    RUNS = 1 if cuda else min(32, next_power_of_2(cdiv(T // pieces + n, 8)))
    BC = min(CHANNELS, next_power_of_2(C))
    return x, ConvSizes(n, C, pieces, silu, RUNS, BC), T // pieces, (cdiv(C, BC), B * pieces)


def _cut(tokens: int, d: ConvSizes, others: int) -> tuple[int, int]:
    """(programs along the tokens, blocks of 8 tokens in a run); others: programs for each of the former."""
    blocks = cdiv(tokens, 8 * d.RUNS)
    each = min(MOST, max(1, blocks * others // PROGRAMS))
    return cdiv(blocks, each), each


def _warps(d: ConvSizes) -> int:
    return max(1, d.BC // (32 * OF_THREAD))
