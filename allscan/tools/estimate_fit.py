"""``allscan estimate --gpu``: whether a training step of a model fits, for several numbers of ranks, and what it costs.

A step is estimated as in estimate_step.py, but with few layers of each kind: memory is linear in their numbers.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from ..base.checks import integer
from .estimate import Cut, check_cut, workspace
from .estimate_step import Step, model_of, step_of

GIB = 1 << 30
RESERVED = 0.05  # part of a GPU's memory for CUDA, NCCL and fragmentation of torch's allocator
BACKWARD = 2.5  # operations of attention's backward over those of its forward


class Options(NamedTuple):
    """checkpointing: each layer is computed again in backward. shard: number of GPUs over which FSDP2
    shards, 1: DistributedDataParallel. loss_slice, mlp_slice: tokens of a slice of the loss and of MLPs, None: whole.
    state_bytes: of a parameter, of its gradient and of each moment of AdamW. offload: with checkpointing, the inputs of
    layers are in the host's memory."""

    checkpointing: bool = False
    shard: int = 1
    loss_slice: int | None = None
    state_bytes: int = 2
    mlp_slice: int | None = None
    offload: bool = False


class Fit(NamedTuple):
    """Bytes of one rank. parameters: their number in the whole model. share: of the speed of data parallelism with a
    sequence of as many tokens on each rank, that softmax attention to the whole sequence leaves, by the operations of
    products on the rank with most of them."""

    ranks: int
    tokens: int  # of a rank
    state: int  # parameters, gradients, moments of AdamW, and what FSDP2 gathers of them
    kept: int  # between forward and backward, without ``keys``
    keys: int  # received by softmax layers: by all of them, with checkpointing by one
    loss: int  # logits, loss and their gradients
    work: int  # of a layer's backward, with checkpointing also of its forward, beside the above
    arena: int  # symmetric memory
    share: float
    checkpointing: bool
    parameters: int

    @property
    def total(self) -> int:
        """The peak."""
        in_loss = self.loss if self.checkpointing else self.keys + self.loss
        return self.state + self.kept + max(in_loss, self.keys + self.work) + self.arena


class Layers:
    """The layers of a model on the meta device, of which some are taken."""

    def __init__(self, model: Any) -> None:
        base = model.base_model
        if not isinstance(getattr(base, "layers", None), nn.ModuleList):
            raise ValueError(f"a {type(base).__name__} has no list of layers")
        self.base, self.whole, self.config = base, base.layers, model.config
        sizes = [_numbers(layer) for layer in self.whole]
        share = sum(sizes) > _numbers(self.whole)  # Zamba2's layers share blocks that know their places: take them all
        self.kinds = [(i,) if share else _kind(layer) for i, layer in enumerate(self.whole)]
        self.counts = Counter(self.kinds)
        self.lists = {
            name: value
            for name, value in vars(self.config).items()
            if isinstance(value, list) and len(value) == len(self.whole)
        }

    def take(self, more: Any = None) -> None:
        """Keep the first layer of each kind, and behind them the second one of kind ``more``."""
        places = {kind: [i for i, x in enumerate(self.kinds) if x == kind] for kind in self.counts}
        taken = [*sorted(some[0] for some in places.values()), *([] if more is None else places[more][1:2])]
        self.base.layers = nn.ModuleList(self.whole[i] for i in taken)
        self.config.num_hidden_layers = len(taken)
        for name, value in self.lists.items():
            setattr(self.config, name, [value[i] for i in taken])


def _numbers(module: nn.Module) -> int:
    """Number of parameters; those that layers share count once."""
    return sum(p.numel() for p in module.parameters())


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    modules = tuple((name, type(x).__name__) for name, x in layer.named_modules())
    return modules, tuple((name, p.shape) for name, p in layer.named_parameters())


