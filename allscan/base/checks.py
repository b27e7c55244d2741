"""Checks and conversions of the arguments of scans and operators."""

from __future__ import annotations

import itertools
import numbers
import operator
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..bindings.torch_compat import forward_ad, without_dispatch_modes

_FLOAT32 = torch.finfo(torch.float32)


class Shift(NamedTuple):
    """Replaces a decay in halo() of a rank that has fewer tokens than are sent: R_{p+1}[k] = R_p[k + rows] +
    state_p[k], with R_p[k + rows] = 0 beyond the last row. The adjoint shifts in the other direction."""

    rows: int


class ScanInputs(NamedTuple):
    """Inputs of a scan, as in ``allscan.allscan``. Types are unchecked; in the zigzag layout the inputs are pairs."""

    state: Any
    decay: Any = None
    transition: Any = None
    initial_state: Any = None
    out: Any = None


def integer(name: str, value: Any, least: int = 1) -> int:
    """``value`` as an int. Raises TypeError unless its type is an integer type, ValueError below ``least``."""
    if type(value) is not int:  # torch.compile takes its symbolic integers for int
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be an integer, got {value!r}")
        value = operator.index(value)
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value  # type: ignore[no-any-return]


def cu_seqlens_error(lengths: Sequence[int], T: int | None, chunks: int = 1) -> str | None:
    """Error message for cu_seqlens that do not rise from 0 to T, the tokens of all ranks (None: to any number), or with
    a sequence whose length is no multiple of ``chunks``; else None."""
    if lengths[0] or list(lengths) != sorted(lengths) or T not in (None, lengths[-1]):
        end = "" if T is None else f" to the {T} tokens of all ranks"
        return f"cu_seqlens must rise from 0{end}, got {tuple(lengths)}"
    if any((b - a) % chunks for a, b in itertools.pairwise(lengths)):
        wanted = f"multiples of {chunks}, twice the ranks"
        return f"with per_document=True lengths must be {wanted}, got cu_seqlens {tuple(lengths)}"
    return None


def checked_first_token(first_token: Any, cu_seqlens: object) -> int | None:
    """``first_token`` as an int, or None. Raises TypeError or ValueError."""
    if first_token is None:
        return None
    if cu_seqlens is None:
        raise ValueError(
            "first_token requires cu_seqlens: it says where this rank's tokens begin in the row of packed sequences"
        )
    return integer("first_token", first_token, 0)


def switch(name: str) -> bool:
    """Whether the environment variable ``name`` is 1. Raises ValueError unless it is 0, 1 or empty."""
    value = os.environ.get(name, "").strip() or "0"
    if value not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {value!r}")
    return value == "1"


def boundaries(cu_seqlens: object) -> Tensor:
    """cu_seqlens as a tensor of integers [N + 1]. Raises TypeError or ValueError."""
    if not isinstance(cu_seqlens, Tensor):
        try:
            cu_seqlens = torch.as_tensor(cu_seqlens, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"cu_seqlens must be a tensor or a list of integers: {error}") from error
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.layout != torch.strided or cu_seqlens.device.type == "meta":
        raise TypeError(f"cu_seqlens must be dense, with values, got {cu_seqlens.layout} on {cu_seqlens.device}")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens must be [N + 1], got {tuple(cu_seqlens.shape)}")
    if not torch.compiler.is_compiling():
        reject_in_capture(cu_seqlens)
    return cu_seqlens


def reject_in_capture(cu_seqlens: Tensor) -> None:
    """Raise ValueError if ``cu_seqlens`` is on the GPU and the current stream is being captured. The host computes
    tables from its values, so every replay would use the values at capture."""
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "cu_seqlens on the GPU cannot be captured, since replays would not see its values: give a list or a tensor "
            "on the CPU, whose values the graph keeps, and capture a graph for each packing"
        )


def plain(x: Tensor) -> Tensor:
    """``x``, contiguous and without a negative bit (Tensor.is_neg): a kernel sees neither strides nor that bit. Not for
    code that torch.compile traces: see ``plain_or_traced``."""
    return x.resolve_neg().contiguous() if x.is_neg() or not x.is_contiguous() else x


def plain_or_traced(*tensors: Tensor | None) -> Sequence[Any]:
    """``plain`` of each tensor. Under torch.compile, which cannot trace is_neg(), only without the negative bit:
    inductor may give a contiguous copy other strides, so operators make copies when they run (base/autograd.py)."""
    if torch.compiler.is_compiling():
        return [x if x is None else x.resolve_neg() for x in tensors]
    for x in tensors:
        if x is not None and (x.is_neg() or not x.is_contiguous()):
            return [y if y is None else y.resolve_neg().contiguous() for y in tensors]  # ``plain``, inlined for speed
    return tensors


described = operator.attrgetter("dtype", "shape", "device")  # properties of a tensor that restored() compares


