"""All-Scan inside flash-linear-attention's own context parallelism (tested with 0.6.0)."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.checks import ScanInputs
from ..base.tiling import multiprocessors, transition_tile
from ..comm.communicator import Communicator, check_communicator
from ..comm.tags import stamp
from ..ops.delta.delta_passes import ChunkOperands, DeltaShape, LocalGrads, StatePass, delta_segment_length
from ..ops.halo import halo
from ..scan.agreement import ScanVariant, get_or_create_scan
from ..scan.zigzag_scan import two_way_scan
from ..tokens.packing import CHUNK_TOKENS, Layout, TokenRange, boundaries_on_host
from ..tokens.partition import cached_table
from . import needing
from .groups import Communicators

with needing(__name__, "flash-linear-attention"):
    import fla.ops.cp.comm
    import fla.ops.cp.context
    from fla.ops.cp import FLACPContext, chunk_delta_h

_FORWARD, _BACKWARD = "chunk_gated_delta_rule_fwd_h_pre_process", "chunk_gated_delta_rule_bwd_dhu_pre_process"
_TAILS, _HEADS = "conv_cp_send_recv_fwd", "conv_cp_send_recv_bwd"
_DEVICE = "_check_cp_device"
_fla = {name: getattr(chunk_delta_h, name) for name in (_FORWARD, _BACKWARD)}
_fla |= {name: getattr(fla.ops.cp.comm, name) for name in (_TAILS, _HEADS)}
_fla |= {_DEVICE: getattr(fla.ops.cp.context, _DEVICE)}
_communicators = Communicators()
_every_group = False  # whether enable() was called


class RankContext(FLACPContext):
    """A context of fla whose states ``comm`` passes, without ``enable``. The ranks' numbers of tokens may differ."""

    def __init__(self, comm: Communicator, **fields: Any) -> None:
        super().__init__(group=comm.group, **fields)
        self.comm = comm


def enable() -> None:
    """Let fla's operators pass their states between ranks by All-Scan in all calls with a ``cp_context``.

    The first call with a context creates the Communicator of the context's group; this is collective on the host. To
    use an existing Communicator, call ``context_parallel``. A second call of ``enable`` has no effect.

    Raises:
        AllScanError, RuntimeError: ``enable`` raises neither. Calls with a context raise the errors of ``Communicator``
            and ``allscan.allscan``.

    Example:
        >>> allscan.integrations.fla_cp.enable()                                  # once, before or after fla's imports
        >>> context = build_cp_context(cu_seqlens, group)                         # fla.ops.cp, unchanged
        >>> o, _ = chunk_kda(q, k, v, g, beta, cp_context=context)
    """
    global _every_group
    _every_group = True
    _install()


def disable() -> None:
    """Undo ``enable`` and ``context_parallel``: fla's operators use fla's own state exchange again.

    The call is collective over the groups of all contexts so far. It closes the communicators that ``enable`` has
    created; communicators passed to ``context_parallel`` stay open. No rank may call it between a forward pass and its
    backward, since the backward pass would then run fla's own exchange. Without ``enable`` it has no effect.

    Raises:
        AllScanOutOfStep: if the ranks have made different numbers of calls; fla's functions are restored nevertheless.

    Example:
        >>> allscan.integrations.fla_cp.disable()                                 # on every rank, between two steps
    """
    global _every_group
    _every_group = False
    _replace(_ours(), _fla)
    _communicators.close()


