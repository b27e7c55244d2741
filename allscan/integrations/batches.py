"""Cuts a batch of whole sequences for this rank, and adds a stamp: split models check by it that all ranks have parts
of one batch."""

from __future__ import annotations

import functools
import json
import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.checks import boundaries, cu_seqlens_error, is_zigzag
from ..comm.communicator import Communicator, check_communicator
from ..comm.host_exchange import by_rank
from ..tokens.packing import boundaries_on_host, document_places
from .softmax import chunks, reject

STAMP = "allscan_cut"  # keyword argument of a model's forward for the stamp
CUT = ("input_ids", "inputs_embeds", "labels", "shift_labels", "position_ids")  # [B, T, ...]
UNCUT = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "max_length_q", "max_length_k")  # of the row


DOCUMENTS = "zigzag, per_document=True"  # the layout of such a batch in its stamp


class _Stamp(NamedTuple):
    rows: int
    tokens: tuple[int, ...]  # of each rank
    layout: str
    digests: tuple[int, ...] | None  # of each rank's input_ids or inputs_embeds
    others: int | None  # digest of the other tensors


def cut_batch(
    batch: Mapping[str, Any], *, comm: Communicator, layout: str = "contiguous", per_document: bool = False
) -> dict[str, Any]:
    """This rank's part of a batch of whole sequences, for ``model(**part)`` of a model of ``sequence_parallel``.

    Args:
        batch: keyword arguments of the ordinary model, equal on every rank: ``input_ids`` [B, T] or ``inputs_embeds``
            [B, T, H]; optionally ``labels``, ``shift_labels``, ``position_ids``. An ``attention_mask`` [B, T] must mask
            nothing and is dropped. ``cu_seq_lens_q`` and fla's ``cu_seqlens`` stay those of the row. Values that are no
            tensors or have no dimension, such as ``use_cache`` or ``num_items_in_batch``, stay unchanged.
        comm, layout, per_document: those of ``sequence_parallel``. "contiguous": the first T % P of P ranks get one
            token more than the others; with the communicator's invariant=S all parts but the last are multiples of S.
            "zigzag": T must be a multiple of 2P. per_document=True: so must the length
            of each sequence in ``cu_seq_lens_q`` or ``cu_seqlens``; a batch without these is cut as one row.

    Returns:
        a dict with this rank's tokens and, as ``allscan_cut``, a stamp (str). The stamp has the number of rows, the
        tokens of each rank, the layout and, for a batch in CPU memory, a checksum of its contents. transformers' models
        compare the stamps of all ranks in every forward pass; fla's models compare them in each host exchange and at
        the first batch of a shape. If ranks have cut different batches, or the model gets other rows or numbers of
        tokens than the stamp's, every rank raises ValueError. In debug mode (``comm.debug``) batches on GPUs get a
        checksum, too (this synchronizes with the GPU), and the model compares it with its tokens. Call it in the rank's
        own process, not in a worker of a DataLoader.

    Raises:
        ValueError: for unknown tensors, inconsistent shapes, a mask that masks tokens, T below P, and in zigzag if T,
            or the length of a sequence that is cut, is no multiple of 2P. The other ranks raise it in their next call.

    Example:
        >>> loss = model(**cut_batch(batch, comm=comm)).loss      # this rank's share
    """
    check_communicator(comm)
    zigzag, size = is_zigzag(layout), comm.size
    tokens_are = "input_ids" if batch.get("input_ids") is not None else "inputs_embeds"
    x: Any = batch.get(tokens_are)
    if not isinstance(x, torch.Tensor) or x.ndim < 2:
        reject(comm, "a batch has input_ids [B, T] or inputs_embeds [B, T, H]")
    B, T = x.shape[:2]
    if zigzag and T % (2 * size * (comm.invariant or 1)):
        most = f"2 * {size} (twice the ranks)" + f" * {comm.invariant} (invariant)" * (comm.invariant > 0)
        reject(comm, f"in the zigzag layout T must be a multiple of {most}, got {T}")
    if T < size:
        reject(comm, f"a sequence of {T} tokens cannot be cut for {size} ranks")
    if per_document and not zigzag:
        reject(comm, f'per_document=True is for layout="zigzag", got {layout!r}')
    tokens = tokens_of_ranks(T, comm)
    with comm.call():
        parts = places_of(batch, T, comm, layout, per_document)
    layout = DOCUMENTS if per_document and _cu_seqlens(batch) is not None else layout

    def part_of(tensor: Tensor, rank: int) -> torch.Tensor:
        pieces = [tensor[:, a:b] for a, b in parts[rank]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)

    found: dict[str, Any] = {}
    for name, value in batch.items():
        if name == "attention_mask" and isinstance(value, torch.Tensor):
            if value.shape != (B, T) or not value.all():
                reject(comm, "attention_mask masks tokens: pack the sequences instead of padding them")
        elif name in CUT and isinstance(value, torch.Tensor):
            if value.shape[:2] != (B, T) and not (name == "position_ids" and value.shape == (1, T)):
                reject(comm, f"{name} must be [{B}, {T}, ...] as the tokens are, got {tuple(value.shape)}")
            found[name] = part_of(value, comm.rank)
        elif name in UNCUT or not isinstance(value, torch.Tensor) or not value.ndim:
            found[name] = value
        else:
            reject(comm, f"{name} {tuple(value.shape)}: cut_batch does not know how to cut it")
    digests = others = None
    if x.device.type == "cpu" or comm.debug:
        digests = [checksum(part_of(x, rank)) for rank in range(size)]
        rest = {n: v for n, v in batch.items() if n in (*CUT, *UNCUT) and n != tokens_are}
        others = checksum(*(rest[name] for name in sorted(rest)))
    return found | {STAMP: json.dumps([B, tokens, layout, digests, others])}


