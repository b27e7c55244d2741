"""Network for ranks without GPUs: NVSHMEM's put with signal in Triton's interpreter, over UCX (network/proxy.c)."""

from __future__ import annotations

import ctypes
import os

import torch.distributed as dist

from allscan.bindings import nvshmem_device
from allscan.comm import heap
from allscan.comm.host_exchange import StoreExchange

from . import network

PLACE_BYTES = 3 * 8 + 1024 + 256  # struct place


def variables(folder: str, heap: str = "host") -> dict[str, str]:
    """Return the variables that ``enter`` needs. ``folder``: for the libraries. Ranks without GPUs are forked, so
    nothing can be preloaded: the hostile network is linked before UCX. heap: as in network.environment; "gpu" is the
    GPU of fake_cuda.c."""
    found, ucx = network.environment(folder, heap), str(network.ucx_folder())
    include = os.path.join(os.path.dirname(ucx), "include")
    libraries = found.pop("LD_PRELOAD").split(":")
    libraries += [os.path.join(ucx, name) for name in ("libucp.so.0", "libucs.so.0")]
    options = ["-Wl,--no-as-needed", *libraries, f"-Wl,-rpath,{ucx}", "-Wl,--allow-shlib-undefined", "-lpthread"]
    del found["LD_LIBRARY_PATH"]
    if heap == "gpu":
        names = "libcuda.so.1", "libnvidia-ml.so.1"
        drivers = [network.build(folder, "fake_cuda.c", name, f"-Wl,-soname,{name}") for name in names]
        found["ALLSCAN_FAKE_CUDA"] = os.pathsep.join(drivers)
    return found | {"ALLSCAN_PROXY": network.build(folder, "proxy.c", "libproxy.so", f"-I{include}", *options)}


class UcxNetwork:
    """Replaces ``bindings.shared_memory.Network``."""

    def __init__(self, arenas: list, me: int) -> None:
        drivers = [ctypes.CDLL(path, ctypes.RTLD_GLOBAL) for path in _paths("ALLSCAN_FAKE_CUDA")]
        self._proxy = ctypes.CDLL(os.environ["ALLSCAN_PROXY"])
        self._base, place = arenas[me].data_ptr(), ctypes.create_string_buffer(PLACE_BYTES)
        size = arenas[me].numel()
        self._there = fake_gpu_memory(self._base, size) if drivers else self._base
        self._proxy.proxy_open(ctypes.c_void_p(self._there), ctypes.c_uint64(size), me + 1, place)
        exchange = StoreExchange(range(dist.get_world_size())).exchange
        places = b"".join(bytes.fromhex(text) for text in exchange(place.raw.hex(), "places of the network"))
        self._proxy.proxy_connect(places, len(arenas))
        exchange("connected", "places of the network")

    def put_signal(self, dst: int, src: int, nbytes: int, signal: int, value: int, pe: int) -> None:
        self._proxy.proxy_put_signal(
            ctypes.c_uint64(dst - self._base),
            ctypes.c_void_p(src - self._base + self._there),
            ctypes.c_uint64(nbytes),
            ctypes.c_uint64(signal - self._base),
            ctypes.c_uint64(value),
            pe,
        )

    def quiet(self) -> None:
        self._proxy.proxy_quiet()

    def close(self) -> None:
        self.quiet()


def _paths(name: str) -> list[str]:
    return list(filter(None, os.environ.get(name, "").split(os.pathsep)))


def fake_gpu_memory(address: int, nbytes: int) -> int:
    """Register memory of this process on the GPU of fake_cuda.c; return its address there."""
    driver = ctypes.CDLL("libcuda.so.1")  # the name under which all libraries find the driver
    if not hasattr(driver, "fake_gpu_memory"):
        raise RuntimeError("this process has loaded CUDA's driver before the one that is made up")
    driver.fake_gpu_memory.restype = ctypes.c_void_p
    there = driver.fake_gpu_memory(ctypes.c_void_p(address), ctypes.c_uint64(nbytes))
    assert there
    return there


def fake_copies() -> int:
    """Return the number of copies that the driver of fake_cuda.c has made."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.fake_copies.restype = ctypes.c_uint64
    return driver.fake_copies()


def enter(nodes: list[int], environment: dict[str, str]) -> bool:
    """Send this rank's puts by UCX, and map only ranks of its own node. nodes: node index by rank."""
    os.environ.update(environment)
    heap.init()
    symmetric = heap.symmetric_heap()
    me = dist.get_rank()
    symmetric.network = nvshmem_device.interpreted_network = UcxNetwork(symmetric._arenas, me)
    symmetric.is_mapped = lambda pe: nodes[pe] == nodes[me]
    return True
