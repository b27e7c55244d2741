"""Functions shared by kernels of several operators: block addresses, exponentials, products of a stated precision."""

from __future__ import annotations

import triton
import triton.language as tl

from ..bindings.triton_compat import builtin, core, unwrapped

# Tables of weights
HALVES = tl.constexpr(0)  # half the sum of a token and those before it, less half the sum of those after it
ONWARD = tl.constexpr(1)  # the sum of a token and those after it
BEFORE = tl.constexpr(2)  # the sum of those before a token

LOG2_E = tl.constexpr(1.4426950408889634)


@builtin
def loop_bound(n, _semantic=None) -> int | core.tensor:
    """Return ``n`` as the bound of a loop: a Python number in the interpreter."""
    return int(n.handle.data.item()) if _semantic is None else n


@builtin
def exp2(x, _semantic=None) -> core.tensor:
    """Return 2 ** x in float32, in one instruction; denormal results are 0."""
    if _semantic is None:
        y = tl.exp2(x)
        return tl.where(y < 2.0**-126, 0.0, y)
    return core.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=core.float32, is_pure=True, pack=1, _semantic=_semantic
    )


@builtin
def minus(x, y, _semantic=None) -> core.tensor:
    """Return x - y in float32. Never contracted: if y is a product, x less its rounded value, as x may contain."""
    if _semantic is None:
        return x - y
    return core.inline_asm_elementwise(
        "sub.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=core.float32, is_pure=True, pack=1, _semantic=_semantic
    )


@builtin
def cast(x, dtype, _semantic=None) -> core.tensor:
    """``x`` in another float type, rounded to nearest: the interpreter's own conversion to bfloat16 cuts off."""
    dtype = unwrapped(dtype)
    if _semantic is not None:
        return x.to(dtype, _semantic=_semantic)
    if dtype == tl.bfloat16 and x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + ((bits >> 16) & 1) + 0x7FFF) & -65536  # the interpreter makes denormals, even 0, 2 ** -126
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), float("nan"))
    return x.to(dtype)


@builtin
def rounded_to_tf32(x, _semantic=None) -> core.tensor:
    """Round float32 to the 11 bits of TF32: a product would truncate. NaN stays NaN, also the GPU's NaN 0x7FFFFFFF."""
    if _semantic is None:
        bits = (tl.minimum(x.to(tl.int32, bitcast=True), 0x7FFFEFFF) + 0x1000) & -0x2000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return core.inline_asm_elementwise(
        "{.reg .b32 t; mov.b32 t, $1; min.s32 t, t, 0x7FFFEFFF; add.s32 t, t, 0x1000; mov.b32 $0, t;}",
        "=f,f",
        [x],
        dtype=core.float32,
        is_pure=True,
        pack=1,
        _semantic=_semantic,
    )


@builtin
def operand(x, dtype, _semantic=None) -> core.tensor:
    """``x`` as an operand of a product in ``dtype``: rounded to it; the interpreter can only multiply it as float32."""
    if _semantic is not None:
        return x.to(unwrapped(dtype), _semantic=_semantic)
    return cast(x, dtype).to(tl.float32)


@builtin
def times(x, y, _semantic=None) -> core.tensor:
    """x y in their own type; of bfloat16 the interpreter would multiply the bits."""
    if _semantic is not None:
        return x.__mul__(y, _semantic=_semantic)
    return x.to(tl.float32) * y.to(tl.float32)


@triton.jit
def product(b_x, b_y, b_sum, PRECISION: tl.constexpr):
    """x y + sum; sum is float32. PRECISION: "bf16" or "tf32x3", of the operands."""
    if PRECISION == "bf16":
        return tl.dot(operand(b_x, tl.bfloat16), operand(b_y, tl.bfloat16), b_sum)
    else:
        return tl.dot(b_x.to(tl.float32), b_y.to(tl.float32), b_sum, input_precision=PRECISION)


