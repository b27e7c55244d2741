"""Gated DeltaProduct in the tests of Megatron-core's chunkwise context parallelism: the recurrence, and a backend."""

from __future__ import annotations

import importlib.util
import os
import sys

import torch

from allscan.reference import delta_reference

from . import gdp_stand_in

PLACES = "megatron.core.ops.ssm.context_parallel", "megatron.core.ssm.context_parallel"


def load(*more):
    """Return Megatron's modules ``chunkwise`` and ``gdp_common``, and ``more`` of their folder, by their paths in the
    checkout that the variable ALLSCAN_MEGATRON names; without it the stand-in, twice. Their names are then in
    sys.modules, beside an installed Megatron-core."""
    checkout = os.environ.get("ALLSCAN_MEGATRON")
    if not checkout:
        names = [f"{PLACES[0]}.{name}" for name in ("chunkwise", "gdp_common")]
        return [sys.modules.setdefault(name, gdp_stand_in) for name in names]
    folders = {place: os.path.join(checkout, *place.split(".")) for place in PLACES}
    place = next(place for place, folder in folders.items() if os.path.exists(os.path.join(folder, "gdp_common.py")))
    return [by_path(f"{place}.{name}", folders[place]) for name in ("chunkwise", "gdp_common", *more)]


def by_path(name, folder):
    """Import a file of ``folder`` as the module ``name``, without the packages that its name has."""
    if name not in sys.modules:
        path = os.path.join(folder, name.rpartition(".")[2] + ".py")
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there for their module
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def recurrence(q, k, v, g, beta, cu_seqlens, n, scale, initial_state=None):
    """Return (o, final states) of n updates with each token, float64: a delta rule over n tokens for each, the first of
    them with the token's gate, and the last with its output."""
    later = g.new_zeros(*g.shape[:2], n - 1, g.shape[2])
    gates = torch.cat([g[:, :, None], later], 2).flatten(1, 2)
    cuts = None if cu_seqlens is None else [n * int(cut) for cut in cu_seqlens]
    o, final = delta_reference(q.repeat_interleave(n, 1), k, v, gates, beta, scale, initial_state, cuts)
    return o[:, n - 1 :: n], final


class Backend:
    """Megatron's ``LinearAttentionCPBackend`` in torch, by the recurrence in float64. ``fails``: the pass that raises
    ValueError. ``packed``: whether its summaries are packed, as those of Megatron's backends are."""

    def __init__(self, chunkwise, gdp_common):
        self.modules, self.fails, self.packed = chunkwise, None, True
        self.autograd_function = gdp_common.GDPChunkwiseContextParallel

    def summary(self, inputs, which, state=None):
        """[..., K, V + K] of one of a rank's sequences, or of each batch entry: (``state``, default that after its
        tokens from zero; its transition)."""
        q, k, v, g, beta, cuts, n, scale = inputs
        if cuts is not None:
            a, b = cuts[:-1][which], cuts[1:][which]
            q, g, k, v, beta = q[:, a:b], g[:, a:b], *(x[:, n * a : n * b] for x in (k, v, beta))
        K = k.shape[3]
        if state is None:
            state = recurrence(q, k, v, g, beta, None, n, scale)[1]
        identity = torch.eye(K, dtype=torch.float64, device=q.device).expand(*state.shape[:2], K, K)
        nothing = v.new_zeros(*v.shape[:3], K)
        transition = recurrence(q, k, nothing, g, beta, None, n, scale, identity)[1]
        return state, transition, cuts is None

    def packed_of(self, kind, state, transition, batch):
        both = torch.cat([state, transition], -1).float()
        both = both if batch else both[0]
        return getattr(self.modules, f"CP{kind}PackedSummary")(both) if self.packed else both

    def composed(self, summaries, like, reverse):
        state = torch.zeros_like(like)
        for part in summaries.packed.double().flip(0) if reverse else summaries.packed.double():
            V = like.shape[-1]
            state = part[..., V:] @ state + part[..., :V]
        return state

    def cp_forward_prepare(self, inputs):
        if self.fails == "forward":
            raise ValueError("the backend rejects these inputs")
        fields = [getattr(inputs, name) for name in gdp_stand_in.GDPInputs._fields]
        with torch.no_grad():
            return self.packed_of("Forward", *self.summary(fields, -1)), fields

    def cp_forward_apply(self, local_context, preceding_summaries):
        q, k, v, g, beta, cuts, n, scale = local_context
        count = len(q) if cuts is None else len(cuts) - 1
        initial = torch.zeros(count, v.shape[2], q.shape[3], v.shape[3], dtype=torch.float64, device=q.device)
        first = initial if cuts is None else initial[0]
        first.copy_(self.composed(preceding_summaries, first, False))
        o = recurrence(*local_context, initial)[0].to(v.dtype)
        saved = (q, k, v, g, beta, initial) + (() if cuts is None else (cuts,))
        return o, self.modules.CPSavedContext(saved, (n, scale))

    def cp_backward_prepare(self, output_grad, saved_context):
        if self.fails == "backward":
            raise ValueError("the backend rejects these gradients")
        q, k, v, g, beta, initial, *cuts = saved_context.tensors
        cuts, (n, scale) = cuts[0] if cuts else None, saved_context.metadata
        leaves = [x.detach().double().requires_grad_() for x in (q, k, v, g, beta, initial)]
        with torch.enable_grad():
            o, final = recurrence(*leaves[:5], cuts, n, scale, leaves[5])
        (gamma,) = torch.autograd.grad(o, leaves[5], output_grad.double(), retain_graph=True)
        first = gamma if cuts is None else gamma[:1]
        with torch.no_grad():
            first, transition, batch = self.summary((q, k, v, g, beta, cuts, n, scale), 0, first)
        summary = self.packed_of("Backward", first, transition.mT, batch)
        return summary, (leaves, o, final, output_grad, batch)

    def cp_backward_apply(self, backward_context, following_summaries):
        leaves, o, final, output_grad, batch = backward_context
        after = torch.zeros_like(final)
        last = after if batch else after[-1]
        last.copy_(self.composed(following_summaries, last, True))
        gradients = torch.autograd.grad((o, final), leaves[:5], (output_grad.double(), after))
        return tuple(x.float() for x in gradients)
