"""Delta rules by chunks in float64, and comparisons with the token-by-token recurrence."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

import allscan
from allscan.base.tiling import multiprocessors
from allscan.ops.carrier import AllScanCarrier, IncomingStates
from allscan.ops.delta.delta_checks import shapes_of
from allscan.ops.delta.delta_passes import ChunkOperands, LocalGrads, SavedStates, delta_segment_length
from allscan.ops.delta.delta_prepared import state_pass
from allscan.ops.operator import Call
from allscan.reference import delta_reference
from allscan.tokens.packing import CHUNK_TOKENS
from allscan.tokens.partition import OwnTokens, find_layout

from .gla import F32, owners
from .values import place, relative, relative_all

LOG2_E = 1.4426950408889634
NAMES = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state")


def gates(kind, shape, generator):
    g = F.logsigmoid(torch.randn(shape, generator=generator))
    if kind == "mixed":
        return g * torch.tensor([0.0, 1e-4, 0.1, 1.0, 20.0])[torch.randint(0, 5, shape, generator=generator)]
    return g * {"zero": 0.0, "weak": 1 / 64, "mild": 1.0, "strong": 30.0}[kind]


class DeltaCase(NamedTuple):
    """A random sequence over the ranks, for the tests of delta rules."""

    rule: str
    tokens: list[int]  # by rank
    B: int = 1
    H: int = 1
    HV: int = 1
    K: int = 16
    V: int = 16
    gates: str = "weak"  # argument of gates()
    dtype: torch.dtype = F32
    lengths: list[int] | None = None  # cu_seqlens of packed sequences
    beta: float | None = None  # for all tokens; None: random
    zigzag: bool = False
    per_document: bool = False
    seed: int = 0


class Whole:
    """The whole sequence with all inputs, the same on every rank."""

    def __init__(self, case: DeltaCase, device):
        rule, _, B, H, HV, K, V, kind, dtype, lengths, beta, _, _, seed = case
        generator, total = torch.Generator().manual_seed(seed), sum(case.tokens)

        def normal(*shape):
            return torch.randn(shape, generator=generator).to(device)

        self.rule, self.lengths, sequences = rule, lengths, B if lengths is None else len(lengths) - 1
        self.q, self.k = (F.normalize(normal(B, total, H, K), dim=-1).to(dtype) for _ in "qk")
        self.v, self.do = (normal(B, total, HV, V).to(dtype) for _ in "vo")
        self.g = gates(kind, (B, total, HV, K) if rule == "kda" else (B, total, HV), generator).to(device)
        self.beta = normal(B, total, HV).sigmoid() if beta is None else torch.full((B, total, HV), beta, device=device)
        self.initial, self.dfinal = normal(sequences, HV, K, V), normal(sequences, HV, K, V)

    def tensors(self):
        return self.q, self.k, self.v, self.g, self.beta

    def reference(self):
        """Return NAMES in float64."""
        leaves = [x.double().requires_grad_() for x in (*self.tensors(), self.initial)]
        o, final = delta_reference(*leaves[:5], initial_state=leaves[5], cu_seqlens=self.lengths)
        return [o, final, *torch.autograd.grad(self.loss(o, final, self.do), leaves, materialize_grads=True)]

    def loss(self, o, final, do):
        return (o * do.to(o.dtype)).sum() + (final * self.dfinal.to(final.dtype)).sum()

    def ours(self, comm, mine, call=None, **options):
        own = [x[:, mine].clone().requires_grad_() for x in self.tensors()]
        own.append(self.initial.clone().requires_grad_())
        call = call or {"kda": allscan.zeco_kda}.get(self.rule, allscan.zeco_gated_delta_rule)
        packed = None if self.lengths is None else torch.tensor(self.lengths, device=comm.device)
        given = dict(initial_state=own[5], output_final_state=True, cu_seqlens=packed)
        o, final = call(*own[:5], comm=comm, **(given | options))
        return [o, final, *torch.autograd.grad(self.loss(o, final, self.do[:, mine]), own)]


def of_rank(expected, comm, tokens, lengths, B, zigzag=False, per_document=False):
    """Return a rank's part of the reference; states belong to the ranks where their sequence begins or ends."""
    mine = place(comm, tokens, zigzag, lengths if per_document else None)
    first, last = owners(tokens, None if per_document else lengths, len(expected[1]) if per_document else B, zigzag)
    expected = [x if i in (1, 7) else x[:, mine] for i, x in enumerate(expected)]
    for i, ranks in ((1, last), (7, first)):
        has = torch.tensor([r == comm.rank for r in ranks], device=comm.device)
        expected[i] = torch.where(has[:, None, None, None], expected[i], 0.0)
    return expected


def operator_case(group, case: DeltaCase):
    """Return the relative error of each tensor."""
    from .fla import import_fla

    import_fla()
    _, tokens, B, *_, lengths, _, zigzag, per_document, _ = case
    with allscan.Communicator(group) as comm:
        whole = Whole(case, comm.device)
        expected = of_rank(whole.reference(), comm, tokens, lengths, B, zigzag, per_document)
        where = dict(layout="zigzag" if zigzag else "contiguous", per_document=per_document, chunk="fla")
        mine = place(comm, tokens, zigzag, lengths if per_document else None)
        return relative_all(NAMES, whole.ours(comm, mine, **where), expected)


