"""The zigzag layout and back."""

from __future__ import annotations

import pytest
import torch

import allscan
from allscan.zigzag import from_zigzag, to_zigzag, zigzag_positions


def zigzag_case(group, T):
    with allscan.Communicator(group) as comm:
        P, rank = comm.size, comm.rank
        whole = torch.arange(2.0 * P * T * 3).reshape(2, P * T, 3).to(comm.device)
        own = whole[:, rank * T : (rank + 1) * T].clone().requires_grad_()
        pieces = whole.chunk(2 * P, 1)
        expected = torch.cat([pieces[rank], pieces[2 * P - 1 - rank]], 1)
        moved = to_zigzag(own, comm=comm)
        assert torch.equal(moved, expected)
        assert torch.equal(moved, whole[:, zigzag_positions(T, comm=comm)])
        (moved * expected).sum().backward()  # the gradient of a token is what it met there: itself
        assert torch.equal(own.grad, own.detach())
        assert torch.equal(from_zigzag(moved, comm=comm), own)
        with pytest.raises(ValueError, match="even number of tokens"):
            to_zigzag(own[:, 1:], comm=comm)
        with pytest.raises(ValueError, match="T must be even"):
            zigzag_positions(T + 1, comm=comm)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("T", [2, 6])
def test_there_and_back(run, size, T):
    run(size, zigzag_case, T)
