"""Random cases of the package's properties, and their laws: float64, written here, sharing no code with the package.

A case comes from its seed alone, so that every rank draws the same one.
"""

from __future__ import annotations

import contextlib
import random
import time

import torch
import torch.distributed as dist

import allscan
from allscan.base.tiling import transition_tile
from allscan.comm import host_exchange

from .gla import gates
from .values import chunks, place, raised

TIMEOUT = 60.0  # of communicators on which nothing is to go wrong


def size_of(name, seed) -> int:
    """How many ranks a case has: up to 4, and up to 8 from the tenth seed on."""
    return random.Random(f"{name} {seed}").choice([1, *3 * [2, 2, 3, 3, 4]] + [5, 6, 7, 8][: 4 * (seed >= 10)])


@contextlib.contextmanager
def told(seed, *what):
    """Puts the seed and the case in front of whatever goes wrong."""
    try:
        yield
    except Exception as problem:
        raise AssertionError(f"SEED {seed}: {'; '.join(map(str, what))}") from problem


class Draw(random.Random):
    """A random.Random that draws tensors too."""

    def __init__(self, *seed):
        super().__init__(" ".join(map(str, seed)))

    def generator(self):
        return torch.Generator().manual_seed(self.getrandbits(40))

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator())

    def uniform_tensor(self, *shape):
        return torch.rand(shape, generator=self.generator())

    def happens(self, chance):
        return self.random() < chance


def strided(x):
    """The same values with the last two dimensions exchanged in memory."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


# The scan


def scan_law(states, decays, transitions, initial, reverse):
    """[R_p]: R_0 = initial or 0, R_{p+1} = decay_p * R_p + state_p, or transition_p R_p + state_p.

    A decay of 0 makes 0 of Inf and NaN too."""
    count, shape = len(states), states[0].shape
    carried = torch.zeros(shape, dtype=torch.float64) if initial is None else initial.double()
    received = [None] * count
    for p in range(count - 1, -1, -1) if reverse else range(count):
        received[p] = carried
        if transitions[p] is not None:
            product = (transitions[p].double()[..., :, :, None] * carried[..., None, :, :]).sum(-2)
            carried = product + states[p].double()
            continue
        factor = torch.tensor(1.0, dtype=torch.float64)
        if isinstance(decays[p], torch.Tensor):
            factor = decays[p].double()
            if factor.ndim:
                factor = factor.reshape(*factor.shape, *[1] * (len(shape) - factor.ndim))
        elif decays[p] is not None:
            factor = torch.tensor(float(decays[p]), dtype=torch.float64)
        passes = torch.where((factor == 0) & ~carried.isfinite(), torch.zeros_like(carried), carried)
        carried = factor * passes + states[p].double()
    return received


def off(actual, expected) -> float:
    """Largest difference, over the largest expected value where that is above 1; Inf where NaN and Inf differ."""
    actual, expected = actual.detach().double().cpu(), expected.double()
    finite = expected.isfinite()
    if actual.shape != expected.shape or not same(actual.masked_fill(finite, 0), expected.masked_fill(finite, 0)):
        return float("inf")
    if not finite.any():
        return 0.0
    difference = (actual - expected)[finite].abs().max() / expected[finite].abs().max().clamp_min(1.0)
    return difference.nan_to_num(float("inf")).item()


def same(a, b) -> bool:
    """Equal values, NaN to NaN, 0 to -0; of one dtype."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_floating_point():
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def draw_shape(draw, most=7):
    return (
        *(draw.randint(1, 3) for _ in range(draw.choice([0, 1, 1, 1, 2, 3]))),
        draw.randint(1, most),
        draw.randint(1, most),
    )


def draw_state(draw, shape, special):
    x = draw.normal(*shape)
    if special:
        pick = draw.uniform_tensor(*shape)
        for i, value in enumerate((-0.0, -0.0, 0.0, float("inf"), float("-inf"), float("nan"))):
            x[(pick > 0.06 * i) & (pick < 0.06 * (i + 1))] = value
    return x