def own_case(group, case: DeltaCase, **options):
    """Return the relative error of each tensor with allscan's own chunk kernels."""
    with allscan.Communicator(group) as comm:
        whole = Whole(case, comm.device)
        expected = of_rank(whole.reference(), comm, case.tokens, case.lengths, case.B, case.zigzag)
        options |= dict(layout="zigzag" if case.zigzag else "contiguous", chunk="allscan")
        return relative_all(NAMES, whole.ours(comm, place(comm, case.tokens, case.zigzag), **options), expected)


def kept_case(group, case, recompute, **options):
    """Return errors with recompute=False on the ranks of which ``recompute`` says so, and the names of results whose
    bits are not those of the default."""
    with allscan.Communicator(group) as comm:
        whole = Whole(case, comm.device)
        wanted = of_rank(whole.reference(), comm, case.tokens, case.lengths, case.B, case.zigzag)
        mine = place(comm, case.tokens, case.zigzag)
        options |= dict(layout="zigzag" if case.zigzag else "contiguous")
        usual, kept = (whole.ours(comm, mine, recompute=x, **options) for x in (True, recompute[comm.rank]))
        differing = [name for name, a, b in zip(NAMES, usual, kept, strict=True) if not torch.equal(a, b)]
        return relative_all(NAMES, kept, wanted), differing


def same_prefix(group, case: DeltaCase, cut, changes):
    """Return, by tensor, whether o and the gradients of the tokens before ``cut`` have the same bits with both changes
    of the sequence, functions of a Whole; the loss is of these tokens alone. With allscan's own chunk kernels."""
    with allscan.Communicator(group) as comm:
        found = []
        for change in changes:
            whole = Whole(case, comm.device)
            change(whole)
            whole.do[:, cut:] = 0.0
            whole.dfinal.zero_()
            o, _, *grads = whole.ours(comm, place(comm, case.tokens), chunk="allscan")
            found.append([o, *grads[:5]])
        names = "o dq dk dv dg dbeta".split()
        return {name: torch.equal(a[:, :cut], b[:, :cut]) for name, a, b in zip(names, *found, strict=True)}


