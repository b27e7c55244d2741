"""Cases of a rank whose neighbour does not call."""

from __future__ import annotations

import time

import torch

import allscan

TIMEOUT = 2.0


def scan_until_timeout(comm, scan, epochs):
    """Scan up to ``epochs`` times; return (seconds until AllScanTimeout, its record, its message)."""
    state = torch.ones(scan.shape, device=comm.device)
    start = time.monotonic()
    try:
        for _ in range(epochs):
            scan.scan(state)
        comm.streams.synchronize()
        comm.check()
    except allscan.AllScanTimeout as timeout:
        comm.streams.synchronize()  # must return: no kernel waits any more
        return time.monotonic() - start, (timeout.rank, timeout.neighbour, timeout.tile, timeout.expected), str(timeout)
    return time.monotonic() - start, None, ""


def poisoned_case(absent, protocol):
    comm = allscan.Communicator(timeout=TIMEOUT)
    scan = allscan.AllScan(comm, (1, 4, 8), protocol=protocol)
    if comm.rank == absent:
        time.sleep(2 * TIMEOUT)
        return None
    out = torch.zeros(scan.shape, device=comm.device)
    try:
        scan.scan(torch.ones(scan.shape, device=comm.device), out=out)
        comm.streams.synchronize()
    except allscan.AllScanTimeout:
        pass
    return bool(out.isnan().all())
