"""A hybrid of transformers on a mesh of dp x sp ranks: a loop to copy, with all that a real one has.

    pip install '.[transformers]'                  # in a checkout
    torchrun --nproc-per-node 4 examples/train_hybrid_fsdp.py --sp 2    # on CPUs with TRITON_INTERPRET=1 before it
    python examples/train_hybrid_fsdp.py           # on all GPUs, or on 4 CPU processes in Triton's interpreter

Every sp group has sequences of its own, split over its ranks in zigzag. FSDP2 shards parameters, gradients and moments
over all ranks, in float32; layers compute in bfloat16 (--dtype), are computed again in backward, and the loss is
computed in slices. Two batches a step are accumulated, gradients are clipped, a batch whose loss is not finite on any
rank is left out by all ranks, and training goes on from a checkpoint of torch.distributed.checkpoint.

Trains twice, the second time from the middle on, and once on one rank with the whole sequences in float32. Prints the
losses; the exit status is 1 if they differ by more than 1e-4 (in bfloat16 2e-2).
"""

import argparse
import contextlib
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from train_text import text_bytes

ON_GPU = torch.cuda.device_count() > 1
if not ON_GPU:
    sys.modules["fla"] = None  # type: ignore[assignment]  # the ordinary model would call its kernels, which need a GPU

from transformers import Qwen3NextConfig, Qwen3NextForCausalLM  # noqa: E402

import allscan  # noqa: E402
from allscan.integrations.transformers import sequence_parallel  # noqa: E402
from allscan.tools.ranks import launch, on_first  # noqa: E402
from allscan.zigzag import zigzag_positions  # noqa: E402

STEPS, BATCHES, LENGTH = (20, 2, 16384) if ON_GPU else (4, 2, 64)  # LENGTH: tokens of a sequence
SPIKE = 1  # the step in which a loss is made infinite
WIDTH = 1024 if ON_GPU else 32
CONFIG = dict(
    vocab_size=256,
    hidden_size=WIDTH,
    intermediate_size=2 * WIDTH,
    num_hidden_layers=4,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
    num_attention_heads=WIDTH // 16,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=WIDTH // 16,
    linear_num_value_heads=WIDTH // 16,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    mlp_only_layers=[0, 1, 2, 3],
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
    attn_implementation="sdpa",
)


def sequences(step, dp):
    """Return the sequences of a step, [BATCHES, dp, LENGTH]; after the text's end it begins again."""
    text, count = text_bytes(), BATCHES * dp * LENGTH
    return text[torch.arange(step * count, (step + 1) * count) % len(text)].view(BATCHES, dp, LENGTH)


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)


def train(sp, dtype, folder, first):
    """Train from step ``first`` on, from the checkpoint in ``folder`` if that is not 0; return the losses."""
    allscan.init()  # all ranks of the job, before groups of them create communicators
    kind, world = "cuda" if torch.cuda.is_available() else "cpu", dist.get_world_size()
    dp = world // sp
    mesh = init_device_mesh(kind, (dp, sp), mesh_dim_names=("dp", "sp"))
    everybody, group = init_device_mesh(kind, (world,)), mesh["dp"].get_local_rank()
    with allscan.Communicator(mesh["sp"]) as comm:
        torch.manual_seed(0)  # the same parameters on every rank
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**CONFIG)).to(comm.device)
        sequence_parallel(model, comm=comm, layout="zigzag", loss_in_slices=True)
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=dict(use_reentrant=False))
        how = dict(mesh=everybody, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
        for layer in model.model.layers:
            fully_shard(layer, **how)
        fully_shard(model, **how)
        optimizer = optimizer_of(model)
        if first:
            saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
            dcp.load(saved, checkpoint_id=f"{folder}/{first}")
            states = dict(model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
            set_state_dict(model, optimizer, **states)
        mine = zigzag_positions(LENGTH // sp, comm=comm).cpu()  # of this rank, in the whole sequence
        labels = torch.tensor(BATCHES * dp * (LENGTH - 1), device=comm.device)  # of the step, of all ranks
        losses = []
        for step in range(first, STEPS):
            comm.step()  # first in every iteration, on every rank
            total = torch.zeros((), device=comm.device)
            for i, batch in enumerate(sequences(step, dp)):
                tokens = batch[group, mine][None].to(comm.device)
                loss = model(input_ids=tokens, labels=tokens, num_items_in_batch=labels, use_cache=False).loss
                if step == SPIKE and i == 1 and dist.get_rank() == world - 1:
                    loss = loss * float("inf")  # only this rank sees it
                # one decision for all ranks, before backward: a rank that skips alone would leave the others waiting
                finite = loss.detach().isfinite().float()
                dist.all_reduce(finite, dist.ReduceOp.MIN)
                if finite:
                    (loss * world).backward()  # a share of the step's mean; FSDP averages over all ranks
                    total += loss.detach()
                else:
                    model.reshard()  # frees what forward has gathered, which would be stale after optimizer.step()
            if any(p.grad is not None for p in model.parameters()):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            dist.all_reduce(total)
            losses.append(total.item())
            if step + 1 == STEPS // 2 and not first:
                states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
                dcp.save(states, checkpoint_id=f"{folder}/{step + 1}")  # for any number of ranks
        comm.barrier()
        return losses


def unsplit(group, dp):
    """Return the losses of the ordinary model on one rank."""
    with allscan.Communicator(group) as comm:
        torch.manual_seed(0)
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**CONFIG)).to(comm.device)
        optimizer, losses = optimizer_of(model), []
        for step in range(STEPS):
            total = 0.0
            for i, batch in enumerate(sequences(step, dp)):
                if step == SPIKE and i == 1:
                    continue
                for tokens in batch[:, None].to(comm.device):
                    count = torch.tensor(BATCHES * dp * (LENGTH - 1))
                    loss = model(input_ids=tokens, labels=tokens, num_items_in_batch=count, use_cache=False).loss
                    loss.backward()
                    total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
        return losses


def main(ranks) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sp", type=int, default=2, help="ranks of a sequence")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16" if ON_GPU else "float32")
    options = parser.parse_args()
    if options.sp < 1 or ranks.size % options.sp or LENGTH % (2 * options.sp):
        raise ValueError(f"--sp must divide {ranks.size} ranks and half of {LENGTH} tokens, got {options.sp}")
    dp, dtype = ranks.size // options.sp, getattr(torch, options.dtype)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        whole = ranks.run(train, options.sp, dtype, folder, 0)[0]
        resumed = ranks.run(train, options.sp, dtype, folder, STEPS // 2)[0]
    expected = ranks.run(on_first, 1, unsplit, dp)[0]
    print(f"{dp} x {options.sp} ranks (dp x sp), loss by step: one rank; all; all, from the checkpoint on")
    for step, (alone, split) in enumerate(zip(expected, whole)):
        again = f"{resumed[step - STEPS // 2]:.6f}" if step >= STEPS // 2 else ""
        print(f"  {alone:.6f}  {split:.6f}  {again}")
    difference = max(abs(b / a - 1) for a, b in zip(expected, whole))
    going_on = max(abs(b / a - 1) for a, b in zip(whole[STEPS // 2 :], resumed))
    print(f"largest relative difference: from one rank {difference:.1e}, from the checkpoint on {going_on:.1e}")
    return int(not (difference < (1e-4 if dtype == torch.float32 else 2e-2) and going_on < 1e-5))


if __name__ == "__main__":
    sys.exit(launch(main))
