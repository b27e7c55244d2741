"""First calls of operators with gates: all argument checks, and the comparison of arguments between ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..base.errors import DeferredError
from ..bindings.torch_compat import without_dispatch_modes
from ..comm.communicator import Communicator

HEAD_FIRST = "warned of head-first inputs"  # attribute of a communicator
LEAST_SUM = -(2.0**20)  # least sum of a chunk's gates, for kernels that subtract such sums: see docs/delta.md


class FirstCall(NamedTuple):
    """Identity of a first call. shape, agree: as for ``get_or_create_scan``; None if the arguments have wrong
    dimensions. tokens: as for ``check_gates``."""

    signature: Hashable
    shape: tuple[int, ...] | None
    agree: tuple[object, ...] | None
    tokens: int | None = None


def check_first(
    comm: Communicator,
    first: FirstCall,
    check: Callable[[], None],
    gates: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    prepare: Callable[..., object],
) -> None:
    """Check the arguments of an operator with gates and compare them with the other ranks', at the first call
    with a signature, or in debug mode at every call. Then add the signature to ``comm.checked``.

    ``check()`` raises TypeError or ValueError for arguments that are wrong on this rank. ``prepare(shape, agree,
    deferred, first_call_only=)`` calls ``get_or_create_scan``. ``check_gates`` reads the gates at the first call with
    the same shape and agree. gates: returns their names and values.
    """
    signature, shape, agree, tokens = first
    deferred, values_checked = None, False
    try:
        check()
        values_checked = looks_at_gates(comm, shape, agree)
        if values_checked:
            with torch.no_grad(), without_dispatch_modes():  # selective checkpointing does not check again
                for name, g in gates():
                    check_gates(name, g, tokens)
    except (TypeError, ValueError) as error:
        deferred = DeferredError(error)
    prepare(shape, agree, deferred, first_call_only=values_checked)
    comm.checked.remember(signature)


def look_for_head_first(comm: Communicator, name: str, what: str, q: torch.Tensor) -> None:
    """Warn on the first rank, once, if inputs like q [B, T, H, K], without packed sequences, may be [B, H, T, K]: if T
    of all ranks, taken as this rank's times their number, is less than H. ``what``: q's name. Not for a single token
    (decoding), nor for as many heads as a call with more tokens had."""
    T, H = q.shape[1:3]
    if T * comm.size >= H:
        comm.attributes[name, "heads", H] = True
    elif T > 1 and comm.rank == 0 and not comm.attributes.keys() & {HEAD_FIRST, (name, "heads", H)}:
        comm.attributes[HEAD_FIRST] = True
        warnings.warn(
            f"{name} got {T} tokens of {H} heads, {what} {list(q.shape)}: are the inputs head-first, [B, H, T, ...]? "
            "Expected [B, T, H, ...]: use transpose(1, 2). Ignore this if so few tokens are intended",
            stacklevel=4,
        )


def looks_at_gates(comm: Communicator, shape: Any, agree: tuple[Any, ...] | None) -> bool:
    """Return whether a call with shape and agree checks its gates. Not in a capture, which forbids synchronization."""
    return (comm.debug or (shape, agree) not in comm.agreed.arguments) and not comm.streams.capturing()


def check_gates(name: str, g: torch.Tensor, tokens: int | None = None) -> None:
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