def draw_decay(draw, shape, differentiable=False):
    """None, a number, or a tensor of any of the shapes that a decay may have."""
    kind = draw.choice(["none", "number", "hop", "rows", "rows", "heads", "scalar"])
    if kind == "none":
        return None
    if kind == "number":
        return draw.choice([0.5, 1, 1.0, 0.25])
    if kind == "hop":
        return draw.choice([0, 0.0, -0.0])
    sizes = {"rows": shape[:-1], "heads": shape[:-2], "scalar": ()}[kind]
    sizes = [1 if draw.happens(0.2) else n for n in sizes]
    decay, pick = draw.uniform_tensor(*sizes), draw.uniform_tensor(*sizes)
    for i, value in enumerate((0.0, -0.0, 1.0, 1e-30)):
        decay[(pick > 0.1 * i) & (pick < 0.1 * (i + 1))] = value
    if draw.happens(0.15):
        decay.zero_()
    return decay


def words(x) -> str:
    """A decay in a description."""
    return f"tensor{tuple(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)


class ScanCall:
    """What all ranks give to one call, and what they are to get."""

    def __init__(self, draw, size, shape, dense_allowed, gradients=False, debug=False):
        """debug: of the communicator's, in which NaN is refused, also where it was given."""
        self.shape, self.gradients, self.debug = shape, gradients, debug
        dense = [dense_allowed and draw.happens(0.3)] * size
        if not gradients and dense[0] and draw.happens(0.3):
            dense = [draw.happens(0.5) for _ in range(size)]  # ranks may mix the two
        special = not gradients and not any(dense) and draw.happens(0.5) and not debug
        K = shape[-2]
        self.dense = dense
        self.states = [draw_state(draw, shape, special) for _ in range(size)]
        self.transitions = [draw.normal(*shape[:-1], K) / (2 * K**0.5) if d else None for d in dense]
        self.decays = [None if d else draw_decay(draw, shape) for d in dense]
        self.initial = draw_state(draw, shape, special) if draw.happens(0.5) else None
        self.reverse, self.adjoint = draw.happens(0.5), not gradients and draw.happens(0.3)
        self.waits = [draw.choice([0, 0, 1, 3, 8]) * draw.random() / 1000 for _ in range(size)]
        self.strided, self.out = draw.happens(0.3), draw.choice(["none", "none", "new", "state"])
        self.weights = [draw.normal(*shape) for _ in range(size)]
        self.tensors = [isinstance(d, torch.Tensor) for d in self.decays]
        wanted = {name for name in ("state", "decay", "transition", "initial") if draw.happens(0.6)}
        backed = "state" in wanted or ("initial" in wanted and self.initial is not None)
        if not backed and not ("decay" in wanted and all(self.tensors)) and not ("transition" in wanted and all(dense)):
            wanted.add("state")  # every rank must have a backward pass
        self.wanted = wanted
        self.text = (
            f"shape {shape}, reverse={self.reverse}, dense {dense}, adjoint={self.adjoint}, special={special}, "
            f"initial={self.initial is not None}, decays {', '.join(map(words, self.decays))}, strided={self.strided}, "
            f"out={self.out}" + (f", gradients of {sorted(wanted)}" if gradients else "")
        )

    def leaves(self, rank, convert):
        """(state, decay, transition, initial) of a rank, where wanted with gradients."""
        given = self.states[rank], self.decays[rank], self.transitions[rank], self.initial
        names = "state", "decay", "transition", "initial"
        return [
            convert(x).requires_grad_(self.gradients and name in self.wanted) if isinstance(x, torch.Tensor) else x
            for name, x in zip(names, given, strict=True)
        ]

    def expected(self, rank):
        """(R_rank, gradients of this rank's leaves by place)."""
        initial = None
        if self.initial is not None:
            initial = self.initial.double().requires_grad_(self.gradients)
        leaves = [self.leaves(p, lambda x: x.double().clone()) for p in range(len(self.states))]
        states, decays, transitions, _ = zip(*leaves, strict=True)
        if self.adjoint:
            transitions = [t if t is None else t.transpose(-1, -2) for t in transitions]
        received = scan_law(states, decays, transitions, initial, self.reverse)
        if not self.gradients:
            return received[rank], None
        loss = sum((w.double() * r).sum() for w, r in zip(self.weights, received, strict=True))
        if loss.requires_grad:
            loss.backward()
        first = rank == (len(self.states) - 1 if self.reverse else 0)
        found = [getattr(x, "grad", None) for x in leaves[rank][:3]]
        found.append(initial.grad if first and initial is not None else None)
        return received[rank].detach(), found

    def forward(self, comm):
        """allscan() with gradients; returns what runs backward and compares."""
        state, decay, transition, initial = self.leaves(comm.rank, lambda x: x.clone().to(comm.device))
        time.sleep(self.waits[comm.rank])
        found = allscan.allscan(
            strided(state) if self.strided else state,
            decay,
            comm=comm,
            transition=transition,
            initial_state=initial,
            reverse=self.reverse,
        )
        value, gradients = self.expected(comm.rank)
        assert off(found, value) < 1e-5, ("value", found, value)

        def backward():
            time.sleep(self.waits[-1 - comm.rank])
            (found * self.weights[comm.rank].to(comm.device)).sum().backward()
            for name, leaf, wanted in zip(
                ("state", "decay", "transition", "initial"), (state, decay, transition, initial), gradients, strict=True
            ):
                if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
                    assert getattr(leaf, "grad", None) is None, name
                    continue
                wanted = torch.zeros_like(leaf) if wanted is None else wanted
                assert leaf.grad.shape == wanted.shape, name
                assert off(leaf.grad, wanted) < 2e-5, ("gradient of " + name, leaf.grad, wanted)

        return backward

    def scan(self, comm, scan=None):
        """AllScan.scan, or allscan() without gradients; compares."""
        state, decay, transition, initial = self.leaves(comm.rank, lambda x: x.clone().to(comm.device))
        state = strided(state) if self.strided else state
        out = None
        if self.out == "new" or (self.out == "state" and (transition is not None or not state.is_contiguous())):
            out = torch.full(self.shape, float("nan"), device=comm.device)
        elif self.out == "state":
            out = state
        time.sleep(self.waits[comm.rank])
        options = dict(transition=transition, initial_state=initial, reverse=self.reverse, out=out)
        with torch.no_grad():
            if scan is None:
                found = allscan.allscan(state, decay, comm=comm, **options)
            else:
                found = scan.scan(state, decay, adjoint=self.adjoint, **options)
        assert out is None or found is out
        value, _ = self.expected(comm.rank)
        assert off(found, value) < 1e-5, ("value", found, value)


