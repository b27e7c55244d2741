"""What the scans ask of their arguments."""

from __future__ import annotations

import numbers
import operator
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..bindings.torch_compat import forward_ad


class Shift(NamedTuple):
    """In place of a decay, for halo() of a rank with fewer tokens than are sent: R_{p+1}[k] = R_p[k + rows] +
    state_p[k], where there is such a row. Its adjoint shifts the other way."""

    rows: int


class ScanInputs(NamedTuple):
    """What a scan is given, as for ``allscan.allscan``: before the checks anything, in the zigzag layout pairs."""

    state: Any
    decay: Any = None
    transition: Any = None
    initial_state: Any = None
    out: Any = None


def integer(name: str, value: Any, least: int = 1) -> int:
    """``value`` as an int. Raises TypeError unless it is a whole number by its type, ValueError below ``least``."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if operator.index(value) < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return operator.index(value)


def own_place(first_token: Any, cu_seqlens: object) -> int | None:
    """``first_token`` as an int, or None. Raises TypeError or ValueError."""
    if first_token is None:
        return None
    if cu_seqlens is None:
        raise ValueError(
            "first_token needs cu_seqlens: it says where this rank's tokens begin in the row of packed sequences"
        )
    return integer("first_token", first_token, 0)


def switch(name: str) -> bool:
    """Of an environment variable, 1 by default. Raises ValueError unless it is 0 or 1."""
    value = os.environ.get(name, "").strip() or "1"
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
    """Raise ValueError for one on the GPU if the current stream is captured: what follows from its values is worked out
    on the host, and would be the same at each replay, whatever is in it then."""
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "cu_seqlens on the GPU cannot be captured, since replays would not see its values: give a list or a tensor "
            "on the CPU, whose values the graph keeps, and capture a graph for each packing"
        )


def plain(x: Tensor) -> Tensor:
    """``x`` contiguous, and no view that stands for the negative of its memory (Tensor.is_neg), which is all that a
    kernel sees. Where torch.compile does not trace: see ``plain_or_traced``."""
    return x.resolve_neg().contiguous() if x.is_neg() or not x.is_contiguous() else x


def plain_or_traced(*tensors: Tensor | None) -> Sequence[Any]:
    """``plain`` of each, wherever this is called: torch.compile cannot trace the questions."""
    if torch.compiler.is_compiling():
        return [x if x is None else x.resolve_neg().contiguous() for x in tensors]
    for x in tensors:
        if x is not None and (x.is_neg() or not x.is_contiguous()):
            return [y if y is None else plain(y) for y in tensors]
    return tensors


described = operator.attrgetter("dtype", "shape", "device")  # of a tensor, to be compared by restored()


def restored(what: str, names: str, tensors: Sequence[Tensor], wanted: list[tuple[Any, ...]]) -> Sequence[Tensor]:
    """The ``tensors`` that autograd has saved for the backward pass of ``what``, ``plain``; a word of ``names`` for
    each. A saved_tensors_hook may give back others than were saved: raises RuntimeError, before anything is launched,
    unless they are ``described`` by ``wanted``. Strides and negative bits may be others."""
    if [*map(described, tensors)] != wanted:
        for name, x, kind in zip(names.split(), tensors, wanted, strict=True):
            if described(x) != kind:
                raise others_than_saved(what, name, x, f"{kind[0]} {list(kind[1])} on {kind[2]}")
    return plain_or_traced(*tensors)


def others_than_saved(what: str, name: str, x: Tensor, saved: str) -> RuntimeError:
    """The error for ``x`` that has come back in place of ``saved``."""
    return RuntimeError(
        f"the backward of {what} was given {name} as {x.dtype} {list(x.shape)} on {x.device}, where {saved} was saved: "
        "what a saved_tensors_hook gives back must have the same dtype, shape and device"
    )


def signature_of(*inputs: object) -> tuple[object, ...]:
    """What checks of tensors look at, and whether other inputs are None or of which type. Hashable. Tangents are looked
    for by Communicator.call; see ``plain`` of negative bits and strides."""
    found: list[object] = []
    for x in inputs:
        if isinstance(x, Tensor):
            found += type(x), x.shape, x.dtype, x.device, x.layout
        else:
            found.append(None if x is None else type(x))
    return tuple(found)


def call_key(inputs: Sequence[object]) -> tuple[object, ...]:
    """Of which variant a call with these inputs is: ``signature_of`` them, with whether a number is 0; and at the
    end whether a gradient is wanted, 1, or 2 if torch could not save for one what was made in torch.inference_mode."""
    grad, inference, wanted = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), False
    found: list[object] = []
    for x in inputs:
        if x is None:
            found.append(None)
        elif isinstance(x, Tensor):
            found += type(x), x.shape, x.dtype, x.device, x.layout
            if grad:
                wanted = wanted or x.requires_grad
                inference = inference or x.is_inference()
        else:
            found += type(x), x == 0 if isinstance(x, numbers.Real) else x if isinstance(x, Shift) else None
    found.append(wanted and 1 + inference)
    return tuple(found)


def check_dense(name: str, tensor: object) -> None:
    """Raise TypeError unless ``tensor`` is a tensor whose elements lie in memory of its own."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(f"{name} must have memory of its own, got {type(tensor).__name__} ({_way_out(tensor)})")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"{name} must be dense, got {tensor.dtype}, {tensor.layout}")


