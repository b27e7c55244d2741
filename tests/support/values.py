"""Functions that run inside a rank's process, on any device: inputs and comparisons shared by the tests."""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import itertools
import random
import re
import time
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
import triton
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

import allscan


def late(epoch: int, rank: int, most_ms: float) -> None:
    """Sleep for 0 to ``most_ms`` before a rank's call, a different time for every epoch and rank."""
    time.sleep(random.Random(epoch * 1000 + rank).uniform(0, most_ms) / 1000)


def inputs(comm, shape, decay_shape, seed, special=False):
    """Draw (states, decays) of all ranks, the same on every rank, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    states = [torch.randn(shape, generator=generator) for _ in range(comm.size)]
    decays = None
    if decay_shape is not None:
        decays = [torch.rand(decay_shape, generator=generator) for _ in range(comm.size)]
        for decay in decays:
            pick = torch.rand(decay_shape, generator=generator)
            decay[pick < 0.2] = 0.0
            decay[pick > 0.8] = 1.0
    if special:
        for state in states:
            pick = torch.rand(shape, generator=generator)
            state[pick < 0.15] = -0.0
            state[(pick > 0.15) & (pick < 0.2)] = float("inf")
            state[(pick > 0.2) & (pick < 0.25)] = float("-inf")
            state[(pick > 0.25) & (pick < 0.3)] = float("nan")
    return states, decays


def own_triton() -> bool:
    """Check whether Triton is the version of this torch, which inductor needs. A torch for CPUs names none."""
    wanted = [re.match(r"triton\s*==\s*([\d.]+)", x) for x in importlib.metadata.requires("torch") or ()]
    return all(version[1] == triton.__version__ for version in wanted if version)


def backend_of_gpus() -> str | Callable:
    """Return the backend of torch.compile for tests of compiled calls."""
    return "inductor" if torch.cuda.is_available() and own_triton() else other_strides


def other_strides(graph, inputs):
    """Backend of torch.compile: "aot_eager", but effects get their inputs in other strides, as inductor may do.
    Not for gathers, which find each other by the address of an input."""
    how = dict(fw_compiler=_turned, bw_compiler=_turned, partition_fn=min_cut_rematerialization_partition)
    return aot_autograd(**how)(graph, inputs)


def _turned(graph, _):
    def turned(x):
        if getattr(x.meta["val"], "ndim", 0) < 3:
            return x
        for function, arguments in (torch.transpose, (1, -1)), (torch.clone, ()), (torch.transpose, (1, -1)):
            options = {"memory_format": torch.contiguous_format} if function is torch.clone else {}
            x = graph.graph.call_function(function, (x, *arguments), options)
        return x

    for node in graph.graph.nodes:
        if node.target is torch.ops.higher_order.with_effects:
            with graph.graph.inserting_before(node):
                node.args = *node.args[:2], *torch.fx.map_arg(node.args[2:], turned)
    graph.recompile()
    return make_boxed_func(graph.forward)


def error(actual, expected) -> float:
    """Return the largest |actual - expected| over the largest |expected|; NaN and Inf must be at the same places."""
    if actual.is_cuda:  # a copy to the host would hold CUDA's locks while it waits, and NVSHMEM's proxy may need them
        torch.cuda.current_stream(actual.device).synchronize()
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    assert torch.equal(actual.isnan(), expected.isnan()), "NaN in other places than expected"
    assert torch.equal(actual.isinf(), expected.isinf()), "Inf in other places than expected"
    assert torch.equal(actual[actual.isinf()], expected[expected.isinf()]), "Inf with another sign than expected"
    finite = expected.isfinite()
    if not finite.any():
        return 0.0
    return ((actual - expected)[finite].abs().max() / expected[finite].abs().max().clamp_min(1e-30)).item()


class Copies(TorchDispatchMode):
    """Counts the numbers that torch functions have written by copies, fills and additions: overhead between layers."""

    NAMES = "cat stack clone copy_ _to_copy fill_ zero_ zeros zeros_like new_zeros full constant_pad_nd".split()
    NAMES += "slice_backward select_backward index_select index index_add index_copy index_put_ where".split()
    NAMES += "masked_fill add add_ sub mul neg".split()

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        # one-dimensional results are memory of Triton's interpreter
        if function.overloadpacket.__name__ in self.NAMES and isinstance(found, torch.Tensor) and found.ndim > 1:
            self.numbers += found.numel()
        return found


def captured(comm, call):
    """Return (a graph of ``call``, what it returned), after three eager calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    comm.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    return graph, found


def raised(function, *arguments, **options):
    """Return (type name, message) of the call's exception, or None."""
    try:
        function(*arguments, **options)
    except Exception as problem:
        return type(problem).__name__, str(problem)
    return None


