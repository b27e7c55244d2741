"""First calls of operators with gates: all checks, and what the ranks agree upon."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..base.checks import PER_DOCUMENT
from ..base.errors import DeferredError
from ..comm.communicator import Communicator

FINAL_OF_ALL = "output_final_state is 'all'"  # the name of this, among what all ranks have alike
LEAST_SUM = -(2.0**20)  # of the gates of a chunk, where kernels take differences of sums: see docs/delta.md


def common_fields(
    B: int, dtype: torch.dtype, scale: float, zigzag: int, initial: bool, packed: bool, told: bool
) -> tuple:
    """Of an operator on tokens, (name, value) of what all ranks have alike. The last three: what is None of
    initial_state, cu_seqlens and first_token."""
    return (
        ("B", B),
        ("dtype", str(dtype)),
        ("scale", scale),
        ("layout", "zigzag" if zigzag else "contiguous"),
        ("per_document", zigzag == PER_DOCUMENT),
        ("initial_state is None", initial),
        ("cu_seqlens is None", packed),
        ("first_token is None", told),
    )


class FirstCall(NamedTuple):
    """What makes a call a first one. shape, agree: as for ``get_or_create_scan``; None where the arguments have no such
    shape. tokens: as for ``check_gates``."""

    signature: Hashable
    shape: tuple[int, ...] | None
    agree: tuple[object, ...] | None
    tokens: int | None = None


def check_first(
    comm: Communicator,
    first: FirstCall,
    check: Callable[[], None],
    g: torch.Tensor,
    prepare: Callable[..., object],
) -> None:
    """All checks of an operator with gates ``g`` at the first call with a signature, which is then in
    ``comm.checked``, and what the ranks agree upon; in debug mode at every call.

    ``check()`` raises TypeError or ValueError for arguments that are wrong on this rank. ``prepare(shape, agree,
    deferred, at_first=)`` calls ``get_or_create_scan``. Gates are looked at, see ``check_gates``, at the first call
    with shape and agree.
    """
    signature, shape, agree, tokens = first
    deferred, looked = None, False
    try:
        check()
        looked = looks_at_gates(comm, shape, agree)
        if looked:
            check_gates("g", g, tokens)
    except (TypeError, ValueError) as error:
        deferred = DeferredError(error)
    prepare(shape, agree, deferred, at_first=looked)
    comm.checked.remember(signature)


def looks_at_gates(comm: Communicator, shape: Any, agree: tuple[Any, ...] | None) -> bool:
    """Whether a call with shape and agree does. Not in a capture, in which nobody may wait for the GPU."""
    return (comm.debug or (shape, agree) not in comm.agreed.arguments) and not comm.streams.capturing()


def check_gates(name: str, g: torch.Tensor, tokens: int | None = None) -> None:
    """Raise ValueError for logarithms of decays [B, T, ...] that are NaN or positive. ``tokens``: of an operator whose
    kernels add up those of so many tokens; for sums below LEAST_SUM too, as of -inf. Waits for the GPU."""
    if not g.numel():
        return
    least, most = torch.stack(torch.aminmax(g.detach())).tolist()
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
            f"{name} must {what} at least {LEAST_SUM:,.0f}, got {least:g}: float32 has no digits left there for the "
            "decays beside. Begin documents by cu_seqlens"
        )