def fit(config: dict[str, Any], cut: Cut, options: Options) -> Fit:
    """Estimate a step. Raises ValueError as ``step_of`` and ``check_options`` do."""
    check_cut(cut)
    check_options(options)
    model = model_of(config)
    state, active, parameters = _state(model, options), _active(model), _numbers(model)
    if options.checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=dict(use_reentrant=False))
    if options.mlp_slice is not None:
        from ..integrations.transformers import cut_mlps  # imports more than the rest needs

        cut_mlps(model, type(model).__module__.split(".")[-2], options.mlp_slice)
    layers = Layers(model)
    layers.take()
    one = step_of(model, cut, options.loss_slice)
    kept, work, loss = one.layers, one.work, one.loss
    received, width = _softmax(one, options)
    for kind, count in layers.counts.items():
        if count > 1:
            layers.take(kind)
            two = step_of(model, cut, options.loss_slice)
            work = max(work, two.work)  # while all other layers' tensors are in memory
            kept += (count - 1) * (two.layers - one.layers)
            more_received, more_width = (b - a for a, b in zip(_softmax(one, options), _softmax(two, options)))
            received, width = received + (count - 1) * more_received, width + (count - 1) * more_width
    if options.checkpointing:  # one layer at a time
        received = max((nbytes for nbytes, _ in one.seen.softmax), default=0)
        work -= received
        if options.offload:  # all but one
            kept -= (len(layers.whole) - 1) * cut.batch * cut.own * layers.config.hidden_size * 2
    else:
        kept -= received
    passes = 3 + options.checkpointing  # in forwards; backward of a product takes two
    linear = 2 * active * passes
    softmax = 2 * width * (passes - 2 + BACKWARD) / 2  # times the tokens of the context; half of them on average
    context = cut.tokens if cut.zigzag else 2 * cut.tokens - cut.own  # contiguous: the last rank has most of it
    share = (linear + softmax * cut.own) / (linear + softmax * context)
    arena = sum(workspace(layer, cut) for layer in {*one.seen.recurrent})
    memory = state, kept, received, loss, work, arena
    return Fit(cut.ranks, cut.own, *memory, share, options.checkpointing, parameters)


def check_options(options: Options) -> None:
    """Raise ValueError for numbers below 1, and for ``offload`` alone."""
    if options.offload and not options.checkpointing:
        raise ValueError("--offload is for --checkpointing: it moves the inputs of layers that are computed again")
    for name in ("shard", "loss_slice", "mlp_slice", "state_bytes"):
        if getattr(options, name) is not None:
            integer(name, getattr(options, name), 1)


def _softmax(step: Step, options: Options) -> tuple[int, int]:
    """(bytes received by all softmax layers, their widths times heads); each is called again with checkpointing."""
    calls = 1 + options.checkpointing
    received, widths = ([x[i] for x in step.seen.softmax] for i in range(2))
    return sum(received) // calls, sum(widths) // calls


def _state(model: Any, options: Options) -> int:
    """Bytes of parameters, gradients and two moments; with FSDP2 also of what is gathered at once: what is outside of
    the layers, and two layers, in bfloat16, and as many gradients."""
    numbers, layers = _numbers(model), model.base_model.layers
    whole = 4 * options.state_bytes * numbers
    if options.shard == 1:
        return whole
    two = sum(sorted(map(_numbers, layers))[-2:])
    return whole // options.shard + 2 * 2 * (numbers - _numbers(layers) + two)


def _active(model: Any) -> int:
    """Parameters that a token is multiplied by, those that layers share once for each layer."""
    chosen = getattr(model.config, "num_experts_per_tok", None)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return head.numel() + sum(  # type: ignore[no-any-return]
        p.numel() * chosen // p.shape[0] if p.ndim == 3 and chosen and p.shape[0] and ".experts." in name else p.numel()
        for name, p in model.named_parameters(remove_duplicate=False)
        if p.ndim > 1 and p is not embedding and p is not head
    )


def report_of_fit(config: dict[str, Any], cuts: Sequence[Cut], options: Options, gpu: float) -> str:
    """The table over numbers of ranks, for GPUs of ``gpu`` bytes. Raises ValueError before the first line it prints."""
    check_options(options)
    if gpu < 1 << 20:
        raise ValueError(f"--gpu is a GPU's memory, such as 80G, got {gpu} bytes")
    lines: list[str] = []
    any_fits = False
    for cut in cuts:
        print(f"allscan estimate: {cut.ranks} rank{'s' * (cut.ranks > 1)}", file=sys.stderr)
        found = fit(config, cut, options)
        if not lines:
            titles = "ranks  tokens of each   state    kept    keys    loss    work   arena   total"
            titles += "  of data parallel's speed with as many tokens a rank"
            lines += [f"{found.parameters / 1e9:.2f} billion parameters", titles]
        columns = found.state, found.kept, found.keys, found.loss, found.work, found.arena, found.total
        numbers = " ".join(f"{x / GIB:7.1f}" for x in columns)
        fits = found.total <= (1 - RESERVED) * gpu
        any_fits |= fits
        told = "fits" if fits else "does not fit"
        lines.append(f"{found.ranks:5}  {found.tokens:14,} {numbers}  {found.share:6.1%} (computed)  {told}")
    if not any_fits:
        lines.append(
            "less memory: more --ranks, --checkpointing, --offload, --loss-slice 4k, --mlp-slice 4k, --shard GPUS; "
            "more speed: --layout zigzag"
        )
    return "\n".join(lines)
