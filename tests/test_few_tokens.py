"""Ranks with few tokens or none at a later batch, which no other rank knows of, in every operator."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import allscan
from allscan.reference import delta_reference, gla_reference, ssd_reference
from support.fla import import_fla
from support.values import error, place

REFERENCES = {
    "zeco_gla": gla_reference, "zeco_kda": delta_reference, "zeco_gated_delta_rule": delta_reference,
    "zeco_ssd": ssd_reference,
}  # fmt: skip
# Tokens of each rank at one batch after the other, and where packed sequences have a boundary
BATCHES = [
    ((8, 8, 8, 8), 5), ((8, 2, 8, 1), 9), ((0, 0, 8, 0), 3), ((8, 0, 0, 0), 8), ((0, 8, 8, 0), 4), ((8, 0, 8, 0), 8),
    ((8, 8, 0, 0), 11), ((0, 0, 0, 0), 0), ((8, 8, 8, 8), 5),
]  # fmt: skip
IN_ZIGZAG = [((8,) * 4, 5), ((0,) * 4, 0), ((2,) * 4, 1)]
SHARED = "A", "D", "initial_state", "initial_states"  # arguments that are not of tokens


def drawn(name, batch, total, sequences):
    generator = torch.Generator().manual_seed(total)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    if name == "zeco_ssd":
        return dict(x=normal(batch, total, 4, 6), dt=normal(batch, total, 4).sigmoid(), A=-normal(4).exp(),
                    B=normal(batch, total, 2, 10), C=normal(batch, total, 2, 10), D=normal(4),
                    initial_states=normal(sequences, 4, 6, 10))  # fmt: skip
    g = F.logsigmoid(normal(batch, total, 2, 16))
    given = dict(q=normal(batch, total, 2, 16), k=normal(batch, total, 2, 16), v=normal(batch, total, 2, 12),
                 g=g, initial_state=normal(sequences, 2, 16, 12))  # fmt: skip
    if name != "zeco_gla":
        given |= dict(k=F.normalize(given["k"], dim=-1), beta=normal(batch, total, 2).sigmoid())
        given["g"] = g[..., 0] if name == "zeco_gated_delta_rule" else g
    return given


def called(name, given, final, **where):
    if name == "zeco_ssd":
        found = allscan.zeco_ssd(**given, chunk_size=4, return_final_states=final, **where)
        return found if final else (found, None)
    return getattr(allscan, name)(**given, output_final_state=final, **where)


def few_case(group, name, batches, packed, layout):
    """Largest error at each batch, of outputs, states and gradients. In turns with states and without."""
    if name in ("zeco_kda", "zeco_gated_delta_rule"):
        import_fla(models=False)
    with allscan.Communicator(group, timeout=60) as comm:
        found = []
        for number, (tokens, boundary) in enumerate(batches):
            tokens, final, errors = tokens[: comm.size], number % 2 == 1, []
            total, batch = sum(tokens), 1 if packed else 2
            lengths = [0, 0, min(boundary, total), min(boundary, total), total] if packed else None
            given = drawn(name, batch, total, 4 if packed else batch)
            if not final:
                given = {n: x for n, x in given.items() if not n.startswith("initial")}
            exact = {n: x.double().requires_grad_() for n, x in given.items()}
            o, state = REFERENCES[name](**exact, cu_seqlens=lengths)
            ((o.sin().sum() + state.sin().sum() * final) + sum(0 * x.sum() for x in exact.values())).backward()

            mine = place(comm, tokens, layout == "zigzag")
            own = {n: (x if n in SHARED else x[:, mine]).to(comm.device).requires_grad_() for n, x in given.items()}
            own_o, own_state = called(name, own, final, comm=comm, cu_seqlens=lengths, layout=layout)
            assert own_o.requires_grad and own_o.shape[1] == tokens[comm.rank]
            (own_o.sin().sum() + (own_state.sin().sum() if final else 0)).backward()
            errors.append(error(own_o, o[:, mine]))
            shared = [(own_state.detach(), state)] if final else []
            for n, x in own.items():
                if n in SHARED:
                    shared.append((x.grad, exact[n].grad))
                else:
                    errors.append(error(x.grad, exact[n].grad[:, mine]))
            for x, y in shared:
                dist.all_reduce(x, group=comm.group)
                errors.append(error(x, y))
            found.append(max(errors))
        return found


def check(answers, limit=2e-5):
    for errors in answers:
        assert max(errors) < limit, errors


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["zeco_gla", "zeco_ssd"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_operators(run, size, name, packed):
    check(run(size, few_case, name, BATCHES, packed, "contiguous"))


@pytest.mark.cpu  # on GPUs fla's kernels round float32 to TF32
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["zeco_kda", "zeco_gated_delta_rule"])
@pytest.mark.parametrize("size", [1, 3])
def test_delta_rules(run, size, name, packed):
    check(run(size, few_case, name, BATCHES, packed, "contiguous"))


@pytest.mark.cpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", REFERENCES)
def test_zigzag(run, name, packed, size=2):
    check(run(size, few_case, name, IN_ZIGZAG, packed, "zigzag"))
