"""The loss, and MLPs, in slices of a rank's tokens: memory for logits and MLPs does not grow with the sequence."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor, Partial
from torch.utils.checkpoint import checkpoint

from ..base.autograd import second_derivative_error
from ..base.checks import plain
from ..base.errors import DeferredError
from ..bindings.torch_compat import graph_task, tree_leaves
from ..bindings.triton_compat import OPTIONS
from ..comm.communicator import Communicator, check_communicator
from ..launch.compiled_kernel import dynamo_disabled
from ..shmem_kernels.cross_entropy import cross_entropy_kernel

SLICE_BYTES = 640_000_000  # of a slice's logits, by default
MULTIPLE = 128  # of a default slice's tokens: rows of a tile of matrix products
DTYPES = torch.float32, torch.bfloat16, torch.float16
WORDS = 4096  # in a step of the kernel, at most


class _Options(NamedTuple):
    """What all ranks have in common; logits have dtype and are multiplied by scale."""

    dtype: torch.dtype
    ignore_index: int
    label_smoothing: float
    z_loss: float
    scale: float


@dynamo_disabled
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    comm: Communicator | None = None,
    num_items: Tensor | float | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    slice_tokens: int | None = None,
) -> Tensor:
    """A language model's head and loss, ``F.cross_entropy(scale * F.linear(x, weight, bias).float(), labels)``, in
    slices of tokens. Logits exist for one slice at a time.

    A slice's logits, losses and gradients are computed at once, in the forward pass; logits are in the dtype of the
    inputs, under autocast in autocast's, and losses in float32, as in transformers. The backward pass multiplies by the
    incoming gradient, which rounds once more unless it is a power of two. The gradients of ``weight`` and ``bias`` are
    summed over the slices in float32, since bfloat16 would round the sum at every slice: with a weight in bfloat16 this
    takes 4 V D bytes beside them, with one in float32 none (under autocast 2 V D bytes, for the weight in autocast's
    dtype). So nothing is computed twice; do not put the call into an activation checkpoint, which would. Without
    gradients, by ``torch.no_grad()`` or because nothing requires them, only losses are computed.

    Args:
        x: [..., D], the hidden states of this rank's tokens, float32, bfloat16 or float16. None may be there.
        weight: [V, D], of x's dtype or, under autocast, any of the three. A DTensor is gathered, and the ranks'
            gradients are averaged over its mesh, as FSDP2 does; inside of the forward of the module that FSDP2 shards
            it is whole already. It may be the embedding's.
        labels: int64 [...], the word that follows each token: shifted, across the boundaries of ranks, by the caller.
            Models of ``sequence_parallel(..., loss_in_slices=True)`` do it.
        bias: [V], like weight.
        comm: the ranks that share a sequence: the loss is divided by the labels of all of them, an all-reduce of one
            number, and the ranks' losses, and gradients, add up. None: this rank alone.
        num_items: a number, or a tensor of one, by which the sum over this rank's tokens is divided in place of the
            number of labels; 1 for the sum itself. Nothing checks that it is equal on all ranks.
        ignore_index: the label of tokens without a loss.
        label_smoothing: in [0, 1], as in ``F.cross_entropy``.
        z_loss: factor of the squared logsumexp of a token's logits, which is added to its loss.
        scale: factor of the logits, above 0.
        slice_tokens: tokens of a slice. None: as many as have 640 MB of logits, a multiple of 128 if that is more.

    Returns:
        float32, a number: this rank's share of the mean over the labels. NaN if no rank has a label. NaN, and its
        gradients too, if a label on a GPU is neither ``ignore_index`` nor in [0, V).

    Raises:
        TypeError, ValueError: for wrong types, shapes, dtypes and devices, options out of range and, on CPUs, labels
            out of range. With ``comm`` on every rank: on GPUs at the first call with these dtypes and options and in
            debug mode, on CPUs at every call. Later on a GPU on this rank alone; the others then wait in the
            all-reduce.
        RuntimeError: for a second derivative, and for a second backward pass of the same graph, whose memory the first
            has used; within ``saved_tensors_hooks`` that return the saved tensors themselves it has NaN instead.

    Example:
        >>> loss = linear_cross_entropy(model.norm(x), model.head.weight, labels, comm=comm)    # this rank's share
        >>> loss.backward()                                              # add the gradients up over the ranks of comm
    """
    if comm is not None:
        check_communicator(comm)
    problem = fields = None
    try:
        options = _options_of(x, ignore_index, label_smoothing, z_loss, scale)
        _check(x, weight, labels, bias, options, slice_tokens)
        given = ("weight", tuple(weight.shape)), ("bias", bias is not None), ("num_items", num_items is not None)
        fields = *((name, str(value)) for name, value in options._asdict().items()), *given
    except (TypeError, ValueError) as error:
        if comm is None:
            raise
        problem = DeferredError(error)
    if comm is not None:
        _agree(comm, fields, problem)
    if slice_tokens is None:
        slice_tokens = max(1, SLICE_BYTES // (weight.shape[0] * options.dtype.itemsize))
        slice_tokens -= slice_tokens % MULTIPLE if slice_tokens > MULTIPLE else 0
    if num_items is None:
        num_items = (labels != ignore_index).sum()
        if comm is not None and comm.size > 1:
            dist.all_reduce(num_items, group=comm.group)
    if not isinstance(num_items, Tensor):
        num_items = torch.full((), num_items, device=x.device)
    divisor = num_items.to(x.device, torch.float32).reshape(())
    weight, bias = _whole(weight), None if bias is None else _whole(bias)
    inputs = x.reshape(-1, x.shape[-1]), weight, bias
    wanted = [torch.is_grad_enabled() and y is not None and y.requires_grad for y in inputs]
    return _LinearCrossEntropy.apply(*inputs, plain(labels.reshape(-1)), divisor, options, slice_tokens, wanted)


def _options_of(x: Any, ignore_index: Any, label_smoothing: Any, z_loss: Any, scale: Any) -> _Options:
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got a {type(x).__name__}")
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return _Options(dtype, int(ignore_index), float(label_smoothing), float(z_loss), float(scale))


def _check(x: Tensor, weight: Any, labels: Any, bias: Any, options: _Options, slice_tokens: Any) -> None:
    for name, y in (("weight", weight), ("labels", labels), ("bias", bias)):
        if not isinstance(y, Tensor) and not (y is None and name == "bias"):
            raise TypeError(f"{name} must be a tensor, got a {type(y).__name__}")
    others = [y for y in (weight, bias) if y is not None]
    dtypes = [y.dtype for y in (x, *others)]
    alike = len({*dtypes}) == 1 or torch.is_autocast_enabled(x.device.type)
    if not alike or not {*dtypes, options.dtype} <= {*DTYPES}:
        raise TypeError(f"x, weight and bias must be float32, bfloat16 or float16, and alike, got {dtypes}")
    if weight.ndim != 2 or not x.ndim or x.shape[-1] != weight.shape[1] or not weight.numel():
        raise ValueError(f"x must be [..., D] and weight [V, D], got {tuple(x.shape)} and {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [V] = [{weight.shape[0]}], got {tuple(bias.shape)}")
    if labels.dtype != torch.int64 or labels.shape != x.shape[:-1]:
        what = f"{labels.dtype} {tuple(labels.shape)}"
        raise ValueError(f"labels must be int64 {tuple(x.shape[:-1])}, one for each token, got {what}")
    if any(y.device != x.device for y in (*others, labels)):
        raise ValueError(f"weight, labels and bias must be on {x.device}, as x is")
    if not 0 <= options.label_smoothing <= 1 or not 0 < options.scale < math.inf or not math.isfinite(options.z_loss):
        raise ValueError(f"label_smoothing must be in [0, 1], scale above 0 and z_loss finite, got {options}")
    check_slice(slice_tokens)
    if labels.device.type == "cpu":
        wrong = labels[(labels != options.ignore_index) & ((labels < 0) | (labels >= weight.shape[0]))]
        if len(wrong):
            raise ValueError(f"a label must be in [0, {weight.shape[0]}) or {options.ignore_index}, got {wrong[0]}")


def check_slice(slice_tokens: Any) -> None:
    """Raise ValueError unless ``slice_tokens`` is None or a positive int."""
    if slice_tokens is not None and (type(slice_tokens) is not int or slice_tokens < 1):  # not a bool
        raise ValueError(f"slice_tokens must be None or a positive int, got {slice_tokens!r}")


def _agree(comm: Communicator, fields: tuple[tuple[str, object], ...] | None, problem: DeferredError | None) -> None:
    """Raise on every rank for a ``problem`` of any, or ``fields`` that differ: see ``linear_cross_entropy``."""
    known, name = comm.agreed.arguments, "linear_cross_entropy"
    always = comm.debug or comm.device.type == "cpu"
    with comm.call(False, "linear_cross_entropy()"):
        if problem is not None and name in known and not always:
            raise problem.take()
        if always or (name, fields) not in known:
            comm.order.agree(fields, problem, "the first call of linear_cross_entropy()")
            known.remember((name, fields))
            known.remember(name)


def _whole(weight: Tensor) -> Tensor:
    if not isinstance(weight, DTensor):
        return weight
    return weight.full_tensor(grad_placements=[Partial("avg")] * weight.device_mesh.ndim)


class _LinearCrossEntropy(torch.autograd.Function):
    """See ``linear_cross_entropy``. wanted: which of x, weight and bias need a gradient.

    Gradients of the logits are divided by the mantissa of ``divisor`` in forward, before they are rounded, and by its
    power of two in backward, which rounds nothing: their size fits float16."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        divisor: Tensor,
        options: _Options,
        slice_tokens: int,
        wanted: list[bool],
    ) -> Tensor:
        tokens, V, dtype = len(x), len(weight), options.dtype
        mantissa = torch.frexp(divisor).mantissa
        factor = mantissa.reciprocal()
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        with torch.autocast(x.device.type, enabled=False):
            w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
            dx = torch.empty_like(x) if wanted[0] else None
            dw = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
            db = x.new_zeros(V, dtype=torch.float32) if wanted[2] else None
            losses, memory = x.new_empty(tokens, dtype=torch.float32), w.new_empty(min(slice_tokens, tokens), V)
            for begin in range(0, tokens, slice_tokens):
                here = slice(begin, begin + slice_tokens)
                part = x[here].to(dtype)
                logits = memory[: len(part)]
                torch.mm(part, w.T, out=logits) if b is None else torch.addmm(b, part, w.T, out=logits)
                _losses(logits, labels[here], losses[here], factor, options, any(wanted))
                if dx is not None:
                    dx[here] = logits @ w
                if dw is not None:
                    _add_product(dw, logits, part)
                if db is not None:
                    db += logits.sum(0, dtype=torch.float32)
        power = mantissa / divisor.clamp_min(torch.finfo(torch.float32).tiny)  # 0 without a label: no gradient is NaN
        ctx.save_for_backward(dx, dw, db, power)
        return losses.sum() / divisor

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise second_derivative_error("linear_cross_entropy()")
        dx, dw, db, power = ctx.saved_tensors
        factor = dloss * power
        power.fill_(math.nan)  # a second backward pass raises, or has NaN where a hook hides the tensor's version
        if dx is not None:
            dx.mul_(factor[None])  # not a scalar, which a GPU would first round to dx's dtype

        def scaled(y: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
            if y is None or y.dtype == dtype:
                return None if y is None else y.mul_(factor)
            return torch.mul(y, factor, out=torch.empty_like(y, dtype=dtype))

        return dx, *map(scaled, (dw, db), ctx.dtypes), *[None] * 5


def _losses(logits: Tensor, labels: Tensor, losses: Tensor, factor: Tensor, options: _Options, gradient: bool) -> None:
    """Write the tokens' losses; with ``gradient`` also their gradient over ``logits``, times ``factor``."""
    tokens, V = logits.shape
    numbers = options.ignore_index, options.scale, options.label_smoothing, options.z_loss
    sizes: dict[str, Any] = dict(V=V, GRAD=gradient, BV=min(WORDS, triton.next_power_of_2(V)), num_warps=8)
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        cross_entropy_kernel[(tokens,)](logits, labels, losses, factor, *numbers, **sizes, **OPTIONS)


def _add_product(total: Tensor, logits: Tensor, x: Tensor) -> None:
    """total += logits.T @ x, in float32."""
    if logits.is_cuda and logits.dtype != torch.float32:
        torch.addmm(total, logits.T, x, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(logits.float().T, x.float())


def mlp_in_slices(module: nn.Module, slice_tokens: int | None) -> nn.Module:
    """Let ``module`` process ``slice_tokens`` tokens at a time, in place, and compute each slice again in the backward
    pass: beside its input and result it keeps nothing, and needs memory for one slice.

    Each slice is one ``torch.utils.checkpoint``. If x is the only tensor of a call, it is saved once, before the first
    slice: a layer that is itself checkpointed (``use_reentrant=False``, with early stop) and ends with this module
    computes it twice in a step, not three times. Gradients of parameters are added up slice by slice in their own
    dtype: take slices of some thousand tokens.

    Args:
        module: a module whose result for a token depends on that token alone, and whose forward takes x [..., D], first
            or alone, and returns [..., E]: an MLP, a norm, a mixture of experts without statistics. It gets x as
            [..., tokens, D] with as many dimensions, all tokens in the last but one.
        slice_tokens: tokens of a slice; None restores the module.

    Returns:
        ``module`` itself, changed.

    Raises:
        ValueError: for a module whose forward was replaced; when called, for a result of any other form. A mixture of
            experts that returns more than its tokens, such as router logits for a balancing loss, needs all of a
            rank's tokens at once; so does one with a capacity of experts, which is not found out.

    Example:
        >>> for layer in model.layers:
        ...     mlp_in_slices(layer.mlp, 4096)
    """
    check_slice(slice_tokens)
    replaced = vars(module).get("forward")
    if getattr(replaced, "func", None) is _in_slices:
        del module.forward
    elif replaced is not None and slice_tokens is not None:
        raise ValueError(f"the forward of a {type(module).__name__} was replaced: call mlp_in_slices before that")
    if slice_tokens is not None:
        module.forward = functools.partial(_in_slices, module, slice_tokens)
    return module


class _Keep(torch.autograd.Function):
    """Saves x for ``_Input``, in the node of its result."""

    @staticmethod
    def forward(ctx: Any, connected: Tensor, x: Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return connected.new_empty(0)


class _Input:
    """The input x of slices of tokens, saved once. The checkpoint of a slice that is made in ``of_slice``, with the
    slice as its only tensor, saves the slice's place in x; a backward pass reads x once."""

    def __init__(self, x: Tensor, count: int) -> None:
        self.kept: Any = _Keep.apply(torch.empty(0, requires_grad=True), x)  # keeps its node's tensors
        self.x: Any = None
        self.count, self.left, self.task = count, 0, -1

    def of_slice(self, first: int, tokens: int) -> saved_tensors_hooks:
        def pack(saved: Tensor) -> Any:
            return None if saved.numel() else saved  # checkpoint also saves an empty tensor of its own

        def unpack(saved: Any) -> Tensor:
            return self._read(first, tokens) if saved is None else saved

        return saved_tensors_hooks(pack, unpack)

    def _read(self, first: int, tokens: int) -> torch.Tensor:
        task = graph_task()
        if self.x is None or task != self.task:  # of an earlier pass that has read some slices only
            (self.x,), self.left, self.task = self.kept.grad_fn.saved_tensors, self.count, task
        part, self.left = self.x.narrow(-2, first, tokens), self.left - 1
        if not self.left:
            self.x = None
        return part


def _in_slices(module: Any, slice_tokens: int, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """The forward of a module of ``mlp_in_slices``."""
    forward = functools.partial(type(module).forward, module)
    flat = x.reshape(*[1] * (x.ndim - 2), -1, x.shape[-1])  # contiguous slices
    parts, found = flat.split(slice_tokens, -2), []
    others = [y for y in tree_leaves((arguments, options)) if isinstance(y, Tensor)]
    alone = type(x) is Tensor and x.is_floating_point() and x.numel() and not others  # else each slice saves its own
    recomputed = torch.is_grad_enabled()
    kept = _Input(flat, len(parts)) if recomputed and alone and not torch.compiler.is_compiling() else None
    for i, part in enumerate(parts):
        if recomputed:
            with contextlib.nullcontext() if kept is None else kept.of_slice(i * slice_tokens, part.shape[-2]):
                y = checkpoint(forward, part, *arguments, use_reentrant=False, **options)
        else:
            y = forward(part, *arguments, **options)
        if not isinstance(y, Tensor) or y.shape[:-1] != part.shape[:-1]:
            got = tuple(y.shape) if isinstance(y, Tensor) else f"a {type(y).__name__}"
            raise ValueError(
                f"a {type(module).__name__} must return a tensor with the tokens of its input {tuple(part.shape)}, got "
                f"{got}: what is computed over all tokens, such as a router's statistics, cannot be cut into slices"
            )
        found.append(y)
    y = torch.cat(found, -2)  # returned as it is for one row: FSDP2 warns of views
    return y if y.shape[:-1] == x.shape[:-1] else y.reshape(*x.shape[:-1], y.shape[-1])
