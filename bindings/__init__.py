"""Interfaces to other libraries, one file each; independent of scans.

``arena``           interface of a symmetric heap, for all transports (a Protocol); allocator of its blocks.
``shared_memory``   symmetric heap in POSIX shared memory, for CPU ranks.
``cuda_ipc``        symmetric heap in CUDA IPC memory, for ranks that may share a GPU.
``nvshmem_host``    symmetric heap in NVSHMEM's memory, through nvshmem4py: initialisation, peers.
``nvshmem_module``  NVSHMEM's device library in compiled Triton kernels.
``nvshmem_device``  NVSHMEM's device functions for stock Triton. Usable without the rest of allscan.
``cuda_driver``     the CUDA driver: exclusive streams, captures, a kernel's carveout.
``torch_compat``    private functions of torch.
``triton_compat``   private functions of Triton: launches of compiled kernels, builtins.
``versions``        the table of tested versions.
``interpreter``     a folder: corrections of Triton's interpreter for kernels on CPU ranks, and a faster version of it.
"""
