"""Random calls of the delta rules, and their law."""

from __future__ import annotations

import torch
import torch.distributed as dist

import allscan

from ..delta import NAMES, DeltaCase, Whole, of_rank
from ..values import chunks, place
from .draw import AUTOCAST, TIMEOUT, Draw, Memory, autocast, draw_memory, draw_wanted, told

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LIMIT = {F32: 5e-5, F16: 5e-3, BF16: 4e-2}
RULES = {"kda": allscan.zeco_kda, "gated_delta_rule": allscan.zeco_gated_delta_rule}
INPUTS = ("q", "k", "v", "g", "beta", "initial_state")


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
    per_document = bool(zigzag and not invariant) and draw.happens(0.4)
    if per_document:
        pieces = [draw.choice([0, 1, 2, draw.randint(1, 20), 40]) for _ in range(draw.randint(1, 3))]
        pieces[draw.randrange(len(pieces))] += 1
        lengths = [2 * size * sum(pieces[:i]) for i in range(len(pieces) + 1)]
        tokens = [2 * sum(pieces)] * size
    elif draw.happens(0.5):  # boundaries also at and beside those of ranks
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
        per_document=per_document,
        seed=draw.getrandbits(30),
    ), invariant


def in_memory(draw, whole):
    """Draw the memory of each tensor, and give a Whole values that its tensors can have there."""
    names = "q", "k", "v", "g", "beta", "initial", "do", "dfinal"
    memories = {name: draw_memory(draw, getattr(whole, name)) for name in names}
    if memories["k"].dim == 3:  # no longer of norm 1
        memories["k"] = Memory()
    for name, memory in memories.items():
        setattr(whole, name, memory.alike(getattr(whole, name)))
    return memories


def delta_case(group, seed):
    """Compare a call and its gradients with the float64 law; the errors are relative to the mean size of a value. Some
    calls follow one whose results no rank uses; some are in debug mode, or under torch.autocast."""
    draw, size = Draw("delta", seed), dist.get_world_size(group)
    case, invariant = drawn_case(draw, size)
    debug, unused = draw.happens(0.3), draw.happens(0.3)
    cast, final = draw.choice(AUTOCAST), draw.choice([False, True, True, "all"])
    of_beta, of_gate = draw.choice([F32, F32, BF16, F16, torch.float64]), draw.choice([F32, F32, case.dtype])
    wanted, loss = draw_wanted(draw, INPUTS), draw.choice(["o", "both", "final"]) if final else "o"
    how = f"{invariant=}, {debug=}, {unused=}, {cast=}, {final=}, beta {of_beta}, g {of_gate}, {loss=}, {wanted=}"
    with told(seed, f"{size} ranks", case, how), allscan.Communicator(group, timeout=TIMEOUT, debug=debug) as comm:
        whole = Whole(case, comm.device)
        whole.beta, whole.g = whole.beta.to(of_beta), whole.g.to(of_gate)
        memories = in_memory(draw, whole)
        with told(seed, {name: str(m) for name, m in memories.items()}):
            whole.do *= loss != "final"
            of_loss, users = whole.dfinal, size if final == "all" else 1  # every rank's loss has the same gradient
            whole.dfinal = of_loss * users * (loss != "o")
            law = whole.reference()
            expected = of_rank(law, comm, case.tokens, case.lengths, case.B, case.zigzag, case.per_document)
            mine = place(comm, case.tokens, case.zigzag, case.lengths if case.per_document else None)
            given = [x[:, mine] for x in whole.tensors()] + [whole.initial]
            memory_of = [memories[name.removesuffix("_state")] for name in INPUTS]
            leaves = [
                m.of(x).requires_grad_(name in wanted) for name, x, m in zip(INPUTS, given, memory_of, strict=True)
            ]
            lengths = None if case.lengths is None else torch.tensor(case.lengths, device=comm.device)
            options = dict(output_final_state=final, cu_seqlens=lengths, per_document=case.per_document)
            options |= dict(layout="zigzag" if case.zigzag else "contiguous", invariant=invariant)
            for _ in range(1 + unused):
                with autocast(cast):
                    o, last = RULES[case.rule](*leaves[:5], initial_state=leaves[5], comm=comm, **options)
            assert o.dtype == case.dtype and (last is not None) == bool(final)
            if wanted:
                results = [(o, memories["do"].of(whole.do[:, mine]))] * (loss != "final")
                results += [(last, memories["dfinal"].of(of_loss))] * (loss != "o")
                torch.autograd.backward(*zip(*results, strict=True))
            for name, leaf, of_law in zip(INPUTS, leaves, given, strict=True):
                assert (leaf.grad is not None) == (name in wanted), name
                assert leaf.grad is None or leaf.grad.dtype == of_law.dtype, name
            if final == "all":
                expected[1] = law[1]
            found = o, last, *(leaf.grad for leaf in leaves)
            for name, x, y, of_all in zip(NAMES, found, expected, law, strict=True):
                if x is None:
                    continue
                assert x.shape == y.shape and x.isfinite().all(), name
                if x.numel():
                    size_of_all = of_all.square().mean().sqrt().clamp_min(1e-2)
                    error = ((x.double() - y).square().mean().sqrt() / size_of_all).item()
                    limit = LIMIT[case.dtype] + (torch.finfo(x.dtype).eps if x.dtype not in (case.dtype, F32) else 0.0)
                    assert error < limit, (name, error)