def check_batch(part: Mapping[str, Any], *, comm: Communicator) -> dict[str, Any]:
    """Check on all ranks that their parts are those that ``cut_batch`` has cut from one batch, for your own model.
    Models of ``sequence_parallel`` do this themselves.

    Collective: a host exchange of all ranks, in the same step. A batch on a GPU has a checksum in debug mode only.

    Args:
        part: the result of ``cut_batch`` on this rank.
        comm: the communicator of ``cut_batch``.

    Returns:
        a dict of ``part`` without the stamp.

    Raises:
        ValueError: on every rank, if the ranks have cut different batches, or if a part has no stamp, or other rows,
            tokens or, in CPU memory, contents than the stamp's.
        AllScanOutOfStep, AllScanHostTimeout: if the ranks are at different calls, or one does not come.

    Example:
        >>> part = allscan.check_batch(allscan.cut_batch(batch, comm=comm), comm=comm)
        >>> loss = own_model(part["input_ids"], part["labels"])
    """
    check_communicator(comm)
    with comm.call(False, "check_batch()"):  # whatever raises on this rank, the other ranks hear of it
        stamp, x = part.get(STAMP), part.get("input_ids")
        x = part.get("inputs_embeds") if x is None else x
        if x is not None and (not isinstance(x, torch.Tensor) or x.ndim < 2):
            raise ValueError("a part has input_ids [B, T] or inputs_embeds [B, T, H]")
        rows, tokens = (None, None) if x is None else x.shape[:2]
        seen = checksum(x) if x is not None and (x.device.type == "cpu" or comm.debug) else None
        all_rows, all_tokens, stamps, all_seen = zip(
            *comm.order.exchange((rows, tokens, stamp, seen), "check_batch()"), strict=True
        )
        problem: str | None = "no rank has a batch of cut_batch"
        if any(stamps):
            layout = read(next(filter(None, stamps))).layout
            problem = misfit(comm, all_rows, all_tokens, layout, stamps, all_seen)
        if problem is not None:
            raise comm.order.raised_everywhere(ValueError(problem))
    return {name: value for name, value in part.items() if name != STAMP}


