"""Random calls of zeco_ssd, against the package's reference."""

from __future__ import annotations

import torch
import torch.distributed as dist

import allscan
from allscan.reference import ssd_reference

from .draw import AUTOCAST, TIMEOUT, Draw, autocast, draw_memory, draw_wanted, told
from .sharding import Sharding

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
OF_TOKENS, SHARED = ("x", "dt", "B", "C", "z"), ("A", "D", "dt_bias")
LIMIT = {F32: 1e-5, F16: 1e-3, BF16: 8e-3}  # relative; the 16-bit ones are the rounding of results


class SsdCall:
    """One call: the whole sequence and how it is cut."""

    def __init__(self, draw, size):
        packed = draw.happens(0.5)
        self.cut = Sharding(draw, size, packed, most=draw.randint(30, 80) if draw.happens(0.15) else 7)
        batch, G, P, N = 1 if packed else draw.choice([1, 1, 2]), draw.choice([1, 1, 2]), draw.randint(1, 7), 5
        self.cut.draw_loss(draw, batch)
        H, T = G * draw.choice([1, 2, 3]), self.cut.total
        sequences = batch if not packed else len(self.cut.lengths) - 1
        self.dtype, more = draw.choice([F32, F32, BF16, F16]), draw.choice([None, F32, BF16])
        like = self.dtype if more is None else more
        A = -draw.uniform_tensor(H) * draw.choice([0.1, 1.0, 30.0])
        A[0] *= draw.choice([0, 1])
        inputs = dict(
            x=draw.normal(batch, T, H, P).to(self.dtype),
            dt=draw.normal(batch, T, H).to(like),
            A=A.to(draw.choice([F32, like])),
            B=draw.normal(batch, T, G, N).to(like),
            C=draw.normal(batch, T, G, N).to(like),
            D=draw.normal(*draw.choice([(H,), (H, P)])).to(like),
            z=draw.normal(batch, T, H, P).to(like),
            dt_bias=draw.normal(H).to(draw.choice([F32, like])),
            initial_states=draw.normal(sequences, H, P, N),
        )
        for name in ("D", "z", "dt_bias", "initial_states"):
            if draw.happens(0.4):
                del inputs[name]
        of_loss = dict(dy=draw.normal(batch, T, H, P).to(self.dtype), dfinal=draw.normal(sequences, H, P, N))
        self.memories = {name: draw_memory(draw, x) for name, x in (inputs | of_loss).items()}
        self.inputs = {name: self.memories[name].alike(x) for name, x in inputs.items()}
        self.of_loss = {name: self.memories[name].alike(x) for name, x in of_loss.items()}
        self.steps = dict(dt_softplus=draw.happens(0.5), dt_limit=draw.choice([(0.0, float("inf")), (0.01, 1.5)]))
        self.chunk_sizes = [draw.choice([1, 4, 64]) for _ in range(size)]
        self.autocast = draw.choice(AUTOCAST)
        self.wanted = draw_wanted(draw, [*self.inputs])
        self.text = (
            f"{self.cut.text}, x {list(inputs['x'].shape)}, groups {G}, "
            f"{ {name: str(x.dtype) for name, x in inputs.items()} }, {self.steps}, chunks of {self.chunk_sizes}, "
            f"autocast={self.autocast}, gradients of {sorted(self.wanted)}, "
            f"memory { {name: str(m) for name, m in self.memories.items() if m.kind != 'own'} }"
        )

    def expected(self):
        """{name: tensor} over the whole sequence."""
        leaves = {name: x.double().requires_grad_(name in self.wanted) for name, x in self.inputs.items()}
        y, final = ssd_reference(**leaves, **self.steps, cu_seqlens=self.cut.lengths)
        shown = torch.tensor(self.cut.shown, dtype=torch.bool)[:, None, None, None]
        found = dict(y=y.detach(), final=torch.where(shown, final.detach(), 0.0))
        if self.wanted:
            zero = 0.0 * sum(x.sum() for x in leaves.values())
            torch.autograd.backward([y + zero, final + zero], self.cut.of_loss(*self.of_loss.values()))
        return found | {"d" + name: x.grad for name, x in leaves.items() if name in self.wanted}

    def run(self, comm):
        """The call on a rank; returns {name: tensor} of this rank."""
        mine, leaves = self.cut.places[comm.rank], {}
        for name, x in self.inputs.items():
            part = x[:, mine] if name in OF_TOKENS else x
            leaves[name] = self.memories[name].of(part.to(comm.device)).requires_grad_(name in self.wanted)
        wanted = self.cut.finals[comm.rank]
        options = self.steps | self.cut.options() | dict(return_final_states=wanted)
        with autocast(self.autocast):
            found = allscan.zeco_ssd(**leaves, chunk_size=self.chunk_sizes[comm.rank], comm=comm, **options)
        y, final = found if wanted else (found, None)
        assert y.dtype == self.dtype
        if self.wanted:
            dy, dfinal = (x.to(comm.device) for x in (self.of_loss["dy"][:, mine], self.of_loss["dfinal"]))
            self.cut.backward(comm.rank, y, final, self.memories["dy"].of(dy), self.memories["dfinal"].of(dfinal))
        found = dict(y=y.detach().cpu(), final=None if final is None else final.detach().cpu())
        for name, leaf in leaves.items():
            if name in self.wanted and not self.cut.uses_o[comm.rank] and leaf.grad is None:  # C, D, z
                leaf.grad = torch.zeros_like(leaf)
            assert (leaf.grad is not None) == (name in self.wanted), name
            if leaf.grad is not None:
                assert leaf.grad.dtype == leaf.dtype and leaf.grad.shape == leaf.shape, name
                found["d" + name] = leaf.grad.cpu()
        return found

    def errors(self, by_rank):
        """{name: relative error over the whole sequence, over its limit} of what the ranks have found."""
        errors = {}
        for name, whole in self.expected().items():
            parts, least = [found[name] for found in by_rank], 1e-2 * whole.numel() ** 0.5
            if name[1:] in SHARED:  # each rank's contribution, rounded
                actual, least = sum(x.double() for x in parts), sum(x.double().norm() for x in parts).item() + 1e-2
            else:
                alias = {"dinitial_states": "dinitial"}.get(name, name)
                actual = self.cut.assembled(alias, parts, whole)
            assert actual.shape == whole.shape, (name, actual.shape, whole.shape)
            assert actual.isfinite().all(), f"{name} is not finite"
            error = ((actual - whole).norm() / whole.norm().clamp_min(least)).item()
            # kernels store intermediates, such as dy times silu(z), in x's dtype
            errors[name] = error / max(LIMIT[x.dtype] for x in (self.inputs["x"], *parts) if x is not None)
        return errors


def ssd_calls(seed, size):
    draw = Draw("ssd", seed)
    return [SsdCall(draw, size) for _ in range(draw.randint(1, 2))]


def ssd_case(group, seed):
    """What this rank has found in each call."""
    size = dist.get_world_size(group)
    calls, found, lengths = ssd_calls(seed, size), [], set()
    with allscan.Communicator(group, timeout=TIMEOUT, debug=Draw("ssd debug", seed).happens(0.2)) as comm:
        for call in calls:
            packed = tuple(call.cut.lengths or ())
            if packed and packed in lengths:  # on one communicator a cu_seqlens has one split
                found.append(None)
                continue
            lengths.add(packed)
            with told(seed, f"zeco_ssd on {size} ranks", call.text):
                found.append(call.run(comm))
    return found