def restored(
    what: str, names: Sequence[str], tensors: Sequence[Tensor], wanted: list[tuple[Any, ...]]
) -> Sequence[Tensor]:
    """``plain`` of the ``tensors`` that autograd saved for the backward pass of ``what``. ``names``: their names. A
    saved_tensors_hook may return other tensors: raises RuntimeError, before any launch, unless ``described`` of each
    equals its entry of ``wanted``. Strides and negative bits may differ."""
    if [*map(described, tensors)] != wanted:
        check_restored(what, names, tensors, wanted)
    if torch.compiler.is_compiling() or any([x.is_neg() or not x.is_contiguous() for x in tensors]):
        return plain_or_traced(*tensors)
    return tensors


def check_restored(what: str, names: Sequence[str], tensors: Sequence[Tensor], wanted: list[tuple[Any, ...]]) -> None:
    """The check of ``restored``."""
    if [*map(described, tensors)] != wanted:
        for name, x, kind in zip(names, tensors, wanted, strict=True):
            if described(x) != kind:
                raise saved_tensor_error(what, name, x, f"{kind[0]} {list(kind[1])} on {kind[2]}")


def saved_tensor_error(what: str, name: str, x: Tensor, saved: str) -> RuntimeError:
    """The error for a saved_tensors_hook that returned ``x`` where the tensor described by ``saved`` was saved."""
    return RuntimeError(
        f"the backward of {what} was given {name} as {x.dtype} {list(x.shape)} on {x.device}, where {saved} was saved: "
        "what a saved_tensors_hook gives back must have the same dtype, shape and device"
    )


def signature_of(*inputs: object) -> tuple[object, ...]:
    """Hashable key: for a tensor the properties that argument checks read, for other inputs None or the type. Excludes
    tangents, which Communicator.call checks, and negative bits and strides, which ``plain`` handles."""
    found: list[object] = []
    for x in inputs:
        if isinstance(x, Tensor):
            found += type(x), x.shape, x.dtype, x.device, x.layout
        else:
            found.append(None if x is None else type(x))
    return tuple(found)


