"""zeco_ssd against the token-by-token recurrence in float64 over the global sequence."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import allscan
from allscan.reference import ssd_reference
from support.values import error, place, raised

TOKENS = {1: [47], 2: [33, 18], 3: [21, 10, 15]}  # of each rank
EVEN = {1: [48], 2: [34, 18], 3: [22, 10, 16]}  # for the zigzag layout
CUTS = [0, 0, 5, 6, 21, 21, 30, 33, 45]  # empty ones, one at a rank's boundary, and one to the end
H, G, P, N, CHUNK = 4, 2, 6, 10, 8
OPTIONS = dict(dt_softplus=True, dt_limit=(0.0, 1.5))
NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")


def drawn(tokens, batch, sequences, strong=False):
    """Return all arguments, and the gradients of outputs and final states."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    A = -torch.rand(H, generator=generator) * (60 if strong else 1)
    A[0] = 0.0
    given = dict(
        x=normal(batch, tokens, H, P),
        dt=normal(batch, tokens, H),
        A=A,
        B=normal(batch, tokens, G, N),
        C=normal(batch, tokens, G, N),
        D=normal(H),
        z=normal(batch, tokens, H, P),
        dt_bias=normal(H),
        initial_states=normal(sequences, H, P, N),
    )
    return given, normal(batch, tokens, H, P), normal(sequences, H, P, N)


