"""Every differentiable operator in every layout, as functions of a communicator and tensors only."""

from __future__ import annotations

from functools import partial

import torch

import allscan
from allscan.integrations.recurrent import delta_rule
from allscan.reference import delta_reference
from allscan.tokens.packing import TokenRange, flags_of
from allscan.zigzag import from_zigzag, to_zigzag

from .fla import import_fla
from .values import error

CHUNK = 8
LAYOUTS = dict(contiguous={}, zigzag=dict(layout="zigzag"), packed=dict(packed=True))
RAW = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)


def gla(comm, q, k, v, g, initial_state, packed=False, **options):
    lengths = [0, 11, 24 * comm.size] if packed else None
    return allscan.zeco_gla(
        q,
        k,
        v,
        -g.abs() / 8,
        comm=comm,
        initial_state=initial_state,
        output_final_state=True,
        cu_seqlens=lengths,
        **options,
    )


def delta(operator, comm, q, k, v, g, beta, initial_state, packed=False, **options):
    lengths = [0, 11, 24 * comm.size] if packed else None
    if not options.get("use_qk_l2norm_in_kernel"):
        q, k = q / 8, k / 8
    if not options.get("use_gate_in_kernel"):
        g, beta = -g.abs() / 8, beta.sigmoid()
    return operator(
        q, k, v, g, beta, comm=comm, initial_state=initial_state, output_final_state=True, cu_seqlens=lengths, **options
    )


def ssd(comm, x, dt, A, B, C, D, z, dt_bias, initial_states, packed=False, **options):
    lengths = [0, 11, 24 * comm.size] if packed else None
    return allscan.zeco_ssd(
        x,
        dt,
        -A.abs(),
        B,
        C,
        CHUNK,
        comm=comm,
        D=D,
        z=z,
        dt_bias=dt_bias,
        initial_states=initial_states,
        dt_softplus=True,
        return_final_states=True,
        cu_seqlens=lengths,
        **options,
    )


def simple_gla(comm, q, k, v, g, initial_state, packed=False, **options):
    lengths = [0, 11, 24 * comm.size] if packed else None
    how = dict(g_gamma=-g.abs() / 8) if g.ndim == 1 else dict(g=-g.abs() / 8)
    return allscan.zeco_simple_gla(
        q,
        k,
        v,
        **how,
        comm=comm,
        initial_state=initial_state,
        output_final_state=True,
        cu_seqlens=lengths,
        **options,
    )


def other_rule(q, k, v, g, beta, initial_state, output_final_state):
    """Compute a custom delta rule in float64."""
    o, state = delta_reference(q, k, v, g, beta, initial_state=initial_state)
    return o.float(), state.float()


def recurrent(comm, q, k, v, g, beta, layout="contiguous"):
    pieces = [TokenRange(0, 24, flags=flags_of(comm.rank == 0))]
    if layout == "zigzag":
        pieces = [TokenRange(0, 12, flags=flags_of(comm.rank == 0)), TokenRange(12, 24, 1)]
    return delta_rule(other_rule, (q / 8, k / 8, v, -g.abs() / 8, beta.sigmoid()), pieces, comm=comm)[0]


def zigzag_scan(comm, ascending, descending, first, second, initial_state, dense=False):
    pair = dict(transition=(first, second)) if dense else dict(decay=(first.sigmoid(), second.sigmoid()))
    return allscan.allscan((ascending, descending), comm=comm, initial_state=initial_state, layout="zigzag", **pair)


def scan(comm, state, factor, initial_state, dense=False, **options):
    factor = dict(transition=factor) if dense else dict(decay=factor.sigmoid())
    return allscan.allscan(state, comm=comm, initial_state=initial_state, **factor, **options)


def halos(comm, *xs, **options):
    return allscan.halo(xs if len(xs) > 1 else xs[0], 2, comm=comm, **options)


