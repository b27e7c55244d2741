"""Random calls of zeco_gla, against the package's reference."""

from __future__ import annotations

import torch
import torch.distributed as dist

import allscan
from allscan.reference import gla_reference

from ..gla import LIMIT, gates
from .draw import AUTOCAST, Draw, Memory, autocast, draw_memory, draw_wanted, told
from .sharding import Sharding

GLA_NAMES = ("q", "k", "v", "g", "initial")


class GlaCall:
    """One call: the whole sequence and how it is cut."""

    def __init__(self, draw, size, B, H, K, V, dtype, packed):
        self.cut = Sharding(draw, size, packed, most=draw.randint(30, 150) if draw.happens(0.15) else 7)
        total, self.lengths = self.cut.total, self.cut.lengths
        sequences = B if self.lengths is None else len(self.lengths) - 1
        self.kind = draw.choice(["mild", "weak", "strong", "zero", "mixed", "closed"])
        self.dtype, self.gate_dtype = dtype, draw.choice([torch.float32, dtype])
        q, k, v = (draw.normal(B, total, H, w).to(dtype) for w in (K, K, V))
        g = gates(self.kind, (B, total, H, K), draw.generator())
        if self.kind == "closed":  # -inf here and there
            g[draw.uniform_tensor(B, total, H, K) < 0.2] = float("-inf")
        initial = draw.normal(sequences, H, K, V) if draw.happens(0.6) else None
        inputs = q, k, v, g.to(self.gate_dtype), initial
        self.cut.draw_loss(draw, B)
        self.scale = draw.choice([None, None, 1.0, -0.3])
        do, dfinal = draw.normal(B, total, H, V).to(dtype), draw.normal(sequences, H, K, V)
        self.memories = {
            name: Memory() if x is None else draw_memory(draw, x)
            for name, x in zip((*GLA_NAMES, "do", "dfinal"), (*inputs, do, dfinal), strict=True)
        }
        alike = [None if x is None else m.alike(x) for x, m in zip((*inputs, do, dfinal), self.memories.values())]
        *self.inputs, self.do, self.dfinal = alike
        self.g = self.inputs[3]
        self.wanted = draw_wanted(draw, GLA_NAMES if initial is not None else GLA_NAMES[:4])
        self.recompute, self.autocast = draw.happens(0.5), draw.choice(AUTOCAST)
        memories = {name: str(m) for name, m in self.memories.items() if m.kind != "own"}
        self.text = (
            f"{self.cut.text}, recompute={self.recompute}, "
            f"B={B}, H={H}, K={K}, V={V}, {dtype}, gates {self.kind} {self.gate_dtype}, "
            f"initial={initial is not None}, autocast={self.autocast}, "
            f"scale={self.scale}, gradients of {sorted(self.wanted)}, memory {memories}"
        )

    def leaves(self, take, convert):
        *of_tokens, initial = self.inputs
        return [
            None if x is None else convert(name, x).requires_grad_(name in self.wanted)
            for name, x in zip(GLA_NAMES, (*map(take, of_tokens), initial), strict=True)
        ]

    def expected(self):
        """{name: tensor} over the whole sequence."""
        leaves = self.leaves(lambda x: x, lambda name, x: x.double().clone())
        o, final = gla_reference(*leaves[:4], self.scale, leaves[4], self.lengths)
        shown = torch.tensor(self.cut.shown, dtype=torch.bool)[:, None, None, None]
        found = dict(o=o.detach(), final=torch.where(shown, final.detach(), 0.0))
        if self.wanted:
            zero = 0.0 * sum(x.masked_fill(x.isinf(), 0).sum() for x in leaves if x is not None)
            torch.autograd.backward([o + zero, final + zero], self.cut.of_loss(self.do, self.dfinal))
        for name, leaf in zip(GLA_NAMES, leaves, strict=True):
            if name in self.wanted:
                found["d" + name] = leaf.grad
        return found

    def forward(self, comm):
        """The call on a rank; returns what runs backward and gives {name: tensor} of this rank."""
        mine = self.cut.places[comm.rank]
        memories = self.memories
        leaves = self.leaves(lambda x: x[:, mine], lambda name, x: memories[name].of(x.to(comm.device)))
        with autocast(self.autocast):
            o, final = allscan.zeco_gla(
                *leaves[:4],
                comm=comm,
                scale=self.scale,
                initial_state=leaves[4],
                output_final_state=self.cut.finals[comm.rank],
                recompute=self.recompute,
                **self.cut.options(),
            )
        assert o.dtype == self.dtype and (final is not None) == bool(self.cut.finals[comm.rank])

        def backward():
            if self.wanted:
                do, dfinal = self.do[:, mine].to(o.device), self.dfinal.to(o.device)
                self.cut.backward(comm.rank, o, final, memories["do"].of(do), memories["dfinal"].of(dfinal))
            found = dict(o=o.detach().cpu(), final=None if final is None else final.detach().cpu())
            for name, leaf in zip(GLA_NAMES, leaves, strict=True):
                if name in self.wanted:
                    found["d" + name] = leaf.grad.cpu()
                else:
                    assert leaf is None or leaf.grad is None, name
            return found

        return backward

    def errors(self, by_rank):
        """{name: relative error over the whole sequence, over its limit} of what the ranks have found."""
        expected, errors = self.expected(), {}
        for name, whole in expected.items():
            parts = [found[name] for found in by_rank]
            actual = self.cut.assembled(name, parts, whole)
            assert actual.shape == whole.shape, (name, actual.shape, whole.shape)
            if name == "dg":  # see support/gla.py
                actual = actual.masked_fill(self.g.isinf(), 0.0)
            assert actual.isfinite().all(), f"{name} is not finite"
            rounded = whole.to(parts[0].dtype if name != "final" else torch.float32).double()
            if name == "dg":
                rounded = rounded.masked_fill(self.g.isinf(), 0.0)
            norm = whole.norm().clamp_min(self.least(name, whole))
            limit = max(LIMIT[self.dtype], 4 * ((rounded - whole).norm() / norm).item())
            errors[name] = ((actual - whole).norm() / norm).item() / limit
        return errors

    def least(self, name, whole):
        """The norm below which a tensor counts as 0."""
        return 1e-2 * whole.numel() ** 0.5


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
