"""Contact with foreign libraries, one file each; knows nothing of scans.

``transport``       what a symmetric heap offers, whichever the transport (a Protocol).
``arena``           blocks carved out of a heap.
``shared_memory``   a symmetric heap in POSIX shared memory, for ranks that are processes on CPUs.
``nvshmem_host``    a symmetric heap in NVSHMEM's memory, through nvshmem4py: initialisation, peers.
``nvshmem_module``  NVSHMEM's device library in compiled Triton kernels.
``nvshmem_device``  NVSHMEM's device functions for stock Triton. Useful by itself.
``cuda_driver``     the CUDA driver: streams of one's own, and graphs that are built of nodes.
``triton_compat``   how Triton's compiled kernels are handed their arguments.
``versions``        which versions of them were tested, in one table.
``interpreter``     Triton's interpreter, which runs the kernels of ranks on CPUs, with less work repeated.
"""
