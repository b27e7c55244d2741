"""Records the package's Python functions in warm calls as they are on a host with a GPU, without one."""

from __future__ import annotations

import contextlib
import gc
import os
import sys

import allscan
from allscan.launch import compiled_kernel, streams
from allscan.scan import launcher
from allscan.tokens import packing

ROOT = os.path.dirname(os.path.realpath(allscan.__file__))
FOLDERS = tuple(os.path.realpath(os.path.join(ROOT, name)) + os.sep for name in (".", "bindings", "shmem_kernels"))
# no part of a call on a GPU; called while a rank waits for others
NOT_COUNTED = tuple(map(os.path.normpath, ("bindings/interpreter", "comm/host_exchange.py", "comm/call_order.py")))


class Steps:
    """Records the package's functions called inside of ``with``, in order, without comprehensions and __del__, and
    without what a plan's launches call."""

    def __init__(self):
        self.files, self.names, self._launches = [], [], None

    def __enter__(self):
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _event(self, frame, event, _):
        code = frame.f_code
        if self._launches is not None:
            if event == "return" and frame is self._launches:
                self._launches = None
            return
        if event == "call" and code.co_filename.startswith(FOLDERS) and not code.co_name.endswith("comp>"):
            if code.co_name not in ("<genexpr>", "__del__") and not any(x in code.co_filename for x in NOT_COUNTED):
                self.files.append(os.path.basename(code.co_filename))
                self.names.append(f"{self.files[-1]}:{code.co_name}")
                if self.names[-1] == "plan.py:_launch":
                    self._launches = frame

    def walk(self):
        stays = [a for a, b in zip(self.files, [None, *self.files]) if a != b]
        return len(self.files), len(set(stays)), len(stays) - len(set(stays))


def as_on_a_gpu(comm):
    """Disable all later launches of this rank."""

    def nothing(*_):
        return None

    for found in gc.get_objects():
        if issubclass(type(found), compiled_kernel.Launch):
            found.ready, found.at = True, nothing
        elif issubclass(type(found), packing.Tables):
            found._streams = {0}  # marked as read on that stream
    for module in (launcher, streams, compiled_kernel, packing):
        for name, value in {"capturing": False, "current_stream_of": 0, "current_device": -1}.items():
            if hasattr(module, name):
                setattr(module, name, lambda *_, value=value: value)
    comm.streams.cuda, comm.streams.last_number = True, 0
    comm.streams.side = lambda *_: contextlib.nullcontext(lambda: None)
