"""All-Scan in the recurrent layers of ringmaster's context parallelism (tested with axolotl-ringmaster 0.2.7)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..comm.communicator import Communicator, check_communicator
from ..ops.delta import zeco_gated_delta_rule, zeco_kda
from ..ops.ssd import zeco_ssd
from ..tokens.packing import TokenRange, cut, flags_of
from . import needing
from .groups import Communicators
from .recurrent import conv_with_halo, names_of
from .softmax import joined, reject

with needing(__name__, "axolotl-ringmaster"):
    from ringmaster import mamba, recurrent
    from ringmaster.runtime import maybe_runtime

_theirs = recurrent.require_fla_cp, recurrent.require_kda_cp, mamba._bindings
_communicators = Communicators()


def enable(comm: Communicator | None = None) -> None:
    """Let the recurrent layers that ringmaster wires from now on pass their states by All-Scan.

    ``ringmaster.wire_recurrent_layers`` then binds ``allscan.zeco_gated_delta_rule`` where it binds fla's
    chunk_gated_delta_rule with a ``cp_context``, ``allscan.zeco_kda`` for chunk_kda, and ``allscan.zeco_ssd`` for
    Mamba2's scan with its all-gather of decays and states. Short convolutions get the tokens before a shard boundary by
    ``allscan.halo``. A rank receives one state in forward and one in backward; a row of packed documents is one call.
    The rest is ringmaster's: which layers it wires, how it cuts batches, softmax layers, fla's first Mamba, its checks.

    Args:
        comm: the Communicator of ringmaster's group, for ``step()`` or another timeout; may be passed after wiring,
            too. Without one, the first call of a group creates it, which is collective on the host.

    Raises:
        TypeError: if ``comm`` is not a Communicator. Layers raise the errors of the operators and of ringmaster; where
            one rank raises alone, the others raise AllScanError, at the latest after the communicator's timeout.

    Example:
        >>> runtime = ringmaster.setup(config, device_mesh=mesh)
        >>> allscan.integrations.ringmaster.enable(comm := allscan.Communicator(runtime.cp_group))
        >>> wiring = ringmaster.wire_recurrent_layers(model)                      # unchanged
    """
    if comm is not None:
        check_communicator(comm)
        _communicators[comm.group] = comm
    recurrent.require_fla_cp, recurrent.require_kda_cp, mamba._bindings = _gated_delta, _kda, _mamba2


def disable() -> None:
    """Undo ``enable``: ringmaster wires its own exchange again; communicators that ``enable`` has created are closed.

    Raises:
        AllScanOutOfStep: if the ranks have made different numbers of calls; ringmaster's functions are restored.

    Example:
        >>> wiring.restore()                                                      # first: on every rank
        >>> allscan.integrations.ringmaster.disable()
    """
    recurrent.require_fla_cp, recurrent.require_kda_cp, mamba._bindings = _theirs
    _communicators.close()


def _calls(group: Any, batch: int, T: int) -> list[tuple[slice, list[TokenRange], dict[str, Any]]]:
    """(rows, this rank's pieces of them, layout arguments) of each call: one, or with documents one for each row."""
    comm, varlen = _communicators.of(group), getattr(maybe_runtime(), "varlen", None)
    if varlen is None:
        return [(slice(None), [TokenRange(0, T, flags=flags_of(comm.rank == 0))], dict(comm=comm))]
    lengths, first, total = varlen[0].tolist(), comm.rank * T, comm.size * T  # ringmaster cuts rows evenly
    if lengths[-1] != batch * total:
        reject(comm, f"ringmaster's documents have {lengths[-1]} tokens, the rows of all ranks {batch * total}")
    calls = []
    for i in range(batch):
        own = [x - i * total for x in lengths if i * total <= x <= (i + 1) * total]
        where = dict(comm=comm, cu_seqlens=own, first_token=first, layout="contiguous")
        calls.append((slice(i, i + 1), cut(own, first, T, comm.rank == 0), where))
    return calls


def _convolve(
    conv: Callable[[Tensor], Tensor], weight: Tensor, bias: Tensor | None, activation: Any, x: Tensor, group: Any
) -> torch.Tensor:
    n, weights = weight.shape[-1] - 1, (weight, bias, activation)
    if not n:
        return conv(x)
    calls = _calls(group, *x.shape[:2])
    found = [conv_with_halo(conv, n, x[rows], pieces, {}, weights=weights, **where) for rows, pieces, where in calls]
    return joined(found, 0)


def _delta(operator: Callable, q: Tensor, *more: Tensor, cp_context: Any, **options: Any) -> tuple[torch.Tensor, Any]:
    ((_, _, where),) = _calls(cp_context, *q.shape[:2])
    known = {name: options[name] for name in names_of(operator) & {*options}}  # fla's operators ignore others, too
    return operator(q, *more, **known | where)


def _gated_delta() -> tuple[Callable, ...]:
    """In place of ``require_fla_cp``: the maker of a cp_context, here the group, and two functions that take one."""
    original = _theirs[0]()[2]

    def conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: Any, cp_context: Any) -> Any:
        def of_tokens(x: Tensor) -> torch.Tensor:
            return original(x, weight=weight, bias=bias, activation=activation)[0]

        return _convolve(of_tokens, weight, bias, activation, x, cp_context), None

    return lambda *_, group, **__: group, functools.partial(_delta, zeco_gated_delta_rule), conv


def _kda() -> tuple[Callable, ...]:
    context, _, conv = _theirs[1]()  # require_kda_cp calls require_fla_cp
    return context, functools.partial(_delta, zeco_kda), conv


def _mamba2(raw: Any, group: Any) -> dict[str, Callable]:
    """In place of ``_bindings``: functions for names in the forward of a Mamba2 layer."""
    original = raw.__globals__["causal_conv1d_fn"]

    def conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None, **_: Any) -> torch.Tensor:
        def of_tokens(x: Tensor) -> torch.Tensor:
            return original(x.mT, weight, bias, activation=activation).mT

        return _convolve(of_tokens, weight, bias, activation, x.mT, group).mT

    def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, **options: Any) -> torch.Tensor:
        if options.get("initial_states") is not None or options.get("return_final_states"):
            reject(_communicators.of(group), "Mamba2 layers of ringmaster keep no states: pass use_cache=False")
        known: dict[str, Any] = {name: options[name] for name in names_of(zeco_ssd) & {*options}}
        calls = [(i, known | where) for i, _, where in _calls(group, *x.shape[:2])]
        found: Any = [zeco_ssd(x[i], dt[i], A, B[i], C[i], chunk_size, **rest) for i, rest in calls]
        return joined(found, 0)

    unfused = dict(mamba2_split_conv1d_scan_combined=lambda *_, **__: None)  # a fused layer cannot be split
    return dict(mamba2_chunk_scan=scan, causal_conv1d_fn=conv, **unfused)