def case(group, tokens, cuts, layout, strong):
    """Return errors of y, final states and each gradient."""
    with allscan.Communicator(group) as comm:
        total, errors = sum(tokens), {}
        lengths = None if cuts is None else [*(c for c in CUTS if c < total), total]
        if layout == "documents":
            lengths = [2 * comm.size * i for i in (0, 1, 1, 4, 5, total // (2 * comm.size))]
        given, dy, dfinal = drawn(total, 1 if cuts else 2, len(lengths) - 1 if cuts else 2, strong)
        exact = {name: t.double().requires_grad_() for name, t in given.items()}
        y, final = ssd_reference(**exact, **OPTIONS, cu_seqlens=lengths)
        ((y * dy).sum() + (final * dfinal).sum() + sum(0.0 * t.sum() for t in exact.values())).backward()

        documents = lengths if layout == "documents" else None
        mine = place(comm, tokens, layout == "zigzag", documents)
        cut = {name: t[:, mine] if name in ("x", "dt", "B", "C", "z") else t for name, t in given.items()}
        cut = {name: t.to(comm.device).requires_grad_() for name, t in cut.items()}
        where = {} if cuts != "given" else dict(first_token=sum(tokens[: comm.rank]))
        own_y, own_final = allscan.zeco_ssd(
            chunk_size=CHUNK,
            comm=comm,
            **cut,
            **OPTIONS,
            cu_seqlens=lengths,
            return_final_states=True,
            layout="contiguous" if layout == "contiguous" else "zigzag",
            per_document=documents is not None,
            **where,
        )
        ((own_y * dy[:, mine].to(comm.device)).sum() + (own_final * dfinal.to(comm.device)).sum()).backward()
        errors["y"] = error(own_y, y[:, mine])
        shared = {"final": own_final.detach()}
        for name, t in cut.items():
            if t.shape == given[name].shape and name in ("A", "D", "dt_bias", "initial_states"):
                shared[name] = t.grad
            else:
                errors[name] = error(t.grad, exact[name].grad[:, mine])
        for name, t in shared.items():
            dist.all_reduce(t, group=comm.group)
            errors[name] = error(t, final if name == "final" else exact[name].grad)
        return errors


@pytest.mark.slow(but=("1-given", "1-None-zigzag", "2-asked", "3-None-contiguous"))
@pytest.mark.quick("2-asked-contiguous")
@pytest.mark.parametrize(
    "cuts, layout",
    [
        (None, "contiguous"),
        ("asked", "contiguous"),
        ("given", "contiguous"),
        (None, "zigzag"),
        ("asked", "zigzag"),
        ("asked", "documents"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.kernels
def test_values_and_gradients(run, size, cuts, layout):
    tokens = {"zigzag": EVEN[size], "contiguous": TOKENS[size], "documents": [16] * size}[layout]
    for errors in run(size, case, tokens, cuts, layout, strong=False):
        assert set(errors) == {"y", "final", *NAMES} and max(errors.values()) < 1e-5, errors


def test_decays_that_leave_nothing(run, size=2):
    for errors in run(size, case, TOKENS[size], cuts="asked", layout="contiguous", strong=True):
        assert max(errors.values()) < 1e-5, errors


def of_initial_states_case(group, tokens, layout):
    """Return the difference of the initial states' gradient, computed alone, to that with the other gradients. Only the
    first token's rank needs the scan for it."""
    with allscan.Communicator(group, timeout=60) as comm:
        given, *_ = drawn(sum(tokens), 2, 2)
        mine = place(comm, tokens, layout == "zigzag")
        cut = {name: t[:, mine] if name in ("x", "dt", "B", "C", "z") else t for name, t in given.items()}
        cut = {name: t.to(comm.device).requires_grad_() for name, t in cut.items()}
        y = allscan.zeco_ssd(chunk_size=CHUNK, comm=comm, **cut, **OPTIONS, layout=layout)
        (alone,) = torch.autograd.grad(y.sum(), [cut["initial_states"]], retain_graph=True)
        y.sum().backward()
        return error(alone, cut["initial_states"].grad)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_the_gradient_of_initial_states_alone(run, layout, size=2):
    assert max(run(size, of_initial_states_case, EVEN[size], layout)) == 0.0


def half_precision_case(group, tokens):
    with allscan.Communicator(group) as comm:
        given, *_ = drawn(sum(tokens), 1, 1)
        mine = place(comm, tokens)
        given = {name: t.bfloat16() if name in ("x", "dt", "B", "C", "z") else t for name, t in given.items()}
        expected, _ = ssd_reference(**given, **OPTIONS)
        cut = {name: t[:, mine] if name in ("x", "dt", "B", "C", "z") else t for name, t in given.items()}
        y = allscan.zeco_ssd(chunk_size=CHUNK, comm=comm, **{k: t.to(comm.device) for k, t in cut.items()}, **OPTIONS)
        return str(y.dtype), error(y, expected[:, mine])


def test_bfloat16(run, size=2):
    """Computed in float32, rounded once."""
    for dtype, difference in run(size, half_precision_case, TOKENS[size]):
        assert dtype == "torch.bfloat16" and difference < 2**-8


WRONG = {
    "x must be bfloat16, float16 or float32": dict(x=torch.zeros(1, 4, H, P, dtype=torch.float64)),
    "float32, got torch.float8": dict(B=torch.zeros(1, 4, G, N).to(torch.float8_e4m3fn)),
    "x must be [B, T, H, P]": dict(x=torch.zeros(4, H, P)),
    "must be a multiple of the 3 groups": dict(B=torch.zeros(1, 4, 3, N)),
    "dt must be [1, 4, 4]": dict(dt=torch.zeros(1, 4, 2)),
    "D must be": dict(D=torch.zeros(3)),
    "A must be at most 0": dict(A=torch.ones(H)),
    "chunk_size must be at least 1": dict(chunk_size=0),
    "dt_limit must be": dict(dt_limit=(-1.0, 1.0)),
    "layout must be": dict(layout="other"),
    "requires an even T": dict(
        layout="zigzag",
        x=torch.zeros(1, 3, H, P),
        dt=torch.zeros(1, 3, H),
        B=torch.zeros(1, 3, G, N),
        C=torch.zeros(1, 3, G, N),
        z=None,
    ),
    "initial_states must have shape": dict(initial_states=torch.zeros(2, H, P, N)),
    "cu_seqlens must rise": dict(cu_seqlens=[0, 3], initial_states=None),
}


def wrong_case(group):
    """Return errors where only the last rank has a wrong argument, at a first call."""
    found, given = {}, {"chunk_size": CHUNK, **drawn(4, 1, 1)[0]}
    for text, wrong in WRONG.items():
        with allscan.Communicator(group, timeout=60) as comm:
            # cu_seqlens may differ between ranks, and all ranks compare it
            own = {**given, **(wrong if comm.rank == comm.size - 1 or "cu_seqlens" in wrong else {})}
            found[text] = raised(allscan.zeco_ssd, comm=comm, **own)
    return found


@pytest.mark.cpu
def test_all_ranks_hear_of_what_is_wrong(run, size=2):
    for found in run(size, wrong_case):
        for text, answer in found.items():
            assert answer is not None and answer[0] in ("TypeError", "ValueError") and text in answer[1], answer