def context_parallel(comm: Communicator) -> None:
    """Let fla's operators pass their states over ``comm.group`` by All-Scan in calls with a ``cp_context``.

    fla's own exchange computes the state and the transition of a rank chunk by chunk, all-gathers those of every rank
    (size * HV * K * (K + V) words), and each rank then combines those of the ranks before it. All-Scan processes
    segments of chunks in parallel (shmem_kernels/delta_state.py; products are in bfloat16 if the inputs are), and a
    rank receives one state of HV * K * V words in forward and one in backward. Transitions are not sent.

    The call affects all ranks of the group until ``comm`` is closed. It covers chunk_kda, chunk_gated_delta_rule,
    chunk_gdn2, chunk_gated_delta_product, chunk_dplr_delta_rule and chunk_rwkv7, in both layouts of a context. Short
    convolutions and token shifts receive the tokens before a shard boundary by halo in the contiguous layout; in zigzag
    they keep fla's exchange. For rules without gates, DPLR and RWKV-7, fla's kernels compute the rank's state and
    transition. Calls with ``use_graph`` keep fla's exchange, except
    for the convolutions: fla reads the sequence boundaries on the GPU at every replay. The first call for a shape is
    collective on the host and must precede a CUDA graph's capture.

    Args:
        comm: the Communicator of the contexts' group.

    Raises:
        TypeError: if ``comm`` is not a Communicator. Later calls raise the errors of ``allscan.allscan``.
        ValueError: if ``comm`` has ``invariant``: fla's kernels compute inside the chunks.

    Example:
        >>> allscan.integrations.fla_cp.context_parallel(comm)
        >>> context = build_cp_context(cu_seqlens, comm.group)                    # fla.ops.cp, unchanged
        >>> o, _ = chunk_kda(q, k, v, g, beta, cp_context=context)
    """
    check_communicator(comm)
    reject_invariant(comm)
    _communicators[comm.group] = comm
    _install()


def reject_invariant(comm: Communicator) -> None:
    """Raise ValueError for a communicator that promises the same bits for every number of ranks."""
    if comm.invariant:
        raise ValueError(
            f"invariant={comm.invariant} of the communicator is not for fla's operators: take allscan.zeco_kda or "
            f"allscan.zeco_gated_delta_rule"
        )


@functools.cache
def _ours() -> dict[str, Callable]:
    """The replacements of fla's functions, by name."""
    ours = {_FORWARD: _or_fla(_FORWARD, _forward, False), _BACKWARD: _or_fla(_BACKWARD, _backward, True)}
    ours |= {name: _convolution(name, reverse=name == _HEADS) for name in (_TAILS, _HEADS)}
    return ours | {_DEVICE: _check_device}


def _check_device(device: torch.device) -> None:
    """Accept CPU tensors too: Triton's interpreter runs fla's kernels on CPU ranks."""
    if device.type != "cpu":
        _fla[_DEVICE](device)


def ensure_installed(module: Any) -> None:
    """Install the replacements again if ``disable`` has restored fla's functions in ``module``."""
    if vars(module)[_FORWARD] is not _ours()[_FORWARD]:
        _install()


def _install() -> None:
    """Replace fla's functions in every module that has imported them by name; later imports find ours."""
    _replace(_fla, _ours())


def _replace(old: dict[str, Callable], new: dict[str, Callable]) -> None:
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("fla."):
            for name, function in new.items():
                if vars(module).get(name) is old[name]:
                    setattr(module, name, function)


def _or_fla(name: str, ours: Callable[..., Any], reverse: bool) -> Callable:
    """Replacement of fla's function ``name``: calls ``ours`` if the context has a communicator, else fla's."""

    @functools.wraps(_fla[name])
    def call(*, context: Any = None, use_graph: bool = False, **operands: Any) -> object:
        comm = _carrier(context, use_graph)
        if comm is None:
            return _fla[name](context=context, use_graph=use_graph, **operands)
        with comm.call(reverse, "fla's context parallelism", (*operands.values(),)):  # reports any error to other ranks
            return ours(comm, context, **operands)

    return call


def _carrier(context: Any, use_graph: bool) -> Communicator | None:
    """The communicator that passes the states of this context, or None for fla's own exchange."""
    if context is None or context.group is None or use_graph:
        return None
    if isinstance(context, RankContext):
        return context.comm
    return _communicator(context.group)


def _communicator(group: Any) -> Communicator | None:
    if _every_group and group is not None:
        return _communicators.of(group)
    comm = _communicators.get(group)
    return None if comm is None or comm.closed else comm


