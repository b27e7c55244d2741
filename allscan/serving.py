"""Prefill of a server's requests over several ranks, with the states in the slots of the server's pool.

A batch is a row of packed requests, of which each rank has consecutive tokens. Every rank has a pool of its own, and
after a call the pools of all ranks have the same states, so that any rank can decode any request.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from .base.checks import check_tensor, zigzag_of
from .bindings.triton_compat import OPTIONS
from .comm.communicator import Communicator, check_communicator
from .launch.compiled_kernel import dynamo_disabled
from .ops.allscan import allscan, final_of_all
from .ops.delta import zeco_gated_delta_rule, zeco_kda
from .ops.gla import zeco_gla
from .ops.halo import halo
from .ops.ssd import zeco_simple_gla, zeco_ssd
from .shmem_kernels.slots import copy_slots_kernel
from .tokens.packing import CUTS, DeviceBoundaries, Tables, boundaries_on_host, even_cut, own_boundaries
from .tokens.partition import cached_table, partition_start

OPERATORS: dict[Any, tuple[str, str]] = {  # names of two arguments: the initial states, whether to return final ones
    operator: ("initial_state", "output_final_state")
    for operator in (zeco_gla, zeco_gated_delta_rule, zeco_kda, zeco_simple_gla)
}
OPERATORS[zeco_ssd] = "initial_states", "return_final_states"
DTYPES = torch.float32, torch.bfloat16, torch.float16  # of a pool


@dynamo_disabled
@torch.no_grad()
def prefill(
    operator: Callable[..., Any],
    *tensors: Any,
    comm: Communicator,
    pool: Tensor,
    slots: Tensor | Sequence[int],
    query_start_loc: Tensor | Sequence[int],
    has_initial_state: Tensor | Sequence[bool] | None = None,
    state_v_first: bool = False,
    on_device: bool = False,
    cut: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Run an operator over a batch of requests whose tokens are sharded across the ranks. Initial states are read from
    the slots of a pool, and final states are written there, on every rank. Inference only.

    A request may begin or continue, have any number of tokens, also fewer than there are ranks, and none: then its
    state does not change; it is zero if the request begins. All ranks call it with the same requests in the same order.
    torch.compile does not trace it (a graph break).

    Args:
        operator: ``allscan.zeco_gla``, ``zeco_gated_delta_rule``, ``zeco_kda``, ``zeco_simple_gla`` or ``zeco_ssd``.
        tensors: its positional arguments, [1, T, ...] of this rank's T tokens: q, k, v, g, beta for a delta rule.
        comm: the communicator.
        pool: [num_slots, H, K, V], the states by slot, float32, bfloat16 or float16, on the communicator's device, with
            any strides but 0. For zeco_ssd [num_slots, H, P, N]. The computation is in float32; a pool of another dtype
            rounds the states between two calls.
        slots: [N] integers, the slot of each request, on this rank: each slot at most once. A negative one stands for
            no slot: the request begins with zeros, and its state is not kept. A slot on the CPU is checked before
            anything is launched, one on the GPU by a kernel, which reads and writes nothing outside of the pool:
            ``comm.check()`` and later calls then raise ValueError.
        query_start_loc: [N + 1] integers rising from 0 to the number of tokens of all ranks: ``cu_seqlens`` of the
            operator, equal on all ranks. A tensor on the GPU is read, which synchronizes.
        has_initial_state: [N] booleans, equal on all ranks (compared in debug mode): whether the request continues. A
            request that begins reads zeros, whatever its slot holds. None: all slots are read.
        state_v_first: whether the pool is [num_slots, H, V, K]; not for zeco_ssd.
        on_device: whether only kernels read query_start_loc, on the communicator's device, so that one CUDA graph
            serves all lengths of N requests (empty ones among them) in T rows on each rank; with zeco_kda and
            zeco_gated_delta_rule, contiguous, without first_token, invariant and chunk="fla". All ranks have the same
            T. Rows behind a rank's tokens are padding: any numbers with gates of at most 0, and 0 in o. Lengths that
            are wrong raise ValueError at ``comm.check()`` and in later calls; those that differ between ranks
            AllScanOutOfStep.
        cut: with on_device [P + 1] integers on the device, equal on all ranks: rank r has tokens cut[r] ..
            cut[r + 1] - 1 in its first rows. None: tokens r T .. (r + 1) T - 1.
        options: those of the operator; ``first_token``, so that a new query_start_loc needs no exchange on the host,
            ``layout``, ``scale``, ``invariant`` and so on.

    Returns:
        o, the operator's output for this rank's tokens.

    Raises:
        TypeError, ValueError: wrong arguments, before anything is launched on this rank. The other ranks raise
            AllScanRejected or AllScanTimeout, with this rank's message.
        RuntimeError: and the other errors of the operator. After an error pools may differ between ranks in the slots
            of these requests, which must begin again.

    Example:
        >>> o = allscan.serving.prefill(allscan.zeco_kda, q, k, v, g, beta, comm=comm, pool=pool, slots=slots,
        ...                             query_start_loc=[0, 8192, 8200], has_initial_state=[True, False])
    """
    check_communicator(comm)
    with comm.call(False, "serving.prefill()", tensors):  # whatever raises on this rank, the other ranks hear of it
        if operator not in OPERATORS:
            names = ", ".join(f"allscan.{known.__name__}" for known in OPERATORS)
            raise ValueError(f"operator must be one of {names}, got {getattr(operator, '__name__', operator)!r}")
        initial, final = OPERATORS[operator]
        if given := {initial, final, "cu_seqlens", "per_document"} & options.keys():
            raise TypeError(f"prefill() takes {', '.join(sorted(given))} from the pool and query_start_loc")
        if state_v_first and operator is zeco_ssd:
            raise ValueError("state_v_first is not for zeco_ssd: its pool is [num_slots, H, P, N]")
        _check_pool(comm, pool, 4)
        if on_device and (operator not in (zeco_kda, zeco_gated_delta_rule) or comm.invariant):
            raise ValueError("on_device=True is for zeco_kda and zeco_gated_delta_rule, without invariant")
        given = options.keys() & {"first_token", "layout", "invariant", "chunk"}
        boundaries = _boundaries(comm, query_start_loc, on_device, cut, given)
        requests = _Requests(comm, pool.mT if state_v_first else pool, slots, boundaries, has_initial_state)
        taken = {initial: requests.read(), final: "all", "cu_seqlens": boundaries}
        o, finals = operator(*tensors, comm=comm, **taken, **options)
        requests.write(finals)
    return o