@triton.jit
def high_half(b_x):
    """Truncate float32 to the 8 bits of a bfloat16. The rest of b_x has another 16 bits; a bfloat16 holds 8 of them."""
    return (b_x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def dot_split(b_x, b_y, b_sum, PRECISION: tl.constexpr):
    """``product``, but a float32 operand is split into the sum of two bfloat16, which hold 16 of its bits."""
    if PRECISION != "bf16":
        return product(b_x, b_y, b_sum, PRECISION)
    b_x_high, b_y_high = b_x, b_y
    if b_x.dtype == tl.float32:
        b_x_high = high_half(b_x)
        b_sum = product(b_x - b_x_high, b_y, b_sum, PRECISION)
    if b_y.dtype == tl.float32:
        b_y_high = high_half(b_y)
        b_sum = product(b_x, b_y - b_y_high, b_sum, PRECISION)
    return product(b_x_high, b_y_high, b_sum, PRECISION)


@triton.jit
def rounded_to_16_bits(b_x, PRECISION: tl.constexpr):
    """Round float32 to the bits of the 2 parts of ``product_of_parts``, for products in bfloat16. NaN stays NaN, also
    the GPU's NaN 0x7FFFFFFF."""
    if PRECISION == "bf16":
        bits = tl.minimum(b_x.to(tl.int32, bitcast=True), 0x7FFFFF00)
        return ((bits + 0x80) & -0x100).to(tl.float32, bitcast=True)
    else:
        return b_x


@triton.jit
def joined(b_x, b_y):
    """Return the columns of b_x, then those of b_y."""
    return tl.reshape(tl.permute(tl.join(b_x, b_y), (0, 2, 1)), [b_x.shape[0], 2 * b_x.shape[1]])


@triton.jit
def product_of_parts(b_x, b_y, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """x y, for bfloat16 with y as the sum of 2 or 3 bfloat16, which hold 16 or 24 of its bits. Two are the columns of
    one operand: half as many products, each of which waits for others. On Hopper y must have 32 columns or more: ptxas
    12.8 generates wrong addresses if operands with rows of 64 and of 128 bytes are at one place in shared memory, one
    after the other."""
    if PRECISION == "bf16":
        b_high = high_half(b_y)
        b_rest = b_y - b_high
        b_sum = tl.zeros([b_x.shape[0], 2 * b_y.shape[1]], tl.float32)
        if PARTS == 3:
            b_middle = high_half(b_rest)
            b_low = joined(b_rest - b_middle, tl.zeros(b_y.shape, tl.float32))
            b_sum = product(b_x, b_low, b_sum, PRECISION)
            b_rest = b_middle
        b_sum = product(b_x, joined(b_high, b_rest), b_sum, PRECISION)
        b_sum = tl.permute(tl.reshape(b_sum, [b_x.shape[0], 2, b_y.shape[1]]), (0, 2, 1))
        b_high, b_rest = tl.split(b_sum)
        return b_rest + b_high
    else:
        return product(b_x, b_y, tl.zeros([b_x.shape[0], b_y.shape[1]], tl.float32), PRECISION)


@triton.jit
def tf32_product(b_x, b_y, b_sum, PRECISION: tl.constexpr):
    """``product`` of float32 in TF32 where ``dot_split`` would take bfloat16: 11 bits in one product, not three."""
    if PRECISION == "bf16":
        return tl.dot(rounded_to_tf32(b_x), rounded_to_tf32(b_y), b_sum, input_precision="tf32")
    else:
        return product(b_x, b_y, b_sum, PRECISION)


@triton.jit
def rows(h, start, end, H: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr, i_w=0):
    """Address tokens start .. start + BT of head h in a tensor [tokens, H, W], columns i_w * BW .. + BW.

    Returns (offsets, mask of the tokens before ``end`` and the columns before W), [BT, BW].
    """
    t = start + tl.arange(0, BT)
    w = i_w * BW + tl.arange(0, BW)
    return (t.to(tl.int64) * H + h)[:, None] * W + w[None, :], (t < end)[:, None] & (w < W)[None, :]


@triton.jit
def state_at(i_state, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, i_k=0):
    """(offsets, mask) [BK, BV] of one of many [K, V] matrices: rows i_k * BK .. + BK, columns i_v * BV .. + BV."""
    k = i_k * BK + tl.arange(0, BK)
    v = i_v * BV + tl.arange(0, BV)
    return i_state.to(tl.int64) * (K * V) + k[:, None] * V + v[None, :], (k < K)[:, None] & (v < V)[None, :]


@triton.jit
def zeros(M: tl.constexpr, N: tl.constexpr = None):
    """Zeros [M, N], float32; [M] without N. Before Triton 3.8 ``tl.zeros`` takes no shape of fields of a constant."""
    if N is None:
        return tl.zeros([M], tl.float32)
    else:
        return tl.zeros([M, N], tl.float32)


@triton.jit
def load(p, at, inside):
    """A block, 0 outside."""
    return tl.load(p + at, mask=inside, other=0.0)


@triton.jit
def load_gates(p_g, at, inside):
    """Load gates in float32, as logarithms to base 2, clamped to -128 from below: that decay is 0, too."""
    b_g = load(p_g, at, inside).to(tl.float32) * LOG2_E
    return tl.maximum(b_g, -128.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def lower(BT: tl.constexpr, DISTANCE: tl.constexpr):
    """Return [BT, BT]: whether the row is at least DISTANCE after the column."""
    return tl.arange(0, BT)[:, None] >= tl.arange(0, BT)[None, :] + DISTANCE


@triton.jit
def upper(BT: tl.constexpr, DISTANCE: tl.constexpr):
    """Return [BT, BT]: whether the row is at least DISTANCE before the column."""
    return tl.arange(0, BT)[None, :] >= tl.arange(0, BT)[:, None] + DISTANCE


@triton.jit
def load_weights(p_weights, i, BT: tl.constexpr):
    """Load one of the tables HALVES, ONWARD, BEFORE [BT, BT]: weights of sums over the tokens of a chunk. Loaded
    tables are operands in shared memory; computed ones would occupy registers."""
    t = tl.arange(0, BT)
    return tl.load(p_weights + i * BT * BT + t[:, None] * BT + t[None, :])


@triton.jit
def sums_of(b_where, b_x, PRECISION: tl.constexpr):
    """For each row the sum of the rows of b_x that b_where selects; no other row is added and subtracted again. The
    only error is the rounding of float32 sums: in bfloat16 x is split into three parts."""
    b_ones = cast(tl.where(b_where, 1.0, 0.0), tl.bfloat16)
    b_sum = tl.zeros([b_where.shape[0], b_x.shape[1]], tl.float32)
    if PRECISION == "bf16":
        b_high = high_half(b_x)
        b_middle = high_half(b_x - b_high)
        b_sum = product(b_ones, b_x - b_high - b_middle, b_sum, PRECISION)
        b_sum = product(b_ones, b_middle, b_sum, PRECISION)
        return product(b_ones, b_high, b_sum, PRECISION)
    return product(b_ones, b_x, b_sum, PRECISION)
