"""A scan under way on a stream of the communicator's own."""

from __future__ import annotations

from torch import Tensor

from ..comm.communicator import Communicator
from ..launch.streams import SideStream


class Work:
    """A scan under way, as ``async_op=True`` returns it.

    What the scan reads must not be written before ``wait``. A Work that goes without having been waited for only
    gives its memory back behind the scan (in a CUDA graph's capture, with the next call behind that): this rank has
    taken part all the same. With gradients its result then counts as ignored, see ``allscan.allscan``.

    Example:
        >>> work = allscan.allscan(state, decay, comm=comm, async_op=True)
        >>> prev = work.wait()
    """

    def __init__(self, comm: Communicator, result: Tensor, side: SideStream, read: tuple[object, ...]) -> None:
        self._comm, self.result, self._side_stream, self._read = comm, result, side, read

    def of(self, result: Tensor) -> Work:
        """This, with ``result`` in place of the tensor that the scan writes."""
        self.result = result
        return self

    def wait(self) -> Tensor:
        """Let the current stream wait for the scan; the host does not wait. May be called again.

        Returns:
            The result, which what is launched on the current stream from here on has.

        Raises:
            AllScanTimeout: the scan is known to have failed, or
            AllScanOutOfStep: likewise; as long as it is not known, the next call raises it, as for a scan that was not
                asynchronous.
            RuntimeError: in a CUDA graph's capture, which goes on, for a scan that was begun before: a graph cannot
                wait for it.
        """
        self._side_stream.wait(self._read)
        self._read = ()
        self._comm.check()
        return self.result

    def __del__(self) -> None:
        if self._read:
            self._side_stream.release(self._read)
