"""transformers' Trainer over split sequences: SequenceParallelTrainer of allscan.integrations.transformers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..comm.host_exchange import by_rank
from . import needing
from .batches import CUT, checksum, cut_batch, places_of, tokens_of_ranks
from .transformers import require_logits, split_of

with needing(__name__, "accelerate", "transformers"):
    from accelerate.data_loader import prepare_data_loader
    from accelerate.utils import recursively_apply
    from transformers import Trainer

# arguments that must be equal on all ranks: they determine the steps, their rows and their numerical results
ALIKE = """
    per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps max_steps
    num_train_epochs seed data_seed dataloader_drop_last train_sampling_strategy learning_rate
    lr_scheduler_type warmup_steps optim weight_decay max_grad_norm average_tokens_across_devices
    logging_nan_inf_filter logging_strategy logging_steps logging_first_step eval_strategy eval_steps
    eval_delay eval_on_start prediction_loss_only include_for_metrics batch_eval_metrics save_strategy
    save_steps load_best_model_at_end bf16 fp16 include_num_input_tokens_seen
""".split()
# arguments that are supported with these values only
REJECTED: dict[str, tuple] = {
    "label_smoothing_factor": (0, 0.0),
    "neftune_noise_alpha": (None,),
    "auto_find_batch_size": (False,),
    "torch_compile": (False,),
    "use_liger_kernel": (False,),
    "parallelism_config": (None,),
    "deepspeed": (None,),
    "fsdp": (None, False, "", []),
    "train_sampling_strategy": ("random", "sequential"),
    "group_by_length": (False,),
    "label_names": (None, ["labels"]),
    "past_index": (-1,),
    "use_cache": (False,),
    "full_determinism": (False,),
}


class SequenceParallelTrainer(Trainer):
    """transformers' ``Trainer`` for a model of ``sequence_parallel``: losses, gradients, metrics and predictions
    are those of the ordinary Trainer with the ordinary model in one process.

    The arguments are Trainer's; comm and layout are the model's. Start the processes as for Trainer on several GPUs
    (torchrun). Each process belongs to the comm of one model, and all comms have the same size P. N processes form
    N / P groups, in the order of their first ranks. Each group takes some rows of a batch, and each rank of the group
    takes its part of every row (``cut_batch``). ``per_device_train_batch_size`` and ``per_device_eval_batch_size`` are
    thus the rows of a group; one process needs N / P times as many for the same result. Every rank reads every row of a
    batch, and the ranks compare checksums: if rows differ (a dataset that is random, or sharded over processes), every
    rank raises ValueError. A last batch of fewer rows is divided as evenly as possible; no row is repeated or dropped.

    Datasets have ``input_ids``, and ``labels`` for a loss. The rows of a batch have equal lengths (or are packed, with
    one group) of at least P tokens, in the zigzag layout a multiple of 2P. ``compute_loss`` gets this rank's part.
    ``compute_metrics``, ``preprocess_logits_for_metrics`` and ``predict`` get whole rows on every rank: every rank
    holds the logits of a whole batch. Rank 0 saves; a checkpoint is the ordinary model's. Dropout draws other random
    numbers than in one process.

    Raises:
        ValueError: in the constructor, on every rank: for a model that is not split, comms that do not divide the
            processes into groups of one size, processes that were not started as Trainer requires, arguments that
            differ between ranks, and unsupported features: ``model_init``, ``compute_loss_func``, label smoothing,
            NEFTune, Liger kernels, torch_compile, auto_find_batch_size, grouping by length, FSDP, DeepSpeed, a
            ``parallelism_config``, batches that accelerate splits or dispatches. Later for batches that cut_batch
            rejects, such as padded ones.

    Example:
        >>> model = sequence_parallel(Qwen3NextForCausalLM(config), comm=allscan.Communicator(mesh["sp"]))
        >>> SequenceParallelTrainer(model=model, args=arguments, train_dataset=rows).train()
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        problem, mine = None, None
        try:
            self._text_model, self._comm, self._layout, self._per_document = split_of(self.model)
            group = self._comm.group
            mine = self._comm.rank, [0] if group is None else dist.get_process_group_ranks(group), self._layout
            problem = self._unsupported()
        except ValueError as error:
            problem = str(error)
        alike = {name: str(getattr(self.args, name, None)) for name in ALIKE}
        alike |= {"compute_metrics": str(self.compute_metrics is not None)}
        answers: list[Any] = [(problem, mine, alike)]
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            answers *= dist.get_world_size()
            dist.all_gather_object(answers, (problem, mine, alike))
        problems, places, settings = zip(*answers, strict=True)
        if any(problems):
            raise ValueError(next(p for p in problems if p) if len({*problems}) == 1 else by_rank(problems))
        for name in alike:
            if len({arguments[name] for arguments in settings}) > 1:
                raise ValueError(f"{name} differs between ranks: {by_rank(arguments[name] for arguments in settings)}")
        groups = sorted({tuple(ranks) for _, ranks, _ in places}, key=min)
        if sorted(rank for group in groups for rank in group) != list(range(len(places))) or (
            len({(len(ranks), layout) for _, ranks, layout in places}) > 1
        ):
            found = by_rank(f"of {list(ranks)}, {layout}" for _, ranks, layout in places)
            raise ValueError(f"the comms must divide the processes into groups of one size and layout: {found}")
        self._groups = len(groups)
        self._places = [(groups.index(tuple(ranks)), rank) for rank, ranks, _ in places]  # (group, rank in it)
        self._group = self._places[self.accelerator.process_index][0]
        if self._groups > 1 and not self.model_accepts_loss_kwargs:
            raise ValueError("a model that does not take num_items_in_batch is supported only with one group of ranks")

    def _unsupported(self) -> str | None:
        processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if self.accelerator.num_processes != processes:
            return (
                f"accelerate has {self.accelerator.num_processes} of {processes} processes: set RANK, WORLD_SIZE, "
                "LOCAL_RANK and MASTER_ADDR, as torchrun does, before TrainingArguments are made"
            )
        for name in ("model_init", "compute_loss_func"):
            if getattr(self, name, None) is not None:
                return f"{name} is not supported by SequenceParallelTrainer"
        for name, supported in REJECTED.items():
            value = getattr(self.args, name, supported[0])
            if value not in supported and str(getattr(value, "value", value)) not in supported:
                return f"{name}={value} is not supported by SequenceParallelTrainer"
        for name in ("split_batches", "dispatch_batches"):
            if getattr(self.args.accelerator_config, name, None):
                return f"accelerator_config's {name} is not supported by SequenceParallelTrainer"
        accelerator = self.accelerator  # environment variables configure it, too
        for name, enabled in (
            ("FSDP", self.is_fsdp_enabled),
            ("DeepSpeed", self.is_deepspeed_enabled),
            ("a parallelism_config", getattr(accelerator, "parallelism_config", None) is not None),
            ("torch_compile", accelerator.state.dynamo_plugin.backend.value not in ("NO", "no")),
        ):
            if enabled:
                return f"{name} (accelerate's) is not supported by SequenceParallelTrainer"
        if self.args.n_gpu > 1:
            return "one process with several GPUs is not supported: start one process for each GPU"
        return None

    # Every rank reads every row, like a single process

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_data_loader = self._prepare_loader

    def _prepare_loader(self, loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None) -> Any:
        """Replaces Accelerator.prepare_data_loader, which would distribute batches over the processes."""
        accelerator = self.accelerator
        if isinstance(loader.worker_init_fn, functools.partial) and "rank" in loader.worker_init_fn.keywords:
            loader.worker_init_fn = functools.partial(loader.worker_init_fn, rank=0)  # workers draw equal numbers
        prepared = prepare_data_loader(
            loader,
            num_processes=1,
            process_index=0,
            put_on_device=False,
            rng_types=accelerator.rng_types.copy(),
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
        )
        accelerator._dataloaders.append(prepared)
        return prepared

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: Any, *arguments: Any, **options: Any
    ) -> torch.utils.data.DataLoader:
        return super()._get_dataloader(dataset, description, batch_size * self._groups, *arguments, **options)

    def get_total_train_batch_size(self, args: Any) -> int:
        return self._train_batch_size * args.gradient_accumulation_steps * self._groups

    def _get_num_items_in_batch(self, batch_samples: Any, device: torch.device) -> Any:
        """Compare the ranks' batches, then count in whole batches; every rank has all items that Trainer would sum."""
        self._compare(batch_samples)
        count = super()._get_num_items_in_batch(batch_samples, device)
        processes = self.accelerator.num_processes
        return count if count is None or not self.args.average_tokens_across_devices else count / processes

    def _compare(self, batches: Sequence[Any]) -> None:
        items = [item for batch in batches for name in sorted(batch) for item in (name, batch[name])]
        steps = self.state.max_steps  # depends on the data set's length
        mine = torch.tensor([[len(batches), checksum(steps, *items)]], device=self.accelerator.device)
        found = self.accelerator.gather(mine).tolist()
        if any(other != found[0] for other in found):
            batches_by_rank = by_rank(f"{count} batches, checksum {digest:x}" for count, digest in found)
            raise ValueError(
                f"the ranks have different batches (a random dataset, or one sharded over the "
                f"processes?): {batches_by_rank}"
            )

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        added = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + added // self.accelerator.num_processes

    def floating_point_ops(self, inputs: Any) -> float:  # type: ignore[override]
        return super().floating_point_ops(inputs) / self.accelerator.num_processes  # super() counts whole batches

    # Each rank processes its part

    def _rows(self, batch: Mapping[str, Any], group: Any) -> tuple[int, int]:
        """(first row, end) of a group."""
        rows = _tokens_of(batch).shape[0]
        return rows * group // self._groups, rows * (group + 1) // self._groups

    def _part(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's tokens of its group's rows. Begins an iteration of the communicator."""
        module, comm = self._text_model, self._comm
        comm.step()
        forward = vars(module).get("forward")
        if getattr(forward, "args", (None, None))[1] is not comm:
            raise ValueError("the model was split anew, or restored, after this SequenceParallelTrainer was created")
        batch = dict(batch)
        x = _tokens_of(batch)
        places = batch.get("position_ids") if x.shape[0] == 1 else None
        packed = "cu_seq_lens_q" in batch or (places is not None and bool((places.diff(dim=-1) != 1).any()))
        if self._groups > 1 and packed:
            raise ValueError("packed sequences, in one row, are supported only with one group of ranks")
        first, end = self._rows(batch, self._group)
        nothing = first == end  # fewer rows than groups: run one row without labels
        for name in (*CUT, "attention_mask"):
            value = batch.get(name)
            if isinstance(value, torch.Tensor) and value.shape[0] == x.shape[0]:
                batch[name] = value[:1] if nothing else value[first:end]
        for name in ("labels", "shift_labels"):
            if nothing and batch.get(name) is not None:
                batch[name] = torch.full_like(batch[name], -100)
        return cut_batch(batch, comm=comm, layout=self._layout, per_document=self._per_document)

    def train(self, *arguments: Any, **options: Any) -> Any:
        if self.model_wrapped is self.model:  # an evaluation before has marked it, and accelerate would not wrap it
            vars(self.model).pop("_is_accelerate_prepared", None)
        return super().train(*arguments, **options)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if self.accelerator.num_processes > 1 and not isinstance(model, DistributedDataParallel):
            raise ValueError(f"expected the model in DistributedDataParallel, which sums gradients, got {type(model)}")
        loss = super().training_step(model, self._part(inputs), num_items_in_batch)
        return self.accelerator.reduce(loss, "mean")  # the logged loss, and its NaN check, are equal on all ranks

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """This rank's share of the loss of its part ``inputs``, times the ranks over which gradients are averaged."""
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        outputs = model(**inputs)
        if isinstance(outputs, dict) and "loss" not in outputs:
            raise ValueError(f"a loss needs labels, got {', '.join(inputs)}")
        loss = (outputs["loss"] if isinstance(outputs, dict) else outputs[0]) * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    # Evaluation on whole rows

    def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
        self.gather_function = self._gathered_already
        output = super().evaluation_loop(*arguments, **options)
        self._compare([])  # detects a rank that has a further batch
        return output

    def _gathered_already(self, data: Any, **_) -> Any:
        """Replaces Accelerator.gather_for_metrics: the data is gathered already.

        Like it, truncates the loss, which is repeated for each row of a full batch, to the rows of the last batch; for
        a data set without a length only if accelerate dispatches the batches.
        """
        state = self.accelerator.gradient_state
        rows = state.remainder
        if isinstance(state.active_dataloader.dataset, torch.utils.data.IterableDataset):
            config: Any = self.args.accelerator_config
            rows = -1 if config.dispatch_batches is False else self._rows_now
        if not state.end_of_dataloader or rows <= 0:
            return data
        return recursively_apply(lambda x: x[:rows], data)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> tuple:
        """(loss, logits, labels) of whole rows, on every rank."""
        if ignore_keys is None:
            ignore_keys = getattr(
                cast(Any, self.model).config, "keys_to_ignore_at_inference", ["past_key_values", "cache"]
            )
        labelled, self._rows_now = inputs.get("labels") is not None, _tokens_of(inputs).shape[0]
        count = self._get_num_items_in_batch([inputs], self.args.device)  # compares the batches, too
        part = self._prepare_inputs(self._part(inputs))
        loss = None
        with torch.no_grad(), self.compute_loss_context_manager():
            if labelled:
                loss, outputs = self.compute_loss(model, part, return_outputs=True, num_items_in_batch=count)
                # evaluation_loop repeats the loss for the rows of one group
                loss = self.accelerator.reduce(loss.detach().mean(), "mean").expand(self._groups)
                loss = loss[0] if self._groups == 1 else loss
            else:
                outputs = model(**part)
        if prediction_loss_only:
            return loss, None, None
        require_logits(outputs)
        if isinstance(outputs, dict):
            logits = tuple(
                v for name, v in outputs.items() if name not in ignore_keys and not (labelled and name == "loss")
            )
        else:
            logits = outputs[labelled:]
        logits = tuple(self._whole(value, inputs) for value in logits)
        labels = self._prepare_input(inputs["labels"]) if labelled else None
        return loss, logits[0] if len(logits) == 1 else logits, labels

    def _whole(self, value: Tensor, batch: Mapping[str, Any]) -> Any:
        """Gather ``value`` [rows, tokens, ...], or each element of a tuple, from all ranks into whole rows."""
        if isinstance(value, (tuple, list)):
            return type(value)(self._whole(x, batch) for x in value)
        (B, T), comm = _tokens_of(batch).shape[:2], self._comm
        tokens, places = tokens_of_ranks(T, comm), places_of(batch, T, comm, self._layout, self._per_document)
        rows = [self._rows(batch, group) for group in range(self._groups)]
        first, end = rows[self._group]
        here = max(1, end - first), tokens[self._comm.rank]
        if not isinstance(value, torch.Tensor) or value.shape[:2] != here:
            shown = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"an output of the model is not [rows, tokens, ...] = {list(here)}, but {shown}")
        value = value.detach()
        padded = value.new_zeros(max(1, *(b - a for a, b in rows)), max(tokens), *value.shape[2:])
        padded[: here[0], : here[1]] = value
        parts = self.accelerator.gather(padded[None])
        whole = value.new_empty(B, T, *value.shape[2:])
        for (group, rank), part in zip(self._places, parts, strict=True):
            (first, end), at = rows[group], 0
            for a, b in places[rank]:
                whole[first:end, a:b] = part[: end - first, at : at + b - a]
                at += b - a
        return whole


def _tokens_of(batch: Mapping[str, Any]) -> torch.Tensor:
    x = batch.get("input_ids")
    x = batch.get("inputs_embeds") if x is None else x
    if not isinstance(x, torch.Tensor) or x.ndim < 2:
        raise ValueError(f"a batch has input_ids [B, T] or inputs_embeds [B, T, H], got {', '.join(batch)}")
    return x
