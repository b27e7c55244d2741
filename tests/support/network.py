"""Sets up a network on one machine with two GPUs: NVSHMEM's UCX transport over TCP on the loopback, with the library of
tests/network/hostile.c in between."""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
import re
import shutil
import subprocess

from allscan.tools.ranks import on_first

SOURCES = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "network")
MODES = "pass", "reorder", "bandwidth", "stall", "never"  # modes of hostile.c
# Counts of signals, and bytes. of_groups: reorderings with a signal of another group of puts
COUNTS = "held", "passed", "overtakings", "lost", "bytes", "most_held", "failed", "of_groups"
TRAFFIC = "/proc/net/dev"


def compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def build(folder: str, source: str, library: str, *options: str) -> str:
    """Compile a C source of tests/network into a shared library; return its path."""
    path = os.path.join(folder, library)
    command = [str(compiler()), "-O1", "-Wall", "-shared", "-fPIC", "-o", path, os.path.join(SOURCES, source), *options]
    subprocess.run(command, check=True, timeout=900)
    return path


def ucx_folder() -> str | None:
    """Return the folder of the libraries of the wheel libucx-cu13 (or -cu12)."""
    found = importlib.util.find_spec("libucx")
    folders = found.submodule_search_locations if found else []
    return next(
        (os.path.join(x, "lib") for x in folders if os.path.exists(os.path.join(x, "lib", "libucp.so.0"))), None
    )


def missing_for_gpu_heap() -> str | None:
    """Return what is missing for a heap in GPU memory, in addition to ``missing``."""
    module = os.path.join(ucx_folder() or "", "ucx", "libuct_cuda.so.0")
    return None if os.path.exists(module) else "needs UCX with its module for CUDA, ucx/libuct_cuda.so.0"


def transport_folder() -> str | None:
    """Return the folder of NVSHMEM with its UCX transport."""
    found = importlib.util.find_spec("nvidia.nvshmem") if importlib.util.find_spec("nvidia") else None
    folders = found.submodule_search_locations if found else []
    return next((x for x in folders if glob.glob(os.path.join(x, "lib", "nvshmem_transport_ucx.so*"))), None)


def missing() -> str | None:
    """Return what this machine lacks; None if nothing."""
    import torch

    wanted = {
        "two GPUs": torch.cuda.device_count() >= 2,
        "Linux, with /proc/net/dev": os.path.exists(TRAFFIC),
        "a C compiler, cc": compiler(),
        "UCX: pip install libucx-cu13 (or -cu12)": ucx_folder(),
        "NVSHMEM with its UCX transport: pip install 'allscan[cuda13]'": transport_folder(),
        "nvshmem4py: pip install 'allscan[cuda13]'": importlib.util.find_spec("nvshmem"),
    }
    needs = [what for what, there in wanted.items() if not there]
    return "needs " + "; ".join(needs) if needs else None


def _in_host_memory(folder: str, hostile: str) -> dict[str, str]:
    return {"LD_PRELOAD": hostile, "ALLSCAN_UCX_TLS": "tcp,self", "NVSHMEM_HEAP_KIND": "SYSMEM"}


def _in_gpu_memory(folder: str, hostile: str) -> dict[str, str]:
    """Return the variables for a heap in GPU memory. NVSHMEM's proxy then calls CUDA while kernels wait for its data.
    So no call may hold CUDA's locks while it waits for these kernels: a copy to pageable memory (cases synchronize the
    stream first), the load of a module, or a launch behind a thousand others. Nor may such work be in front of the
    proxy's copies in a hardware queue."""
    gpu_heap = build(folder, "gpu_heap.c", "libgpu_heap.so", "-ldl", "-lpthread")
    return {
        "LD_PRELOAD": f"{hostile}:{gpu_heap}",
        "ALLSCAN_GPU_HEAP": gpu_heap,
        "ALLSCAN_UCX_TLS": "tcp,cuda_copy,self",
        "NVSHMEM_HEAP_KIND": "DEVICE",
        "NVSHMEM_DISABLE_CUDA_VMM": "1",  # one block from cudaMalloc
        "UCX_MEMTYPE_CACHE": "n",  # its hooks in CUDA may miss NVSHMEM's libraries, if these were loaded before
        "UCX_CUDA_COPY_DMABUF": "n",
        "CUDA_MODULE_LOADING": "EAGER",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    }


IN_MEMORY = {"host": _in_host_memory, "gpu": _in_gpu_memory}


