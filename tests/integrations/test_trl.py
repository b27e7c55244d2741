"""TRL's SFTTrainer and DPOTrainer with SequenceParallelMixin, beside the ordinary model in one process."""

from __future__ import annotations

import functools
import os

import numpy as np
import pytest
import torch
from test_transformers_trainer import SHAPES, arguments, begin, different, summed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import allscan
from allscan.tools.ranks import Ranks
from support.models import VOCABULARY, made, sequence_parallel
from support.values import check_answers, raised, relative

pytest.importorskip("trl", minversion="1.16", reason="needs trl")
pytest.importorskip("transformers", minversion="5.23", reason="needs transformers")

pytestmark = pytest.mark.cpu
PRELOAD = [
    "allscan.integrations.transformers_trainer",
    "transformers.models.qwen3_5.modeling_qwen3_5",
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
]
LENGTHS = 13, 24, 9, 17, 5, 20, 11, 24, 7, 16, 22


def tokenizer():
    """A tokenizer of the words w1, w2, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<end>", *(f"w{i}" for i in range(2, VOCABULARY))]
    of_words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    of_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=of_words, pad_token="<pad>", eos_token="<end>")


def rows(kind, count, seed=0):
    """Rows of unequal lengths."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(seed)

    def tokens(length):
        return torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()

    found = []
    for i in range(count):
        ids = tokens(LENGTHS[(i + seed) % len(LENGTHS)])
        labels = [-100] * (i % 4) + ids[i % 4 :]
        chosen, rejected = (" ".join(f"w{x}" for x in tokens(n)) for n in (4 + i % 5, 3 + i % 7))
        pair = dict(prompt=" ".join(f"w{x}" for x in ids), chosen=" " + chosen, rejected=" " + rejected)
        found.append(dict(input_ids=ids, labels=labels) if kind == "sft" else pair)
    return Dataset.from_list(found)


class _Kept:
    """compute_metrics: of the logits of tokens with labels, which are no padding."""

    def __call__(self, prediction):
        kept = prediction.label_ids != -100
        return {"sum": float(np.abs(prediction.predictions[kept]).mean()), "count": int(kept.sum())}


FLATTENED = dict(padding_free=True, max_length=None)
CASES = {
    "sft": dict(),
    "dpo": dict(beta=0.5),
    "sft in accumulated steps, discounted": dict(loss_type="dft", gradient_accumulation_steps=2),
    "sft smoothed": dict(label_smoothing_factor=0.1),
    "sft by a function": dict(compute_loss_func=summed),
    "sft with metrics": dict(compute_metrics=_Kept()),
    "sft with metrics, smoothed": dict(compute_metrics=_Kept(), label_smoothing_factor=0.1),
    "sft of flattened rows": FLATTENED,
    "sft of packed rows": dict(packing=True, max_length=40, max_steps=2),  # beside one rank of ours
    "dpo of shared tokens, in accumulated steps": dict(
        loss_type=["ipo", "sft", "aot"], loss_weights=[1.0, 0.5, 0.5], ld_alpha=0.5, gradient_accumulation_steps=2
    ),
    "dpo weighted": dict(use_weighting=True),
}
UNLIKE = "runtime", "per_second", "preparation_time", "flos"  # parts of names: times, and operations with padding


def trainer_of(kind, ours, model, **options):
    import transformers
    import trl

    from allscan.integrations.transformers import SequenceParallelMixin

    base = trl.SFTTrainer if kind == "sft" else trl.DPOTrainer
    made_of = type(f"Long{base.__name__}", (SequenceParallelMixin, base), {}) if ours else base
    trainer = made_of(model, **options)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def config(kind, folder, batch, **options):
    import trl

    plain = arguments(folder, batch)
    known = {name: getattr(plain, name) for name in ("max_steps", "learning_rate", "max_grad_norm", "logging_steps")}
    known |= dict(lr_scheduler_type="constant", report_to="none", save_strategy="no", disable_tqdm=True, bf16=False)
    known |= dict(dataloader_pin_memory=False, per_device_train_batch_size=batch, per_device_eval_batch_size=batch)
    known |= {} if torch.cuda.is_available() else dict(use_cpu=True, ddp_backend="gloo")
    return (trl.SFTConfig if kind == "sft" else trl.DPOConfig)(folder, **known | options)


def models(kind, split):
    """A model, and for DPO a reference with other weights."""
    model, reference = made("qwen3_5", use_cache=False), made("qwen3_5", use_cache=False)
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(0.9)
    return dict(model=split(model)) | (dict(ref_model=split(reference)) if kind == "dpo" else {})


