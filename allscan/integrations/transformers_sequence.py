"""Positions of a rank's tokens in the row, for transformers' models; exchanged at each forward pass."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.checks import boundaries, cu_seqlens_error
from ..comm.communicator import Communicator
from ..comm.host_exchange import by_rank, differing
from ..tokens.packing import TokenRange, boundaries_on_host, flags_of, without_empty
from .batches import DOCUMENTS, misfit
from .recurrent import Cuts
from .softmax import Row, chunks

# With at most so many tokens a rank, and ranks that map each other's memory, softmax layers gather keys and values in
# place of latents: these arrive during the own blocks, and a second projection would cost more Python
FEW_TOKENS, FEW_RANKS = 4096, 4


@dataclasses.dataclass(frozen=True, eq=False)
class SplitSequence(Row):
    """Token layout that the model passes to its layers."""

    inner: str  # the attention function that the model had
    merged: bool = True  # attention runs in merged blocks where kernels for that exist
    home: str = ""  # the module of the model's classes
    pieces: list[TokenRange] = dataclasses.field(default_factory=list)
    where: dict[str, Any] = dataclasses.field(default_factory=dict)
    cuts: dict[int, Cuts] = dataclasses.field(default_factory=dict)
    few: bool = False  # see FEW_TOKENS

    @property
    def first(self) -> int:
        """Index of this rank's first token in the global sequence."""
        return sum(self.tokens[: self.comm.rank]) // (1 + self.zigzag)

    def __post_init__(self) -> None:
        """Set what all layers read: here, since torch.compile cannot trace functools.cached_property. Copies have it
        already: FSDP2 makes one where it casts a layer's inputs.

        pieces: of this rank. where: arguments of operators that say where this rank's tokens lie. cuts: the tables of
        convolutions, see ``conv_with_halo``."""
        if self.where:
            return
        pieces = [TokenRange(p.start, p.end, p.half, p.entry, flags=flags_of(p.before == 0)) for p in self.parts()]
        where = dict(
            comm=self.comm,
            cu_seqlens=self.lengths,
            first_token=None if self.lengths is None else self.first,
            layout="zigzag" if self.zigzag else "contiguous",
            per_document=self.per_document,
        )
        comm, most = self.comm, max(self.tokens)
        few = most <= FEW_TOKENS and 1 < comm.size <= FEW_RANKS and comm.topology.maps(0, comm.size - 1)
        self.__dict__.update(pieces=pieces, where=where, few=few)  # the dataclass is frozen


# End of messages about packed sequences that may be unintended
BY_POSITIONS = "; position_ids begin a sequence wherever they do not rise by 1"


UNREAD = "a tensor"  # stands for a number that is not read


class Agreed(NamedTuple):
    """What decides which collectives follow, in the layers, the loss and backward, and their dtypes: equal on all
    ranks."""

    model: Any
    device: str
    labels: bool | None  # whether there are labels; None if the base model was called
    num_items_in_batch: Any
    shift_labels: Any
    past: int | None  # tokens in the cache, see Row

    def fields(self, debug: bool) -> tuple[list[tuple[str, object]], float | str | None]:
        """((name, value) pairs, num_items_in_batch). A number in the GPU's memory is read in debug mode only, since
        reading it synchronizes; otherwise UNREAD stands for it."""
        count, model = self.num_items_in_batch, self.model
        autocast = str(torch.get_autocast_dtype(self.device)) if torch.is_autocast_enabled(self.device) else None
        checkpointed = model.training and any(getattr(x, "gradient_checkpointing", False) for x in model.layers)
        # none with FSDP1's flat parameters
        dtype = next((str(x.dtype) for x in model.parameters() if x.is_floating_point()), None)
        trainable = _trainable(model) if torch.is_grad_enabled() else 0  # not counted where no backward follows
        pairs: list[tuple[str, object]] = [
            ("torch.is_grad_enabled()", torch.is_grad_enabled()),
            ("trainable parameters", trainable),
            ("model.dtype", dtype),
            ("torch.autocast", autocast),
            ("gradient checkpointing", checkpointed),
            ("labels is None", None if self.labels is None else not self.labels),
            ("num_items_in_batch is None", count is None),
            ("shift_labels is None", self.shift_labels is None),
            ("tokens in the cache", self.past),
        ]
        if isinstance(count, Tensor) and count.device.type != "cpu" and not debug:
            return pairs, UNREAD
        return pairs, None if count is None else float(count)