class Chunk:
    """The WY form of one chunk in float64, for all heads: [H, C, ...]."""

    def __init__(self, whole, dtype, begin, end):
        q, k, v, g, beta = (x[0, begin:end].double().movedim(1, 0) for x in whole.tensors())
        self.scalar, heads = g.ndim == 2, v.shape[0]
        q, k = (x.repeat_interleave(heads // x.shape[0], 0) for x in (q, k))
        self.begin, self.end, self.scale = begin, end, q.shape[-1] ** -0.5
        sums = g.cumsum(1)
        wide = sums[..., None].expand_as(k) if self.scalar else sums
        pairs = (wide[:, :, None] - wide[:, None]).clamp(max=0).exp()
        scores = self.scale * torch.einsum("htc,hsc,htsc->hts", q, k, pairs).tril()
        among = torch.einsum("ht,htc,hsc,htsc->hts", beta, k, k, pairs).tril(-1)
        solved = torch.linalg.inv(torch.eye(end - begin, dtype=torch.float64, device=q.device) + among)
        onward = (wide[:, -1:] - wide).exp()

        def rounded(x):
            return x.to(dtype).double()

        self.w, self.u = rounded(solved @ (beta[..., None] * k * wide.exp())), rounded(solved @ (beta[..., None] * v))
        self.scores, self.do = rounded(scores), whole.do[0, begin:end].double().movedim(1, 0)
        self.dv = rounded(self.scores.mT @ self.do)
        self.sums, self.decay = sums * LOG2_E, wide[:, -1].exp()[..., None]
        # in the kernels' form, and in the form of the recurrence
        self.q, self.k = (q, k) if self.scalar else (rounded(q * wide.exp()), rounded(k * onward))
        self.qg, self.kg = (q * wide.exp(), k * onward) if self.scalar else (self.q, self.k)

    def through(self, state):
        v_new = self.u - self.w @ state
        return v_new, self.decay * state + self.kg.mT @ v_new

    def back(self, dstate):
        dv = self.dv + self.kg @ dstate
        return dv, self.decay * dstate + self.scale * self.qg.mT @ self.do - self.w.mT @ dv


class Parts:
    """The chunks of a rank, and the results of all chunks of all ranks in sequence."""

    def __init__(self, comm, whole, tokens, dtype):
        edges, mine = [sum(tokens[:r]) for r in range(comm.size + 1)], place(comm, tokens)
        self.expected = {name: [] for name in ("h", "v_new", "dh", "dv")}
        self.final, self.dinitial = (torch.zeros_like(whole.initial).double() for _ in range(2))
        self.own, self.whole, self.dtype, self.mine = [], whole, dtype, mine
        for i, (first, end) in enumerate(pairwise(whole.lengths or (0, sum(tokens)))):
            cuts = sorted({first, end, *(e for e in edges if first < e < end)})
            chunks = [
                Chunk(whole, dtype, a, min(a + CHUNK_TOKENS, b))
                for a0, b in pairwise(cuts)
                for a in range(a0, b, CHUNK_TOKENS)
            ]
            state, dstate, states, dstates = whole.initial[i].double(), whole.dfinal[i].double(), [], []
            for c in chunks:
                v_new, after = c.through(state)
                states.append((state, v_new))
                state = after
            for c in reversed(chunks):
                dv, before = c.back(dstate)
                dstates.append((dstate, dv))
                dstate = before
            self.final[i], self.dinitial[i] = state, dstate
            for c, (h, v_new), (dh, dv) in zip(chunks, states, reversed(dstates), strict=True):
                if mine.start <= c.begin < mine.stop:
                    self.own.append(c)
                    for name, x in dict(h=h, v_new=v_new, dh=dh, dv=dv).items():
                        self.expected[name].append(x)

    def joined(self, name, dtype=None):
        """Concatenate a tensor of this rank's chunks, [1, T, H, ...]."""
        parts = [getattr(c, name) for c in self.own]
        return torch.cat(parts, 1).movedim(0, 1)[None].to(dtype or self.dtype).contiguous()

    def inputs(self):
        """Return (q, k, w, u, sums, do, dv) in the kernels' form."""
        q, k, w, u, do, dv = (self.joined(n) for n in ("q", "k", "w", "u", "do", "dv"))
        if self.whole.rule != "kda":
            q, k = (x[:, self.mine].contiguous() for x in (self.whole.q, self.whole.k))
        return q, k, w, u, self.joined("sums", F32), do, dv


def saved_states_for(passes):
    """Allocate the tensors that forward saves for backward."""
    shapes = (passes.of_transitions, torch.float32), (passes.of_states, torch.float32), ((2,), torch.int64)
    return SavedStates(*(torch.empty(shape, dtype=dtype, device=passes.comm.device) for shape, dtype in shapes))


def pass_case(comm, case: DeltaCase):
    """Return relative errors of StatePass against chunks in sequence, for the same w, u, ... in ``case.dtype``."""
    rule, tokens, _, _, HV, K, V, _, dtype, lengths, *_ = case
    whole = Whole(case, comm.device)
    parts = Parts(comm, whole, tokens, dtype)
    q, k, w, u, sums, do, dv = parts.inputs()
    T = w.shape[1]
    scores = torch.zeros(1, T, HV, CHUNK_TOKENS, dtype=dtype, device=comm.device)
    for c in parts.own:
        at = slice(c.begin - parts.mine.start, c.end - parts.mine.start)
        scores[0, at, :, : c.end - c.begin] = c.scores.movedim(0, 1).to(dtype)
    segment = delta_segment_length(T, HV, multiprocessors(comm.device))
    cu_seqlens = None if lengths is None else torch.tensor(lengths)
    layout = find_layout(comm, OwnTokens(1, T, cu_seqlens), segment)
    passes = state_pass(comm, layout, shapes_of(whole.q, whole.v), Call(rule, 1.0))
    AllScanCarrier.of(comm, dense=True).get_or_create_scan((HV, K, V))
    found_final, found_dinitial = torch.zeros_like(whole.initial), torch.zeros_like(whole.initial)
    saved_states = saved_states_for(passes)
    between = ChunkOperands(k, w, u, sums, q)
    h, v_new = passes.forward(between._replace(q=None), whole.initial, found_final, saved_states)
    scale, turned = K**-0.5, []
    for d in (LocalGrads(do, dv), LocalGrads(do, None, scores)):
        *again, incoming, through, prev = passes.turn(between, d, whole.dfinal, saved_states, scale)
        assert torch.equal(h, again[0]) and torch.equal(v_new, again[1])
        turned.append(incoming)
    if dtype == F32:
        assert relative(turned[0], turned[1].double()) < 1e-5
    incoming = IncomingStates(incoming, through, prev)
    dh, dv_new = passes.backward(between, LocalGrads(do, dv), incoming, found_dinitial, scale)
    comm.barrier()
    first, last = owners(tokens, lengths, 1)
    for x, ranks in ((parts.final, last), (parts.dinitial, first)):
        x[[r != comm.rank for r in ranks]] = 0.0
    of_tokens = {name: torch.cat(parts.expected[name], 1).movedim(0, 1)[None] for name in ("v_new", "dv")}
    of_chunks = {name: torch.stack(parts.expected[name])[None] for name in ("h", "dh")}
    wanted = of_chunks["h"], of_tokens["v_new"], parts.final, of_chunks["dh"], of_tokens["dv"]
    return relative_all(
        ("h", "v_new", "final", "dh", "dv", "dinitial"),
        (h, v_new, found_final, dh, dv_new, found_dinitial),
        (*wanted, parts.dinitial),
    )