def check_tensor(name: str, tensor: Any, shape: Sequence[int] | None, device: torch.device) -> None:
    """Raise TypeError or ValueError unless ``tensor`` is a float32 tensor of that shape (None: any) and device."""
    check_dense(name, tensor)
    if tensor.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, got {tensor.dtype}")
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def _way_out(tensor: Tensor) -> str:
    """How a tensor of a subclass gives one with memory."""
    if hasattr(tensor, "wait") and not hasattr(tensor, "to_local"):  # torch.distributed._functional_collectives
        return "of a collective that is under way: wait()"
    return "of a DTensor: to_local()"


def check_decay(decay: object, shape: Sequence[int], device: torch.device) -> None:
    """Raise TypeError or ValueError unless ``decay`` goes with a state of ``shape``: None, a number, or a tensor that
    is broadcastable to [..., K] or [...]."""
    if decay is None or isinstance(decay, Shift):
        return
    if not isinstance(decay, Tensor):
        if not isinstance(decay, numbers.Real):
            raise TypeError(f"decay must be a number or a tensor, got {type(decay).__name__}")
        try:
            float(decay)
        except OverflowError as error:
            raise ValueError(f"decay must be a float: {error}") from error
        return
    check_tensor("decay", decay, None, device)
    rows, heads = tuple(shape[:-1]), tuple(shape[:-2])
    target = rows if decay.ndim == len(rows) else heads if decay.ndim else ()
    if decay.ndim != len(target) or any(d not in (1, t) for d, t in zip(decay.shape, target, strict=True)):
        raise ValueError(f"decay must be broadcastable to {rows} or {heads}, got {tuple(decay.shape)}")


def check_scan(inputs: ScanInputs, shape: Sequence[int] | None, device: torch.device) -> None:
    """Raise TypeError or ValueError for inputs of a scan of states of this shape, None: any that a scan can have."""
    state, decay, transition, initial_state, out = inputs
    check_tensor("state", state, shape, device)
    if state.ndim < 2 or min(state.shape) < 1:
        raise ValueError(f"state must be [..., K, V] with no empty dimension, got {tuple(state.shape)}")
    check_decay(decay, state.shape, device)
    if transition is not None:
        check_tensor("transition", transition, (*state.shape[:-1], state.shape[-2]), device)
        if decay is not None:
            raise ValueError("a scan has a decay or a transition, not both")
    for name, x in (("initial_state", initial_state), ("out", out)):
        if x is not None:
            check_tensor(name, x, state.shape, device)


def decay_rows(decay: Tensor | float, shape: Sequence[int], device: torch.device) -> Tensor:
    """The float32 tensor that a kernel gets of a decay that ``check_decay`` has seen, without strides of 0."""
    if not isinstance(decay, Tensor):
        return torch.full((), float(decay), dtype=torch.float32, device=device)
    decay, target = decay.resolve_neg(), shape[:-1] if decay.ndim == len(shape) - 1 else shape[:-2]
    if decay.ndim and decay.shape != target:
        decay = decay.expand(target)
    return decay.contiguous()


def decay_strides(decay: object, shape: Sequence[int]) -> tuple[int, int]:
    """(of a matrix, of a row), in what ``decay_rows`` makes."""
    if not isinstance(decay, Tensor) or not decay.ndim:
        return 0, 0
    return (shape[-2], 1) if decay.ndim == len(shape) - 1 else (1, 0)


def is_zigzag(layout: str) -> bool:
    """Raises ValueError unless it is one of the two layouts."""
    if layout not in ("contiguous", "zigzag"):
        raise ValueError(f'layout must be "contiguous" or "zigzag", got {layout!r}')
    return layout == "zigzag"


PER_DOCUMENT = 2  # of the values that ``zigzag`` has below the operators: each sequence is cut, not the row; 0: none is


def zigzag_of(layout: str, per_document: bool, cu_seqlens: object) -> int:
    """Which cut the tokens of an operator have: 0 contiguous, 1 zigzag of the row, PER_DOCUMENT. Raises ValueError."""
    zigzag = is_zigzag(layout)
    if not per_document:
        return int(zigzag)
    if not zigzag or cu_seqlens is None:
        presence = "without" if cu_seqlens is None else "with"
        raise ValueError(f'per_document=True is for layout="zigzag" with cu_seqlens, got {layout!r} {presence} them')
    return PER_DOCUMENT


def check_halves(T: int) -> None:
    """Raise ValueError for an odd number of tokens in the zigzag layout."""
    if T % 2:
        raise ValueError(f"the zigzag layout wants an even T, half of it for each of a rank's two places, got {T}")


def check_for_an_operator(tensors: dict[str, Any], scale: object) -> None:
    """Raise for arguments of an operator that a custom op does not take as they are; ``tensors`` by name."""
    for name, x in tensors.items():
        if x is None and name == "initial_state":
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.layout != torch.strided:
            raise TypeError(f"{name} must be dense, got {x.layout}")
    if tensors["q"].ndim != 4:
        raise ValueError(f"q must be [B, T, H, K], got {tuple(tensors['q'].shape)}")
    if scale is not None and not (isinstance(scale, numbers.Real) and 0.0 < abs(float(scale)) < float("inf")):
        raise ValueError(f"scale must be a finite number and not 0, got {scale!r}")


def has_tangents(inputs: object) -> bool:
    """Whether forward-mode derivatives of an input, or of one in a tuple or list of them, are under way."""
    if forward_ad._current_level < 0:
        return False
    if isinstance(inputs, tuple | list):
        return any(has_tangents(x) for x in inputs)
    return isinstance(inputs, Tensor) and forward_ad.unpack_dual(inputs).tangent is not None