def _convolution(name: str, reverse: bool) -> Callable:
    """Replacement of fla's exchange of a short convolution's preceding tokens (``reverse``: of their gradients)."""
    signature = inspect.signature(_fla[name])

    @functools.wraps(_fla[name])
    def call(*arguments: Any, **named: Any) -> torch.Tensor:
        x, group = signature.bind(*arguments, **named).args
        comm = _communicator(group)
        if comm is None:
            return _fla[name](x, group)
        return halo(x.reshape(1, 1, -1), 1, comm=comm, reverse=reverse).reshape(x.shape)

    return call


class _Part(NamedTuple):
    """A contiguous part of this rank's tokens: all of them, or one half in the zigzag layout."""

    first: int  # sequences first .. end - 1 of this rank have tokens in this part
    end: int
    starts: bool  # whether the first sequence has no tokens before this part
    finishes: bool  # whether the last sequence has no tokens behind this part


def _parts(context: Any, N: int) -> list[_Part]:
    if context.layout == "contiguous":
        return [_Part(0, N, context.is_first_rank, context.is_last_rank)]
    middle, starts, finishes = context.front_num_seqs, context.is_first_by_part, context.is_last_by_part
    return [_Part(0, middle, starts[0], finishes[0]), _Part(middle, N, starts[1], finishes[1])]


def _forward(
    comm: Communicator,
    context: Any,
    *,
    cu_seqlens: Tensor,
    initial_state: Tensor | None = None,
    state_v_first: bool = False,
    **operands: Any,
) -> torch.Tensor:
    """Initial states of this rank's sequences [N, HV, K, V]: the incoming state for the first sequence of a part,
    zeros for the others."""
    if initial_state is not None:
        raise ValueError("initial_state must be None with a cp_context")
    N = len(cu_seqlens) - 1
    parts, totals = _parts(context, N), []
    for part in parts:
        state, transition = _summary(operands["k"], operands["u"])
        if not part.finishes:  # the last sequence continues in another part
            passes = _passes(comm, context, cu_seqlens, part.end - 1, operands, operands["k"], operands["u"])
            if passes is not None:
                state, transition = passes.total(
                    ChunkOperands(operands["k"], operands["w"], operands["u"], _gates(operands))
                )
            else:
                both, own = torch.cat([state, transition], -1), cu_seqlens[part.end - 1 : part.end + 1]
                chunk_delta_h.chunk_cp_fwd_h(hm=both, cu_seqlens=own, **operands)
                state, transition = both.split([state.shape[-1], transition.shape[-1]], -1)
        begun_here = part.starts or part.end - part.first > 1  # the last sequence
        totals.append((state, transition, begun_here or part.finishes))
    found = _scan(comm, totals, _alike(context, operands["k"]), reverse=False)
    places = [(part.first, prev) for part, prev in zip(parts, found, strict=True) if not part.starts]
    return _states(found[0], places, N, state_v_first)


def _backward(
    comm: Communicator,
    context: Any,
    *,
    cu_seqlens: Tensor,
    dht: Tensor | None = None,
    initial_state: Tensor | None = None,
    state_v_first: bool = False,
    **operands: Any,
) -> tuple[torch.Tensor, None]:
    """(Gradients of the outgoing states of this rank's sequences, nonzero for the last sequence of a part; None)."""
    if dht is not None:
        raise ValueError("dht must be None with a cp_context")
    N = len(cu_seqlens) - 1
    parts, totals = _parts(context, N), []
    for part in parts:
        state, transition = _summary(operands["w"], operands["do"])
        if not part.starts:  # the first sequence began in another part
            passes = _passes(comm, context, cu_seqlens, part.first, operands, operands["q"], operands["do"])
            if passes is not None:
                q, k, w, do, dv = (operands[name].contiguous() for name in ("q", "k", "w", "do", "dv"))
                between = ChunkOperands(k, w, None, _gates(operands), q)
                state, transition = passes.total_back(between, LocalGrads(do, dv), operands["scale"])
            else:
                both, own = torch.cat([state, transition], -1), cu_seqlens[part.first : part.first + 2]
                chunk_delta_h.chunk_cp_bwd_dh(dhm=both, cu_seqlens=own, **operands)
                state, transition = both.split([state.shape[-1], transition.shape[-1]], -1)
        ended_here = part.finishes or part.end - part.first > 1
        totals.append((state, transition, ended_here or part.starts))
    found = _scan(comm, totals, (*_alike(context, operands["w"]), operands.get("scale")), reverse=True)
    places = [(part.end - 1, after) for part, after in zip(parts, found, strict=True) if not part.finishes]
    return _states(found[0], places, N, state_v_first), None


