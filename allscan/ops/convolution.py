"""Short causal convolutions over a sharded sequence: the tokens before a shard boundary by ``halo``'s scan, and kernels
that read them in place of tokens of the row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..base.autograd import inference_tensors, wants_gradient
from ..base.checks import has_tangents
from ..base.tiling import cdiv, next_power_of_2
from ..comm.communicator import Communicator
from ..launch.plan import Buffer, Plan
from ..shmem_kernels.short_convolution import TAPS, conv_back_kernel, conv_kernel, conv_sums_kernel
from .halo import pieces_with_halo
from .local import LocalFunction, by_kernels

SILU = "silu", "swish"
WARPS = 8  # a thread has 4 channels of a token: with 8, conv_back_kernel takes more than 200 registers
MOST = 8  # blocks of tokens of a program of conv_kernel
PROGRAMS = 4096  # about the number from which on a program has several blocks: each loads the weights
INTERPRETED = 1 << 16  # numbers of x on CPUs: Triton's interpreter takes seconds for more
MOST_ROWS = 65535  # of a CUDA grid


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
    n, pieces = weight.shape[-1] - 1, 1 + (layout == "zigzag")
    (B, T, C), own = x.shape, (x, weight, bias)
    known = 0 < n < TAPS and T >= pieces * n and (activation is None or activation in SILU)
    shapes = weight.shape == (C, n + 1) and (bias is None or bias.shape == (C,))
    shapes = shapes and (state is None or state.shape == (B, n, C)) and B * pieces <= MOST_ROWS
    if not (known and shapes and by_kernels(comm, *own, state)) or has_tangents(own):
        return None
    if comm.device.type == "cpu" and x.numel() > INTERPRETED or wants_gradient(own) and inference_tensors(own):
        return None
    x, before = pieces_with_halo(x, n, comm=comm, layout=layout)
    first, second = before if pieces == 2 else (*before, None)
    first = first if state is None else state.detach().float()
    options = dict(pieces=pieces, silu=activation is not None)
    found: Tensor = _CONVOLUTION(comm, x, weight, bias, first, second, **options)[0]
    return found


def _convolve(
    plan: Plan,
    cuda: bool,
    x: Buffer,
    weight: Buffer,
    bias: Buffer | None,
    first: Buffer,
    second: Buffer | None,
    pieces: int,
    silu: bool,
) -> list[Buffer]:
    fixed, (BT, BC) = _sizes(x, weight, pieces, silu), _block(x, cuda)
    blocks, columns, rows = cdiv(fixed["L"], BT), cdiv(fixed["C"], BC), x.shape[0] * pieces
    each = min(MOST, max(1, blocks * columns * rows // PROGRAMS))
    grid, y = (cdiv(blocks, each), columns, rows), plan.output_like(x)
    plan.launch(
        conv_kernel, grid, x, weight, bias, first, second, y, blocks=each, BT=BT, BC=BC, num_warps=WARPS, **fixed
    )
    return [y]


def _convolve_back(
    plan: Plan,
    cuda: bool,
    x: Buffer,
    weight: Buffer,
    bias: Buffer | None,
    first: Buffer,
    second: Buffer | None,
    dy: Buffer,
    pieces: int,
    silu: bool,
) -> list[Buffer | None]:
    outputs = [y if y is None else plan.output_like(y) for y in (x, weight, bias, first, second)]
    dx, dweight, dbias, *before = outputs
    fixed, (BT, BC) = _sizes(x, weight, pieces, silu), _block(x, cuda)
    N, C, rows = fixed["N"], fixed["C"], x.shape[0] * pieces
    blocks, columns = cdiv(fixed["L"] + N, BT) - 1, cdiv(C, BC)  # without the first of a piece
    each = max(1, blocks * columns * rows // PROGRAMS)
    programs = 1 + cdiv(blocks, each)
    parts = plan.scratch(rows, programs, N + 2, C)
    tensors = x, weight, bias, first, second, dy, dx, *before, parts
    plan.launch(
        conv_back_kernel, (programs, columns, rows), *tensors, blocks=each, BT=BT, BC=BC, num_warps=WARPS, **fixed
    )
    BN = 32 if cuda else min(256, next_power_of_2(rows * programs))
    sums = dict(parts=rows * programs, N=N, C=C, BN=BN, BC=BC)
    plan.launch(conv_sums_kernel, (columns, N + 2), parts, dweight, dbias, **sums)
    return outputs


def _sizes(x: Buffer, weight: Buffer, pieces: int, silu: bool) -> dict[str, Any]:
    return dict(L=x.shape[1] // pieces, N=weight.shape[1] - 1, C=x.shape[2], PIECES=pieces, SILU=silu)


def _block(x: Buffer, cuda: bool) -> Sequence[int]:
    """(BT, BC) of a program. The interpreter's time grows with the number of programs."""
    BC = min(128 if cuda else 512, next_power_of_2(x.shape[2]))
    return (8, BC) if cuda else (max(8, min(256, next_power_of_2(x.shape[1]))), BC)


_CONVOLUTION = LocalFunction(
    _convolve, _convolve_back, what="a convolution", names="x weight bias tokens_before tokens_before_second_piece"
)