def _trainable(model: Any) -> int:
    """The number of trainable parameters. At the beginning of a step the GPU may wait for this function, and
    ``model.modules()`` alone takes twice as long."""
    modules, seen = [model], {model}
    for module in modules:  # grows meanwhile
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
    return sum(p is not None and p.requires_grad for x in modules for p in x._parameters.values())


def _differing(told: Sequence[tuple[Any, object]]) -> str:
    """``differing`` for the results of Agreed.fields; UNREAD may be any number."""
    pairs, counts = zip(*told, strict=True)
    if len({*counts} - {UNREAD}) < 2:
        return differing(pairs)
    return differing([(*some, ("num_items_in_batch", count)) for some, count in zip(pairs, counts, strict=True)])


class SequenceOptions(NamedTuple):
    """A rank's tokens and options, before the exchange with the other ranks."""

    B: int
    T: int
    cu_seqlens: Any
    zigzag: bool
    per_document: bool
    merged: bool
    inner: str
    home: str
    alike: Agreed


def agree_sequence(
    comm: Communicator, asked: SequenceOptions, position_ids: Tensor | None, wanted: Any, stamp: Any, kernel: int
) -> tuple[SplitSequence, bool]:
    """Exchange the ranks' tokens and check them: (the sequence, whether any rank's embeddings need a gradient).

    ``wanted``: whether this rank's embeddings need a gradient; ``stamp``: (the batch's stamp, result of ``looked_at``),
    see batches.py; ``kernel``: number of tokens in the convolutions' states, -1 without a cache.
    """
    B, T, cu_seqlens, zigzag, per_document, merged, inner, home, alike = asked
    with comm.call(False, f"the forward pass of {type(alike.model).__name__} (tokens [{B}, {T}])"):
        lengths = None if cu_seqlens is None else boundaries_on_host(boundaries(cu_seqlens))
        rises, begun = None, []  # position_ids at the beginnings of sequences
        if lengths is None and position_ids is not None:
            rises = [_rises(half) for half in position_ids.chunk(1 + zigzag, -1)] if T else []
        layout = DOCUMENTS if per_document else "zigzag" if zigzag else "contiguous"
        counts = comm.order.forwards, comm.order.steps
        told = B, T, lengths, rises, layout, wanted, *stamp, kernel, merged, alike.fields(comm.debug), counts
        answers = comm.order.exchange(told, "the tokens of each rank")
        rows, tokens, _, _, _, _, stamps, contents, kernels, kinds, others, counts_of_all = map(
            list, zip(*answers, strict=True)
        )
        comm.order.compare_forwards(counts_of_all)
        if len(set(kernels)) > 1:
            why = f"use_cache differs between ranks: {by_rank(kernel >= 0 for kernel in kernels)}"
            raise comm.order.raised_everywhere(ValueError(why))
        last = tokens[0] // 2 if zigzag else tokens[-1]
        if last < kernel:  # the layers compute the convolution's state from these tokens alone
            where = "half of the first rank's tokens" if zigzag else "the last rank"
            why = f"with a cache {where} must have as many tokens as a convolution's kernel, got {last}"
            raise comm.order.raised_everywhere(ValueError(why))
        fewest, least = min(tokens) // (1 + zigzag), max(kernel, 2)  # of one token layers would decode
        if alike.past is not None and fewest < least:
            where = "each half of a rank's tokens" if zigzag else "each rank"
            why = f"after tokens in a cache {where} must have at least {least} tokens, got {fewest}"
            raise comm.order.raised_everywhere(ValueError(why))
        if len({answer[4] for answer in answers}) > 1:
            layouts = by_rank(answer[4] for answer in answers)
            raise comm.order.raised_everywhere(ValueError(f"layout differs between ranks: {layouts}"))
        if len({*kinds}) > 1:
            why = f"merged_attention differs between ranks: {by_rank(kinds)}"
            raise comm.order.raised_everywhere(ValueError(why))
        if different := _differing(others):
            raise comm.order.raised_everywhere(ValueError(f"ranks call with different arguments: {different}"))
        cut_row = per_document and lengths is None  # the row is one sequence
        problem = misfit(comm, rows, tokens, "zigzag" if cut_row else layout, stamps, contents)
        if problem is not None:
            raise comm.order.raised_everywhere(ValueError(problem))
        if zigzag and (len(set(tokens)) > 1 or tokens[0] % 2):
            needs = "an even number of tokens, the same on every rank"
            raise comm.order.raised_everywhere(ValueError(f"the zigzag layout needs {needs}, got {by_rank(tokens)}"))
        if any(list(answer[2] or ()) != list(lengths or ()) for answer in answers):
            cu_seq_lens = by_rank(answer[2] for answer in answers)
            raise comm.order.raised_everywhere(ValueError(f"cu_seq_lens_q differs between ranks: {cu_seq_lens}"))
        if len({answer[3] is None for answer in answers}) > 1:
            raise comm.order.raised_everywhere(ValueError("position_ids must be given on every rank or on none"))
        if rises is not None:
            found, before = [], None  # row indices where position_ids do not rise by 1
            halves = [iter(answer[3]) for answer in answers]
            for rank, first, last in chunks(tokens, zigzag):
                if first == last:
                    continue
                here, positions, (start, end) = next(halves[rank])
                if before is None or any(a != b + 1 for a, b in zip(start, before, strict=True)):
                    found.append(first)
                    begun += start
                found += [first + i for i in here]
                begun += itertools.chain(*positions)
                before = end
            lengths = (*found, sum(tokens)) if len(found) > 1 else None
        if lengths is not None and cut_row:
            problem = f"per_document=True requires cu_seq_lens_q for packed sequences, got position_ids {begun}"
        elif lengths is not None and zigzag and any(begun):  # e.g. position_ids of another layout
            problem = f"in the zigzag layout position_ids of packed sequences begin with 0, got {lengths[:-1]}"
            problem = f"{problem} of the row at positions {begun}: see allscan.zigzag.zigzag_positions"
        elif lengths is not None and (unfit := cu_seqlens_error(lengths, sum(tokens))):
            problem = unfit
        elif lengths is not None and B != 1:
            problem = f"packed sequences require batch size 1, got {B}{'' if rises is None else BY_POSITIONS}"
        elif per_document and not cut_row:
            assert lengths is not None  # follows from the branches above
            problem = cu_seqlens_error(lengths, sum(tokens), 2 * comm.size)
        if problem is not None:
            raise comm.order.raised_everywhere(ValueError(problem))
        per_document = per_document and not cut_row
        if lengths is not None and per_document:
            lengths = without_empty(lengths)
        cuts = None if lengths is None else torch.tensor(lengths, device="cpu")
        layout_options: dict[str, Any] = dict(zigzag=zigzag, per_document=per_document, past=alike.past)
        sequence = SplitSequence(comm, tokens, cuts, inner, merged, home, **layout_options)
        return sequence, any(answer[5] for answer in answers)


def _rises(position_ids: Any) -> tuple[list[int], list, list]:
    """(indices where they do not rise by 1, each row's values there, each row's first and last); synchronizes."""
    breaks = (position_ids.diff(dim=-1) != 1).any(0).nonzero()[:, 0] + 1
    return breaks.tolist(), position_ids[:, breaks].mT.tolist(), position_ids[:, [0, -1]].mT.tolist()
