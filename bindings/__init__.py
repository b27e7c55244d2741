"""Contact with foreign libraries, one file each; knows nothing of scans.

``nvshmem_host``    NVSHMEM's host side through nvshmem4py: initialisation, the symmetric heap, peers.
``nvshmem_device``  NVSHMEM's device functions for stock Triton. Useful by itself.
``shared_memory``   the same kind of heap in POSIX shared memory, for ranks that are processes on CPUs.
``interpreter``     Triton's interpreter, which runs the kernels of such ranks, with less work repeated.
``heap``            what the two heaps have in common: carving blocks out of one arena.
"""
