"""zeco_gla over ranks that share one GPU, in one process: tests first, middle and last ranks with few GPUs."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
import triton.language as tl

import allscan
from allscan.base.tiling import scan_num_warps
from allscan.bindings.triton_compat import OPTIONS
from allscan.launch.compiled_kernel import prefer_shared_memory_carveout
from allscan.ops.carrier import register
from allscan.ops.gla import GLA
from allscan.ops.operator import Asked
from allscan.shmem_kernels.scan import scan_kernel
from support.gla import BF16, LIMIT, GLACase, Whole, errors_of_part
from support.values import place
from support.virtual import VirtualRanks


class Seat:
    """The StateCarrier of one virtual rank; its communicator has that rank's number."""

    def __init__(self, group, ranks: VirtualRanks, rank: int, scan_us: float) -> None:
        self.comm, self.handle = allscan.Communicator(group), register(self)
        self.comm.rank, self.comm.size = rank, ranks.size
        self._ranks, self._scan_us = ranks, scan_us
        self.stream = self.comm.streams.side
        self.queue = ranks.ranks[rank].stream  # stream of this rank's calls

    def get_or_create_scan(self, shape, agree=None, problem=None, *, first_call_only=False):
        assert problem is None
        self.comm.agreed.arguments.remember((shape, agree))

    def neighbours(self, shape, zigzag):
        return self.comm.rank > 0, self.comm.rank < self.comm.size - 1

    def expected_us(self, words, zigzag):
        return self._scan_us

    def pending(self, prepared, zigzag):
        return []

    def record(self, plan, carried, reverse, zigzag):
        ranks = self._ranks
        channel = ranks.channels[self.comm.rank][reverse]._replace(ADJOINT=tl.constexpr(reverse))
        options = dict(stride_g=ranks.K, stride_k=1, K=ranks.K, V=ranks.V)

        def scan(_, state, decay, out, fwd_epoch):
            compiled = scan_kernel[(ranks.programs,)](
                state,
                decay,
                state,
                out,
                channel._replace(fwd_epoch=fwd_epoch),
                **options,
                HAS_DECAY=True,
                HAS_INITIAL=False,
                NEIGHBOUR_SHIFT=False,
                num_warps=scan_num_warps(ranks.spec.tile),
                **OPTIONS,
            )
            if state.is_cuda:
                prefer_shared_memory_carveout(compiled)

        plan.call_python(scan, carried.state, carried.decay, carried.out, carried.fwd_epoch)

    def close(self):
        self.comm.rank, self.comm.size = 0, 1
        self.comm.close()


def virtual_case(group, case, scan_us, rounds):
    """Return relative errors of each rank, and how many tensors of later rounds differ from the first round's."""
    tokens, chance = case.tokens, random.Random(0)
    size = len(tokens)
    ranks = VirtualRanks(size, (case.H, case.K, case.V), programs=8)
    with contextlib.ExitStack() as stack:
        seats = [Seat(group, ranks, r, scan_us) for r in range(size)]
        for seat in seats:
            stack.callback(seat.close)
        whole = Whole(case, ranks.device)
        parts = [place(seat.comm, tokens) for seat in seats]
        rounds_found = []
        for i in range(rounds):
            backwards = []
            for seat, mine in zip(seats, parts):
                first_token = None if case.lengths is None else sum(tokens[: seat.comm.rank])

                def call(*x, comm, initial_state, seat=seat, first_token=first_token, **options):
                    asked = Asked(**options, first_token=first_token, recompute=case.recompute)
                    return GLA.run(seat.comm, "zeco_gla", (*x, initial_state), asked, seat)

                with torch.cuda.stream(seat.queue) if seat.queue else contextlib.nullcontext():
                    if seat.queue and i and chance.random() < 0.3:
                        torch.cuda._sleep(chance.randrange(1_000_000))  # up to half a millisecond
                    backwards.append((seat, whole.forward(seat.comm, mine, call)))
            found = []
            for seat, backward in reversed(backwards):
                with torch.cuda.stream(seat.queue) if seat.queue else contextlib.nullcontext():
                    found.insert(0, backward())
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            rounds_found.append(found)
        ranks.check()
        expected = whole.reference()
        answers = [
            errors_of_part(whole, expected, actual, r, tokens, mine)
            for r, (actual, mine) in enumerate(zip(rounds_found[0], parts))
        ]
        pairs = [(a, b) for found in rounds_found[1:] for x, y in zip(rounds_found[0], found) for a, b in zip(x, y)]
        return answers, sum(not torch.equal(a, b) for a, b in pairs)


@pytest.mark.slow(but=("case0", "case1-0.0-T", "case3-0.0-False"))
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("scan_us", [0.0, 1e6])  # overlaps: forward saves nothing, or q_in and A
@pytest.mark.parametrize(
    "case",
    [
        GLACase([70, 130], H=2, K=32),
        GLACase([64, 33, 100, 70], H=2, V=32, gates="zero"),
        GLACase([70, 40, 129], H=2, K=24, gates="mixed"),
        GLACase([40, 70, 10, 50], H=2, lengths=[0, 13, 39, 125, 126, 170]),
        GLACase([100, 80, 70], H=2, K=32, V=32, dtype=BF16),
        pytest.param(GLACase([2048, 1000, 4096, 1500], H=2, K=128, V=128, dtype=BF16), marks=pytest.mark.gpu),
    ],
)
def test_ranks_that_share_a_device(run, case, scan_us, recompute):
    rounds = 12 if torch.cuda.is_available() else 2
    [(answers, different)] = run(1, virtual_case, case._replace(recompute=recompute), scan_us, rounds)
    assert len(answers) == len(case.tokens) and not different
    for errors in answers:
        assert max(errors.values()) < LIMIT[case.dtype], errors
