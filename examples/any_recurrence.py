"""Sequence parallelism with allscan() for any operator that takes an initial state and returns a final state.

    python examples/any_recurrence.py             # on all GPUs, or on 4 CPU processes in Triton's interpreter
    torchrun --nproc-per-node 2 examples/any_recurrence.py  # with its ranks; on CPUs with TRITON_INTERPRET=1

Here the operator is a loop over tokens; replace it by your own kernels. allscan() needs the factor of an incoming state
over this rank's tokens: none (linear attention), a number per head (RetNet, simple GLA, Mamba2), a number per head and
row (GLA, RWKV6, HGRN2), or a matrix per head (Gated DeltaNet, KDA): the operator's final state from the identity. Only
the state is sent, the matrix stays. The operator runs twice, from zero and from this rank's incoming state; if its
output is linear in the state, it may add q S instead. Prints the largest differences to the unsplit sequence, of
outputs and gradients; above 1e-4 the exit status is 1.
"""

import sys

import torch
import torch.nn.functional as F

import allscan
from allscan.tools.ranks import launch

T, H, K, V = 48, 2, 16, 16  # tokens per rank, heads, widths


def operator(q, k, v, g, initial_state):
    """o_t = q_t S_t with S_t = exp(g_t) S_{t-1} + k_t^T v_t. q, k [T, H, K], v [T, H, V], g [T, H, K or 1]."""
    state = initial_state
    outputs = []
    for q_t, k_t, v_t, decay_t in zip(q, k, v, g.exp()):
        state = decay_t[..., None] * state + k_t[..., None] * v_t[..., None, :]
        outputs.append((q_t[..., None] * state).sum(-2))
    return torch.stack(outputs), state


def delta_rule(q, k, v, g, initial_state):
    """o_t = q_t S_t with S_t = exp(g_t) (1 - k_t^T k_t / 2) S_{t-1} + k_t^T v_t / 2, for k_t of length 1."""
    state = initial_state
    outputs = []
    for q_t, k_t, v_t, decay_t in zip(q, F.normalize(k, dim=-1), v, g.exp()):
        state = decay_t[..., None] * state
        seen = (k_t[..., None] * state).sum(-2)
        state = state + k_t[..., None] * (v_t - seen)[..., None, :] / 2
        outputs.append((q_t[..., None] * state).sum(-2))
    return torch.stack(outputs), state


def sequence_parallel(q, k, v, g, decay, comm):
    """Run ``operator`` on the whole sequence; each rank has a part of the tokens. decay: [H, K], [H] or None for 1."""
    _, left = operator(q, k, v, g, torch.zeros(H, K, V, device=q.device))
    prev = allscan.allscan(left, decay, comm=comm)
    o, _ = operator(q, k, v, g, prev)
    return o


def sequence_parallel_delta_rule(q, k, v, g, comm):
    _, left = delta_rule(q, k, v, g, torch.zeros(H, K, V, device=q.device))
    identity = torch.eye(K, device=q.device).expand(H, K, K)
    _, transition = delta_rule(q, k, torch.zeros_like(v), g, identity)  # possible since V = K here
    prev = allscan.allscan(left, comm=comm, transition=transition)
    o, _ = delta_rule(q, k, v, g, prev)
    return o


def gates(kind, tokens):
    """Return (g, function from a part of g to its decay)."""
    if kind == "linear attention":
        return torch.zeros(tokens, H, 1), lambda g: None
    if kind == "RetNet":
        rates = torch.log(1 - 2.0 ** -(5 + torch.arange(H)))
        return rates[:, None].expand(tokens, H, 1).contiguous(), lambda g: g.sum(0).squeeze(-1).exp()
    if kind in ("simple GLA, Mamba2", "Gated DeltaNet"):
        return F.logsigmoid(torch.randn(tokens, H, 1)), lambda g: g.sum(0).squeeze(-1).exp()
    return F.logsigmoid(torch.randn(tokens, H, K)), lambda g: g.sum(0).exp()


def compare(kind):
    with allscan.Communicator() as comm:
        torch.manual_seed(0)
        tokens = comm.size * T
        q, k, v = (torch.randn(tokens, H, width) for width in (K, K, V))
        g, decay_of = gates(kind, tokens)
        mine = slice(comm.rank * T, (comm.rank + 1) * T)

        whole = [x.to(comm.device).requires_grad_() for x in (q, k, v, g)]
        dense = kind in ("Gated DeltaNet", "KDA")
        expected, _ = (delta_rule if dense else operator)(*whole, torch.zeros(H, K, V, device=comm.device))
        expected.square().sum().backward()

        own = [x.detach()[mine].clone().requires_grad_() for x in whole]
        if dense:
            o = sequence_parallel_delta_rule(*own, comm)
        else:
            o = sequence_parallel(*own, decay_of(own[3]), comm)
        o.square().sum().backward()
        pairs = [(o, expected[mine])] + [(a.grad, b.grad[mine]) for a, b in zip(own, whole)]
        if kind == "linear attention":
            pairs.pop()  # its gates are no parameter
        return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def main(ranks) -> int:
    worst = 0.0
    for kind in ("linear attention", "RetNet", "simple GLA, Mamba2", "GLA, RWKV6, HGRN2", "Gated DeltaNet", "KDA"):
        difference = max(ranks.run(compare, kind))
        worst = max(worst, difference)
        print(f"{kind:20} {ranks.size} ranks against 1: {difference:.1e}", flush=True)
    return int(not worst < 1e-4)


if __name__ == "__main__":
    sys.exit(launch(main))
