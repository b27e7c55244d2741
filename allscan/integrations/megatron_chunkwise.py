"""All-Scan in the chunkwise context parallelism of Megatron-core's main branch: Gated DeltaProduct.

Megatron gathers the summaries of all ranks, states and transitions, and its backends compose them. A scan delivers the
state that they compose to, which is a summary, too: (state, zeros). For Gated DeltaNet there is ``fla_cp.enable()``.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..base.tiling import transition_tile
from ..comm.communicator import Communicator, check_communicator
from ..comm.tags import stamp
from ..scan.agreement import ScanVariant, get_or_create_scan
from .groups import Communicators

_FORWARD, _BACKWARD = "chunkwise_cp_forward", "chunkwise_cp_backward"
_PLACES = "megatron.core.ops.ssm", "megatron.core.ssm"  # where versions of Megatron-core have context_parallel
_communicators = Communicators()
_theirs: dict[str, Callable[..., Any]] = {}  # Megatron's functions, while they are replaced


def enable(*, comm: Communicator | None = None) -> None:
    """Let Megatron-core's chunkwise Gated DeltaProduct (``linear_cp_mode="chunkwise"``) pass its states by All-Scan.

    Megatron all-gathers the state and the transition of every rank, size * HV * K * (V + K) words, and each rank
    composes those of the ranks before it, in backward of the ranks behind it. By All-Scan a rank receives one state of
    HV * K * V words in each pass; transitions are not sent. Megatron's backends, fla's or CuTeDSL's, compute the rest
    as before. Packed sequences are cut by Megatron's ``PackedSequenceCPMetadata``.

    The call replaces ``chunkwise_cp_forward`` and ``chunkwise_cp_backward`` in Megatron's module ``gdp_common``, on
    every rank, between two steps; a second call only adds ``comm``. A layer's first call for a shape is collective on
    the host.

    Args:
        comm: the Communicator of a context-parallel group, in the group's order. By default the first call with a group
            creates one; this is collective on the host.

    Raises:
        ImportError: if Megatron-core has no ``gdp_common``: version 0.19 and earlier.
        TypeError: if ``comm`` is not a Communicator. Layers raise it for a backend whose summaries are not packed.
        ValueError: if ``comm`` has ``invariant``: Megatron's backends compute inside the chunks. Layers raise their
            backend's errors, and those of ``allscan.allscan``.

    Example:
        >>> allscan.integrations.megatron_chunkwise.enable()                      # once, on every rank
        >>> model = HybridModel(config, spec, ...)                                # linear_cp_mode="chunkwise"
    """
    if comm is not None:
        check_communicator(comm)
        if comm.invariant:
            raise ValueError(f"invariant={comm.invariant} of the communicator is not for Megatron's backends")
    module = _gdp_common()
    if comm is not None:
        _communicators[comm.group] = comm
    for name, ours in {_FORWARD: _forward, _BACKWARD: _backward}.items():
        if name not in _theirs:
            _theirs[name] = getattr(module, name)
            setattr(module, name, ours)


def disable() -> None:
    """Undo ``enable``: Megatron's layers gather their summaries again. Without ``enable`` it has no effect.

    The call is collective over the groups of all calls so far: it closes the communicators that ``enable`` has created,
    but none that was passed to it. No rank may call it between a forward pass and its backward.

    Raises:
        AllScanOutOfStep: if the ranks have made different numbers of calls; the functions are restored nevertheless.

    Example:
        >>> allscan.integrations.megatron_chunkwise.disable()                     # on every rank, between two steps
    """
    for name, function in _theirs.items():
        setattr(_gdp_common(), name, function)
    _theirs.clear()
    _communicators.close()


def _gdp_common() -> Any:
    for place in _PLACES:
        try:
            return importlib.import_module(f"{place}.context_parallel.gdp_common")
        except ModuleNotFoundError as error:
            missing = error
    raise ImportError(f"{__name__} needs Megatron-core's gdp_common, of versions later than 0.19") from missing


class _Passing(NamedTuple):
    """What a backward pass needs of its forward, in place of the backend's own metadata."""

    metadata: Any  # the backend's own
    comm: Communicator
    one_sequence: bool  # whether this rank has tokens of one sequence, or of a batch of such, only
    alike: tuple[Any, ...]  # values that must be equal on all ranks

    def summaries(self, summary: Any, others: slice, reverse: bool) -> Any:
        """A summary like this rank's of the ranks ``others``, [1, ..., K, V + K], or [0, ...] if there are none."""
        if not isinstance(getattr(summary, "packed", None), Tensor):
            raise TypeError(f"the backend must return packed summaries, got {type(summary).__name__}")
        K, width = summary.packed.shape[-2:]
        state, transition = summary.packed.split([width - K, K], -1)
        through = self.one_sequence and others.start < others.stop  # else a sequence boundary stops the state, even NaN
        scan = get_or_create_scan(self.comm, state.shape, variant=ScanVariant(transition_tile(K)))
        self.comm.order.stamp = stamp("gdp", *self.alike)
        found = scan.scan(state, None if through else 0, transition=transition if through else None, reverse=reverse)
        packed = summary.packed.new_zeros(int(others.start < others.stop), *summary.packed.shape)
        packed[..., : width - K] = found
        return dataclasses.replace(summary, packed=packed)


def _forward(backend: Any, inputs: Any, cp_group: Any, preceding_slice: slice) -> Any:
    """In place of Megatron's ``chunkwise_cp_forward``. The summary of this rank is that of its last sequence."""
    comm, cuts = _communicators.of(cp_group), inputs.cu_seqlens
    with comm.call(False, "Megatron's Gated DeltaProduct", (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)):
        summary, local = backend.cp_forward_prepare(inputs=inputs)
        alike = (*inputs.q.shape[:2], inputs.num_householder, inputs.scale)
        passing = _Passing(None, comm, cuts is None or len(cuts) == 2, alike)
        preceding = passing.summaries(summary, preceding_slice, reverse=False)
    output, saved = backend.cp_forward_apply(local_context=local, preceding_summaries=preceding)
    saved = dataclasses.replace(saved, metadata=passing._replace(metadata=saved.metadata))
    return _theirs[_FORWARD].__globals__["CPForwardResult"](output=output, saved_context=saved)


def _backward(backend: Any, output_grad: Tensor, saved_context: Any, cp_group: Any, following_slice: slice) -> Any:
    """In place of Megatron's ``chunkwise_cp_backward``. The summary of this rank is that of its first sequence."""
    passing = saved_context.metadata
    if not isinstance(passing, _Passing):  # of a forward before enable()
        return _theirs[_BACKWARD](backend, output_grad, saved_context, cp_group, following_slice)
    saved = dataclasses.replace(saved_context, metadata=passing.metadata)
    with passing.comm.call(True, "Megatron's Gated DeltaProduct", (output_grad,)):
        summary, local = backend.cp_backward_prepare(output_grad=output_grad, saved_context=saved)
        following = passing.summaries(summary, following_slice, reverse=True)
    return backend.cp_backward_apply(backward_context=local, following_summaries=following)
