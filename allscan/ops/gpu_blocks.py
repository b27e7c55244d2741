"""Block sizes on other GPUs than Hopper, with which kernels were compiled, never timed. Plans have those of Hopper.

sizes = fitted(gpu_kind(device), "output", dict(BV=128, BJ=32, num_warps=8, num_stages=2))
"""

from __future__ import annotations

import functools
from typing import Any

import torch

# Kinds of GPUs. Those of the last two multiply by mma.sync, with operands and results in registers: without smaller
# blocks their code spills kilobytes a thread. SMALL, sm_86, sm_89 and sm_120 among them, has 99 KiB of shared memory.
HOPPER, BLACKWELL, A100, SMALL = "sm_90", "sm_100", "sm_80", "99 KiB"
SHARED_MEMORY = {HOPPER: 227 << 10, BLACKWELL: 227 << 10, A100: 163 << 10, SMALL: 99 << 10}  # bytes of a program

# By kind and launch, what replaces Hopper's sizes, unless one of these blocks is smaller there.
# With 128 columns code of Triton 3.6 to 3.8 for Blackwell needs more tensor memory than the 512 columns of a
# multiprocessor; that of KDA's gradients also with 32 channels in float32 (ptxas gets 16 wrong for Hopper only, see
# blocks.product_of_parts). "solved" takes 256 of them: two programs, which then need not share registers with a third.
NARROW = "output local adjoint scalar_output scalar_states scalar_local scalar_adjoint"
OF_BLACKWELL = dict.fromkeys(NARROW.split(), dict(BV=64, num_warps=8))
OF_BLACKWELL |= dict.fromkeys(("gradient", "rest"), dict(BJ=16, BV=32)) | dict(solved=dict(maxnreg=255))
OF_A100 = OF_BLACKWELL | dict(
    summary=dict(BV=64),
    states=dict(BV=64, num_warps=8),
    gradients=dict(BJ=32),
    operands=dict(BJ=32, num_warps=8),
    strong=dict(BJ=16, BV=32, num_warps=8, maxnreg=255),
    solved=dict(BJ=32, num_warps=8, maxnreg=255),
    gradient=dict(BJ=16, BV=32, num_warps=8),
    rest=dict(BJ=16, BV=32, num_warps=8),
    triangle=dict(maxnreg=255),
    scalar_gradients=dict(BJ=32, BV=32),
    gla_output=dict(BV=64, num_warps=8),
    gla_output_reverse=dict(BV=64, num_warps=8, num_stages=2),
    gla_grad=dict(BK=32),
    gla_strong=dict(num_warps=8),
    ssd_output=dict(num_warps=8),
    ssd_adjoint=dict(BV=64, HEADS=1, num_warps=8),
    ssd_gradients=dict(num_warps=8, num_stages=2),
)
SIZES: dict[str, dict[str, dict[str, int]]] = {HOPPER: {}, BLACKWELL: OF_BLACKWELL, A100: OF_A100, SMALL: OF_A100}
MOST_STAGES = {HOPPER: 4, BLACKWELL: 4, A100: 4, SMALL: 2}


@functools.cache
def gpu_kind(device: torch.device) -> str:
    """The kind of this GPU. HOPPER for CPUs, and without a GPU, as in tracing."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return HOPPER
    found: Any = torch.cuda.get_device_properties(device)  # torch has no type of this field of it
    return kind_of(found.major, found.shared_memory_per_block_optin)


def kind_of(major: int, shared_memory: int) -> str:
    """The kind of a GPU of this major compute capability, whose programs may have so many bytes of shared memory."""
    if major == 9:
        return HOPPER
    return next((kind for kind in (BLACKWELL, A100) if shared_memory >= SHARED_MEMORY[kind]), SMALL)


def fitted(gpu: str, name: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return ``sizes``, block sizes and options of the launch ``name`` on Hopper, as they are on this kind of GPU."""
    found = SIZES[gpu].get(name, {})
    if any(sizes.get(block, least) < least for block, least in found.items() if block in ("BJ", "BK", "BV")):
        found = {}
    chosen = sizes | found
    if "num_stages" in sizes:
        chosen["num_stages"] = min(sizes["num_stages"], chosen["num_stages"], MOST_STAGES[gpu])
    return chosen
