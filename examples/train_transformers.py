"""transformers' Trainer over a split sequence: a Qwen3-Next of 3 layers of Gated DeltaNet and 1 of softmax attention.

    pip install '.[transformers]' accelerate    # in a checkout
    python examples/train_transformers.py         # on all GPUs, or on 4 CPU processes in Triton's interpreter
    torchrun --nproc-per-node 2 examples/train_transformers.py  # with its ranks; on CPUs with TRITON_INTERPRET=1

SequenceParallelTrainer is transformers' Trainer for a model from sequence_parallel. Prints the losses of Trainer itself
with the ordinary model in one process, and those of all ranks; with a difference above 1e-4 the exit status is 1.
"""

import argparse
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from train_text import text_bytes

# Without fla on CPU ranks, and in the single reference process, since fla rejects the backward pass on Hopper with
# Triton 3.6
if torch.cuda.device_count() < 2 or os.environ.get("WITHOUT_FLA"):
    sys.modules["fla"] = None  # type: ignore[assignment]  # transformers then uses its own functions in torch

import transformers  # noqa: E402
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM, Trainer, TrainingArguments  # noqa: E402

import allscan  # noqa: E402
from allscan.integrations.transformers import SequenceParallelTrainer, sequence_parallel  # noqa: E402
from allscan.tools.ranks import Ranks, launch, on_first  # noqa: E402

LENGTH = 240
CONFIG = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    mlp_only_layers=[0, 1, 2, 3],
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
    attn_implementation="sdpa",
)


def train(group, steps):
    """Return the loss of each step; on one rank with the ordinary model, by Trainer itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    known = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_ADDR="localhost")
    os.environ |= {name: str(value) for name, value in known.items()}  # torchrun's variables, for accelerate
    transformers.logging.set_verbosity_error()
    with allscan.Communicator(group) as comm, tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model, kind = Qwen3NextForCausalLM(Qwen3NextConfig(**CONFIG)), Trainer
        if comm.size > 1:
            model, kind = sequence_parallel(model, comm=comm), SequenceParallelTrainer
        tokens = text_bytes()[: 2 * steps * LENGTH].view(-1, LENGTH).long()
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
            use_cpu=comm.device.type == "cpu",
            ddp_backend=None if comm.device.type == "cuda" else "gloo",
            ddp_find_unused_parameters=False,
        )
        trainer = kind(model=model, args=arguments, train_dataset=[dict(input_ids=x, labels=x) for x in tokens])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        comm.barrier()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(ranks) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    os.environ["WITHOUT_FLA"] = "1"  # for the process that starts here
    with Ranks(1, ranks.device) as one:
        del os.environ["WITHOUT_FLA"]
        curves = [one.run(on_first, 1, train, steps)[0], ranks.run(on_first, ranks.size, train, steps)[0]]
    print(f"loss by step: 1 rank, {ranks.size} ranks")
    for alone, split in zip(*curves, strict=True):
        print(f"  {alone:.6f}  {split:.6f}")
    worst = max(abs(split / alone - 1) for alone, split in zip(*curves, strict=True))
    print(f"largest relative difference: {worst:.1e}")
    return int(not worst < 1e-4)


if __name__ == "__main__":
    sys.exit(launch(main))
