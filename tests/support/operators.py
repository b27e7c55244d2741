"""An operator over ranks against its reference in float64 over the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

from support.values import error, place

LAYOUTS = "contiguous", "zigzag", "documents"


class Operator(NamedTuple):
    call: Callable  # (**arguments, comm, cu_seqlens, layout, per_document) -> (outputs, final states)
    reference: Callable
    of_tokens: tuple[str, ...]  # arguments with a dimension of tokens; outputs have the dtype of the first


class Split(NamedTuple):
    tokens: list[int]  # of each rank
    lengths: list[int] | None = None  # cu_seqlens
    layout: str = "contiguous"  # "documents": zigzag, each document sharded

    @property
    def sequences(self) -> int | None:
        return None if self.lengths is None else len(self.lengths) - 1


def random_split(draw, size: int) -> tuple[Split, int, int]:
    """Draw (split, batch, number of sequences)."""
    layout = draw.choice(LAYOUTS)
    packed = layout == "documents" or draw.random() < 0.5
    if layout == "documents":
        steps = [draw.choice([0, 1, 3, 20]) for _ in range(3)] + [3]
        lengths = [2 * size * sum(steps[:i]) for i in range(len(steps) + 1)]
        split = Split([lengths[-1] // size] * size, lengths, layout)
    else:
        tokens = [draw.choice([0, 1, 40, 150]) for _ in range(size - 1)] + [65]
        tokens = [draw.choice([2, 40, 132])] * size if layout == "zigzag" else tokens
        total = sum(tokens)
        inner = sorted(draw.randint(0, total) for _ in range(3))
        split = Split(tokens, [0, *inner, total] if packed else None, layout)
    batch = 1 if packed else draw.choice([1, 2])
    return split, batch, split.sequences or batch


def compared(operator: Operator, comm, split: Split, given, grads, where=None, **options) -> dict[str, float]:
    """Return errors of outputs, final states and the gradient of each argument. given: {name: argument of the whole
    sequence}; grads: gradients of outputs and final states; where: options of the ranks' call alone."""
    documents = split.lengths if split.layout == "documents" else None
    mine = place(comm, split.tokens, split.layout != "contiguous", documents)
    exact = {name: x.double().requires_grad_() for name, x in given.items()}
    o, final = operator.reference(**exact, **options, cu_seqlens=split.lengths)
    do, dfinal = grads
    ((o * do).sum() + (final * dfinal).sum() + sum(0.0 * x.sum() for x in exact.values())).backward()
    own = {name: x[:, mine] if name in operator.of_tokens else x for name, x in given.items()}
    own = {name: x.to(comm.device).requires_grad_() for name, x in own.items()}
    own_o, own_final = operator.call(
        **own,
        **options,
        **(where or {}),
        comm=comm,
        cu_seqlens=split.lengths,
        layout="contiguous" if split.layout == "contiguous" else "zigzag",
        per_document=documents is not None,
    )
    assert own_o.dtype == given[operator.of_tokens[0]].dtype
    ((own_o.float() * do[:, mine].to(comm.device)).sum() + (own_final * dfinal.to(comm.device)).sum()).backward()
    errors, shared = {"o": error(own_o, o[:, mine])}, {"final": own_final.detach()}
    for name, x in own.items():
        if name in operator.of_tokens:  # over all ranks' largest value: a rank's may be tiny behind strong decays
            difference = (x.grad.double().cpu() - exact[name].grad[:, mine]).abs()
            errors[name] = (
                (difference.max() / exact[name].grad.abs().max().clamp_min(1e-30)).item() if x.numel() else 0.0
            )
        else:
            shared[name] = x.grad.float()
    for name, x in shared.items():
        dist.all_reduce(x, group=comm.group)
        errors[name] = error(x, final if name == "final" else exact[name].grad)
    return errors
