"""Random calls of the delta rules, and their law."""

from __future__ import annotations

import torch
import torch.distributed as dist

import allscan

from ..delta import NAMES, DeltaCase, Whole, of_rank
from ..values import chunks, place
from .draw import TIMEOUT, Draw, strided, told

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LIMIT = {F32: 5e-5, F16: 5e-3, BF16: 4e-2}
RULES = {"kda": allscan.zeco_kda, "gated_delta_rule": allscan.zeco_gated_delta_rule}


def drawn_tokens(draw, size, zigzag, invariant):
    """The tokens of each rank, of some none; at least one in all."""
    if not invariant:
        tokens = [draw.choice([0, 1, 2, 64, 65, draw.randint(3, 20), draw.randint(20, 100)]) for _ in range(size)]
        tokens[draw.randrange(size)] += 2
        return [n + n % 2 for n in tokens] if zigzag else tokens
    tokens = [invariant * (1 + zigzag) * draw.choice([0, 1, 1, 2]) for _ in range(size)]
    tokens[0] = tokens[0] or invariant * (1 + zigzag)
    if not zigzag:  # the last rank ends anywhere
        tokens[-1] = draw.randint(1, invariant + 20)
    return tokens


def drawn_case(draw, size):
    """A random DeltaCase, and ``invariant``."""
    zigzag, invariant = draw.happens(0.3), draw.choice([0, 0, 64])
    tokens, lengths = drawn_tokens(draw, size, zigzag, invariant), None
    if draw.happens(0.5):  # boundaries also at and beside those of ranks
        total, edges = sum(tokens), [0, *(end for _, _, end in chunks(tokens, zigzag))]
        beside = [min(total, max(0, draw.choice(edges) + draw.choice([-1, 0, 1]))) for _ in range(3)]
        cuts = [draw.choice([draw.randint(0, total), x]) for x in beside]
        lengths = sorted([0, total, *cuts, *draw.sample(cuts, 1)])
    H, groups = draw.choice([(1, 1), (1, 1), (1, 2), (2, 1), (1, 3)])
    return DeltaCase(
        draw.choice([*RULES]),
        tokens,
        B=1 if lengths else draw.choice([1, 1, 2]),
        H=H,
        HV=H * groups,
        K=draw.choice([8, 16, 17, 24, 40, 80, 96]),
        V=draw.choice([1, 2, 16, 24, 33, 40, 80]),
        gates=draw.choice(["zero", "weak", "mild", "strong", "mixed"]),
        dtype=draw.choice([F32, F32, BF16, F16]),
        lengths=lengths,
        beta=draw.choice([None, None, 0.0, 1.0]),
        zigzag=zigzag,
        seed=draw.getrandbits(30),
    ), invariant


def delta_case(group, seed):
    """Compare a call and its gradients with the float64 law; the errors are relative to the mean size of a value. Some
    calls follow one whose results no rank uses; some are in debug mode, or under torch.autocast."""
    draw, size = Draw("delta", seed), dist.get_world_size(group)
    case, invariant = drawn_case(draw, size)
    debug, unused, in_strides = draw.happens(0.3), draw.happens(0.3), draw.happens(0.3)
    autocast = draw.choice([None, None, BF16, F16])
    how = f"invariant={invariant}, debug={debug}, {unused=}, {in_strides=}, {autocast=}"

    def call(*tensors, **options):
        given = [strided(x) if in_strides else x for x in tensors]
        with torch.autocast("cpu", autocast or BF16, enabled=autocast is not None):
            for _ in range(1 + unused):
                found = RULES[case.rule](*given, **options)
        return found

    with told(seed, f"{size} ranks", case, how), allscan.Communicator(group, timeout=TIMEOUT, debug=debug) as comm:
        whole = Whole(case, comm.device)
        law = whole.reference()
        expected = of_rank(law, comm, case.tokens, case.lengths, case.B, case.zigzag)
        options = dict(layout="zigzag" if case.zigzag else "contiguous", invariant=invariant)
        found = whole.ours(comm, place(comm, case.tokens, case.zigzag), call, **options)
        for name, x, y, of_all in zip(NAMES, found, expected, law, strict=True):
            assert x.shape == y.shape and x.isfinite().all(), name
            if x.numel():
                size_of_all = of_all.square().mean().sqrt().clamp_min(1e-2)
                error = ((x.double() - y).square().mean().sqrt() / size_of_all).item()
                assert error < LIMIT[case.dtype], (name, error)
