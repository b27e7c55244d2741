"""The streams on which a communicator's launches follow one another. Without GPUs there are none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch


class Streams:
    """Of one communicator, on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        self._last: torch.cuda.Stream | None = None
        self._side: torch.cuda.Stream | None = None
        self._looking: torch.cuda.Stream | None = None

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""
        return self._cuda and torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        """Wait for this rank's kernels."""
        if self._cuda:
            torch.cuda.synchronize(self.device)

    def follow(self) -> None:
        """Put the current stream behind what was launched on another one. In a capture the order is the caller's."""
        if self._cuda and not torch.cuda.is_current_stream_capturing():
            stream = torch.cuda.current_stream(self.device)
            if self._last is not None and self._last != stream:
                stream.wait_stream(self._last)
            self._last = stream

    def peek(self, words: torch.Tensor) -> list:
        """What is in this rank's ``words`` now, beside whatever its streams are doing."""
        if not self._cuda:
            return words.tolist()
        if self._looking is None:
            self._looking = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._looking):
            return words.tolist()

    @contextlib.contextmanager
    def side(self) -> Iterator[Callable[[], None]]:
        """A stream behind the current one, which goes on no earlier than this one begins. Yields ``join``, which makes
        the current stream wait for what was launched inside; memory that it uses may not be given back before."""
        if not self._cuda:
            yield lambda: None
            return
        current, side = torch.cuda.current_stream(self.device), self._own()
        side.wait_stream(current)
        current.wait_stream(side)
        with torch.cuda.stream(side):
            yield lambda: current.wait_stream(side)

    @contextlib.contextmanager
    def beside(self) -> Iterator[Callable[[], None]]:
        """The same stream, but the current one goes on at once. ``join`` waits for what was launched inside only: the
        stream that is current here, whose memory is used, and the one that is current when ``join`` is called. In a
        CUDA graph's capture it is the current stream: there nothing else orders a communicator's launches."""
        if not self._cuda or self.capturing():
            yield lambda: None
            return
        current, side, done = torch.cuda.current_stream(self.device), self._own(), torch.cuda.Event()

        def join() -> None:
            for stream in {current, torch.cuda.current_stream(self.device)}:
                stream.wait_event(done)

        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                yield join
        finally:
            done.record(side)

    def _own(self) -> torch.cuda.Stream:
        if self._side is None:
            self._side = torch.cuda.Stream(self.device, priority=-1)
        return self._side