@dynamo_disabled
@torch.no_grad()
def convolve(
    conv: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    comm: Communicator,
    pool: Tensor,
    slots: Tensor | Sequence[int],
    query_start_loc: Tensor | Sequence[int],
    has_initial_state: Tensor | Sequence[bool] | None = None,
    first_token: int | None = None,
    layout: str = "contiguous",
    on_device: bool = False,
    cut: Tensor | None = None,
) -> Tensor:
    """Run a short causal convolution over a batch of requests whose tokens are sharded across the ranks. The n tokens
    before a request are read from the slots of a pool, and its last n tokens are written there, on every rank.

    Args:
        conv: a function of a row [1, tokens, C] to [1, tokens, C'], whose output for a token depends on that token and
            the n before it: for example a depthwise convolution with n + 1 weights and an activation.
        x: [1, T, C], this rank's tokens, any float dtype of at most 32 bits.
        comm: the communicator.
        pool: [num_slots, C, n], with any strides but 0; n at least 1.
        slots, query_start_loc, has_initial_state: as in ``prefill``.
        first_token, layout: as in ``allscan.zeco_gla``.
        on_device, cut: as in ``prefill``, for the contiguous layout without first_token. Lengths that are wrong or
            differ between ranks are not found here, but in a layer's ``prefill``.

    Returns:
        [1, T, C'], the outputs of this rank's tokens.

    Raises:
        TypeError, ValueError, RuntimeError: as ``prefill``.

    Example:
        >>> conv = lambda x: F.silu(F.conv1d(x.mT, weight, bias, padding=n, groups=C)[..., :-n].mT)
        >>> y = allscan.serving.convolve(conv, x, comm=comm, pool=pool, slots=slots, query_start_loc=[0, 8192, 8200])
    """
    check_communicator(comm)
    with comm.call(False, "serving.convolve()", (x,)):
        _check_pool(comm, pool, 3)
        C, n = pool.shape[1:]
        check_tensor("x", x, None, comm.device, None)
        if x.ndim != 3 or x.shape[::2] != (1, C):
            raise ValueError(f"x must be [1, T, {C}], as the pool is {list(pool.shape)}, got {list(x.shape)}")
        given = {
            name for name, x in (("first_token", first_token), ("layout", layout)) if x not in (None, "contiguous")
        }
        boundaries = _boundaries(comm, query_start_loc, on_device, cut, given)
        requests = _Requests(comm, pool[:, None].mT, slots, boundaries, has_initial_state)
        if isinstance(boundaries, DeviceBoundaries):
            y, states = _convolve_on_device(conv, x, requests.read(), comm, boundaries)
            requests.write(states)
            return y
        zigzag = zigzag_of(layout, False, query_start_loc)
        lengths, T = requests.lengths, x.shape[1]
        where: dict[str, Any] = dict(cu_seqlens=query_start_loc, first_token=first_token, layout=layout)
        after = halo(x, n, comm=comm, **where).unflatten(1, (-1, n))
        first = partition_start(comm, lengths, T, first_token, zigzag)
        key = "serving", n, lengths, T, first, zigzag
        tables = cached_table(comm, key, lambda: _Windows(lengths, T, first, n, zigzag, comm))
        states = requests.read()  # [N, 1, n, C]
        finals = torch.zeros_like(states)
        if not tables.pieces:
            y = conv(x.new_zeros(1, n + 1, C))[:, :0]
        else:
            windows = F.pad(states[:, 0], (0, 0, 0, 1)).to(x.dtype)[tables.sequences[:, None], tables.columns]
            windows = windows.index_add(0, tables.heads, after[0, tables.halves])
            row = torch.cat([windows.flatten(0, 1), x[0]])[tables.row]
            y = conv(row[None])[:, tables.outputs]
            finals[tables.ended, 0] = row[tables.tails].float()
        y, finals = final_of_all(y, finals, comm, True, bool(zigzag))
        requests.write(torch.where(tables.empty[:, None, None, None], states, finals))
    return y


