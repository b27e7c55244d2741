"""Trainers over split sequences: SequenceParallelMixin and SequenceParallelTrainer of
allscan.integrations.transformers."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ..base.checks import boundaries
from ..comm.host_exchange import by_rank
from ..tokens.packing import boundaries_on_host
from . import needing
from .batches import CUT, checksum, cut_batch, places_of
from .transformers import require_logits, split_of

with needing(__name__, "accelerate", "transformers"):
    from accelerate.data_loader import prepare_data_loader
    from accelerate.utils import DistributedType, recursively_apply
    from transformers import Trainer

SUPPORTED = "Trainer", "SFTTrainer", "DPOTrainer"
# first letters of arguments that may differ between ranks: what a process reports, and where
MAY_DIFFER = (
    *("disable_tqdm", "hub_", "local_rank", "log_", "logging_dir", "output_dir", "project", "push_to_hub"),
    *("report_to", "run_name", "trackio_"),
)
# arguments that are supported with these values only
REJECTED: dict[str, tuple] = {
    "neftune_noise_alpha": (None,),
    "auto_find_batch_size": (False,),
    "use_liger_kernel": (False,),
    "parallelism_config": (None,),
    "deepspeed": (None,),
    "train_sampling_strategy": ("random", "sequential"),
    "group_by_length": (False,),
    "label_names": (None, ["labels"]),
    "past_index": (-1,),
    "use_cache": (False,),
    "full_determinism": (False,),
    "precompute_ref_log_probs": (False,),  # TRL's
}
NOT_SUPPORTED = "is not supported by SequenceParallelMixin"


class _Share(NamedTuple):
    """What a group of ranks runs of a batch."""

    rows: list[int]  # of the batch; with none the group runs the first one without labels
    first: int  # of the rows' tokens; those of a packed row are divided
    end: int
    packed: bool
    cu_seqlens: list[int] | None  # of these tokens
    length: int  # tokens with padding at the end
    places: list[list[tuple[int, int]]]  # for each rank, (first, end) of each of its parts of length tokens


class _OfAllRanks(torch.autograd.Function):
    """``joined(part)``, equal on all ranks. Its gradient is ``own(gradient) * ranks``, for this rank's part: each rank
    has the whole loss, and gradients of parameters are averaged over ``ranks``."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, joined: Callable, own: Callable, ranks: int) -> torch.Tensor:
        ctx.own, ctx.ranks = own, ranks
        return joined(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple:
        return ctx.own(gradients[0]) * ctx.ranks, None, None, None


class _OverRanks:
    """Takes the place of a trainer's model: called with a whole batch, runs its parts on the ranks.

    Of the outputs the loss, and TRL's fields by token, are those of the whole batch; with ``logits``, all outputs but
    those named in ``ignored``.
    """

    def __init__(self, trainer: Any, model: Any, logits: bool = False, ignored: Sequence[str] = ()) -> None:
        self._trainer, self._model, self._logits, self._ignored = trainer, model, logits, ignored

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        trainer, labels, fused = self._trainer, inputs.get("labels"), inputs.get("fused_lm_head")
        shifts = labels is not None and inputs.get("shift_labels") is None
        if shifts:  # now: of a packed row another group may have the token that follows
            inputs["shift_labels"] = _following(inputs["labels"])
        if fused:
            inputs.pop("labels", None)
        elif labels is not None and trainer.model_accepts_loss_kwargs and inputs.get("num_items_in_batch") is None:
            inputs["num_items_in_batch"] = _count(inputs)
        shares, shape = trainer._shares(inputs), _tokens_of(inputs).shape[:2]
        trainer._called = shares, self._logits and not fused
        outputs = self._model(**trainer._part(inputs, shares))
        if not isinstance(outputs, dict):
            raise ValueError(f"the model must return a dict of outputs (return_dict), got {type(outputs).__name__}")
        whole = functools.partial(trainer._whole, shares=shares, shape=shape)
        if fused:
            names = [name for name, x in outputs.items() if isinstance(x, torch.Tensor) and x.ndim == 2]
            fields = whole(torch.stack([outputs[name].float() for name in names], -1))
            fields = fields[:, : -1 if shifts else None].unbind(-1)
            return type(outputs)(**{n: x.to(outputs[n].dtype) for n, x in zip(names, fields, strict=True)})
        if outputs.get("loss") is not None:
            outputs["loss"] = trainer._summed(outputs["loss"])
        if self._logits:
            require_logits(outputs)
        for name in list(outputs) if self._logits else ():
            if name != "loss" and name not in self._ignored:
                outputs[name] = whole(outputs[name])
        return outputs


class SequenceParallelMixin(Trainer if TYPE_CHECKING else object):  # type: ignore[misc]
    """Makes transformers' ``Trainer``, and TRL's ``SFTTrainer`` and ``DPOTrainer`` (from 1.16 on), trainers for a model
    of ``sequence_parallel``: losses, gradients, metrics and predictions are those of the ordinary trainer with the
    ordinary model in one process. ``SequenceParallelTrainer`` is made of it and ``Trainer``.

    The arguments are the trainer's; comm and layout are the model's, and those of DPOTrainer's ``ref_model``, which
    must be given. Start the processes as for Trainer on several GPUs (torchrun). Each process belongs to the comm of
    one model, and all comms have the same size P. N processes form N / P groups, in the order of their first ranks.
    Each group takes some rows of a batch, of a packed row some documents, and each rank of the group takes its part of
    every row (``cut_batch``). ``per_device_train_batch_size`` and ``per_device_eval_batch_size`` are thus the rows of a
    group; one process needs N / P times as many for the same result. Every rank reads every row of a batch, and the
    ranks compare checksums: if rows differ (a dataset that is random, or sharded over processes), every rank raises
    ValueError. A last batch of fewer rows is divided as evenly as possible; no row is repeated or dropped.

    Datasets have ``input_ids``, and ``labels`` for a loss, or what TRL's trainers require. Rows may be padded on the
    right. They are lengthened, without labels, to at least P tokens and in the zigzag layout to a multiple of 2P.
    ``compute_loss`` gets the whole batch, and as ``model`` a function that runs the parts of such a batch on the ranks:
    its loss, and TRL's log-probabilities, are of the whole batch, and every rank calls it equally often; in training
    its ``logits`` are this rank's. ``compute_loss_func`` is called with this rank's logits and labels, and its results
    are summed over the ranks: it must sum over tokens, shift the labels as causal models do, and divide by
    ``num_items_in_batch``. ``compute_metrics``, ``preprocess_logits_for_metrics`` and ``predict`` get whole rows on
    every rank: every rank holds the logits of a whole batch; those of padding are not the ordinary model's. Rank 0
    saves; a checkpoint is the ordinary model's. Dropout draws other random numbers than in one process.

    Raises:
        TypeError: when a class is made of it and another trainer, such as GRPOTrainer.
        ValueError: in the constructor, on every rank: for a model or ``ref_model`` that is not split, or by another
            comm or layout, comms that do not divide the processes into groups of one size, processes that were not
            started as Trainer requires, arguments that differ between ranks, and unsupported features: ``model_init``,
            ``peft_config``, ``precompute_ref_log_probs``, auxiliary losses of experts, NEFTune, Liger kernels,
            auto_find_batch_size, grouping by length, FSDP1 and FSDP2 on CPUs, DeepSpeed, a ``parallelism_config``,
            batches that accelerate splits or dispatches. Later for batches that cut_batch rejects, for masks that mask
            other tokens than the last ones of a row, or tokens with labels, and for a ``compute_loss_func`` that does
            not divide by ``num_items_in_batch``.

    Example:
        >>> class LongSFTTrainer(SequenceParallelMixin, trl.SFTTrainer): ...
        >>> model = sequence_parallel(Qwen3NextForCausalLM(config), comm=allscan.Communicator(mesh["sp"]))
        >>> LongSFTTrainer(model, args=arguments, train_dataset=rows, processing_class=tokenizer).train()
    """

    _halves = 1  # of a batch, which have the same rows; DPOTrainer's has accepted and rejected ones

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for base in cls.__mro__:
            if base.__module__.partition(".")[0] not in ("transformers", "trl") or not issubclass(base, Trainer):
                continue
            if base.__name__ not in (*SUPPORTED, "_BaseTrainer") or base.__module__.startswith("trl.experimental"):
                raise TypeError(f"{base.__name__} {NOT_SUPPORTED}: only {', '.join(SUPPORTED)} are")
            if base.__name__ in SUPPORTED[1:]:
                with needing(__name__, "trl"):  # checks its version
                    cls._halves = 2 if base.__name__ == "DPOTrainer" else cls._halves

    def __init__(self, *arguments: Any, **options: Any) -> None:
        alike, error, mine, problem = {}, None, None, None
        try:
            bound = inspect.signature(super().__init__).bind(*arguments, **options).arguments
            given = {name: x for name, x in bound.items() if x is not None}
            alike = {name: type(x).__name__ for name, x in given.items()}
            for field in dataclasses.fields(given["args"]) if "args" in given else ():
                if not field.name.startswith(MAY_DIFFER):  # functions have other addresses
                    alike[field.name] = re.sub(" at 0x[0-9a-f]+", "", str(getattr(given["args"], field.name)))
            problem = self._unsupported_arguments(given)
        except (TypeError, ValueError) as caught:
            problem = str(caught)
        settings = _agree(problem, alike)
        for name in sorted({name for each in settings for name in each}):
            if len({each.get(name) for each in settings}) > 1:
                raise ValueError(f"{name} differs between ranks: {by_rank(each.get(name) for each in settings)}")
        try:
            super().__init__(*arguments, **options)
            self._text_model, self._comm, self._layout, self._per_document = split_of(self.model)
            group = self._comm.group
            mine = self._comm.rank, [0] if group is None else dist.get_process_group_ranks(group), self._layout
            problem = self._unsupported()
        except Exception as caught:  # any: the other ranks wait in _agree
            if hasattr(self, "_tag_names"):
                raise  # or in the barriers of TRL's constructors, until this process ends
            error, problem = caught, f"{type(caught).__name__}: {caught}"
        try:
            places = _agree(problem, mine)
        except ValueError as refused:
            raise error or refused from None
        groups = sorted({tuple(ranks) for _, ranks, _ in places}, key=min)
        if sorted(rank for group in groups for rank in group) != list(range(len(places))) or (
            len({(len(ranks), layout) for _, ranks, layout in places}) > 1
        ):
            found = by_rank(f"of {list(ranks)}, {layout}" for _, ranks, layout in places)
            raise ValueError(f"the comms must divide the processes into groups of one size and layout: {found}")
        self._groups = len(groups)
        self._places = [(groups.index(tuple(ranks)), rank) for rank, ranks, _ in places]  # (group, rank in it)
        self._group = self._places[self.accelerator.process_index][0]
        if self._groups > 1 and self._halves == 1 and not self.model_accepts_loss_kwargs:
            raise ValueError("a model that does not take num_items_in_batch is supported only with one group of ranks")
        self.args.average_tokens_across_devices = False  # losses and counts are of all ranks: nothing to multiply
        if self._halves == 2:
            self.ref_model = _OverRanks(self, self.ref_model)  # type: ignore[has-type]
        self._divides = self.compute_loss_func is None  # otherwise its first call shows it
        for name in ("compute_loss_func", "label_smoother"):
            if getattr(self, name) is not None:
                setattr(self, name, functools.partial(self._by_part, getattr(self, name), name == "label_smoother"))

    def _unsupported_arguments(self, given: Mapping[str, Any]) -> str | None:
        for name in ("model_init", "peft_config"):
            if given.get(name) is not None:
                return f"{name} {NOT_SUPPORTED}"
        model, reference = (x if isinstance(x, nn.Module) else None for x in map(given.get, ("model", "ref_model")))
        how = split_of(model)[1:]
        try:
            alike = self._halves == 1 or split_of(reference)[1:] == how
        except ValueError:
            alike = False
        if not alike:
            return "ref_model must be given, and split by sequence_parallel with the model's comm, layout, per_document"
        for name, supported in REJECTED.items():
            value = getattr(given.get("args"), name, supported[0])
            if value not in supported and str(getattr(value, "value", value)) not in supported:
                return f"{name}={value} {NOT_SUPPORTED}"
        return None

    def _unsupported(self) -> str | None:
        accelerator = self.accelerator  # environment variables configure it, too
        processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if accelerator.num_processes != processes:
            return (
                f"accelerate has {accelerator.num_processes} of {processes} processes: set RANK, WORLD_SIZE, "
                "LOCAL_RANK and MASTER_ADDR, as torchrun does, before TrainingArguments are made"
            )
        for name in ("split_batches", "dispatch_batches"):
            if getattr(self.args.accelerator_config, name, None):
                return f"accelerator_config's {name} {NOT_SUPPORTED}"
        for name, enabled in (
            ("FSDP1 (FSDP2 is supported)", self.is_fsdp_enabled and accelerator.state.fsdp_plugin.fsdp_version != 2),
            ("DeepSpeed", self.is_deepspeed_enabled),
            ("a parallelism_config", getattr(accelerator, "parallelism_config", None) is not None),
        ):
            if enabled:
                return f"{name} (accelerate's) {NOT_SUPPORTED}"
        asked = self.args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true")
        if asked and accelerator.distributed_type != DistributedType.FSDP:
            return "FSDP is only for GPUs: accelerate makes DistributedDataParallel of it on other devices"
        if self.args.n_gpu > 1:
            return "one process with several GPUs is not supported: start one process for each GPU"
        if getattr(self, "aux_loss_enabled", False):
            return "the auxiliary loss of experts is not supported: set router_aux_loss_coef=0.0"
        return None

    # Every rank reads every row, like a single process

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_data_loader = self._prepare_loader
        self.accelerator.gather_for_metrics = self._gathered_already

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

    def get_tp_size(self) -> int:
        """The ranks that have the same rows, by which Trainer divides the number of processes: all."""
        return self.accelerator.num_processes

    def get_total_train_batch_size(self, args: Any) -> int:
        return super().get_total_train_batch_size(args) * self._groups

    def get_batch_samples(self, *arguments: Any) -> tuple[list, Any]:
        """Also compares the ranks' batches."""
        samples: list[Any] = []
        count, error = None, None
        try:
            samples, count = super().get_batch_samples(*arguments)
        except Exception as caught:  # of the loader: the other ranks wait in _compare
            error = caught
        self._compare(samples, error)
        return samples, count

    def _get_num_items_in_batch(self, batch_samples: Any, device: torch.device) -> Any:
        """The labels of whole batches, which every rank has."""
        counted = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if not (batch_samples and counted and isinstance(batch_samples[0].get("labels"), torch.Tensor)):
            return None
        return sum(map(_count, batch_samples)).to(device)  # type: ignore[union-attr]

    def _compare(self, batches: Sequence[Any], error: Exception | None = None) -> None:
        items = [item for batch in batches for name in sorted(batch) for item in (name, batch[name])]
        steps = self.state.max_steps  # depends on the data set's length
        mine = [-1, 0] if error is not None else [len(batches), checksum(steps, *items)]
        found = self.accelerator.gather(torch.tensor([mine], device=self.accelerator.device)).tolist()
        if error is not None:
            raise error
        if any(other != found[0] for other in found):
            batches_by_rank = by_rank(
                "an error" if count < 0 else f"{count} batches, checksum {digest:x}" for count, digest in found
            )
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

    def _shares(self, batch: Mapping[str, Any]) -> list[_Share]:
        """What each group runs of a whole batch; raises ValueError on every rank, for any group."""
        x, comm, mask = _tokens_of(batch), self._comm, batch.get("attention_mask")
        B, T = x.shape[:2]
        for name in (*CUT, "attention_mask"):
            value = batch.get(name)
            if isinstance(value, torch.Tensor) and value.shape[:2] not in ((B, T), (1, T)):
                raise ValueError(f"{name} must be [{B}, {T}, ...] as the tokens are, got {tuple(value.shape)}")
        if mask is not None:
            if mask.ndim != 2 or bool((mask[:, 1:].bool() > mask[:, :-1].bool()).any()):
                raise ValueError("attention_mask masks tokens before others: pad rows on the right")
            for name in ("labels", "shift_labels"):
                kept = mask[:, 1:] if name == "labels" else mask
                labels = batch.get(name)
                if labels is not None and bool((labels[:, T - kept.shape[1] :].ne(-100) & ~kept.bool()).any()):
                    raise ValueError(f"{name} of masked tokens must be -100")
        ends = _documents(batch) if B == 1 else None
        cuts = [0] + [T] * self._groups
        if ends is not None:  # for each group documents of about T / groups tokens
            cuts = [min(ends, key=lambda end: abs(end - T * group / self._groups)) for group in range(self._groups + 1)]
        shares = []
        for group in range(self._groups):
            pairs, (a, b) = B // self._halves, (0, T)
            first, last = pairs * group // self._groups, pairs * (group + 1) // self._groups
            rows = [half * pairs + row for half in range(self._halves) for row in range(first, last)]
            if ends is not None:
                rows, (a, b) = [0], cuts[group : group + 2]
                if a == b:
                    rows, a, b = [], 0, next(end for end in ends if end)
            cu_seqlens = [end - a for end in ends or () if a <= end <= b] if "cu_seq_lens_q" in batch else None
            zigzag = self._layout == "zigzag" and not (self._per_document and cu_seqlens)
            unit = 2 * comm.size * (comm.invariant or 1) if zigzag else 1
            length = max(-(-(b - a) // unit) * unit, comm.size)
            if cu_seqlens and length > b - a:
                cu_seqlens.append(length)
            documents = {"cu_seq_lens_q": torch.tensor(cu_seqlens)} if cu_seqlens else {}
            places = places_of(documents, length, comm, self._layout, self._per_document)
            shares.append(_Share(rows, a, b, ends is not None, cu_seqlens, length, places))
        return shares

    def _part(self, batch: Mapping[str, Any], shares: Sequence[_Share]) -> dict[str, Any]:
        """This rank's tokens of its group's share of a whole batch."""
        if getattr(vars(self._text_model).get("forward"), "args", (None, None))[1] is not self._comm:
            raise ValueError("the model was split anew, or restored, after this trainer was created")
        share = shares[self._group]
        found: dict[str, Any] = {name: x for name, x in batch.items() if name != "attention_mask"}
        rows, extra = share.rows or [0], share.length - share.end + share.first
        for name in CUT:
            value = found.get(name)
            if not isinstance(value, torch.Tensor):
                continue
            value = value[rows if len(value) > 1 else [0], share.first : share.end]
            tail = value.new_full((len(value), extra, *value.shape[2:]), -100 if "labels" in name else 0)
            if name == "position_ids":
                tail += torch.arange(extra, device=tail.device) + (0 if share.packed else value[:, -1:] + 1)
            value = torch.cat([value, tail], 1)
            found[name] = torch.full_like(value, -100) if "labels" in name and not share.rows else value
        if share.cu_seqlens is not None:
            found["cu_seq_lens_q"] = torch.tensor(share.cu_seqlens, dtype=torch.int32, device=_tokens_of(batch).device)
            for name in ("cu_seq_lens_k", "seq_idx", "max_length_q", "max_length_k"):
                found.pop(name, None)
        return cut_batch(found, comm=self._comm, layout=self._layout, per_document=self._per_document)

    def train(self, *arguments: Any, **options: Any) -> Any:
        if self.model_wrapped is self.model:  # an evaluation before has marked it, and accelerate would not wrap it
            self.model.__dict__.pop("_is_accelerate_prepared", None)
        return super().train(*arguments, **options)

    def training_step(self, model: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        inner = getattr(model, "_orig_mod", model)  # of torch.compile
        if self.accelerator.num_processes > 1 and not isinstance(inner, (DistributedDataParallel, FSDPModule)):
            raise ValueError(
                f"expected the model in DistributedDataParallel or FSDP2, which sum gradients, got {type(inner)}"
            )
        self._comm.step()
        return super().training_step(_OverRanks(self, model), *arguments, **options)

    def _summed(self, share: Tensor) -> torch.Tensor:
        reduce = functools.partial(self.accelerator.reduce, reduction="sum")
        return _OfAllRanks.apply(share, reduce, lambda x: x, self.accelerator.num_processes)

    def _by_part(
        self, function: Any, shifts: bool, outputs: Any, labels: Any, num_items_in_batch: Any = None, **options: Any
    ) -> torch.Tensor:
        """The loss of a whole batch by ``function``, which is called with this rank's logits and labels."""
        shares, whole = self._called
        if not isinstance(labels, torch.Tensor):
            raise ValueError("compute_loss_func and label smoothing need labels")
        options |= {"shift_labels": True} if shifts else {}
        num_items_in_batch = _count({"labels": labels}) if num_items_in_batch is None else num_items_in_batch
        if whole:
            return function(outputs, labels, num_items_in_batch=num_items_in_batch, **options)
        part = self._own(shares[self._group], outputs["logits"].shape[:2], _following(labels), fill=-100)
        # function drops the last logits and the first labels
        given = type(outputs)(**{**outputs, "logits": F.pad(outputs["logits"], (0, 0, 0, 1))})
        call = functools.partial(function, given, F.pad(part, (1, 0), value=-100), **options)
        loss = call(num_items_in_batch=num_items_in_batch)
        if not self._divides:
            with torch.no_grad():
                half = call(num_items_in_batch=2 * num_items_in_batch)
                fits = torch.isclose(half * 2, loss, rtol=1e-3, equal_nan=True).view(1)
            self._divides = bool(self.accelerator.gather(fits.int()).all())
            if not self._divides:
                raise ValueError("compute_loss_func must sum over tokens and divide by num_items_in_batch")
        return self._summed(loss)

    # Evaluation on whole rows

    def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
        self.gather_function, self._in_step = self._gathered_already, False
        try:
            output = super().evaluation_loop(*arguments, **options)
        except Exception as error:
            if not self._in_step:  # of the loader or of metrics: the other ranks come to _compare
                self._compare([], error)
            raise
        self._compare([])  # detects a rank that has a further batch
        return output

    def _gathered_already(self, data: Any, *_, **__) -> Any:
        """Replaces Accelerator.gather_for_metrics: the data is gathered already.

        Like it, truncates the loss, which is repeated for each row of a full batch, to the rows of the last batch; for
        a data set without a length only if accelerate dispatches the batches.
        """
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader:
            return data
        rows = state.remainder
        if isinstance(state.active_dataloader.dataset, torch.utils.data.IterableDataset):
            config: Any = self.args.accelerator_config
            rows = -1 if config.dispatch_batches is False else self._rows_now
        return recursively_apply(lambda x: x[:rows] if x.ndim and rows > 0 else x, data)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> tuple:
        """(loss, logits, labels) of whole rows, on every rank."""
        self._in_step = True
        self._compare([inputs])
        self._comm.step()
        self._rows_now = _tokens_of(inputs).shape[0] // self._halves
        ignored = ignore_keys or getattr(getattr(self.model, "config", None), "keys_to_ignore_at_inference", ())
        model = _OverRanks(self, model, not prediction_loss_only, ignored)
        loss, *others = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        self._in_step = False
        # evaluation_loop repeats the loss for the rows of one group
        return loss if loss is None else loss.expand(self._groups), *others

    def _whole(self, value: Any, shares: Sequence[_Share], shape: Sequence[int]) -> Any:
        """Gather ``value`` [rows, tokens, ...], or each element of a tuple, from all ranks into whole rows."""
        if isinstance(value, (tuple, list)):
            return type(value)(self._whole(x, shares, shape) for x in value)
        share, rank = shares[self._group], self._comm.rank
        here = max(1, len(share.rows)), sum(b - a for a, b in share.places[rank])
        if not isinstance(value, torch.Tensor) or value.shape[:2] != here:
            shown = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"an output of the model is not [rows, tokens, ...] = {list(here)}, but {shown}")

        def joined(value: Tensor) -> torch.Tensor:
            most = max(sum(b - a for a, b in part) for share in shares for part in share.places)
            padded = value.new_zeros(max(1, *(len(share.rows) for share in shares)), most, *value.shape[2:])
            padded[: here[0], : here[1]] = value
            whole = value.new_zeros(*shape, *value.shape[2:])
            for (group, rank), part in zip(self._places, self.accelerator.gather(padded[None]), strict=True):
                share = shares[group]
                for a, b, at in _pieces(share, rank):
                    whole[share.rows, a:b] = part[: len(share.rows), at : at + b - a]
            return whole

        own = functools.partial(self._own, share, value.shape)
        return _OfAllRanks.apply(value, joined, own, self.accelerator.num_processes)

    def _own(self, share: _Share, shape: Sequence[int], whole: Tensor, fill: int = 0) -> torch.Tensor:
        """This rank's part of whole rows, with ``fill`` at padding."""
        part = whole.new_full(shape, fill)
        for a, b, at in _pieces(share, self._comm.rank):
            part[: len(share.rows), at : at + b - a] = whole[share.rows, a:b]
        return part


class SequenceParallelTrainer(SequenceParallelMixin, Trainer):  # type: ignore[misc]
    """transformers' ``Trainer`` for a model of ``sequence_parallel``: see ``SequenceParallelMixin``.

    Raises:
        ValueError: as said there.

    Example:
        >>> model = sequence_parallel(Qwen3NextForCausalLM(config), comm=allscan.Communicator(mesh["sp"]))
        >>> SequenceParallelTrainer(model=model, args=arguments, train_dataset=rows).train()
    """


def _agree(problem: str | None, value: Any) -> list[Any]:
    """Every rank's ``value``; ValueError on all ranks if there is a problem on any."""
    answers: list[Any] = [(problem, value)]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        answers *= dist.get_world_size()
        dist.all_gather_object(answers, (problem, value))
    problems, values = zip(*answers, strict=True)
    if any(problems):
        raise ValueError(problems[0] if len({*problems}) == 1 else by_rank(problems))
    return [*values]


def _pieces(share: _Share, rank: int) -> Iterator[tuple[int, int, int]]:
    """(first token in the batch, end, first token in the rank's part) of each of its pieces, without padding."""
    at = 0
    for a, b in share.places[rank]:
        end = min(b, share.end - share.first)
        if a < end:
            yield share.first + a, share.first + end, at
        at += b - a


def _documents(batch: Mapping[str, Any]) -> list[int] | None:
    """Where the documents of a packed row begin and end; None for others."""
    given, positions = batch.get("cu_seq_lens_q"), batch.get("position_ids")
    if given is not None:
        return list(boundaries_on_host(boundaries(given)))
    starts = [] if positions is None else ((positions[0].diff() != 1).nonzero().flatten() + 1).tolist()
    return [0, *starts, _tokens_of(batch).shape[1]] if starts else None


def _following(labels: Tensor) -> torch.Tensor:
    """The label of the token that follows each."""
    return F.pad(labels, (0, 1), value=-100)[:, 1:]


def _count(batch: Mapping[str, Any]) -> torch.Tensor:
    """The number of labels that a causal language model predicts."""
    shifted = batch.get("shift_labels")
    return (batch["labels"][..., 1:] if shifted is None else shifted).ne(-100).sum()


def _tokens_of(batch: Mapping[str, Any]) -> torch.Tensor:
    x = batch.get("input_ids")
    x = batch.get("inputs_embeds") if x is None else x
    if not isinstance(x, torch.Tensor) or x.ndim < 2:
        raise ValueError(f"a batch has input_ids [B, T] or inputs_embeds [B, T, H], got {', '.join(batch)}")
    return x
