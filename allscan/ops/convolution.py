"""Short causal convolutions over a sharded sequence: the tokens before a shard boundary by ``halo``'s scan, and kernels
that read them in place of tokens of the row."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..base.autograd import inference_tensors, wants_gradient
from ..base.checks import has_tangents
from ..base.tiling import cdiv, next_power_of_2
from ..comm.communicator import Communicator
from ..launch.plan import Buffer, Plan
from ..shmem_kernels.short_convolution import TAPS, ConvSizes, conv_back_kernel, conv_kernel, conv_sums_kernel
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


def _convolve(plan: Plan, cuda: bool, *tensors: Buffer | None, pieces: int, silu: bool) -> list[Buffer]:
    x, d, L, (columns, rows) = _sizes(tensors, cuda, pieces, silu)
    blocks = cdiv(L, d.BT)
    each, y = min(MOST, max(1, blocks * columns * rows // PROGRAMS)), plan.output_like(x)
    grid = cdiv(blocks, each), columns, rows
    plan.launch(conv_kernel, grid, *tensors, y, L=L, blocks=each, d=d, num_warps=WARPS)
    return [y]


def _convolve_back(plan: Plan, cuda: bool, *tensors: Buffer | None, pieces: int, silu: bool) -> list[Buffer | None]:
    x, d, L, (columns, rows) = _sizes(tensors, cuda, pieces, silu)
    outputs = [y if y is None else plan.output_like(y) for y in tensors[:-1]]  # the last is the output's gradient
    dx, dweight, dbias, *before = outputs
    blocks = cdiv(L + d.N, d.BT) - 1  # without the first of a piece
    each = max(1, blocks * columns * rows // PROGRAMS)
    programs = 1 + cdiv(blocks, each)
    parts = plan.scratch(rows, programs, d.N + 2, d.C)
    grid, arguments = (programs, columns, rows), (*tensors, dx, *before, parts)
    plan.launch(conv_back_kernel, grid, *arguments, L=L, blocks=each, d=d, num_warps=WARPS)
    BN = 32 if cuda else min(256, next_power_of_2(rows * programs))
    plan.launch(conv_sums_kernel, (columns, d.N + 2), parts, dweight, dbias, parts=rows * programs, BN=BN, d=d)
    return outputs


def _sizes(
    tensors: Sequence[Buffer | None], cuda: bool, pieces: int, silu: bool
) -> tuple[Buffer, ConvSizes, int, tuple[int, int]]:
    """(x, the kernels' constants, tokens of a piece, (blocks of channels, pieces of all rows)). tensors: x, weight,
    bias, the tokens before first and before second pieces. The interpreter's time grows with the number of blocks."""
    x, weight = tensors[:2]
    assert x is not None and weight is not None
    (B, T, C), n = x.shape, weight.shape[1] - 1
    BT = 8 if cuda else max(8, min(256, next_power_of_2(T)))
    BC = min(128 if cuda else 512, next_power_of_2(C))
    return x, ConvSizes(n, C, pieces, silu, BT, BC), T // pieces, (cdiv(C, BC), B * pieces)


_CONVOLUTION = LocalFunction(
    _convolve, _convolve_back, what="a convolution", names="x weight bias tokens_before tokens_before_second_piece"
)