def _check_pool(comm: Communicator, pool: Any, dims: int) -> None:
    check_tensor("pool", pool, None, comm.device, None)
    if pool.dtype not in DTYPES:
        raise TypeError(f"pool must be float32, bfloat16 or float16, got {pool.dtype}")
    if pool.ndim != dims or not pool.numel():
        raise ValueError(f"pool must have {dims} dimensions, none of them empty, got {list(pool.shape)}")
    if pool.is_neg() or any(not stride and size > 1 for stride, size in zip(pool.stride(), pool.shape, strict=True)):
        raise ValueError("pool must be written to: it must be neither expanded nor a negated view")


def _boundaries(comm: Communicator, boundaries: Any, on_device: bool, cut: Any, given: Iterable[str]) -> Any:
    """query_start_loc as operators take it, after the checks for ``on_device``. given: arguments that exclude it."""
    if not on_device:
        if cut is not None:
            raise ValueError("cut requires on_device=True")
        return boundaries
    if names := ", ".join(sorted(given)):
        raise TypeError(f"on_device=True does not support {names}")
    for name, x, shape in ("query_start_loc", boundaries, None), ("cut", cut, (comm.size + 1,)):
        if x is None and shape is not None:
            continue
        check_tensor(name, x, shape, comm.device, None)
        if x.dtype not in (torch.int32, torch.int64) or x.ndim != 1 or len(x) < 2:
            raise ValueError(f"{name} must be [.. + 1] int32 or int64, got {list(x.shape)} {x.dtype}")
    step = torch.empty(1, dtype=torch.int64, device=comm.device)
    return DeviceBoundaries(boundaries.contiguous(), None if cut is None else cut.contiguous(), step)


