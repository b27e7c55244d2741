"""FSDP2 over all ranks, sequence parallelism inside groups of them, activation checkpointing: one mesh, dp x sp.

    python examples/train_fsdp.py                 # on all GPUs, or on 4 CPU processes in Triton's interpreter
    torchrun --nproc-per-node 2 examples/train_fsdp.py  # with its ranks; on CPUs with TRITON_INTERPRET=1

Every sp group has its own sequence, split over its ranks; parameters, gradients and optimizer are sharded over all
ranks. FSDP averages the gradients over all ranks, but the ranks of a group hold parts of one loss, so each part is
multiplied by the size of the group. The model is that of train_text.py. Training on one rank with the whole sequences
must give the same losses: prints both, and the largest relative difference of losses and parameters; above 1e-4 the
exit status is 1.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from train_text import Model, text_bytes

import allscan
from allscan.tools.ranks import launch, on_first

ON_GPU = torch.cuda.device_count() > 1
STEPS, LENGTH, WIDTH, HEADS = (20, 8192, 512, 4) if ON_GPU else (4, 64, 64, 2)  # LENGTH: tokens of a sequence


class Checkpointed(Model):
    """Recomputes each block in backward, including its scan: in the same order on every rank."""

    def forward(self, tokens, comm):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, comm, use_reentrant=False)
        return self.head(x)


def batch(step, sequence, device):
    """Return LENGTH tokens and their labels, the next tokens."""
    begin = (sequence * STEPS + step) * LENGTH
    return text_bytes()[begin : begin + LENGTH + 1].to(device)


def summed_loss(model, tokens, comm):
    logits = model(tokens[None, :-1], comm)
    return F.cross_entropy(logits.flatten(0, 1), tokens[1:], reduction="sum")


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)  # eps: see train_text.py


def split(dp):
    """Return (losses, parameters) of the split training."""
    allscan.init()
    world = dist.get_world_size()
    mesh = init_device_mesh(
        "cuda" if torch.cuda.is_available() else "cpu", (dp, world // dp), mesh_dim_names=("dp", "sp")
    )
    with allscan.Communicator(mesh["sp"]) as comm:
        torch.manual_seed(0)
        model = Checkpointed(WIDTH, HEADS).to(comm.device)
        everybody = init_device_mesh(comm.device.type, (world,))
        for block in model.blocks:
            fully_shard(block, mesh=everybody)
        fully_shard(model, mesh=everybody)
        optimizer, losses = optimizer_of(model), []
        begin, end = (rank * LENGTH // comm.size for rank in (comm.rank, comm.rank + 1))
        for step in range(STEPS):
            comm.step()
            tokens = batch(step, mesh["dp"].get_local_rank(), comm.device)
            loss = summed_loss(model, tokens[begin : end + 1], comm) / LENGTH
            (loss * comm.size).backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach()
            dist.all_reduce(total)
            losses.append(total.item() / dp)
        parameters = torch.cat([p.full_tensor().flatten() for p in model.parameters()])
        comm.barrier()
        return losses, parameters.detach().cpu()


def unsplit(group, dp):
    """Return (losses, parameters) of the training on one rank alone."""
    with allscan.Communicator(group) as comm:
        torch.manual_seed(0)
        model = Model(WIDTH, HEADS).to(comm.device)
        optimizer, losses = optimizer_of(model), []
        for step in range(STEPS):
            loss = sum(summed_loss(model, batch(step, i, comm.device), comm) for i in range(dp)) / (LENGTH * dp)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, torch.cat([p.flatten() for p in model.parameters()]).detach().cpu()


def main(ranks) -> int:
    dp = 2 if ranks.size % 2 == 0 and ranks.size > 2 else 1
    expected_losses, expected = ranks.run(on_first, 1, unsplit, dp)[0]
    losses, parameters = ranks.run(split, dp)[0]
    print(f"{dp} x {ranks.size // dp} ranks (dp x sp), loss by step: one rank, all")
    for pair in zip(expected_losses, losses):
        print("  {:.6f}  {:.6f}".format(*pair))
    differences = [abs(b / a - 1) for a, b in zip(expected_losses, losses)]
    differences.append(((parameters - expected).norm() / expected.norm()).item())
    print(f"largest relative difference: losses {max(differences[:-1]):.1e}, parameters {differences[-1]:.1e}")
    return int(not max(differences) < 1e-4)


if __name__ == "__main__":
    sys.exit(launch(main))
