"""allscan(): the differentiable function over AllScan."""

from __future__ import annotations

import torch

from .checks import check_tensor, check_transition, decay_target
from .collective import AllScan, transition_tile, uncompiled
from .communicator import Communicator, by_rank
from .order import Pending, recomputing


def persistent(
    comm: Communicator, shape, agree=None, problem: Exception | None = None, tile=None, at_first: bool = False,
    max_ctas: int | None = None,
) -> AllScan:  # fmt: skip
    """The AllScan that ``comm`` keeps for a shape (tile, max_ctas), made at the first call, which is collective.

    ``agree``: what else must be the same on all ranks; a first call with it is collective too. None: nothing.
    ``problem``: what is wrong with this rank's arguments. It is raised here; at a first call the other ranks, which are
    on their way to make the workspace, raise ValueError with it, as they do when shape or agree differ. (A problem
    without a shape, None, counts as one of a first call as long as there has been no other call.) ``at_first``: the
    problem is of a kind that is looked for at a first call with ``agree`` only, which this is for all ranks.
    """
    comm.check()
    shape = shape and tuple(shape)
    key = shape if tile is None and max_ctas is None else (shape, tile, max_ctas)
    if problem is not None and not at_first and (key in comm.scans or (shape is None and comm.scans)):
        raise problem
    if key not in comm.scans or (agree is not None and (shape, agree) not in comm.agreements):
        try:
            answers = comm.exchange(
                ((key, agree), problem and f"{type(problem).__name__}: {problem}"), "the first call for a shape"
            )
        except RuntimeError as nobody_came:
            if problem is not None:
                raise problem from nobody_came
            raise
        if problem is None and any(answer != ((key, agree), None) for answer in answers):
            problem = ValueError("ranks call with different arguments: " + by_rank(e or k for k, e in answers))
        if problem is not None:
            comm.told(problem)
    if problem is not None:
        raise problem
    if key not in comm.scans:
        comm.scans[key] = AllScan(comm, shape, tile=tile, max_ctas=max_ctas)
    comm.agreements.add((shape, agree))
    return comm.scans[key]


@uncompiled
def allscan(
    state, decay=None, *, comm: Communicator, transition=None, initial_state=None, reverse: bool = False, out=None
):
    """Exclusive scan of a state over the ranks of ``comm``, in rank order, differentiable.

        R_0 = initial_state (or 0),   R_{p+1} = decay_p * R_p + state_p,   rank p gets R_p
        with a transition:            R_{p+1} = transition_p R_p + state_p

    With reverse=True the last rank is the first. With E_p = dL/dR_{p+1} the adjoint is the scan in the other direction:
    E_{p-1} = decay_p * E_p + dL/d(out_p),  dstate_p = E_p,  ddecay_p = sum(E_p * R_p) over what it is broadcast along;
    E_{p-1} = transition_p^T E_p + dL/d(out_p),  dtransition_p = E_p R_p^T.

    state: [..., K, V] float32; on the communicator's device. A torch tensor, or a CuPy or NumPy array.
    decay: None (1), a number, or float32 [..., K], [...], or no dimension; in [0, 1]. 0 lets nothing pass; with the
        number 0 this rank sends each tile before it waits for that tile, so that the next rank does not wait for the
        previous ones (as far as a GPU holds the tiles' programs at once: about 2 MiB of state).
    transition: float32 [..., K, K] in place of a decay, for delta rules and other dense recurrences: the product of the
        transitions of this rank's tokens. Stays where it is; products are as accurate as float32's.
    initial_state: like state, the same on every rank; its gradient is non-zero on the first rank only.
    out: like state, to be written instead of a new array; not with gradients.
    Returns R_p, like state and of the same kind of array.

    Each rank receives one state and sends one. The first call for a shape is collective on the host (it makes an
    :class:`AllScan`, which ``comm`` keeps); later ones only launch one kernel on the current stream.

    Raises TypeError (dtype), ValueError (shape, device, ranks that differ), RuntimeError (closed, no transport),
    AllScanTimeout (an earlier call has timed out), before anything is launched.

        >>> comm = allscan.Communicator()
        >>> prev = allscan.allscan(state, decay, comm=comm)         # rank p: what ranks 0 .. p-1 have left
    """
    with comm.call(reverse):
        if not isinstance(state, torch.Tensor):
            return _foreign(state, decay, transition, comm, initial_state, reverse, out)
        return _allscan(state, decay, comm, transition, initial_state, reverse, out)


