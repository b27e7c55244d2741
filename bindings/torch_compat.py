"""What torch does not promise, and a new version may change: all that allscan uses of it. Bound once, at import.

Read in torch 2.11 to 2.14, where all is in the same places, but for what a comment names. Beside each stands why what
torch has in public does not do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _are_functorch_transforms_active as transforms_active  # vmap, grad and the like around a call
from torch._C._functorch import unwrap_if_dead  # of a tensor that such a transform has left; Function.apply does it
from torch.autograd import forward_ad  # _current_level: whether forward-mode derivatives are under way, in one look
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves  # of what operators return, which torch has nothing public for

__all__ = [
    "TorchDispatchMode",
    "bare_apply",
    "capturing",
    "coalesced",
    "compiled_effects",
    "current_device",
    "current_stream_of",
    "default_store",
    "forward_ad",
    "has_backward_hooks",
    "in_backward",
    "ipc_handle",
    "left_out_arguments",
    "mapped",
    "no_cuda_graph",
    "num_dispatch_modes",
    "operator",
    "stops_recomputation",
    "transforms_active",
    "tree_leaves",
    "unsafe_view",
    "unwrap_if_dead",
    "version_of",
    "without_dispatch_modes",
]

# Handle of the current stream of the GPU with a number; torch's own way makes an object, which takes 30 times as long.
current_stream_of: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
# torch.cuda.current_device and is_current_stream_capturing, which look again whether torch knows of GPUs
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)

# How many dispatch modes are on, and a block without them: there is nothing public for either
num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
without_dispatch_modes = _disable_current_modes

_graph_task: Callable[[], int] = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return _graph_task() != -1


def stops_recomputation(error: BaseException) -> bool:
    """Whether an exception is that by which torch.utils.checkpoint ends a region early. By its name,
    since the class is private."""
    return type(error).__name__ == "_StopRecomputationError"


def version_of(tensor: torch.Tensor) -> int:
    """How often torch has written to a tensor; 0 for one made in inference mode, where it does not count. torch's own
    documentation of autograd names ``_version``."""
    return 0 if tensor.is_inference() else tensor._version


# A tensor of another shape with the same memory, which torch does not know for a view: a custom operator may not return
# one, and autograd would reject to let its caller write to it
unsafe_view: Callable[[torch.Tensor, Sequence[int]], torch.Tensor] = torch.ops.aten._unsafe_view.default


def ipc_handle(memory: torch.Tensor) -> tuple:
    """Numbers and bytes by which another process maps a tensor's memory on a GPU (``mapped``): what torch gives its
    own queues between processes, without those."""
    return memory.untyped_storage()._share_cuda_()


def mapped(handle: Sequence[Any]) -> torch.UntypedStorage:
    """See ``ipc_handle``."""
    return torch.UntypedStorage._new_shared_cuda(*handle)


def operator(name: str, arguments: str, more: bool = False) -> Any:
    """torch.ops.aten's of this name, None unless it takes these arguments, ``more``: and others behind them: attention
    that takes and gives log-sum-exps, which nothing public does."""
    found, wanted = getattr(torch.ops.aten, name, None), arguments.split()
    taken = [] if found is None else [x.name for x in found.default._schema.arguments]
    return found if (taken[: len(wanted)] if more else taken) == wanted else None


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether somebody is given the gradients of a module's inputs. There is nothing public to ask by."""
    return bool(module._backward_hooks or torch.nn.modules.module._global_backward_hooks)


coalesced = dist._coalescing_manager  # collectives of one process group in one launch; nothing public does it


def default_store() -> dist.Store:
    """The store of torch.distributed's default group. init_process_group takes one, nothing public gives it back."""
    return dist.distributed_c10d._get_default_store()


def bare_apply(cls: Any) -> Callable[..., Any]:
    """``apply`` of an autograd.Function's class without what torch does about default arguments and transforms."""
    return super(torch.autograd.Function, cls).apply


# For operators that must not be part of a CUDA graph of torch's: a tag that torch has where it knows such a thing
no_cuda_graph = [tag] if (tag := getattr(torch.Tag, "cudagraph_unsafe", None)) is not None else []


def left_out_arguments(operator: Any, count: int) -> list[Any]:
    """Defaults of an operator's arguments from number ``count`` on, but for the last one."""
    return [x.default_value for x in operator._schema.arguments[count:-1]]


@functools.cache
def compiled_effects() -> Any:
    """What torch.compile does about operators with effects; None in a torch that has that elsewhere. Imported when it
    is asked for: the compiler takes a second."""
    try:
        from torch._higher_order_ops.effects import _register_effectful_op
        from torch._library.effects import EffectType
        from torch._subclasses.functional_tensor import FunctionalTensorMode
        from torch.fx.experimental import proxy_tensor
        from torch.utils.checkpoint import _CachingTorchDispatchMode
    except ImportError:
        return None

    class Effects:
        modes = FunctionalTensorMode, _CachingTorchDispatchMode
        recorder = staticmethod(proxy_tensor.get_proxy_mode)
        # of a region of the user's (torch 2.13 and later)
        budget = staticmethod(getattr(torch.fx.traceback, "_get_memory_budget_annotation", lambda node: None))

        @staticmethod
        def memory_budget() -> float:
            """Of activations, for the whole graph."""
            from torch._functorch import config

            return config.activation_memory_budget

        @staticmethod
        def order(name: str) -> None:
            _register_effectful_op(name, EffectType.ORDERED)

        @staticmethod
        def within_another() -> bool:
            """Whether the graph that is recorded is to be called by another graph."""
            tracer = proxy_tensor._CURRENT_MAKE_FX_TRACER
            return tracer is not None and tracer.is_hop_subgraph_tracer()

    return Effects