def check_tensor(
    name: str,
    tensor: Any,
    shape: Sequence[int] | None,
    device: torch.device | None,
    dtype: torch.dtype | None = torch.float32,
) -> None:
    """Raise TypeError or ValueError unless ``tensor`` is a dense, unquantized tensor with its own memory (no wrapper
    subclass), of this shape and dtype, on this device; None: of any."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise _without_memory(name, tensor)
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"{name} must be dense, got {tensor.dtype}, {tensor.layout}")
    if dtype is not None and tensor.dtype != dtype:
        raise TypeError(f"{name} must be {str(dtype).removeprefix('torch.')}, got {tensor.dtype}")
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def _without_memory(name: str, tensor: Tensor) -> TypeError:
    """The error for a tensor subclass, with the method that returns a tensor with its own memory."""
    hint = "a tensor subclass without storage"
    if hasattr(tensor, "to_local"):
        hint = "of a DTensor: to_local()"
    elif hasattr(tensor, "wait"):  # torch.distributed._functional_collectives
        hint = "of a collective that is under way: wait()"
    return TypeError(f"{name} must own its storage, got {type(tensor).__name__} ({hint})")


def check_decay(decay: object, shape: Sequence[int], device: torch.device, values: bool = False) -> None:
    """Raise TypeError or ValueError unless ``decay`` is valid for a state of ``shape`` [..., K, V]: None, a Shift, a
    number in [0, 1], or a float32 tensor that is broadcastable to [..., K] or [...]; with ``values``, which waits for
    the GPU, of numbers in [0, 1]."""
    if decay is None or isinstance(decay, Shift):
        return
    if not isinstance(decay, Tensor):
        if not isinstance(decay, numbers.Real):
            raise TypeError(f"decay must be a number or a tensor, got {type(decay).__name__}")
        try:
            number = float(decay)
        except OverflowError as error:
            raise ValueError(f"decay must be a float: {error}") from error
        if not 0.0 <= number <= 1.0:
            raise ValueError(f"decay must be in [0, 1], got {number}; for a log gate g pass exp(g)")
        return
    check_tensor("decay", decay, None, device)
    rows, heads = tuple(shape[:-1]), tuple(shape[:-2])
    target = rows if decay.ndim == len(rows) else heads if decay.ndim else ()
    if decay.ndim != len(target) or any(d not in (1, t) for d, t in zip(decay.shape, target, strict=True)):
        raise ValueError(f"decay must be broadcastable to {rows} or {heads}, got {tuple(decay.shape)}")
    if values:
        with without_dispatch_modes():  # recomputation in selective checkpointing does not check again
            right = bool(((decay >= 0) & (decay <= 1)).all())
        if not right:
            raise ValueError("decay must be in [0, 1]; for a log gate g pass exp(g)")


def check_scan(inputs: ScanInputs, shape: Sequence[int] | None, device: torch.device) -> None:
    """Raise TypeError or ValueError for wrong inputs of a scan. ``shape``: required shape of the state; None: any."""
    state, decay, transition, initial_state, out = inputs
    check_tensor("state", state, shape, device)
    if state.ndim < 2 or min(state.shape) < 1:
        raise ValueError(f"state must be [..., K, V] with no empty dimension, got {tuple(state.shape)}")
    check_decay(decay, state.shape, device)
    if transition is not None:
        check_tensor("transition", transition, (*state.shape[:-1], state.shape[-2]), device)
        if decay is not None:
            raise ValueError("give decay or transition, not both")
    for name, x in (("initial_state", initial_state), ("out", out)):
        if x is not None:
            check_tensor(name, x, state.shape, device)


def decay_rows(decay: Tensor | float, shape: Sequence[int], device: torch.device) -> Tensor:
    """The float32 tensor that a kernel gets for a checked ``decay``: contiguous, expanded to [..., K] or [...]; a
    number or a tensor without dimensions becomes a tensor of shape []."""
    if not isinstance(decay, Tensor):
        return torch.full((), float(decay), dtype=torch.float32, device=device)
    decay, target = decay.resolve_neg(), shape[:-1] if decay.ndim == len(shape) - 1 else shape[:-2]
    if decay.ndim and decay.shape != target:
        decay = decay.expand(target)
    return decay.contiguous()


def is_zigzag(layout: str) -> bool:
    """Whether ``layout`` is "zigzag". Raises ValueError unless it is "contiguous" or "zigzag"."""
    if layout not in ("contiguous", "zigzag"):
        raise ValueError(f'layout must be "contiguous" or "zigzag", got {layout!r}')
    return layout == "zigzag"


LEAST_SUM = -(2.0**20)  # least sum of a chunk's gates, for kernels that subtract such sums: see docs/delta.md
PER_DOCUMENT = 2  # value of ``zigzag`` in internal functions: zigzag of each sequence (0: contiguous, 1: of the row)


def zigzag_of(layout: str, per_document: bool, cu_seqlens: object) -> int:
    """How an operator's tokens are sharded: 0 contiguous, 1 zigzag of the row, PER_DOCUMENT zigzag of each sequence.
    Raises ValueError for arguments that contradict each other."""
    zigzag = is_zigzag(layout)
    if not per_document:
        return int(zigzag)
    if not zigzag or cu_seqlens is None:
        presence = "without" if cu_seqlens is None else "with"
        raise ValueError(
            f'per_document=True requires layout="zigzag" and cu_seqlens, got {layout!r} {presence} cu_seqlens'
        )
    return PER_DOCUMENT


def check_halves(T: int) -> None:
    """Raise ValueError for an odd number of tokens in the zigzag layout."""
    if T % 2:
        raise ValueError(f'layout="zigzag" requires an even T (each rank has two chunks of T / 2), got {T}')


def check_for_an_operator(tensors: dict[str, Any], optional: Sequence[str], q: str, scale: object) -> None:
    """Raise TypeError or ValueError for arguments that a custom op's schema cannot take. ``tensors``: by name.
    optional: names of those that may be None. q: name of the one whose last dimension is that of the keys."""
    for name, x in tensors.items():
        if x is None and name in optional:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if hasattr(x, "to_local"):
            raise _without_memory(name, x)
        if x.layout != torch.strided:
            raise TypeError(f"{name} must be dense, got {x.layout}")
    if tensors[q].ndim != 4:
        raise ValueError(f"{q} must be [B, T, heads, width], got {tuple(tensors[q].shape)}")
    # backward divides by it in float32
    value: Any = scale
    if scale is not None and not (isinstance(scale, numbers.Real) and _FLOAT32.tiny <= abs(value) <= _FLOAT32.max):
        raise ValueError(f"scale must be finite and non-zero in float32, got {scale!r}")


def has_tangents(inputs: object) -> bool:
    """Whether an input, or a member of a nested tuple or list, has a tangent of forward-mode AD."""
    if forward_ad._current_level < 0:
        return False
    if isinstance(inputs, tuple | list):
        return any(has_tangents(x) for x in inputs)
    return isinstance(inputs, Tensor) and forward_ad.unpack_dual(inputs).tangent is not None


def check_gates(name: str, g: Tensor, tokens: int | None = None) -> None:
    """Raise ValueError if a logarithm of a decay [B, T, ...] is NaN or positive. ``tokens``: the kernels add up the
    logarithms of this many tokens; a sum below LEAST_SUM, such as -inf, raises too. Synchronizes with the GPU."""
    if not g.numel():
        return
    # in float32: torch.autocast rejects stack() of bfloat16 in a region of float16, and of float16 in one of bfloat16
    least, most = torch.stack([x.float() for x in torch.aminmax(g.detach())]).tolist()
    if most != most:
        raise ValueError(f"{name} must not be NaN")
    if most > 0:
        raise ValueError(f"{name} must be at most 0, got {most:g}")
    if tokens is None or least * tokens >= LEAST_SUM:
        return
    rest = (0, 0) * (g.ndim - 2) + (0, -g.shape[1] % tokens)
    least = F.pad(g.detach().float(), rest).unflatten(1, (-1, tokens)).sum(2).min().item()
    if least < LEAST_SUM:
        what = "be" if tokens == 1 else f"add up, in {tokens} tokens, to"
        raise ValueError(
            f"{name} must {what} at least {LEAST_SUM:,.0f}, got {least:g}: sums in float32 would lose the other gates. "
            "Separate documents by cu_seqlens"
        )
