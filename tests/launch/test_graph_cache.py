"""The cache of CUDA graphs, with fakes in place of the driver."""

from __future__ import annotations

import contextlib

import pytest

from allscan.launch import graph_cache

pytestmark = [pytest.mark.cpu, pytest.mark.quick]


class Graph:
    """A CUDA graph and its executable form."""

    alive, interrupted = 0, False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def instantiate(self):
        Graph.alive += 1
        return self

    def launch(self, stream):
        if Graph.interrupted:
            raise KeyboardInterrupt

    def destroy(self):
        Graph.alive -= 1


class Plan:
    number, num_nodes, failures = 1, 2, 0

    def build(self, builder):
        pass


def test_ctrl_c_in_a_launch_keeps_the_budget(monkeypatch):
    monkeypatch.setattr(graph_cache, "new_graph", Graph)
    for name, answer in (("current_device", 0), ("capturing", False), ("current_stream_of", 0)):
        monkeypatch.setattr(graph_cache, name, lambda *_, answer=answer: answer)
    graphs = graph_cache.Graphs(1 << 20)
    for _ in range(3):
        for Graph.interrupted in (False, False, True):
            with contextlib.suppress(KeyboardInterrupt):
                graphs.launch(0, Plan(), [1, 2], lambda *_: None, None)
        assert graphs.launched and not graphs.bytes and not Graph.alive
