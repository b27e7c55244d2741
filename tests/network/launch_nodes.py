"""Runs several nodes on one host: a torchrun per node, each with its own host name.

    python tests/network/launch_nodes.py 2,2 -m allscan.tools.network_check

runs the program on 4 ranks in two nodes of 2. With the wheel libucx-cu13 the nodes are connected by UCX over the
loopback only. With fewer GPUs than ranks the ranks share GPUs. ALLSCAN_NETWORK=reorder:2000000 delays puts by up to
2 ms, and so reorders them (hostile.c).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from support import network  # noqa: E402


def main(arguments: list[str]) -> int:
    """Run all nodes. If one fails, terminate the others and return its exit status."""
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    nodes = [int(size) for size in arguments[0].split(",")]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        if network.ucx_folder():
            more = network.environment(folder)
        else:
            more = {"LD_PRELOAD": network.build(folder, "hostile.c", "libhostile.so", "-ldl", "-lpthread")}
        more |= {"GLOO_SOCKET_IFNAME": "lo"}
        started = []
        for number, size in enumerate(nodes):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(nodes))]
            command += ["--node-rank", str(number), "--nproc-per-node", str(size)]
            command += ["--master-addr", "127.0.0.1", "--master-port", str(port), *arguments[1:]]
            environment = os.environ | more | {"ALLSCAN_NODE": f"node{number}-{port}"}
            started.append(subprocess.Popen(command, env=environment))
        while any(node.poll() is None for node in started) and not any(node.poll() for node in started):
            time.sleep(0.1)
        for node in started:
            if any(other.poll() for other in started):
                node.terminate()
            node.wait()
    return next((node.returncode for node in started if node.returncode), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