def calls(fla=True):
    """Return {name: (function of the communicator and tensors, their shapes)}."""
    if fla:
        import_fla(False)
    T, state, tokens = 24, (2, 16, 8), (1, 24, 2, 16)
    found = {
        "allscan, decay": (scan, (state, (2, 16), state)),
        "allscan, a decay of heads": (partial(scan, reverse=True), (state, (2,), state)),
        "allscan, transition": (partial(scan, dense=True), (state, (2, 16, 16), state)),
        "allscan, zigzag": (zigzag_scan, (state, state, (2, 16), (2, 16), state)),
        "allscan, zigzag, transition": (partial(zigzag_scan, dense=True), (state, state, *[(2, 16, 16)] * 2, state)),
        "halo": (halos, ((2, T, 6),)),
        "halo, reverse": (partial(halos, reverse=True), ((2, T, 2, 3),)),
        "halo, several": (halos, ((2, T, 6), (2, T, 2, 3))),
        "halo, zigzag": (partial(halos, layout="zigzag"), ((2, T, 6), (2, T))),
        "to_zigzag": (lambda comm, x: to_zigzag(x, comm=comm), ((2, T, 6),)),
        "from_zigzag": (lambda comm, x: from_zigzag(x, comm=comm), ((2, T, 6),)),
        "a delta rule of other make": (recurrent, (*[tokens] * 4, tokens[:3])),
        "a delta rule of other make, zigzag": (partial(recurrent, layout="zigzag"), (*[tokens] * 4, tokens[:3])),
    }
    for layout, options in LAYOUTS.items():
        starts = (2 if layout == "packed" else 1, 2, 16, 16)
        found[f"zeco_gla, {layout}"] = partial(gla, **options), (*[tokens] * 4, starts)
        found[f"zeco_gla, {layout}, kept"] = partial(gla, recompute=False, **options), (*[tokens] * 4, starts)
        of_ssd = (1, T, 2, 6), (1, T, 2), (2,), (1, T, 1, 10), (1, T, 1, 10), (2,), (1, T, 2, 6), (2,)
        found[f"zeco_ssd, {layout}"] = partial(ssd, **options), (*of_ssd, (*starts[:2], 6, 10))
        of_simple = (1, T, 1, 16), (1, T, 1, 16), tokens
        found[f"zeco_simple_gla, {layout}"] = partial(simple_gla, **options), (*of_simple, tokens[:3], starts)
        if layout == "contiguous":
            found["zeco_simple_gla, g_gamma"] = partial(simple_gla, state_v_first=True), (*of_simple, (2,), starts)
        if not fla:
            continue
        of_rule = *[tokens] * 4, tokens[:3], starts
        found[f"zeco_kda, {layout}"] = partial(delta, allscan.zeco_kda, **options), of_rule
        found[f"zeco_gated_delta_rule, {layout}"] = (
            partial(delta, allscan.zeco_gated_delta_rule, **options),
            (*of_rule[:3], tokens[:3], *of_rule[4:]),
        )
        if layout == "packed":
            for name in ("zeco_kda", "zeco_gated_delta_rule"):
                function, shapes = found[f"{name}, packed"]
                found[f"{name}, packed, kept"] = partial(function, recompute=False), shapes
    if fla:

        def raw(operator, comm, *tensors, **options):
            *tensors, A_log, dt_bias = tensors
            return delta(operator, comm, *tensors, A_log=A_log, dt_bias=dt_bias, **RAW, **options)

        of_raw = *[tokens] * 4, tokens[:3], (1, 2, 16, 16)
        found["zeco_kda, raw"] = partial(raw, allscan.zeco_kda), (*of_raw, (2,), (32,))
        found["zeco_gated_delta_rule, raw"] = (
            partial(raw, allscan.zeco_gated_delta_rule, state_v_first=True),
            (*of_raw[:3], tokens[:3], *of_raw[4:], (2,), (2,)),
        )
    return found


def drawn(comm, shapes):
    """Draw this rank's tensors; the last one, initial states and parameters are the same on every rank."""
    own, same = (torch.Generator().manual_seed(seed) for seed in (100 + comm.rank, 7))
    shared = {(1, 2, 16, 16), (2, 2, 16, 16), (1, 2, 6, 10), (2, 2, 6, 10), (2,), (32,)}
    return [torch.randn(x, generator=same if x in shared else own).to(comm.device) for x in shapes]


def as_tuple(results):
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def with_gradients(comm, function, tensors, change=lambda x: x, of_gradients=lambda x: x):
    """Return [results, gradients of ``tensors``]. ``change`` is applied to the call's tensors, ``of_gradients`` to the
    gradients of its results."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    results = as_tuple(function(comm, *map(change, leaves)))
    grads = [of_gradients(1.5 + y.detach().sin()) for y in results]
    return [*results, *torch.autograd.grad(results, leaves, grads)]


def worst(found, expected) -> float:
    """Return the largest error; infinite if there is a NaN."""
    if any(not a.isfinite().all() for a in found):
        return float("inf")
    return max(error(a, b) for a, b in zip(found, expected, strict=True))
