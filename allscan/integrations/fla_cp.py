"""All-Scan inside flash-linear-attention's own context parallelism (tested with 0.6.0)."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from fla.ops.cp import chunk_delta_h

from ..communicator import Communicator
from ..first_call import get_or_create_scan
from ..tiling import transition_tile

_FORWARD, _BACKWARD = "chunk_gated_delta_rule_fwd_h_pre_process", "chunk_gated_delta_rule_bwd_dhu_pre_process"
_fla = {name: getattr(chunk_delta_h, name) for name in (_FORWARD, _BACKWARD)}
_communicators: dict[Any, Communicator] = {}  # by process group


def context_parallel(comm: Communicator) -> None:
    """Let fla's operators carry their states over ``comm.group`` by All-Scan where they are given a ``cp_context``.

        >>> context_parallel(comm)
        >>> context = build_cp_context(cu_seqlens, comm.group)                    # fla.ops.cp, as ever
        >>> o, _ = chunk_kda(q, k, v, g, beta, cp_context=context)

    By itself fla gathers the state and the transition of every rank on every rank, size * HV * K * (K + V) words, and
    each rank goes through those before it. With this a rank gets one state, HV * K * V words, forward and backward, in
    products of float32; the transitions stay where they are.

    For all ranks of the group, until ``comm`` is closed, in chunk_kda, chunk_gated_delta_rule and their relatives.
    Contexts of the "zigzag" layout, ``use_graph`` and the short convolutions go on as fla does them. The first call for
    a shape is collective on the host.
    """
    _communicators[comm.group] = comm
    ours = {_FORWARD: _or_fla(_FORWARD, _forward), _BACKWARD: _or_fla(_BACKWARD, _backward)}
    for module in list(sys.modules.values()):  # those that have imported fla's functions by name
        if getattr(module, "__name__", "").startswith("fla.ops"):
            for name, function in ours.items():
                if vars(module).get(name) is _fla[name]:
                    setattr(module, name, function)


def _or_fla(name, ours):
    """What stands for fla's function ``name``: ``ours`` where a communicator carries the states of its context."""

    @functools.wraps(_fla[name])
    def call(*, context=None, use_graph=False, **given):
        comm = _carrier(context, use_graph)
        if comm is None:
            return _fla[name](context=context, use_graph=use_graph, **given)
        return ours(comm, context, **given)

    return call


def _carrier(context, use_graph):
    """The communicator that carries the states of this context, or None: fla does it."""
    if context is None or context.group is None or context.layout != "contiguous" or use_graph:
        return None
    comm = _communicators.get(context.group)
    if comm is not None and comm.closed:
        del _communicators[context.group]
        return None
    return comm


def _forward(comm, context, *, cu_seqlens, initial_state=None, state_v_first=False, **given):
    """The states that enter this rank's sequences [N, HV, K, V]: what precedes the first, zeros for the others."""
    if initial_state is not None:
        raise ValueError("initial_state must be None with a cp_context")
    summary = _summary(given["k"], given["u"])
    if not context.is_last_rank:  # the last sequence here goes on behind this rank
        chunk_delta_h.chunk_cp_fwd_h(hm=summary, cu_seqlens=cu_seqlens[-2:], **given)
    begins = context.is_first_rank or len(cu_seqlens) > 2  # that sequence, on this rank
    prev = _scan(comm, summary, begins or context.is_last_rank, reverse=False)
    return _states(prev, 0, not context.is_first_rank, len(cu_seqlens) - 1, state_v_first)


def _backward(comm, context, *, cu_seqlens, dht=None, initial_state=None, state_v_first=False, **given):
    """(The gradients of the states that leave this rank's sequences: zeros but for the last, None)."""
    if dht is not None:
        raise ValueError("dht must be None with a cp_context")
    summary = _summary(given["q"], given["do"])
    if not context.is_first_rank:  # the first sequence here began before this rank
        chunk_delta_h.chunk_cp_bwd_dh(dhm=summary, cu_seqlens=cu_seqlens[:2], **given)
    ends = context.is_last_rank or len(cu_seqlens) > 2
    following = _scan(comm, summary, ends or context.is_first_rank, reverse=True)
    return _states(following, -1, not context.is_last_rank, len(cu_seqlens) - 1, state_v_first), None


def _summary(k, v) -> torch.Tensor:
    """Zeros for what fla writes of a sequence's part: [HV, K, V + K], what it leaves from zero, and its transition."""
    HV, V = v.shape[2:]
    return k.new_zeros(HV, k.shape[3], V + k.shape[3], dtype=torch.float32)


def _scan(comm, summary, cut, reverse) -> torch.Tensor:
    """What comes from the ranks before; nothing of it goes on where a sequence is ``cut``, not even NaN."""
    K = summary.shape[1]
    V = summary.shape[2] - K
    state, transition = summary[..., :V], summary[..., V:]
    scan = get_or_create_scan(comm, state.shape, tile=transition_tile(K))
    return scan.scan(state, 0 if cut else None, transition=None if cut else transition, reverse=reverse)


def _states(state, i, enters, N, state_v_first) -> torch.Tensor:
    state = state.mT if state_v_first else state
    states = state.new_zeros(N, *state.shape)
    if enters:
        states[i] = state
    return states