def results(folder, ours, groups, layout, names):
    """Train, evaluate before and after it, and return what is logged, by case."""
    os.environ |= dict(HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    mesh, found = begin(groups), {}
    with allscan.Communicator(mesh) as comm:
        for name in names:
            options, kind = dict(CASES[name]), name[:3]
            split = functools.partial(sequence_parallel, comm=comm, layout=layout or "contiguous")
            if not ours:  # the ordinary model takes no packed rows; the loss is the same
                options = {key: x for key, x in options.items() if key not in FLATTENED or "packing" in options}
                split = split if "packing" in options else lambda model: model
            own = {key: options.pop(key) for key in ("compute_loss_func", "compute_metrics") if key in options}
            trainer = trainer_of(
                kind,
                ours or "packing" in options,
                **models(kind, split),
                args=config(kind, folder, 2 // groups if ours else 2, **options),
                train_dataset=rows(kind, 11),
                eval_dataset=rows(kind, 5, seed=1),
                processing_class=tokenizer(),
                **own,
            )
            before = trainer.evaluate()
            trainer.train()
            trainer.evaluate()
            logged = [
                {key: float(x) for key, x in entry.items() if not any(part in key for part in UNLIKE)}
                for entry in (before, *trainer.state.log_history)
            ]
            found[name] = {f"{i} {key}": x for i, entry in enumerate(logged) for key, x in entry.items()}
        comm.barrier()
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What the ordinary trainers log, by case, computed once."""
    folder = str(tmp_path_factory.mktemp("stock"))
    with Ranks(1, "cpu") as ranks:
        yield functools.cache(lambda case: ranks.run(results, folder, False, 1, None, [case])[0][case])


@pytest.mark.parametrize(
    "size, layout, names",
    [
        (2, "zigzag", ("sft", "dpo")),
        pytest.param(2, "contiguous", tuple(CASES), marks=pytest.mark.slow),
        pytest.param(3, "zigzag", ("sft", "dpo"), marks=pytest.mark.slow),
        pytest.param(4, "contiguous", tuple(CASES), marks=pytest.mark.slow),
        pytest.param(4, "zigzag", tuple(CASES), marks=pytest.mark.slow),
    ],
)
def test_as_trls_trainers(reference, fresh, tmp_path, size, layout, names):
    """Losses, norms of gradients and metrics of padded rows, whose lengths are no multiples of the ranks. Four ranks
    are two groups of two; batches have 2 rows or pairs, the last ones 1."""
    for found in fresh(size).run(results, str(tmp_path), True, SHAPES[size][0], layout, list(names)):
        for case in names:
            errors = list(different(found[case], reference(case), 1e-4))
            assert not errors, (case, errors)


def sharded_case(folder, kind, ours):
    """Return (loss, gradients) of a step; ours: of a split model whose parameters FSDP2 shards."""
    os.environ |= dict(HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_OFFLINE="1")
    with allscan.Communicator(begin(1)) as comm:
        split = functools.partial(sequence_parallel, comm=comm) if ours else lambda model: model
        args, known = config(kind, folder, 4), dict(train_dataset=rows(kind, 4), processing_class=tokenizer())
        trainer = trainer_of(kind, ours, **models(kind, split), args=args, **known)
        model = trainer.model.train()
        for module in (*model.model.layers, model) if ours else ():
            fully_shard(module, mesh=DeviceMesh.from_group(comm.group, "cpu"))
        trainer.current_gradient_accumulation_steps = 1
        samples, count = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, args.device)
        loss = trainer.training_step(model, samples[0], count)
        found = {name: p.grad for name, p in model.named_parameters()}
        return loss, {name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_sharded_parameters(fresh, tmp_path, kind, size=2):
    """accelerate gives FSDP2 only to GPUs: shards of another loop have the gradients of the whole batch."""
    ((loss, expected),) = fresh(1).run(sharded_case, str(tmp_path), kind, False)
    for found, gradients in fresh(size).run(sharded_case, str(tmp_path), kind, True):
        assert relative(found, loss) < 1e-5
        errors = {name: relative(gradients[name], x) for name, x in expected.items() if x.any()}
        assert max(errors.values()) < 2e-5, errors


def rejected_case(folder):
    """Return this rank's {expected text: error}."""
    import trl

    from allscan.integrations.transformers import SequenceParallelMixin

    os.environ |= dict(HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_OFFLINE="1")
    mesh, answers = begin(1), {}
    with allscan.Communicator(mesh) as comm:
        rank, other = comm.rank, sequence_parallel(made("qwen3_5"), comm=comm, layout="zigzag")

        def make(kind="dpo", batch=2, split=True, experts=0.0, **options):
            args = {name: options.pop(name) for name in ("beta", "precompute_ref_log_probs") if name in options}
            given = models(kind, lambda model: sequence_parallel(model, comm=comm) if split else model)
            if experts:
                given["model"].config.output_router_logits, given["model"].config.router_aux_loss_coef = False, experts
            known = dict(
                train_dataset=rows(kind, 4), processing_class=tokenizer(), args=config(kind, folder, 2, **args)
            )
            return trainer_of(kind, True, **known | given | options)

        for text, options in {
            "ref_model must be given": dict(ref_model=None),
            "rank 0: None; rank 1: ref_model must be": dict(ref_model=None) if rank else {},
            "and split by sequence_parallel": dict(ref_model=made("qwen3_5")),
            "with the model's comm, layout": dict(ref_model=other),
            "the model is not split": dict(split=False),
            "precompute_ref_log_probs=True is not": dict(precompute_ref_log_probs=True),
            "beta differs between ranks": dict(beta=0.1 + rank),
            "peft_config is not": dict(kind="sft", peft_config=object()),
            "set router_aux_loss_coef=0.0": dict(kind="sft", experts=0.1),
            "train_dataset differs between ranks: rank 0: None; rank 1: list": dict(
                kind="sft", train_dataset=[{}] if rank else None
            ),
        }.items():
            answers[text] = raised(make, **options)
        for base in (trl.GRPOTrainer, trl.RewardTrainer, trl.KTOTrainer):
            name = f"{base.__name__} is not supported by SequenceParallelMixin"
            answers[name] = raised(type, "Long", (SequenceParallelMixin, base), {})
    return answers


@pytest.mark.slow
def test_what_is_rejected(fresh, tmp_path, size=2):
    for answers in fresh(size).run(rejected_case, str(tmp_path)):
        check_answers(answers, "ValueError", "TypeError")
