"""All private torch functions that allscan uses; a new torch may change them. Bound once, at import.

Checked against the sources of torch 2.11 to 2.14; comments name the differences. Each entry says why the public API is
not enough.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import forward_ad as forward_ad  # _current_level: whether forward-mode AD is active, in one lookup
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves as tree_leaves  # flattens results of operators; no public function

transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active  # vmap, grad, ... around a call
# of a wrapper that outlived its transform; Function.apply does the same
unwrap_if_dead: Callable[[torch.Tensor], torch.Tensor] = torch._C._functorch.unwrap_if_dead

# Handle of the current stream of a GPU, by index. The public function creates an object and takes 30 times as long.
current_stream_of: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
# torch.cuda.current_device and is_current_stream_capturing without their check whether CUDA is initialised
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)

# The number of active dispatch modes, and a context without them; no public function for either
num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
without_dispatch_modes = _disable_current_modes


def recorded() -> bool:
    """Check whether make_fx records the operators of this thread. torch.compiler.is_compiling() is False then; no
    public function."""
    proxy_tensor = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return proxy_tensor is not None and proxy_tensor.get_proxy_mode() is not None


# Number of the backward pass that this thread runs, -1 outside of one; no public function
graph_task: Callable[[], int] = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Check whether this thread runs a backward pass."""
    return graph_task() != -1


def runs_next(node: Any, number: int) -> bool:
    """Check, in the backward of a Function's node, whether this backward pass also runs the node of the tensor input
    ``number``: torch.autograd.grad leaves out those that lead to none of its inputs."""
    following = node.next_functions[number][0]
    try:
        return following is not None and bool(torch._C._will_engine_execute_node(following))
    except RuntimeError:  # of a leaf whose gradient torch.autograd.grad returns; or torch compiles the backward pass
        return True


def stops_recomputation(error: BaseException) -> bool:
    """Check whether an exception is torch.utils.checkpoint's early stop of a recomputation. Compares the name, since
    the class is private."""
    return type(error).__name__ == "_StopRecomputationError"


def version_of(tensor: torch.Tensor) -> int:
    """Return a tensor's version counter (``_version`` in torch's documentation of autograd): the number of in-place
    writes. 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version


# A tensor with another shape and the same memory that torch does not track as a view: a custom operator may not return
# a view, and autograd would reject the caller's in-place writes to it
unsafe_view: Callable[[torch.Tensor, Sequence[int]], torch.Tensor] = torch.ops.aten._unsafe_view.default


def ipc_handle(memory: torch.Tensor) -> tuple:
    """Return the CUDA IPC handle of a tensor's memory, as numbers and bytes, for ``mapped`` in another process. torch
    offers it only through its multiprocessing queues."""
    return memory.untyped_storage()._share_cuda_()


def mapped(handle: Sequence[Any]) -> torch.UntypedStorage:
    """Map the memory of an ``ipc_handle`` of another process."""
    return torch.UntypedStorage._new_shared_cuda(*handle)


def operator(name: str, arguments: str, more: bool = False) -> Any:
    """Return the operator of torch.ops.aten if its arguments are these (with ``more``: start with these), else None.
    Used for attention with log-sum-exps as inputs and outputs, which has no public function."""
    found, wanted = getattr(torch.ops.aten, name, None), arguments.split()
    taken = [] if found is None else [x.name for x in found.default._schema.arguments]
    return found if (taken[: len(wanted)] if more else taken) == wanted else None


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Check whether a module has backward hooks, which see the gradients of its inputs. No public function."""
    return bool(module._backward_hooks or torch.nn.modules.module._global_backward_hooks)


coalesced = dist._coalescing_manager  # several collectives of a process group in one launch; no public function


def default_store() -> dist.Store:
    """Return the store of torch.distributed's default group. No public function returns it."""
    return dist.distributed_c10d._get_default_store()


def bare_apply(cls: Any) -> Callable[..., Any]:
    """Return ``apply`` of an autograd.Function without torch's handling of default arguments and transforms."""
    return super(torch.autograd.Function, cls).apply


# Tag for operators that torch.compile must not put into its CUDA graphs; empty if this torch has no such tag
no_cuda_graph = [tag] if (tag := getattr(torch.Tag, "cudagraph_unsafe", None)) is not None else []


def left_out_arguments(operator: Any, count: int) -> list[Any]:
    """Return the defaults of an operator's arguments from index ``count`` to the last but one."""
    return [x.default_value for x in operator._schema.arguments[count:-1]]


@functools.cache
def compiled_effects() -> Any:
    """Return torch.compile's functions for operators with side effects; None if this torch has them elsewhere. Imported
    on demand: importing the compiler takes a second."""
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
        # memory budget of a region that the user annotated (torch 2.13 and later)
        budget = staticmethod(getattr(torch.fx.traceback, "_get_memory_budget_annotation", lambda node: None))

        @staticmethod
        def memory_budget() -> float:
            """Return the activation memory budget of the whole graph."""
            from torch._functorch import config

            return config.activation_memory_budget

        @staticmethod
        def order(name: str) -> None:
            _register_effectful_op(name, EffectType.ORDERED)

        @staticmethod
        def within_another() -> bool:
            """Check whether the graph being traced is a subgraph of another graph."""
            tracer = proxy_tensor._CURRENT_MAKE_FX_TRACER
            return tracer is not None and tracer.is_hop_subgraph_tracer()

    return Effects
