"""Random calls of the scan, and their law."""

from __future__ import annotations

import contextlib
import time

import torch
import torch.distributed as dist

import allscan
from allscan.base.tiling import transition_tile

from .draw import AUTOCAST, TIMEOUT, Draw, autocast, draw_memory, draw_wanted, off, told, words


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


SCAN_NAMES = ("state", "decay", "transition", "initial")


class ScanCall:
    """What all ranks give to one call, and what they are to get. In the zigzag layout each rank has two chunks."""

    def __init__(self, draw, size, shape, dense_allowed, gradients=False, debug=False, zigzag=False):
        """debug: of the communicator's, in which NaN is rejected, also where it was given."""
        self.shape, self.gradients, self.debug, self.zigzag = shape, gradients, debug, zigzag
        chunks = size * (1 + zigzag)
        self.own = [[p, chunks - 1 - p][: 1 + zigzag] for p in range(size)]
        dense = [dense_allowed and draw.happens(0.3)] * chunks
        if not gradients and not zigzag and dense[0] and draw.happens(0.3):
            dense = [draw.happens(0.5) for _ in range(chunks)]  # ranks may mix the two
        special = not gradients and not any(dense) and draw.happens(0.5) and not debug
        K = shape[-2]
        self.dense = dense
        states = [draw_state(draw, shape, special) for _ in range(chunks)]
        transitions = [draw.normal(*shape[:-1], K) / (2 * K**0.5) if d else None for d in dense]
        decays = [None if d else draw_decay(draw, shape) for d in dense]
        initial = draw_state(draw, shape, special) if draw.happens(0.5) else None
        self.inputs, self.memories = [], []  # of each chunk
        of_initial = None if initial is None else draw_memory(draw, initial)
        for given in zip(states, decays, transitions, strict=True):
            memories = [draw_memory(draw, x) if isinstance(x, torch.Tensor) else None for x in given] + [of_initial]
            of_chunk = zip(memories, (*given, initial), strict=True)
            self.inputs.append([x if m is None else m.alike(x) for m, x in of_chunk])
            self.memories.append(memories)
        self.states, self.decays, self.transitions, (self.initial, *_) = map(list, zip(*self.inputs, strict=True))
        self.reverse, self.adjoint = not zigzag and draw.happens(0.5), not gradients and draw.happens(0.3)
        self.waits = [draw.choice([0, 0, 1, 3, 8]) * draw.random() / 1000 for _ in range(size)]
        self.out = "none" if zigzag else draw.choice(["none", "none", "new", "state"])
        weights = [draw.normal(*shape) for _ in range(chunks)]
        self.of_weights = [draw_memory(draw, x) for x in weights]
        self.weights = [m.alike(x) for m, x in zip(self.of_weights, weights, strict=True)]
        self.used = [draw.choice([[0], [1], [0, 1]]) if zigzag else [0] for _ in range(size)]  # results, by rank
        self.autocast = draw.choice(AUTOCAST)
        self.tensors = [isinstance(d, torch.Tensor) for d in self.decays]
        wanted = draw_wanted(draw, SCAN_NAMES)
        backed = "state" in wanted or ("initial" in wanted and self.initial is not None)
        if not backed and not ("decay" in wanted and all(self.tensors)) and not ("transition" in wanted and all(dense)):
            wanted.add("state")  # every rank must have a backward pass
        self.wanted = wanted
        self.text = (
            f"shape {shape}, reverse={self.reverse}, zigzag={zigzag}, dense {dense}, adjoint={self.adjoint}, "
            f"special={special}, initial={self.initial is not None}, decays {', '.join(map(words, self.decays))}, "
            f"out={self.out}, autocast={self.autocast}, memory of [state, decay, transition, initial] "
            + str([[str(m) for m in memories] for memories in self.memories])
            + (f", gradients of {sorted(wanted)}, of weights in {[*map(str, self.of_weights)]}" if gradients else "")
        )

    def leaves(self, chunk, convert):
        """(state, decay, transition, initial) of a chunk, where wanted with gradients. convert(x, its memory)."""
        return [
            convert(x, m).requires_grad_(self.gradients and name in self.wanted) if isinstance(x, torch.Tensor) else x
            for name, x, m in zip(SCAN_NAMES, self.inputs[chunk], self.memories[chunk], strict=True)
        ]

    def on_rank(self, comm):
        """(states, decays, transitions, initial) that this rank gives: lists of its chunks'."""
        leaves = [self.leaves(chunk, lambda x, m: m.of(x.to(comm.device))) for chunk in self.own[comm.rank]]
        states, decays, transitions, (initial, *_) = map(list, zip(*leaves, strict=True))
        return states, decays, transitions, initial

    def expected(self, rank):
        """([R of each chunk of this rank], [gradients of the chunk's state, decay and transition], initial's)."""
        initial = None
        if self.initial is not None:
            initial = self.initial.double().requires_grad_(self.gradients)
        leaves = [self.leaves(p, lambda x, m: x.double().clone()) for p in range(len(self.states))]
        states, decays, transitions, _ = zip(*leaves, strict=True)
        if self.adjoint:
            transitions = [t if t is None else t.transpose(-1, -2) for t in transitions]
        received = scan_law(states, decays, transitions, initial, self.reverse)
        own = self.own[rank]
        if not self.gradients:
            return [received[chunk] for chunk in own], None, None
        places = [(chunks, i) for chunks, used in zip(self.own, self.used, strict=True) for i in used]
        loss = sum((self.weights[chunks[i]].double() * received[chunks[i]]).sum() for chunks, i in places)
        if loss.requires_grad:
            loss.backward()
        first = rank == (len(self.own) - 1 if self.reverse else 0)
        found = [[getattr(x, "grad", None) for x in leaves[chunk][:3]] for chunk in own]
        of_initial = initial.grad if first and initial is not None else None
        return [received[chunk].detach() for chunk in own], found, of_initial

    def forward(self, comm):
        """allscan() with gradients; returns what runs backward and compares."""
        states, decays, transitions, initial = self.on_rank(comm)
        time.sleep(self.waits[comm.rank])
        if self.zigzag:
            how = [states, decays, transitions], dict(layout="zigzag")
        else:
            how = [states[0], decays[0], transitions[0]], dict(reverse=self.reverse)
        (state, decay, transition), options = how
        with autocast(self.autocast):
            found = allscan.allscan(state, decay, comm=comm, transition=transition, initial_state=initial, **options)
        found = found if self.zigzag else (found,)
        values, gradients, of_initial = self.expected(comm.rank)
        for chunk, value in zip(found, values, strict=True):
            assert off(chunk, value) < 1e-5, ("value", chunk, value)

        def backward():
            time.sleep(self.waits[-1 - comm.rank])
            own, used = self.own[comm.rank], self.used[comm.rank]
            weights = [self.of_weights[own[i]].of(self.weights[own[i]].to(comm.device)) for i in used]
            torch.autograd.backward([found[i] for i in used], weights)
            leaves = [("initial", initial, of_initial)]
            for i, of_chunk in enumerate(gradients):
                leaves += zip(SCAN_NAMES, (states[i], decays[i], transitions[i]), of_chunk, strict=False)
            for name, leaf, wanted in leaves:
                if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
                    assert getattr(leaf, "grad", None) is None, name
                    continue
                wanted = torch.zeros_like(leaf) if wanted is None else wanted
                assert leaf.grad.shape == wanted.shape, name
                assert off(leaf.grad, wanted) < 2e-5, ("gradient of " + name, leaf.grad, wanted)

        return backward

    def scan(self, comm, scan=None):
        """AllScan.scan, or allscan() without gradients; compares."""
        states, decays, transitions, initial = self.on_rank(comm)
        state, decay, transition = states[0], decays[0], transitions[0]
        out = None
        kept = state.is_contiguous() and not state.is_neg() and transition is None
        if self.out == "new" or (self.out == "state" and not kept):
            out = torch.full(self.shape, float("nan"), device=comm.device)
        elif self.out == "state":
            out = state
        time.sleep(self.waits[comm.rank])
        options = dict(transition=transition, initial_state=initial, reverse=self.reverse, out=out)
        with torch.no_grad(), autocast(self.autocast):
            if self.zigzag:
                options = dict(transition=transitions, initial_state=initial, layout="zigzag")
                found = allscan.allscan(states, decays, comm=comm, **options)
            elif scan is None:
                found = allscan.allscan(state, decay, comm=comm, **options)
            else:
                found = scan.scan(state, decay, transpose=self.adjoint, **options)
        assert out is None or found is out
        values, *_ = self.expected(comm.rank)
        for chunk, value in zip(found if self.zigzag else (found,), values, strict=True):
            assert off(chunk, value) < 1e-5, ("value", chunk, value)


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
                zigzag = draw.happens(0.3)
                call = ScanCall(draw, size, draw.choice(shapes), True, False, settings[which]["debug"], zigzag)
                call = _alike(call, draw, size)
                with told(seed, f"call {number}, allscan()", settings[which], call.text):
                    call.scan(comms[which])
            else:
                call = ScanCall(draw, size, draw.choice(shapes), True, gradients=True, zigzag=draw.happens(0.3))
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
        call = ScanCall(draw, size, call.shape, True, False, call.debug, call.zigzag)
    return call


def _backward(seed, entry, drop):
    """Run a backward pass, or drop it on all ranks."""
    what, backward = entry
    with told(seed, *what, "backward"):
        if not drop:
            backward()