def _convolve_on_device(
    conv: Callable[[Tensor], Tensor], x: Tensor, states: Tensor, comm: Communicator, boundaries: DeviceBoundaries
) -> tuple[Tensor, Tensor]:
    """``convolve`` without lengths on the host: (its outputs, the states behind it). states: [N, 1, n, C] float32.

    The row has, for each request, the n tokens before those that this rank has of it, and these; then the padding."""
    (T, C), (N, _, n, _) = x.shape[1:], states.shape
    if not T:
        raise ValueError("on_device=True requires rows on each rank, got T = 0")
    starts = boundaries.boundaries.long()
    cut = even_cut(comm.size, T, comm.device) if boundaries.cut is None else boundaries.cut.long()
    cut = torch.minimum(cut.clamp(min=0), starts[-1])
    begin, end = cut[comm.rank], cut[comm.rank + 1]
    count = (end - begin).clamp(0, T)
    i, k, r = (torch.arange(size, device=comm.device) for size in (T, n, N))

    # the n tokens before this rank's, which several ranks may have
    tails = torch.zeros(comm.size, n, C, device=comm.device)
    tails[comm.rank] = x[0, (count - n + k).clamp(0, T - 1)].float()
    tails = allscan(tails, comm=comm)
    before = begin - n + k
    owner = (torch.searchsorted(cut, before, right=True) - 1).clamp(0, comm.size - 1)
    halo = tails[owner, (before - cut[owner + 1] + n).clamp(0, n - 1)]

    passed = (begin - starts[:-1, None]).clamp(min=0)  # tokens of each request before this rank's
    old = states[:, 0].gather(1, (k + passed).clamp(max=n - 1)[..., None].expand(-1, -1, C))
    windows = torch.where((k >= n - passed)[..., None], halo, old)
    heads, ends = (torch.minimum((y - begin).clamp(min=0), count)[:, None] for y in (starts[:-1], starts[1:]))
    request = (torch.searchsorted(starts, begin + i, right=True) - 1).clamp(0, N - 1)
    place = i + n * (torch.where(i < count, request, N - 1) + 1)
    row = x.new_zeros(T + N * n, C)
    row[place] = x[0]
    row[heads + n * r[:, None] + k] = windows.to(x.dtype)
    y = conv(row[None])[:, place]
    y = torch.where((i < count)[:, None], y, 0)

    empty = starts[1:] == starts[:-1]
    ended = ~empty & (starts[1:] > begin) & (starts[1:] <= end)
    finals = torch.where(ended[:, None, None], row[ends + n * r[:, None] + k].float(), 0)
    y, finals = final_of_all(y, finals[:, None], comm, True, False)
    return y, torch.where(empty[:, None, None, None], states, finals)


