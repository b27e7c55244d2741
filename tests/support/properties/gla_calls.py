"""Random calls of zeco_gla, and their law."""

from __future__ import annotations

import torch
import torch.distributed as dist

import allscan

from ..gla import gates
from ..values import chunks, place
from .draw import Draw, strided, told

GLA_NAMES = ("q", "k", "v", "g", "initial")


def gla_law(q, k, v, g, initial, lengths, scale):
    """(o, final states), token by token."""
    q, k, v, g = (x.double() for x in (q, k, v, g))
    cuts = [(0, q.shape[1])] if lengths is None else list(zip(lengths, lengths[1:], strict=False))
    outputs, finals = [], []
    for i, (begin, end) in enumerate(cuts):
        if initial is None:
            state = q.new_zeros(q.shape[0], *q.shape[2:], v.shape[-1])
        else:
            state = (initial if lengths is None else initial[i : i + 1]).double()
        for t in range(begin, end):
            state = torch.einsum("bhk,bhkv->bhkv", g[:, t].exp(), state)
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
            outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        finals.append(state)
    return torch.stack(outputs, 1), torch.cat(finals)


class GlaCall:
    """One call: the whole sequence and how it is cut."""

    def __init__(self, draw, size, B, H, K, V, dtype, packed):
        long = draw.happens(0.15)
        self.tokens = [
            draw.choice([1, 1, 2, draw.randint(3, 20), draw.randint(30, 150) if long else 7]) for _ in range(size)
        ]
        self.zigzag = draw.happens(0.3)
        if self.zigzag:
            self.tokens = [n + n % 2 for n in self.tokens]
        self.chunks, total = list(chunks(self.tokens, self.zigzag)), sum(self.tokens)
        self.lengths = None
        if packed:
            edges = [0, *(end for _, _, end in self.chunks)]
            cuts = [draw.choice([draw.randint(0, total), draw.choice(edges)]) for _ in range(draw.randint(0, 6))]
            self.lengths = sorted([0, total, *cuts, *draw.sample(cuts, len(cuts) // 3)])
        sequences = B if self.lengths is None else len(self.lengths) - 1
        self.kind = draw.choice(["mild", "weak", "strong", "zero", "mixed", "closed"])
        self.dtype, self.gate_dtype = dtype, draw.choice([torch.float32, dtype])
        self.q, self.k, self.v = (draw.normal(B, total, H, w).to(dtype) for w in (K, K, V))
        self.g = gates(self.kind, (B, total, H, K), draw.generator())
        if self.kind == "closed":  # -inf here and there
            self.g[draw.uniform_tensor(B, total, H, K) < 0.2] = float("-inf")
        self.g = self.g.to(self.gate_dtype)
        self.initial = draw.normal(sequences, H, K, V) if draw.happens(0.6) else None
        self.final = draw.happens(0.6)
        self.scale = draw.choice([None, None, 1.0, -0.3])
        self.do, self.dfinal = draw.normal(B, total, H, V).to(dtype), draw.normal(sequences, H, K, V)
        self.loss = draw.choice(["o", "both", "final"]) if self.final else "o"
        self.wanted = {name for name in GLA_NAMES if draw.happens(0.5)} if draw.happens(0.85) else set()
        if self.initial is None:
            self.wanted.discard("initial")
        self.strided, self.form = draw.happens(0.3), draw.choice(["list", "int32", "int64"])
        self.recompute = draw.happens(0.5)
        self.text = (
            f"tokens {self.tokens}, zigzag={self.zigzag}, recompute={self.recompute}, "
            f"B={B}, H={H}, K={K}, V={V}, {dtype}, "
            f"gates {self.kind} {self.gate_dtype}, cu_seqlens {self.lengths} as {self.form}, "
            f"initial={self.initial is not None}, final={self.final}, "
            f"scale={self.scale}, loss of {self.loss}, gradients of {sorted(self.wanted)}, strided={self.strided}"
        )

    def leaves(self, take, convert):
        given = take(self.q), take(self.k), take(self.v), take(self.g), self.initial
        return [
            None if x is None else convert(x).requires_grad_(name in self.wanted)
            for name, x in zip(GLA_NAMES, given, strict=True)
        ]

    def total_loss(self, o, do, final):
        parts = []
        if self.loss != "final":
            parts.append((o.double() * do.double()).sum())
        if self.loss != "o":
            parts.append((final.double() * self.dfinal.double().to(final.device)).sum())
        return sum(parts)

    def expected(self):
        """{name: tensor} over the whole sequence."""
        leaves = self.leaves(lambda x: x, lambda x: x.double().clone())
        scale = self.q.shape[-1] ** -0.5 if self.scale is None else self.scale
        o, final = gla_law(*leaves, self.lengths, scale)
        found = dict(o=o.detach(), final=final.detach() if self.final else None)
        loss = self.total_loss(o, self.do, final)
        if loss.requires_grad:
            loss.backward()
        for name, leaf in zip(GLA_NAMES, leaves, strict=True):
            if name in self.wanted:
                found["d" + name] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        return found

    def forward(self, comm):
        """The call on a rank; returns what runs backward and gives {name: tensor} of this rank."""
        mine = place(comm, self.tokens, self.zigzag)
        leaves = self.leaves(lambda x: x[:, mine], lambda x: x.clone().to(comm.device))
        packed = self.lengths
        if packed is not None and self.form != "list":
            packed = torch.tensor(packed, dtype=getattr(torch, self.form))
        given = [strided(x) if self.strided else x for x in leaves[:4]]
        o, final = allscan.zeco_gla(
            *given,
            comm=comm,
            scale=self.scale,
            initial_state=leaves[4],
            output_final_state=self.final,
            cu_seqlens=packed,
            layout="zigzag" if self.zigzag else "contiguous",
            recompute=self.recompute,
        )
        assert o.dtype == self.dtype and (final is not None) == self.final

        def backward():
            if self.wanted:
                self.total_loss(o, self.do[:, mine].to(o.device), final).backward()
            found = dict(o=o.detach().cpu(), final=final.detach().cpu() if self.final else None)
            for name, leaf in zip(GLA_NAMES, leaves, strict=True):
                if name in self.wanted:
                    found["d" + name] = leaf.grad.cpu()
                else:
                    assert leaf is None or leaf.grad is None, name
            return found

        return backward

    def errors(self, by_rank):
        """{name: relative error over the whole sequence} of what the ranks have found."""
        expected, errors = self.expected(), {}
        for name, whole in expected.items():
            if whole is None:
                continue
            parts = [found[name] for found in by_rank]
            if name in ("final", "dinitial"):
                self._check_owners(name, parts)
                actual = sum(part.double() for part in parts)
            else:
                actual = torch.empty_like(whole)
                for rank, part in enumerate(parts):
                    where = [torch.arange(begin, end) for r, begin, end in self.chunks if r == rank]
                    actual[:, torch.cat(where)] = part.double()
            assert actual.shape == whole.shape, (name, actual.shape, whole.shape)
            if name == "dg":  # see support/gla.py
                actual = actual.masked_fill(self.g.isinf(), 0.0)
            assert actual.isfinite().all(), f"{name} is not finite"
            errors[name] = ((actual - whole).norm() / whole.norm().clamp_min(self.least(name, whole))).item()
        return errors

    def least(self, name, whole):
        """The norm below which a tensor counts as 0."""
        return 1e-2 * whole.numel() ** 0.5

    def _check_owners(self, name, parts):
        """A final state lies on the rank of the sequence's last token, an initial state's gradient on the first's."""
        size = len(self.tokens)
        owner = [p for p, begin, end in self.chunks for _ in range(begin, end)]
        for i in range(parts[0].shape[0]):
            begin, end = (0, len(owner)) if self.lengths is None else self.lengths[i : i + 2]
            having = [p for p in range(size) if parts[p][i].any()]
            if begin < end:
                assert having in ([], [owner[end - 1 if name == "final" else begin]]), (name, i, having)
            else:
                assert len(having) <= 1, (name, i, having)


def gla_calls(seed, size):
    """The calls of a case, and when the backward passes run: after call i those with numbers order[i]."""
    draw = Draw("gla", seed)
    B, H = draw.choice([(1, 1), (1, 1), (1, 2), (1, 3), (2, 1), (3, 1)])
    K, V = (draw.choice([1, 2, 3, 5, 7, 9, 16, 17, 20]) for _ in range(2))
    dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    calls = [
        GlaCall(draw, size, B, H, K, V, dtype, B == 1 and draw.happens(0.6))
        for _ in range(draw.choice([1, 1, 1, 2, 3]))
    ]
    waiting, order = [], []
    for number in range(len(calls)):
        waiting.append(number)
        now = []
        while waiting and (number == len(calls) - 1 or draw.happens(0.5)):
            now.append(waiting.pop(draw.randrange(len(waiting))))
        order.append(now)
    return calls, order


def gla_case(group, seed):
    """What this rank has found in each call."""
    size = dist.get_world_size(group)
    calls, order = gla_calls(seed, size)
    with told(seed, f"zeco_gla on {size} ranks", *(call.text for call in calls)):
        with allscan.Communicator(group, timeout=60) as comm:
            halves, results = [], [None] * len(calls)
            for call, now in zip(calls, order, strict=True):
                halves.append(call.forward(comm))
                for number in now:
                    results[number] = halves[number]()
        return results
