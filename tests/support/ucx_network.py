"""A network for ranks without GPUs: NVSHMEM's put with signal in Triton's interpreter, over UCX (network/proxy.c)."""

from __future__ import annotations

import ctypes
import os

import torch.distributed as dist

from allscan.bindings import nvshmem_device
from allscan.comm import heap
from allscan.comm.host_exchange import StoreExchange

from . import network

PLACE_BYTES = 3 * 8 + 1024 + 256  # struct place


def variables(folder: str) -> dict[str, str]:
    """What ``enter`` needs; the libraries lie in ``folder``. Nothing is preloaded, as ranks without GPUs are forked:
    the hostile network is linked before UCX."""
    found, ucx = network.environment(folder), str(network.ucx_folder())
    include = os.path.join(os.path.dirname(ucx), "include")
    libraries = [found.pop("LD_PRELOAD"), *(os.path.join(ucx, name) for name in ("libucp.so.0", "libucs.so.0"))]
    options = ["-Wl,--no-as-needed", *libraries, f"-Wl,-rpath,{ucx}", "-Wl,--allow-shlib-undefined", "-lpthread"]
    del found["LD_LIBRARY_PATH"]
    return found | {"ALLSCAN_PROXY": network.build(folder, "proxy.c", "libproxy.so", f"-I{include}", *options)}


class UcxNetwork:
    """In place of ``bindings.shared_memory.Network``."""

    def __init__(self, arenas: list, me: int) -> None:
        self._proxy = ctypes.CDLL(os.environ["ALLSCAN_PROXY"])
        self._base, place = arenas[me].data_ptr(), ctypes.create_string_buffer(PLACE_BYTES)
        size = arenas[me].numel()
        self._proxy.proxy_open(ctypes.c_void_p(self._base), ctypes.c_uint64(size), me + 1, place)
        exchange = StoreExchange(range(dist.get_world_size())).exchange
        places = b"".join(bytes.fromhex(text) for text in exchange(place.raw.hex(), "places of the network"))
        self._proxy.proxy_connect(places, len(arenas))
        exchange("connected", "places of the network")

    def put_signal(self, dst: int, src: int, nbytes: int, signal: int, value: int, pe: int) -> None:
        self._proxy.proxy_put_signal(
            ctypes.c_uint64(dst - self._base),
            ctypes.c_void_p(src),
            ctypes.c_uint64(nbytes),
            ctypes.c_uint64(signal - self._base),
            ctypes.c_uint64(value),
            pe,
        )

    def quiet(self) -> None:
        self._proxy.proxy_quiet()


def enter(nodes: list[int], environment: dict[str, str]) -> bool:
    """From now on this rank's puts go by UCX, and it maps those of its node alone. nodes: [rank]: the number of its."""
    os.environ.update(environment)
    heap.init()
    symmetric = heap.symmetric_heap()
    me = dist.get_rank()
    symmetric.network = nvshmem_device.interpreted_network = UcxNetwork(symmetric._arenas, me)
    symmetric.is_mapped = lambda pe: nodes[pe] == nodes[me]
    return True