def _allscan(state, decay, comm, transition, initial_state, reverse, out):
    problem = tile = None
    try:
        check_tensor("state", state, None, comm.device)
        if state.ndim < 2 or min(state.shape) < 1:
            raise ValueError(f"state must be [..., K, V] with no empty dimension, got {tuple(state.shape)}")
        decay_target(decay, state.shape, comm.device)
        if transition is not None:
            tile = transition_tile(state.shape[-2])
            check_transition(transition, decay, state.shape, comm.device)
        for name, x in (("initial_state", initial_state), ("out", out)):
            if x is not None:
                check_tensor(name, x, state.shape, comm.device)
        inputs = (state, decay, transition, initial_state, out)
        wanted = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
        if out is not None and (wanted or not out.is_contiguous()):
            raise ValueError("out must be contiguous, and cannot be used where a gradient is wanted")
    except (TypeError, ValueError) as error:
        problem = error
    scan = persistent(comm, state.shape, problem=problem, tile=tile)
    if wanted:
        return _AllScan.apply(state, decay, transition, initial_state, scan, reverse)
    return scan.scan(state, decay, transition=transition, initial_state=initial_state, reverse=reverse, out=out)


class _AllScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, state, decay, transition, initial_state, scan, reverse):
        ctx.ticket = scan.ticket()
        prev = scan.scan(
            state, decay, transition=transition, initial_state=initial_state, reverse=reverse,
            channel=scan.channel(reverse, ticket=ctx.ticket),
        )  # fmt: skip
        tensor_decay = isinstance(decay, torch.Tensor)
        ctx.save_for_backward(decay if tensor_decay else None, transition, prev)
        ctx.number = None if tensor_decay else decay
        ctx.scan, ctx.reverse = scan, reverse
        ctx.pending = None if recomputing() else Pending(scan, reverse)
        return prev

    @staticmethod
    def backward(ctx, dprev):
        if ctx.pending is not None:
            ctx.pending.run()
        with ctx.scan.comm.call(not ctx.reverse):
            if torch.is_grad_enabled():
                raise RuntimeError("allscan() has no second derivative (create_graph=True)")
            with torch.autocast(dprev.device.type, enabled=False):
                return _gradients(ctx, dprev.contiguous())


def _gradients(ctx, dprev):
    decay, transition, prev = ctx.saved_tensors
    scan, given = ctx.scan, decay if decay is not None else ctx.number
    dstate = scan.scan(
        dprev, given, transition=transition, adjoint=True, reverse=not ctx.reverse,
        channel=scan.channel(not ctx.reverse, adjoint_of=ctx.ticket),
    )  # fmt: skip
    ddecay = dtransition = dinitial = None
    if ctx.needs_input_grad[1]:
        rows = (dstate * prev).sum(-1)
        if decay.ndim < rows.ndim:
            rows = rows.sum(-1)
        ddecay = rows.sum_to_size(decay.shape)
    if ctx.needs_input_grad[2]:
        dtransition = dstate @ prev.transpose(-1, -2)
    if ctx.needs_input_grad[3]:
        dinitial = torch.zeros_like(prev)
        if scan.comm.rank == (scan.comm.size - 1 if ctx.reverse else 0):
            if transition is not None:
                dinitial = transition.transpose(-1, -2) @ dstate + dprev
            elif decay is None:
                dinitial = dprev if ctx.number == 0 else dprev + dstate * (1.0 if ctx.number is None else ctx.number)
            else:
                factor = decay[(...,) + (None,) * (prev.ndim - decay.ndim)] if decay.ndim else decay
                dinitial = torch.where(factor == 0, dprev, factor * dstate + dprev)
    return dstate, ddecay, dtransition, dinitial, None, None


def _foreign(state, decay, transition, comm, initial_state, reverse, out):
    """CuPy and NumPy arrays, through DLPack, without a copy."""
    if not hasattr(state, "__dlpack__"):
        raise TypeError(f"state must be a torch tensor or a CuPy or NumPy array, got {type(state).__name__}")

    def tensor(array):
        if any(stride < 0 for stride in getattr(array, "strides", None) or ()):
            raise ValueError("an array with negative strides cannot be shared: make a copy of it")
        return torch.from_dlpack(array) if hasattr(array, "__dlpack__") else array

    result = allscan(
        tensor(state), tensor(decay), transition=tensor(transition), comm=comm, initial_state=tensor(initial_state),
        reverse=reverse, out=tensor(out),
    )  # fmt: skip
    if type(state).__module__.partition(".")[0] == "cupy":
        import cupy

        result = cupy.from_dlpack(result)  # puts CuPy's stream behind torch's
        return result if out is None else out
    return result.numpy() if out is None else out