def _one_of_each(name: str, x: Any, n: int) -> Tensor:
    """slots or has_initial_state as a tensor, after its checks."""
    kind = f"{n} signed integers" if name == "slots" else f"{n} booleans"
    try:
        x = x if isinstance(x, Tensor) else torch.as_tensor(x, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be {kind}: {error}") from error
    signed = x.dtype.is_signed or name != "slots"
    if x.shape != (n,) or x.is_floating_point() or x.is_complex() or not signed:
        raise ValueError(f"{name} must be {kind}, got {x.dtype} {list(x.shape)}")
    return x


class _Requests:
    """The requests of a batch. pool: [num_slots, H, R, C], any strides."""

    def __init__(self, comm: Communicator, pool: Tensor, slots: Any, query_start_loc: Any, begun: Any) -> None:
        self.comm, self.pool = comm, pool
        on_device = isinstance(query_start_loc, DeviceBoundaries)
        if not on_device:
            self.lengths = boundaries_on_host(own_boundaries(query_start_loc))
        n = query_start_loc.shape[0] - 1 if on_device else len(self.lengths) - 1
        slots = _one_of_each("slots", slots, n)
        if begun is None:
            begun = torch.ones(n, dtype=torch.int8, device=comm.device)
        else:
            begun = (_one_of_each("has_initial_state", begun, n) != 0).to(torch.int8)
        debug = comm.debug and not comm.streams.capturing()
        if slots.device.type == "cpu" or debug:
            used = [slot for slot in slots.tolist() if slot >= 0]
            if len({*used}) < len(used):
                raise ValueError(f"slots must be distinct, got {used}")
            if used and max(used) >= len(pool):
                raise ValueError(f"slots must be below {len(pool)}, the number of slots of the pool, got {used}")
        if debug:
            read = tuple(bool(x) and slot >= 0 for x, slot in zip(begun.tolist(), slots.tolist(), strict=True))
            fields: list[tuple[str, object]] = [("has_initial_state, False without a slot", read)]
            if on_device:
                values = [None if x is None else tuple(x.tolist()) for x in query_start_loc[:2]]
                fields += zip(("query_start_loc", "cut"), values, strict=True)
            comm.order.agree((*fields,), None, "a batch, in debug mode")
        # a copy of slots on the CPU: the caller may write to pinned memory before the GPU has read it
        self.slots = (slots.contiguous() if slots.is_cuda else slots.clone()).to(comm.device, non_blocking=True)
        self.begun = begun.to(comm.device, non_blocking=True)

    def read(self) -> Tensor:
        """The requests' states before this batch, [N, H, R, C] float32; zeros for those that begin."""
        states = self.pool.new_empty(len(self.slots), *self.pool.shape[1:], dtype=torch.float32)
        self._copy(states, False)
        return states

    def write(self, states: Tensor) -> None:
        """Write states [N, H, R, C] into the pool."""
        self._copy(states.contiguous(), True)

    def _copy(self, states: Tensor, write: bool) -> None:
        N, H, R, C = states.shape
        BN, BR, BC = map(triton.next_power_of_2, (N, min(R, 32), min(C, 64)))
        blocks, memory = dict(R=R, C=C, WRITE=write, BN=BN, BR=BR, BC=BC), self.comm.memory
        numbers = len(self.pool), *self.pool.stride(), N, H
        tensors = self.pool, states, self.slots, self.begun, memory.fault, memory.record
        with torch.cuda.device_of(states):  # Triton launches on the current device
            copy_slots_kernel[(N * H, triton.cdiv(R, BR))](*tensors, *numbers, **blocks, **OPTIONS)


class _Windows(Tables):
    """Tables for ``convolve`` over the pieces of requests on this rank: a row with the n tokens before each piece.

    pieces: their number, without empty ones. Of each piece, in order: ``sequences``, its request; ``columns`` [pieces,
    n], those of a request's state, n + 1 wide with a zero at its end, that precede the piece. ``heads``: the pieces
    that continue on this rank, at the beginning of its ``halves``. row: the numbers of the row's tokens among the
    windows and the rank's tokens. outputs: the places of the rank's tokens in the row. ended: requests that end on this
    rank; tails: the places of their last n tokens. empty: whether each request has no tokens.
    """

    def __init__(self, lengths: Sequence[int], T: int, first: int, n: int, zigzag: int, comm: Communicator) -> None:
        cut = [p for p in CUTS[zigzag](lengths, first, T, comm.rank == 0) if p.tokens]
        self.pieces = len(cut)
        begun = [first + p.start if not p.half else lengths[-1] - first - T + p.start for p in cut]
        before = [min(place - lengths[p.sequence], n) for p, place in zip(cut, begun, strict=True)]
        heads = [i for i, p in enumerate(cut) if p.start == p.half * (T // 2) and before[i]]
        ends = {p.sequence: p.end + i * n for i, p in enumerate(cut) if p.ends}

        def joined(parts: Iterable[tuple[int, int]]) -> Tensor:
            return torch.cat([torch.arange(*part, device="cpu") for part in (*parts, (0, 0))])

        windows = [(i * n, i * n + n) for i in range(len(cut))]
        tokens = [(len(cut) * n + p.start, len(cut) * n + p.end) for p in cut]
        numbers = [p.sequence for p in cut], heads, [cut[i].half for i in heads], [*ends]
        tables = [torch.tensor(x, dtype=torch.int64, device="cpu") for x in numbers]
        tables += [
            joined((b, b + n) for b in before).clamp(max=n).view(-1, n),
            joined(itertools.chain(*zip(windows, tokens, strict=True))),
            joined((p.start + i * n + n, p.end + i * n + n) for i, p in enumerate(cut)),
            joined((end, end + n) for end in ends.values()).view(-1, n),
            torch.tensor([a == b for a, b in itertools.pairwise(lengths)], device="cpu"),
        ]
        super().__init__(tables, comm.device)
        self.sequences, self.heads, self.halves, self.ended = self.tensors[:4]
        self.columns, self.row, self.outputs, self.tails, self.empty = self.tensors[4:]
