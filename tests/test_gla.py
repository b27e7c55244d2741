"""zeco_gla on the ranks against the token-by-token recurrence in float64 over the whole sequence."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import allscan
from allscan.reference import gla_reference
from ranks import raised


def gates(kind, shape, generator):
    """Natural-log decays: mild ones as models have, near 1, strong, exactly 1, closed, and all of these mixed."""
    g = F.logsigmoid(torch.randn(shape, generator=generator))
    if kind == "weak":
        return g / 64
    if kind == "strong":
        return -20 - 60 * torch.rand(shape, generator=generator)
    if kind == "zero":
        return torch.zeros(shape)
    if kind == "mixed":
        scales = torch.tensor([0.0, 1e-4, 1.0, 20.0, 80.0, float("inf")])
        g = g * scales[torch.randint(0, 6, shape, generator=generator)]
    return g


def relative(actual, expected):
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    assert actual.isfinite().all()
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-12)).item()


def gla_case(group, lengths, B, H, K, V, kind, dtype, gate_dtype, steps):
    """Largest relative error by tensor. ``lengths``: tokens of each rank."""
    worst = {}
    with allscan.Communicator(group) as comm:
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            total = sum(lengths)

            def normal(*shape, generator=generator):
                return torch.randn(shape, generator=generator)

            q, k, v = (normal(B, total, H, w).to(dtype) for w in (K, K, V))
            g = gates(kind, (B, total, H, K), generator).to(gate_dtype)
            do, dfinal = normal(B, total, H, V).to(dtype), normal(B, H, K, V)
            initial = normal(B, H, K, V)
            device = comm.device
            leaves = [x.double().to(device).requires_grad_() for x in (q, k, v, g, initial)]
            o, final = gla_reference(*leaves[:4], initial_state=leaves[4])
            ((o * do.double().to(device)).sum() + (final * dfinal.double().to(device)).sum()).backward()

            begin = sum(lengths[: comm.rank])
            mine = slice(begin, begin + lengths[comm.rank])
            own = [x[:, mine].to(device).requires_grad_() for x in (q, k, v, g)]
            own.append(initial.to(device).requires_grad_())
            own_o, own_final = allscan.zeco_gla(*own[:4], comm=comm, initial_state=own[4], output_final_state=True)
            loss = (own_o.float() * do[:, mine].float().to(device)).sum() + (own_final * dfinal.to(device)).sum()
            loss.backward()
            errors = {"o": relative(own_o, o[:, mine])}
            if comm.rank == comm.size - 1:
                errors["final_state"] = relative(own_final, final)
            else:
                assert not own_final.any()
            for name, leaf, reference in zip("qkvg", own, leaves):
                # -inf gates have no gradient worth the name
                expected = reference.grad[:, mine].nan_to_num()
                errors["d" + name] = relative(torch.where(leaf.isfinite(), leaf.grad, 0), expected)
            if comm.rank == 0:
                errors["dinitial_state"] = relative(own[4].grad, leaves[4].grad)
            else:
                assert not own[4].grad.any()
            worst = {name: max(value, worst.get(name, 0.0)) for name, value in errors.items()}
    return worst


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_gradients_and_values(run, size):
    lengths = [(40, 70, 16, 65, 1, 33, 64, 20)[rank] for rank in range(size)]
    for worst in run(size, gla_case, lengths, 1, 2, 16, 24, "mild", torch.float32, torch.float32, 1):
        assert max(worst.values()) < 1e-5, worst


@pytest.mark.parametrize("kind", ["weak", "strong", "zero", "mixed"])
def test_every_gate_is_exact(run, kind):
    for worst in run(2, gla_case, [66, 70], 2, 1, 32, 16, kind, torch.float32, torch.float32, 1):
        assert max(worst.values()) < 1e-5, (kind, worst)


@pytest.mark.parametrize("K, V", [(17, 5), (48, 80), (160, 33)])
def test_odd_widths(run, K, V):
    for worst in run(2, gla_case, [30, 35], 1, 1, K, V, "mild", torch.float32, torch.float32, 1):
        assert max(worst.values()) < 1e-5, worst


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs(run, dtype):
    for worst in run(2, gla_case, [40, 50], 1, 1, 32, 32, "mild", dtype, dtype, 1):
        assert max(worst.values()) < (4e-3 if dtype == torch.bfloat16 else 6e-4), worst


def bad_input_case(group):
    with allscan.Communicator(group) as comm:
        q = torch.zeros(1, 8, 2, 16, device=comm.device)
        v = torch.zeros(1, 8, 2, 8, device=comm.device)
        answers = [
            raised(allscan.zeco_gla, q, q, v, q.double(), comm=comm),
            raised(allscan.zeco_gla, q, q[:, :4], v, q, comm=comm),
            raised(allscan.zeco_gla, q, q, v, q, comm=comm, initial_state=q),
            raised(allscan.zeco_gla, q, q, v[..., :0], q, comm=comm),
            raised(allscan.zeco_gla, q, q, v, q, comm=comm, cu_seqlens=[0, 8]),
            raised(allscan.zeco_gla, q.bfloat16() if comm.rank else q, q.bfloat16() if comm.rank else q,
                   v.bfloat16() if comm.rank else v, q, comm=comm),
        ]  # fmt: skip
        return [name for name, _ in answers]


def test_bad_input_is_refused_on_every_rank(run):
    expected = ["TypeError", "ValueError", "ValueError", "ValueError", "NotImplementedError", "ValueError"]
    assert run(2, bad_input_case) == [expected] * 2