def value_or_error(function, *arguments, **options):
    """Return the call's value, or the type name of its RuntimeError."""
    try:
        return function(*arguments, **options)
    except RuntimeError as problem:
        return type(problem).__name__


def on_communicator(function, group, *arguments, **options):
    with allscan.Communicator(group) as comm:
        return function(comm, *arguments, **options)


def in_ranks(module, name):
    """A function of allscan.integrations that is imported when it is called: the packages behind it take seconds."""
    return lambda *given, **how: getattr(importlib.import_module(f"allscan.integrations.{module}"), name)(*given, **how)


def added_up(x, group):
    """The sum over the ranks of a tensor, or of each in a dict."""
    if isinstance(x, dict):
        return {name: added_up(y, group) for name, y in x.items()}
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def check_answers(answers, *kinds):
    """Check {expected text: ``raised``}: every call has raised an error of one of these kinds, by default ValueError,
    with the text; of a key that is a tuple, with its first entry."""
    for text, answer in answers.items():
        words = text[0] if isinstance(text, tuple) else text
        assert answer is not None and answer[0] in (kinds or ("ValueError",)) and words in answer[1], (text, answer)


def check_errors(answers, limit):
    """Check that every rank's errors, a list or a dict by name, are below the limit, and that there are some."""
    for errors in answers:
        named = errors.items() if isinstance(errors, dict) else enumerate(errors)
        wrong = {name: x for name, x in named if not x < limit}
        assert errors and not wrong, wrong


class _Held:
    pass


def raised_and_freed(function, *arguments, **options):
    """Return ``raised`` of a call, and check that it leaves no reference cycle of exception, traceback and frame: such
    a cycle keeps tensors, and the hooks of torch's activation checkpointing, until the garbage collector runs."""
    held = _Held()
    alive = weakref.ref(held)

    def call(held):
        function(*arguments, **options)

    gc.disable()
    try:
        answer = raised(call, held)
        del held
        assert alive() is None, f"{answer} keeps the frames that it came through"
    finally:
        gc.enable()
    return answer


def relative(actual, expected):
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    assert actual.isfinite().all()
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-12)).item()


def relative_all(names, actual, expected):
    return {name: relative(x, y) for name, x, y in zip(names, actual, expected)}


def chunks(tokens, zigzag=False):
    """Yield (rank, first token, end) in the order of the sequence."""
    numbers = [(rank, n // (1 + zigzag)) for rank, n in enumerate(tokens)]
    begin = 0
    for rank, n in numbers + numbers[::-1] * zigzag:
        yield rank, begin, begin + n
        begin += n


def place(comm, tokens, zigzag=False, documents=None):
    """Return this rank's tokens of the whole sequence as a slice, in the zigzag layout as indices. documents:
    cu_seqlens of the whole, if each sequence is split over the ranks."""
    if documents is not None:
        parts = [torch.arange(a, b).chunk(2 * comm.size) for a, b in itertools.pairwise(documents) if b > a]
        own = [some[i] for some in parts for i in (comm.rank, 2 * comm.size - 1 - comm.rank)]
        return torch.cat([torch.arange(0), *own])
    own = [(begin, end) for rank, begin, end in chunks(tokens, zigzag) if rank == comm.rank]
    return torch.cat([torch.arange(*part) for part in own]) if zigzag else slice(*own[0])


def random_requests(order, requests, size, T, uneven):
    """Return (query_start_loc of ``requests`` requests, the cut of ranks with T rows each)."""
    tokens = [order.choice([0, T, order.randint(0, T)]) if uneven else T for _ in range(size)]
    row = [0, *itertools.accumulate(tokens)]
    total = order.choice([row[-1], order.randint(0, row[-1])])
    inner = [
        order.choice([0, total, order.randint(0, total), *(x for x in row if x <= total)]) for _ in range(requests)
    ]
    return [0, *sorted(inner[1:]), total], row


def pairs(*parameters):
    """Return rows for parametrize, with one value of each parameter, tuples spread: each two values of different
    parameters are together in at least one row, with fewer rows than the product has."""
    rows, chosen = [*itertools.product(*(range(len(values)) for values in parameters))], []

    def together(row):
        return set(itertools.combinations(enumerate(row), 2))

    missing = set().union(*map(together, rows))
    while missing:
        chosen.append(max(rows, key=lambda row: len(together(row) & missing)))
        missing -= together(chosen[-1])
    found = [[values[i] for values, i in zip(parameters, row, strict=True)] for row in sorted(chosen)]
    return [tuple(y for x in row for y in (x if type(x) is tuple else (x,))) for row in found]