def _gates(operands: Any) -> torch.Tensor | None:
    gates = operands.get("gk") if operands.get("g") is None else operands["g"]
    return None if gates is None else gates.contiguous()


def _passes(
    comm: Communicator, context: Any, cu_seqlens: Tensor, i: int, operands: Any, k: Tensor, v: Tensor
) -> StatePass | None:
    """The StatePass of sequence i, or None for rules that shmem_kernels/delta_state.py does not implement: without
    gates, with a gate of the keys, or with another chunk length."""
    if _gates(operands) is None or operands.get("bg") is not None or operands.get("chunk_size", 64) != CHUNK_TOKENS:
        return None
    if context.cu_seqlens_cpu is None:
        begin, end = boundaries_on_host(cu_seqlens)[i:][:2]
    else:  # gated_delta_product expands a token into several
        times = v.shape[1] // int(context.cu_seqlens_cpu[-1])
        begin, end = (times * int(x) for x in context.cu_seqlens_cpu[i:][:2])
    HV, V = v.shape[2:]
    segment = delta_segment_length(end - begin, HV, multiprocessors(comm.device))
    middle = [TokenRange(begin, end)]
    layout = cached_table(comm, ("fla_cp", begin, end, segment), lambda: Layout(middle, 1, segment, comm.device))
    shape = DeltaShape(1, HV, k.shape[2], k.shape[3], V, k.dtype, operands.get("gk") is None)
    return layout.derived(shape, lambda: StatePass(comm, layout.for_calls(), shape))


def _summary(k: Tensor, v: Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero-filled buffers for a part's local state [HV, K, V] and its transition [HV, K, K]."""
    HV, V = v.shape[2:]
    total, transition = (k.new_zeros(HV, k.shape[3], width, dtype=torch.float32) for width in (V, k.shape[3]))
    return total, transition


def _alike(context: Any, x: Tensor) -> tuple:
    """What must be equal on all ranks."""
    return (context.layout, x.shape[0], *(() if isinstance(context, RankContext) else (x.shape[1],)))


def _scan(comm: Communicator, totals: Any, alike: Any, reverse: bool) -> list[torch.Tensor]:
    """The incoming state of each part (its gradient with ``reverse``).

    A sequence boundary inside a part stops the state, even NaN. ``alike``: values that must be equal on all ranks.
    """
    states, matrices, cuts = zip(*totals, strict=True)
    decays = [0 if cut else None for cut in cuts]
    transitions = [None if cut else x for cut, x in zip(cuts, matrices, strict=True)]
    scan = get_or_create_scan(comm, states[0].shape, variant=ScanVariant(transition_tile(states[0].shape[1])))
    comm.order.stamp = stamp("fla_cp", *alike)
    if len(states) == 1:
        return [scan.scan(states[0], decays[0], transition=transitions[0], reverse=reverse)]
    order = slice(None, None, -1 if reverse else 1)  # backward: second halves ascend the ranks
    ascending, descending = [*map(ScanInputs, states, decays, transitions)][order]
    found = two_way_scan(scan, ascending, descending)
    return list(found[order])


def _states(like: Any, places: Any, N: int, state_v_first: bool) -> torch.Tensor:
    like = like.mT if state_v_first else like
    states = like.new_zeros(N, *like.shape)
    for i, state in places:
        states[i] = state.mT if state_v_first else state
    return states
