"""The handle of an asynchronous scan, which runs on a stream of the communicator."""

from __future__ import annotations

from torch import Tensor

from ..comm.communicator import Communicator
from ..launch.streams import AsyncLaunches


class Work:
    """The handle of an asynchronous scan, returned by ``async_op=True``.

    The scan's inputs must not be written before ``wait``. A Work that is deleted without ``wait`` frees its memory
    after the scan (in a CUDA graph's capture: at the next call after the scan). This rank has taken part in the scan
    even so. With gradients the result then counts as ignored, see ``allscan.allscan``.

    Example:
        >>> work = allscan.allscan(state, decay, comm=comm, async_op=True)
        >>> prev = work.wait()
    """

    def __init__(self, comm: Communicator, result: Tensor, launches: AsyncLaunches, read: tuple[object, ...]) -> None:
        self._comm, self.result, self._launches, self._read = comm, result, launches, read

    def of(self, result: Tensor) -> Work:
        """This Work, with ``result`` in place of the scan's output tensor."""
        self.result = result
        return self

    def wait(self) -> Tensor:
        """Let the current stream wait for the scan; the host does not wait. May be called again.

        Returns:
            The result, ready for later launches on the current stream.

        Raises:
            AllScanTimeout: if the scan is known to have failed.
            AllScanOutOfStep: likewise. A failure that is not known yet is raised by the next call, as for a synchronous
                scan.
            RuntimeError: in a CUDA graph's capture, for a scan begun before the capture: a graph cannot wait for it.
                The capture goes on.
        """
        self._launches.wait(self._read)
        self._read = ()
        self._comm.check()
        return self.result

    def __del__(self) -> None:
        if self._read:
            self._launches.release(self._read)