def environment(folder: str, heap: str = "host") -> dict[str, str]:
    """Return the environment, to be set before their start, of processes whose NVSHMEM uses the loopback only.
    ``folder``: for libraries and UCX's logs. heap: memory of NVSHMEM's heap, "host" or "gpu"."""
    hostile = build(folder, "hostile.c", "libhostile.so", "-ldl", "-lpthread")
    build(folder, "gdrcopy.c", "libgdrapi.so.2")
    ucx = ucx_folder()
    assert ucx is not None
    before = [os.environ["LD_LIBRARY_PATH"]] if os.environ.get("LD_LIBRARY_PATH") else []
    return IN_MEMORY[heap](folder, hostile) | {
        "LD_LIBRARY_PATH": os.pathsep.join([folder, ucx, *before]),
        "ALLSCAN_HOSTILE": hostile,
        "NVSHMEM_REMOTE_TRANSPORT": "ucx",
        "NVSHMEM_DISABLE_MNNVL": "1",
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo",
        "UCX_NET_DEVICES": "lo",
        "UCX_MAX_RMA_RAILS": "1",  # the signal is an active message, ordered behind its data only on the same lane
        "UCX_MAX_EAGER_RAILS": "1",
        "UCX_FENCE_MODE": "weak",  # otherwise a TCP round trip for each signal
        "UCX_LOG_LEVEL": "info",
        "UCX_LOG_FILE": os.path.join(folder, "ucx.%p.log"),
        "UCX_WARN_UNUSED_ENV_VARS": "n",
    }


def lanes(folder: str) -> set[str]:
    """Return the transports to other processes in UCX's logs, such as "tcp/lo"."""
    found: set[str] = set()
    for path in glob.glob(os.path.join(folder, "ucx.*.log")):
        with open(path) as file:
            for line in file:
                if "cfg#" in line:
                    found.update(re.findall(r"\w+\((\w+/\w+)", line))
    return {lane for lane in found if not lane.startswith("self/")}


def loopback_bytes() -> int:
    """Return the number of bytes that the interface lo has received."""
    with open(TRAFFIC) as file:
        line = next(line for line in file if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def run_over(ranks, size, function, *arguments, behaves, timeout):
    """Return (results by rank, increases of the network's counters, bytes through lo) of function(group, *arguments) on
    ``size`` ranks, over a network with behaviour ``behaves``."""
    before, start = ranks.run(behave, *behaves), loopback_bytes()
    found = ranks.run(on_first, size, function, *arguments, timeout=timeout)
    after = ranks.run(counts)
    counted = {name: sum(x[name] for x in after) - sum(x[name] for x in before) for name in after[0]}
    received = loopback_bytes() - start
    print(f"{function.__name__}{arguments} over {behaves}: {received:,} bytes by lo, {counted}", flush=True)
    if behaves[0] != "pass":
        assert counted["passed"] > 0 and counted["failed"] == 0, counted
    assert received >= counted["bytes"]
    return found, counted, received


# In the processes of the ranks


def hostile() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ["ALLSCAN_HOSTILE"])  # the preloaded library
    library.network_count.restype = ctypes.c_uint64
    return library


def behave(mode: str, value: int = 0) -> dict[str, int]:
    """Set the network's mode; return its counts so far."""
    hostile().network_set(MODES.index(mode), ctypes.c_uint64(value))
    return counts()


def counts() -> dict[str, int]:
    return {name: hostile().network_count(i) for i, name in enumerate(COUNTS)}


def gpu_heap_signals() -> int:
    """Return the number of signals that CUDA's driver has written in place of NVSHMEM."""
    library = ctypes.CDLL(os.environ["ALLSCAN_GPU_HEAP"])
    library.gpu_heap_signals.restype = ctypes.c_uint64
    return library.gpu_heap_signals()


def memory_of(address: int) -> tuple[str, int]:
    """Return ("host" or "gpu", the GPU's index) of an address, from CUDA's driver."""
    cuda, kind, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int()
    for attribute, found in ((2, kind), (9, device)):  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, _DEVICE_ORDINAL
        error = cuda.cuPointerGetAttribute(ctypes.byref(found), attribute, ctypes.c_uint64(address))
        assert not error, (attribute, error)
    return {1: "host", 2: "gpu"}[kind.value], device.value


def enter_node(names: list[str]) -> str:
    """Assign this process to the node of a name; call it before NVSHMEM starts."""
    import torch.distributed as dist

    os.environ["ALLSCAN_NODE"] = names[dist.get_rank()]
    return os.uname().nodename
