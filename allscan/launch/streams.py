"""CUDA streams of a communicator and the order of its launches on them. Without GPUs there are no streams."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..bindings import cuda_driver
from ..bindings.torch_compat import capturing, current_device, current_stream_of

# Priorities of a communicator's own streams. SCANS: kernels that other ranks wait for. LONG: kernels of few long
# programs, which are scheduled before the pending short programs on the caller's stream
SCANS, LONG = -2, -1


class Streams:
    """The streams of one communicator on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.index = device.index
        self._last: torch.cuda.Stream | None = None  # stream of the last launch; last_number: its handle
        self.last_number: int | None = None
        self._own: dict[int, torch.cuda.Stream] = {}
        self._for_peek: torch.cuda.Stream | None = None
        self._event: torch.cuda.Event | None = None
        self._known: dict[int, torch.cuda.Stream] = {}
        # (launches, their memory): to be released at the first launch that is not captured
        self.later: list[tuple[AsyncLaunches, tuple[object, ...]]] = []

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""
        return self.cuda and capturing()

    def number(self) -> int:
        """The handle of the current stream."""
        return current_stream_of(self.index) if self.cuda else 0

    def current(self) -> torch.cuda.Stream:
        """torch.cuda.current_stream(), with one cached object for each stream."""
        number = current_stream_of(self.index)
        stream = self._known.get(number)
        if stream is None:
            stream = self._known[number] = torch.cuda.current_stream(self.device)
        return stream

    def synchronize(self) -> None:
        """Wait for this rank's kernels."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
            self.later.clear()

    def follow(self) -> None:
        """Let the current stream wait for the stream of the last launch. In a capture the caller orders launches."""
        if not self.cuda:
            return
        if self.later and not capturing():
            later, self.later = self.later, []
            for launches, memory in later:
                launches.release(memory)
        number = current_stream_of(self.index)
        if number != self.last_number and not capturing():
            stream = self.current()
            if self._last is not None:
                stream.wait_stream(self._last)
            self._last, self.last_number = stream, number

    def peek(self, words: torch.Tensor) -> list[Any]:
        """The present values of this rank's ``words``, read without waiting for other streams."""
        if not self.cuda:
            return words.tolist()
        if self._for_peek is None:
            self._for_peek = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._for_peek):
            return words.tolist()

    def side(self, priority: int = SCANS) -> AbstractContextManager[Callable[[], None]]:
        """A context manager that enters the communicator's own stream of this priority, after the current stream's
        work. With SCANS the current stream also waits for the start of this stream, so that later kernels do not occupy
        all SMs before the scan. Returns ``join``, which makes the current stream wait for the launches inside. Memory
        that these use must not be freed before. A stream of another priority may be entered and joined inside."""
        return Side(self, priority) if self.cuda else contextlib.nullcontext(lambda: None)

    def put_behind(self, later: torch.cuda.Stream, earlier: torch.cuda.Stream) -> None:
        """Let ``later`` wait for all work launched on ``earlier`` so far."""
        if self._event is None:
            self._event = torch.cuda.Event()  # reused: takes half the time of Stream.wait_stream
        self._event.record(earlier)
        later.wait_event(self._event)

    def own(self, priority: int) -> torch.cuda.Stream:
        """The communicator's own stream of this priority."""
        if priority not in self._own:
            self._own[priority] = private_stream(self.device, priority)
        return self._own[priority]


_idle: dict[tuple[torch.device, int], list[int]] = {}  # free private streams, by device and priority


def private_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """A stream that no other code gets: a capture of it includes no launches of other threads. When it is no longer
    referenced, it is not destroyed, since torch's allocator may know it, but reused."""
    idle = _idle.setdefault((device, priority), [])
    with torch.cuda.device(device):
        try:
            number = idle.pop()
        except IndexError:
            number = cuda_driver.new_stream(priority)
        stream = _PrivateStream(number, device)
    stream.idle = idle
    return stream


@functools.cache
def table_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which tables are allocated and copied to this GPU."""
    return private_stream(device)


class _PrivateStream(torch.cuda.ExternalStream):
    """A stream that returns to ``idle`` when it is deleted. Uses __del__, since weakref.finalize holds a weak
    reference: torch (2.11) does not clear those to CUDA streams, and the interpreter's last garbage collection then
    reads freed memory."""

    idle: list[int]

    # is_finalizing is bound here, since at the interpreter's end the module's global names may be None
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self.idle.append(self.cuda_stream)


class Side:
    """See ``Streams.side``; torch.cuda.stream would take 7 us more. ``done``: an event to be recorded after the
    launches inside; with it the current stream does not wait for the start of this stream."""

    def __init__(self, streams: Streams, priority: int, done: torch.cuda.Event | None = None) -> None:
        self._streams, self._stream, self._done = streams, streams.own(priority), done
        self._first = done is None and priority == SCANS

    def __enter__(self) -> Callable[[], None]:
        self.current, self._device = self._streams.current(), current_device()
        self._streams.put_behind(self._stream, self.current)
        if self._first:
            self._streams.put_behind(self.current, self._stream)
        torch.cuda.set_stream(self._stream)
        return self._join

    def __exit__(self, *error: object) -> None:
        if self._done is not None:
            self._done.record(self._stream)
        torch.cuda.set_stream(self.current)
        if self._device != self._streams.device.index:  # set_stream has changed the device
            torch.cuda.set_device(self._device)

    def _join(self) -> None:
        self._streams.put_behind(self.current, self._stream)


class AsyncLaunches:
    """A context manager, and then the handle, of the launches of an asynchronous call. They are made on the stream of
    ``streams.side(SCANS)``, for which the current stream does not wait; in the capture of a CUDA graph on the current
    stream, since only that orders a communicator's launches."""

    def __init__(self, streams: Streams) -> None:
        self._streams, self._side = streams, None
        if streams.cuda and not streams.capturing():
            self._done = torch.cuda.Event()
            self._side = Side(streams, SCANS, self._done)

    def __enter__(self) -> AsyncLaunches:
        if self._side is not None:
            self._side.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._side is not None:
            self._side.__exit__(*error)

    def wait(self, memory: tuple[object, ...]) -> None:
        """Let the current stream wait for the launches inside, and release ``memory``. Raises RuntimeError in a capture
        if the launches were made outside of it; the capture continues."""
        if self._side is None:
            return
        if self._streams.capturing():
            raise RuntimeError("call wait() before the capture: this scan was launched before it")
        if not self.release(memory):
            self._streams.current().wait_event(self._done)

    def release(self, memory: tuple[object, ...]) -> bool:
        """Allow ``memory``, which the launches inside use, to be freed after them: the stream that was current at their
        launch and the stream that is current now wait for them. Returns False if one of the two is being captured,
        since the graph would wait for work outside of it; the memory is then held until after the capture."""
        side, streams = self._side, self._streams
        if side is None:
            return True
        origin, current = side.current, streams.current()
        if streams.capturing() or (origin != current and cuda_driver.is_captured(origin.cuda_stream)):
            streams.later.append((self, memory))
            return False
        for stream in {origin, current}:
            stream.wait_event(self._done)
        return True