def tokens_of_ranks(T: int, comm: Communicator) -> list[int]:
    """The number of tokens of each rank after cut_batch: with invariant=S multiples of S, but for the last rank."""
    unit = comm.invariant or 1
    units, rest = divmod(T, unit)
    tokens = [(units // comm.size + (rank < units % comm.size)) * unit for rank in range(comm.size)]
    return [*tokens[:-1], tokens[-1] + rest]


def _cu_seqlens(batch: Mapping[str, Any]) -> torch.Tensor | Sequence[int] | None:
    return next((batch[name] for name in ("cu_seq_lens_q", "cu_seqlens") if batch.get(name) is not None), None)


def places_of(
    batch: Mapping[str, Any], T: int, comm: Communicator, layout: str, per_document: bool
) -> list[list[tuple[int, int]]]:
    """For each rank, (first token, end) of each of its parts of T tokens. ValueError if a sequence cannot be cut."""
    cu_seqlens, size = _cu_seqlens(batch), comm.size
    if not per_document or cu_seqlens is None:
        parts = chunks(tokens_of_ranks(T, comm), layout == "zigzag")
        return [[(a, b) for rank, a, b in parts if rank == r] for r in range(size)]
    lengths = boundaries_on_host(boundaries(cu_seqlens))
    problem = cu_seqlens_error(lengths, T, 2 * size)
    if problem is not None:
        raise ValueError(problem)
    return [document_places(lengths, rank, size) for rank in range(size)]


def checksum(*values: Any) -> int:
    """CRC-32 of the shapes, dtypes and contents of tensors, and of the ``repr`` of other values."""
    found = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            found = zlib.crc32(f"{tuple(value.shape)} {value.dtype}".encode(), found)
            value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        else:
            value = repr(value).encode()
        found = zlib.crc32(value, found)
    return found


@functools.lru_cache(maxsize=64)
def read(stamp: str) -> _Stamp:
    """Parse the stamp of a batch."""
    rows, tokens, layout, digests, others = json.loads(stamp)
    return _Stamp(rows, tuple(tokens), layout, digests and tuple(digests), others)


def looked_at(comm: Communicator, ids: Tensor | None, stamp: Any) -> int | None:
    """Checksum of this rank's input_ids for the other ranks, at the first batch without a ``stamp`` and in debug mode;
    otherwise None. Synchronizes with the GPU."""
    first = stamp is None and STAMP not in comm.attributes
    return checksum(ids) if ids is not None and (first or comm.debug) else None


def misfit(
    comm: Communicator, rows: Any, tokens: Sequence[int], layout: str, stamps: Any, seen: Any = None
) -> str | None:
    """Error message for inconsistent parts of a batch, or None; equal on all ranks.

    ``rows``, ``tokens``, ``stamps`` and ``seen`` (results of ``looked_at``) have an entry for each rank."""
    if len(set(rows)) > 1:
        return f"the numbers of rows differ between ranks: {by_rank(rows)}"
    if seen and all(stamp is None for stamp in stamps):
        comm.attributes[STAMP] = True
    seen = seen or [None] * len(rows)
    if all(stamp is None for stamp in stamps):
        if comm.size > 1 and seen[0] is not None and len({*zip(seen, tokens, strict=True)}) == 1 and tokens[0] > 1:
            warnings.warn(
                "every rank was given the same tokens: whole sequences in place of parts? cut_batch cuts them",
                stacklevel=2,
            )
        return None
    if any(stamp is None for stamp in stamps):
        return f"some ranks have a batch of cut_batch, others not: {by_rank(s is not None for s in stamps)}"
    if len(set(stamps)) > 1:
        how = [
            f"{s.rows} rows, tokens {list(s.tokens)}, {s.layout}, checksums of tokens {s.digests and list(s.digests)}, "
            f"of the rest {s.others}"
            for s in map(read, stamps)
        ]
        same = "they must read the same rows: the same seed, and no DistributedSampler in the group"
        return f"the ranks have cut different batches; {same}: {by_rank(how)}"
    stamp = read(stamps[0])
    if (stamp.rows, stamp.tokens, stamp.layout) != (rows[0], tuple(tokens), layout):
        cut = f"{stamp.rows} rows, tokens {list(stamp.tokens)}, {stamp.layout}"
        return f"cut_batch has cut {cut}, but the model has {rows[0]} rows, tokens {list(tokens)}, {layout}"
    if stamp.digests and any(a is not None and a != b for a, b in zip(seen, stamp.digests, strict=True)):
        return "the model's tokens are not those that cut_batch has cut (input_ids have other contents)"
    return None