def draw_allscan(draw, shape):
    """Options of an AllScan of this shape, (dense transitions possible, options)."""
    options = dict(depth=draw.randint(1, 4), protocol=draw.choice(["auto", "sentinel", "signal", "put"]))
    dense = draw.happens(0.35)
    if dense:
        BK, BV = transition_tile(shape[-2])
        options["tile"] = (BK * draw.choice([1, 1, 2]), draw.choice([16, 32, BV]))
    elif draw.happens(0.6):
        tiles = [(1 << draw.randint(0, 4), 1 << draw.randint(0, 4)) for _ in range(20)]
        count = lambda tile: -(-shape[-2] // tile[0]) * -(-shape[-1] // tile[1])  # noqa: E731
        lead = torch.Size(shape[:-2]).numel()
        options["tile"] = next((t for t in tiles if lead * count(t) <= 16), (8, 8))
    if draw.happens(0.4):
        options["max_ctas"] = draw.randint(1, 5)
    return dense, options


def scans_case(group, seed):
    """Calls in a random order over several communicators, AllScans and directions, some ranks late; and gradients,
    whose backward passes come in any order."""
    size = dist.get_world_size(group)
    draw = Draw("scans", seed)
    with contextlib.ExitStack() as stack, told(seed, f"scans on {size} ranks"):
        comms, settings = [], []
        for _ in range(draw.randint(1, 3)):
            settings.append(dict(max_ctas=draw.choice([None, 1, 2, 3]), debug=draw.happens(0.1)))
            comms.append(stack.enter_context(allscan.Communicator(group, timeout=TIMEOUT, **settings[-1])))
        scans = []
        for _ in range(draw.randint(1, 3)):
            which, shape = draw.randrange(len(comms)), draw_shape(draw)
            dense, options = draw_allscan(draw, shape)
            with told(seed, f"AllScan of {shape}, {options}"):
                scan = stack.enter_context(allscan.AllScan(comms[which], shape, **options))
            scans.append((which, scan, dense, options))
        shapes = [draw_shape(draw) for _ in range(2)]
        waiting = []
        for number in range(draw.randint(5, 9)):
            kind = draw.choice(["scan", "scan", "scan", "function", "gradients", "gradients", "step"])
            which = draw.randrange(len(comms))
            if kind == "step":
                comms[which].step()
            elif kind == "scan":
                which, scan, dense, options = draw.choice(scans)
                many = 2 * options["depth"] + 1 if scan.num_tiles <= 4 else 3
                for epoch in range(draw.choice([1, 1, 2, many])):
                    call = ScanCall(draw, size, scan.shape, dense, debug=settings[which]["debug"])
                    with told(seed, f"call {number}.{epoch}", settings[which], options, call.text):
                        call.scan(comms[which], scan)
            elif kind == "function":
                call = ScanCall(draw, size, draw.choice(shapes), True, debug=settings[which]["debug"])
                call.dense = [call.dense[0]] * size
                call = _alike(call, draw, size)
                with told(seed, f"call {number}, allscan()", settings[which], call.text):
                    call.scan(comms[which])
            else:
                call = ScanCall(draw, size, draw.choice(shapes), True, gradients=True)
                what = f"call {number}, allscan() with gradients", settings[which], call.text
                with told(seed, *what):
                    waiting.append((what, call.forward(comms[which])))
            while waiting and draw.happens(0.5):
                _backward(seed, waiting.pop(draw.randrange(len(waiting))), draw.happens(0.1))
        while waiting:
            _backward(seed, waiting.pop(draw.randrange(len(waiting))), False)
        for comm in comms:
            comm.check()


def _alike(call, draw, size):
    """allscan() keeps an AllScan of its own for transitions: all ranks have them or none. It takes no ``adjoint``."""
    while len(set(t is None for t in call.transitions)) > 1 or call.adjoint:
        call = ScanCall(draw, size, call.shape, True, debug=call.debug)
    return call


def _backward(seed, entry, drop):
    """Run a backward pass, or drop it on all ranks."""
    what, backward = entry
    with told(seed, *what, "backward"):
        if not drop:
            backward()


# Gated linear attention

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


# Halos

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float32", "bfloat16", "float16")


def draw_numbers(draw, dtype, *shape):
    """Integers over their full range, with those at its ends; floats with Inf and NaN."""
    kind = getattr(torch, dtype)
    if dtype in INTEGERS:
        bits = torch.randint(-(2**63), 2**63 - 1, shape, generator=draw.generator())
        pick = draw.uniform_tensor(*shape)
        width = 8 * kind.itemsize
        ends = [0, -1, 1, 1 << 31, -(1 << 31), 1 << 16, (1 << (width - 1)) - 1, -(1 << (width - 1)), 0x80008000]
        for i, value in enumerate(ends):
            bits[(pick > 0.05 * i) & (pick < 0.05 * (i + 1))] = value
        signed = bits.to(getattr(torch, dtype.removeprefix("u")))  # the low bits
        return signed.view(kind)
    x = draw.normal(*shape) * 10.0 ** draw.choice([-40, -6, 0, 3])
    pick = draw.uniform_tensor(*shape)
    for i, value in enumerate((0.0, -0.0, float("inf"), float("-inf"), float("nan"))):
        x[(pick > 0.04 * i) & (pick < 0.04 * (i + 1))] = value
    return x.to(kind)


class HaloCall:
    def __init__(self, draw, size):
        self.n = draw.choice([1, 1, 2, 3, 5])
        self.tokens = [self.n + draw.choice([0, 0, 1, 4, 9]) for _ in range(size)]
        self.total, self.reverse = sum(self.tokens), draw.happens(0.5)
        packed = draw.happens(0.4)
        B = 1 if packed else draw.randint(1, 3)
        self.lengths = None
        if packed:
            edges = [sum(self.tokens[:p]) for p in range(size + 1)]
            cuts = [draw.choice([draw.randint(0, self.total), draw.choice(edges)]) for _ in range(draw.randint(0, 6))]
            self.lengths = sorted([0, self.total, *cuts])
        self.several = draw.happens(0.4)
        self.dtypes = [draw.choice(INTEGERS + 3 * FLOATS) for _ in range(draw.randint(1, 3) if self.several else 1)]
        rests = [[draw.randint(1, 5) for _ in range(draw.choice([0, 1, 1, 2]))] for _ in self.dtypes]
        self.wholes = [draw_numbers(draw, d, B, self.total, *rest) for d, rest in zip(self.dtypes, rests, strict=True)]
        self.wanted = [d in FLOATS and draw.happens(0.5) for d in self.dtypes]
        self.weights = [
            [draw.normal(B, self.n, *rest).to(getattr(torch, d)) if d in FLOATS else None for _ in range(size)]
            for d, rest in zip(self.dtypes, rests, strict=True)
        ]
        self.waits = [draw.choice([0, 0, 4]) * draw.random() / 1000 for _ in range(size)]
        self.text = (
            f"n={self.n}, tokens {self.tokens}, B={B}, reverse={self.reverse}, cu_seqlens {self.lengths}, "
            f"{'tuple of ' if self.several else ''}{list(zip(self.dtypes, rests, self.wanted, strict=True))}"
        )

    def sources(self, rank):
        """The token of the whole that each of the n is, or None."""
        first = sum(self.tokens[:rank])
        end = first + self.tokens[rank]
        here, places = (end - 1, range(end, end + self.n)) if self.reverse else (first, range(first - self.n, first))
        lengths = self.lengths or [0, self.total]

        def sequence(t):
            return max(i for i, cut in enumerate(lengths[:-1]) if cut <= t)

        return [t if 0 <= t < self.total and sequence(t) == sequence(here) else None for t in places]

    def check(self, comm):
        first = sum(self.tokens[: comm.rank])
        mine = slice(first, first + self.tokens[comm.rank])
        xs = tuple(
            x[:, mine].clone().to(comm.device).requires_grad_(w) for x, w in zip(self.wholes, self.wanted, strict=True)
        )
        time.sleep(self.waits[comm.rank])
        found = allscan.halo(
            xs if self.several else xs[0], self.n, comm=comm, reverse=self.reverse, cu_seqlens=self.lengths
        )
        found = found if self.several else (found,)
        sources = self.sources(comm.rank)
        for x, y in zip(self.wholes, found, strict=True):
            zero = torch.zeros_like(x[:, :1])
            expected = torch.cat([zero if t is None else x[:, t : t + 1] for t in sources], 1)
            assert same(y.detach().cpu(), expected), ("values", y, expected)
        if not any(self.wanted):
            return
        used = [i for i, wanted in enumerate(self.wanted) if wanted]
        torch.autograd.backward([found[i] for i in used], [self.weights[i][comm.rank].to(comm.device) for i in used])
        for i in used:
            whole = torch.zeros_like(self.wholes[i])
            for rank in range(len(self.tokens)):
                for n, t in enumerate(self.sources(rank)):
                    if t is not None:
                        whole[:, t] += self.weights[i][rank][:, n]
            assert same(xs[i].grad.cpu(), whole[:, mine]), ("gradients", i, xs[i].grad, whole[:, mine])


def halo_case(group, seed):
    size = dist.get_world_size(group)
    draw = Draw("halo", seed)
    with told(seed, f"halo on {size} ranks"), allscan.Communicator(group, timeout=TIMEOUT) as comm:
        lengths = set()  # on one communicator a cu_seqlens has one split
        for number in range(draw.randint(2, 5)):
            call = HaloCall(draw, size)
            if call.lengths is not None and tuple(call.lengths) in lengths:
                continue
            lengths.add(tuple(call.lengths or ()))
            with told(seed, f"call {number}", call.text):
                call.check(comm)


# Life cycles


class Cycle:
    """Operations that all ranks draw alike, each by the ranks of one communicator, and what is to come of them.

    Of memory: what the arena has free is what it had at first, less the AllScans of the communicators that are open.
    """

    MOST_COMMS, MOST_SCANS = 3, 4
    TIMEOUT = 5.0  # of communicators on which a rank refuses a call, so that the others wait for it

    def __init__(self, seed):
        self.seed, self.draw = seed, Draw("cycle", seed)
        self.me, self.world = dist.get_rank(), dist.get_world_size()
        self.log = []
        self.groups = {tuple(range(self.world)): dist.group.WORLD}
        allscan.init()
        self.begin_arena()

    def begin_arena(self):
        self.comms = []  # dicts, alike on every rank but for what belongs to members
        self.faults = 0
        self.free = None

    def arena(self):
        from allscan.comm.heap import symmetric_heap

        return symmetric_heap().arena

    def run(self):
        with told(self.seed, f"life cycle on {self.world} ranks", LogOf(self.log)):
            self.free = self.arena().free_bytes
            for _ in range(self.draw.randint(12, 22)):
                self.operation()
                self.check_memory()
            self.log.append("close everything")
            while self.comms:
                self.close(self.draw.choice(self.comms))
            self.check_memory()  # all of it is free
            for ranks, group in self.groups.items():
                if len(ranks) < self.world and self.me in ranks:
                    dist.destroy_process_group(group)
            self.finalize()

    def check_memory(self):
        taken = sum(comm["taken"] for comm in self.comms)
        assert self.arena().free_bytes == self.free - taken, (self.arena().free_bytes, self.free, taken)

    # What is drawn is drawn on every rank before any rank leaves

    def operation(self):
        weights = dict(
            open=3,
            make=5,
            scan=8,
            function=4,
            gradients=3,
            halo=2,
            step=1,
            close_scan=2,
            forget=1,
            close=2,
            barrier=2,
            resync=2,
            all_refuse=2,
            first_refused=2,
            one_refuses=3,
            missed=2,
            late_backward=1,
            finalize=1,
            anew=1,
        )
        name = self.draw.choices(list(weights), weights.values())[0]
        comm = self.draw.choice(self.comms) if self.comms else None
        number = self.draw.getrandbits(40)
        if name == "open" or comm is None:
            if name in ("finalize", "anew"):
                return self.finalize()
            if len(self.comms) < self.MOST_COMMS:
                return self.open()
            return None
        if name in ("one_refuses", "missed"):
            self.faults += 1
            if self.faults > 2 or len(comm["ranks"]) < 2 or comm["patient"]:
                return None
        self.log.append(f"{name} of communicator {comm['number']} of {comm['ranks']}")
        if not comm["patient"]:
            dist.barrier()  # else a rank of a busy machine may be that late
        getattr(self, "count_step" if name == "step" else name)(comm, Draw(self.seed, name, number))
        if name == "one_refuses":
            dist.barrier()  # those who have not waited would wait elsewhere

    def open(self):
        ranks = tuple(range(self.world))
        if self.draw.happens(0.5):
            ranks = tuple(sorted(self.draw.sample(ranks, self.draw.randint(1, self.world))))
        if ranks not in self.groups:
            self.groups[ranks] = dist.new_group(list(ranks))
        number = self.draw.getrandbits(20)
        patient = self.draw.happens(0.6)
        options = dict(max_ctas=self.draw.choice([None, 1, 3]), debug=self.draw.happens(0.1))
        options["timeout"] = 60 if patient else self.TIMEOUT
        self.log.append(f"open communicator {number} of {ranks}, {options}")
        comm = dict(
            number=number,
            ranks=ranks,
            scans=[],
            shapes=set(),
            lengths=set(),
            taken=0,
            patient=patient,
            comm=None,
            debug=options["debug"],
        )
        if self.me in ranks:
            comm["comm"] = allscan.Communicator(self.groups[ranks], **options)
        self.comms.append(comm)

    def member(self, comm):
        return self.me in comm["ranks"]

    def take(self, comm, shape, **options):
        if self.member(comm):
            hint = allscan.AllScan.size_hint(comm["comm"], shape, **options)
            comm["taken"] += hint
            return hint
        return 0

    def make(self, comm, draw):
        if len(comm["scans"]) >= self.MOST_SCANS:
            return
        shape = draw_shape(draw)
        dense, options = draw_allscan(draw, shape)
        self.log.append(f"AllScan {shape} {options}")
        entry = dict(shape=shape, dense=dense, options=options, scan=None, bytes=0)
        comm["scans"].append(entry)
        if self.member(comm):
            entry["scan"] = allscan.AllScan(comm["comm"], shape, **options)
            entry["bytes"] = self.take(comm, shape, **options)
            assert entry["scan"].workspace_bytes == entry["bytes"]

    def scan(self, comm, draw):
        if not comm["scans"]:
            return self.make(comm, draw)
        entry = draw.choice(comm["scans"])
        for _ in range(draw.randint(1, 3)):
            call = ScanCall(draw, len(comm["ranks"]), entry["shape"], entry["dense"], debug=comm["debug"])
            self.log.append(call.text)
            if self.member(comm):
                call.scan(comm["comm"], entry["scan"])

    def function_shape(self, comm, shape):
        """The first call for a shape takes memory."""
        if shape not in comm["shapes"]:
            comm["shapes"].add(shape)
            self.take(comm, shape)

    def function(self, comm, draw):
        shape = draw.choice([(2, 3, 4), (1, 5, 3), (4, 4)])
        call = ScanCall(draw, len(comm["ranks"]), shape, False, debug=comm["debug"])
        call = _without_adjoint(call)
        self.log.append(call.text)
        if self.member(comm):
            call.scan(comm["comm"])
        self.function_shape(comm, call.shape)

    def gradients(self, comm, draw):
        size, shapes = len(comm["ranks"]), [(2, 3, 4), (1, 5, 3)]
        calls = [ScanCall(draw, size, draw.choice(shapes), False, True) for _ in range(draw.randint(1, 2))]
        for call in calls:
            self.log.append(call.text)
        backward_first = draw.happens(0.5)
        halves = []
        for call in calls:
            if self.member(comm):
                halves.append(call.forward(comm["comm"]))
            self.function_shape(comm, call.shape)
        for half in halves if backward_first else halves[::-1]:
            half()

    def halo(self, comm, draw):
        call, simple = None, (["float32"], ["int64"])
        while call is None or call.dtypes not in simple or tuple(call.lengths or ()) in comm["lengths"]:
            call = HaloCall(draw, len(comm["ranks"]))
        if call.lengths is not None:
            comm["lengths"].add(tuple(call.lengths))
        self.log.append("halo " + call.text)
        if self.member(comm):
            call.check(comm["comm"])
        x = call.wholes[0]
        width = torch.Size(x.shape[2:]).numel() * (4 if call.dtypes[0] == "int64" else 1)
        self.function_shape(comm, (x.shape[0], call.n, width))

    def count_step(self, comm, draw):
        if self.member(comm):
            comm["comm"].step()

    def close_scan(self, comm, draw):
        if not comm["scans"]:
            return
        entry = comm["scans"].pop(draw.randrange(len(comm["scans"])))
        if self.member(comm):
            entry["scan"].close()
            entry["scan"].close()
            comm["taken"] -= entry["bytes"]
            answer = raised(entry["scan"].scan, torch.zeros(entry["shape"]))
            assert answer and answer[0] == "RuntimeError" and "AllScan is closed" in answer[1], answer

    def forget(self, comm, draw):
        """Its memory stays with the communicator."""
        if comm["scans"]:
            comm["scans"].pop(draw.randrange(len(comm["scans"])))

    def close(self, comm, draw=None):
        self.comms.remove(comm)
        self.log.append(f"close communicator {comm['number']}")
        if self.member(comm):
            comm["comm"].close()
            comm["comm"].close()
            assert comm["comm"].closed
            for call in (comm["comm"].check, comm["comm"].barrier, comm["comm"].resync):
                answer = raised(call)
                assert answer and answer[0] == "RuntimeError" and "closed" in answer[1], answer
            for entry in comm["scans"]:
                entry["scan"].close()

    def barrier(self, comm, draw):
        if self.member(comm):
            comm["comm"].barrier()

    def resync(self, comm, draw):
        if self.member(comm):
            comm["comm"].resync()
            if len(comm["ranks"]) > 1:
                for entry in comm["scans"]:
                    assert entry["scan"].epochs == (0, 0)

    def wrong_call(self, comm, draw):
        """(a call that is refused, the exception's name, alike on every rank that makes it)"""
        kind = draw.choice(["shape", "dtype", "decay", "both"])
        self.log.append("refused for its " + kind)
        if not self.member(comm):
            return None
        comm, entry = comm["comm"], draw.choice(comm["scans"])
        scan, state = entry["scan"], torch.zeros(entry["shape"])
        K = state.shape[-2]
        if kind == "shape":
            return lambda: scan.scan(torch.zeros(2, *entry["shape"])), "ValueError"
        if kind == "dtype":
            return lambda: scan.scan(state.double()), "TypeError"
        if kind == "decay":
            return lambda: scan.scan(state, torch.ones(*state.shape[:-2], K + 1)), "ValueError"
        return lambda: scan.scan(state, 0.5, transition=torch.zeros(*state.shape[:-1], K)), "ValueError"

    def all_refuse(self, comm, draw):
        """Nothing changes. A rank may refuse several before the others have."""
        self.make(comm, draw)
        for _ in range(draw.randint(1, 3)):
            wrong = self.wrong_call(comm, draw)
            if self.member(comm):
                answer = raised(wrong[0])
                assert answer and answer[0] == wrong[1], (answer, wrong[1])
                if draw.happens(0.2):
                    time.sleep(self.draw_wait(comm))
        if draw.happens(0.5):
            self.scan(comm, draw)

    def draw_wait(self, comm):
        return 0.02 * comm["ranks"].index(self.me)

    def first_refused(self, comm, draw):
        """What is wrong on one rank in a first call is refused on all, and takes nothing."""
        odd = draw.choice(comm["ranks"])
        kind = draw.choice(["function", "AllScan", "halo", "full"])
        self.log.append(f"{kind} refused by rank {odd}")
        if not self.member(comm):
            return
        wrong, comm = self.me == odd or comm["comm"].size == 1, comm["comm"]
        if kind == "function":
            answer = raised(
                allscan.allscan, torch.zeros(3, 3, 3, dtype=torch.float64 if wrong else torch.float32), comm=comm
            )
        elif kind == "AllScan":
            answer = raised(allscan.AllScan, comm, (3, 3, 3), depth=0 if wrong else 2)
        elif kind == "halo":
            answer = raised(allscan.halo, torch.zeros(1, 5 if wrong else 4, 77), 2, comm=comm, layout="zigzag")
        elif comm.size > 1:
            answer = raised(allscan.AllScan, comm, (1 << 14, 64, 64))
            assert answer and answer[0] == "MemoryError", answer
            return
        else:
            return
        assert answer and answer[0] in ("TypeError", "ValueError"), answer

    def one_refuses(self, comm, draw):
        """It makes no further calls; the others time out or have what is theirs; resync() brings all back."""
        self.make(comm, draw)
        entry = draw.choice(comm["scans"])
        odd = draw.choice(comm["ranks"])
        call = ScanCall(draw, len(comm["ranks"]), entry["shape"], entry["dense"], debug=comm["debug"])
        wrong = self.wrong_call(comm, draw)
        more = draw.happens(0.5)
        self.log.append(f"rank {odd} refuses {call.text}")
        if not self.member(comm):
            return
        comm = comm["comm"]
        try:
            if self.me == odd:
                wrong[0]()
            else:
                call.scan(comm, entry["scan"])
            refused = False
        except (TypeError, ValueError):
            assert self.me == odd
            refused = True
        except allscan.AllScanTimeout:
            assert not comm.debug and self.me != odd
            refused = None
        except RuntimeError as problem:
            assert comm.debug and self.me != odd, problem
            refused = None
        assert refused is not False or self.me != odd
        if more and not comm.debug:
            answer = raised(entry["scan"].scan, torch.zeros(entry["shape"]))
            assert self.me != odd or answer[0] == "AllScanOutOfStep", answer
            assert answer is None or answer[0] in ("AllScanTimeout", "AllScanOutOfStep"), answer
        comm.resync()

    def missed(self, comm, draw):
        """The last rank leaves out a call; the others, which do not wait for it, hear of it in barrier()."""
        self.make(comm, draw)
        entry = draw.choice(comm["scans"])
        if entry["options"]["depth"] == 1 or not self.member(comm) or comm["comm"].debug:
            return
        comm = comm["comm"]
        if comm.rank < comm.size - 1:
            entry["scan"].scan(torch.zeros(entry["shape"]))
        answer = raised(comm.barrier)
        assert answer and answer[0] == "AllScanOutOfStep", answer
        answer = raised(entry["scan"].scan, torch.zeros(entry["shape"]))
        assert answer and answer[0] == "AllScanOutOfStep", answer
        comm.resync()

    def late_backward(self, comm, draw):
        """A backward pass of a call before resync() is refused, on all ranks alike, and costs nothing."""
        if self.member(comm):
            x = torch.ones(2, 3, 4, requires_grad=True)
            found = allscan.allscan(x, comm=comm["comm"])
            comm["comm"].resync()
            answer = raised(found.sum().backward)
            assert answer and answer[0] == "RuntimeError" and "resync" in answer[1], answer
        self.function_shape(comm, (2, 3, 4))

    def finalize(self, comm=None, draw=None):
        """Refused while a communicator over several ranks is open, on the ranks that have one; else the arena goes."""
        if any(len(c["ranks"]) > 1 for c in self.comms):
            if any(self.member(c) and c["comm"].size > 1 for c in self.comms):
                answer = raised(allscan.finalize)
                assert answer and answer[0] == "RuntimeError" and "open communicators" in answer[1], answer
            return
        for alone in list(self.comms):
            self.close(alone)
        nbytes = self.draw.choice([None, 32 << 20, 12345678])
        self.log.append(f"finalize, init({nbytes})")
        allscan.finalize()
        allscan.init(nbytes)
        self.begin_arena()
        self.free = self.arena().free_bytes
        if nbytes is not None:
            assert self.free == -(-nbytes // 512) * 512

    def anew(self, comm, draw):
        """Close everything, and begin again."""
        while self.comms:
            self.close(self.draw.choice(self.comms))
        self.check_memory()
        self.finalize()


class LogOf:
    """The operations so far, when they are asked for."""

    def __init__(self, log):
        self.log = log

    def __str__(self):
        return "\n  " + "\n  ".join(self.log)


def _without_adjoint(call):
    call.adjoint = False
    return call


def cycle_case(seed):
    host_exchange.EXCHANGE_TIMEOUT_S = 60.0  # of ranks that end with this test
    Cycle(seed).run()
