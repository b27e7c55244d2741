"""SequenceParallelTrainer against transformers' own Trainer with the ordinary model in one process."""

from __future__ import annotations

import functools
import os
import re
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

import allscan
from allscan.tools.ranks import Ranks
from support import ROOT
from support.models import VOCABULARY, made, sequence_parallel
from support.values import added_up, check_answers, raised, relative

pytest.importorskip("transformers", minversion="5.18", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")

PRELOAD = ["allscan.integrations.transformers_trainer", "transformers.models.qwen3_5.modeling_qwen3_5"]
SHAPES = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2)}  # processes: (groups, ranks of each)
LENGTH = 24


def rows(count, labelled, seed=0):
    """Return rows that differ in the number of labels that count."""
    generator = torch.Generator().manual_seed(seed)
    found = [dict(input_ids=torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)) for _ in range(count)]
    for i, row in enumerate(found if labelled else ()):
        row["labels"] = row["input_ids"].clone()
        row["labels"][: 3 * (i % 6)] = -100
        row["labels"][LENGTH - i % 3 :] = -100
    return found


def begin(groups):
    """Set torchrun's variables; reset accelerate's state."""
    import transformers
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    transformers.logging.set_verbosity_error()
    rank, size = dist.get_rank(), dist.get_world_size()
    known = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_ADDR="localhost")
    os.environ |= {name: str(value) for name, value in known.items()}
    return dist.device_mesh.init_device_mesh(
        "cuda" if torch.cuda.is_available() else "cpu", (groups, size // groups), mesh_dim_names=("dp", "sp")
    )["sp"]


def arguments(folder, batch, **options):
    from transformers import TrainingArguments

    options = (
        dict(
            max_steps=3,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            max_grad_norm=0.3,
            dataloader_pin_memory=False,
        )
        | options
    )
    if not torch.cuda.is_available():
        options = dict(use_cpu=True, ddp_backend="gloo") | options
    return TrainingArguments(folder, per_device_train_batch_size=batch, per_device_eval_batch_size=batch, **options)


class _Seen:
    """compute_metrics that records its argument."""

    def __call__(self, prediction):
        self.given = prediction
        return {"sum": float(np.mean([np.abs(x).mean() for x in prediction if x is not None]))}


NO_ARGUMENTS = (
    "train_dataset eval_dataset data_collator compute_metrics compute_loss_func model_init optimizers".split()
)


def trainer_of(kind, model, folder, batch, **options):
    import transformers

    from allscan.integrations.transformers import SequenceParallelTrainer

    given = {name: options.pop(name) for name in NO_ARGUMENTS if name in options}
    given |= {} if "model_init" in given else dict(model=model)
    trainer = transformers.Trainer if kind == "stock" else SequenceParallelTrainer
    found = trainer(args=arguments(folder, batch, **options), **given)
    found.remove_callback(transformers.PrinterCallback)
    return found


def training(make, evaluated=False, positions=False, **options):
    """Return losses and norms of gradients of each step, and train()'s result. evaluated: there is an evaluation before
    it. positions: rows have position_ids, and the last batch has one row."""
    data = rows(9 if positions else 11, True)
    data = [row | dict(position_ids=torch.arange(LENGTH)) for row in data] if positions else data
    trainer = make(train_dataset=data, eval_dataset=rows(3, True), **options)
    if evaluated:
        trainer.evaluate()
    result = trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    state = trainer.state
    return dict(
        losses=[entry["loss"] for entry in history],
        norms=[float(entry["grad_norm"]) for entry in history],
        train_loss=result.training_loss,
        epoch=state.epoch,
        flos=state.total_flos,
        tokens=state.num_input_tokens_seen,
    )


def evaluation(make, labelled, **options):
    seen = _Seen()
    trainer = make(eval_dataset=rows(7, labelled), compute_metrics=seen, **options)
    metrics = trainer.evaluate()
    found = {name: metrics.get(name) for name in ("eval_loss", "eval_sum")}
    if labelled:
        found |= {f"given {i}": np.asarray(x) for i, x in enumerate(seen.given) if x is not None}
    output = trainer.predict(rows(5, labelled, seed=1))
    found |= dict(predictions=output.predictions, predict_loss=output.metrics.get("test_loss"))
    if labelled:
        found["labels"] = output.label_ids
    loss_only = make(eval_dataset=rows(7, labelled)).evaluate()
    return found | dict(loss_only=loss_only.get("eval_loss"))


def collated(some):
    """A batch padded on the right to its longest row."""
    most = max(len(row["input_ids"]) for row in some)

    def padded(name, value):
        tensors = [row[name] if name in row else torch.ones_like(row["input_ids"]) for row in some]
        return torch.stack([torch.nn.functional.pad(x, (0, most - len(x)), value=value) for x in tensors])

    return {name: padded(name, value) for name, value in dict(input_ids=0, labels=-100, attention_mask=0).items()}


def summed(outputs, labels, num_items_in_batch):
    """A compute_loss_func: the squares of tokens' losses. TRL's evaluation leaves the number out."""
    logits, labels = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return losses.square().sum() / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def averaged(outputs, labels, num_items_in_batch):
    """A compute_loss_func that is not supported."""
    return torch.nn.functional.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def padded(make, **options):
    """Train and evaluate with padded rows of unequal lengths."""
    data = [{name: x[: LENGTH - i * 5 % 13] for name, x in row.items()} for i, row in enumerate(rows(11, True))]
    trainer = make(train_dataset=data, eval_dataset=data[:7], data_collator=collated, **options)
    trainer.train()
    found = {f"{key} {i}": float(x) for i, entry in enumerate(trainer.state.log_history) for key, x in entry.items()}
    found = {name: x for name, x in found.items() if name.startswith(("loss", "grad_norm"))}
    return found | dict(eval_loss=trainer.evaluate()["eval_loss"])


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def streams(make):
    """Use data sets without a length, and metrics batch by batch."""
    sums = []

    def metrics(prediction, compute_result):
        sums.append(float(prediction.predictions.float().abs().mean() + prediction.label_ids.float().mean()))
        return {"sum": sum(sums)} if compute_result else {}

    trainer = make(
        train_dataset=Stream(rows(11, True)),
        eval_dataset=Stream(rows(7, True)),
        compute_metrics=metrics,
        batch_eval_metrics=True,
        gradient_accumulation_steps=2,
        max_steps=2,
    )
    trainer.train()
    metrics, losses = trainer.evaluate(), [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return dict(losses=losses, **{name: metrics[name] for name in ("eval_loss", "eval_sum")})


def checkpoints(make):
    """Evaluate and save within training, with activation checkpointing; resume; load as an ordinary model."""
    options = dict(
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=2,
        max_steps=3,
        gradient_checkpointing=True,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )
    data = dict(train_dataset=rows(11, True), eval_dataset=rows(7, True))
    trainer = make(**data, **options | dict(load_best_model_at_end=False))
    trainer.train()
    folder = os.path.join(trainer.args.output_dir, "checkpoint-2")
    again = make(**data, **options | dict(eval_steps=2, output_dir=trainer.args.output_dir + "/again"))
    again.train(resume_from_checkpoint=folder)
    found = {}
    for name, one in dict(first=trainer, again=again).items():
        for key in ("loss", "eval_loss", "grad_norm"):
            found[f"{name}, {key}"] = [float(entry[key]) for entry in one.state.log_history if key in entry]
    ordinary = type(made("qwen3_5")).from_pretrained(folder)
    with torch.no_grad():
        logits = ordinary(input_ids=rows(1, False, seed=5)[0]["input_ids"][None], use_cache=False).logits
    return found | dict(logits=logits.numpy(), config=len(ordinary.config._attn_implementation))


# For two batches a step: with Adam the third norm of the ordinary trainer in float32 differs from that in float64 by
# 6.5e-5, more than ``different`` allows
SGD = dict(optim="sgd", learning_rate=0.3)
CASES = {
    "training": functools.partial(training, include_num_input_tokens_seen="all"),
    "training after an evaluation": functools.partial(training, evaluated=True),
    "training with positions": functools.partial(training, positions=True),
    "accumulation": functools.partial(training, gradient_accumulation_steps=2, **SGD),
    "accumulation over epochs": functools.partial(
        training, gradient_accumulation_steps=4, max_steps=-1, num_train_epochs=2, logging_steps=2
    ),
    "accumulation without averaging of tokens": functools.partial(
        training, gradient_accumulation_steps=2, average_tokens_across_devices=False, **SGD
    ),
    "evaluation": functools.partial(evaluation, labelled=True, include_for_metrics=["inputs", "loss"]),
    "evaluation without labels": functools.partial(evaluation, labelled=False),
    "streams": streams,
    "checkpoints": checkpoints,
    "padded rows, labels smoothed": functools.partial(padded, label_smoothing_factor=0.1),
    "padded rows, a loss function": functools.partial(padded, compute_loss_func=summed, gradient_accumulation_steps=2),
    "evaluation, labels smoothed": functools.partial(evaluation, labelled=True, label_smoothing_factor=0.1),
}


def results(folder, kind, groups, layout, names, batch=2):
    """Return the results of every case, with a model of equal weights."""
    mesh = begin(groups)
    found = {}
    with allscan.Communicator(mesh) as comm:

        def make(output_dir=folder, **options):
            options = {name: x for name, x in options.items() if kind != "stock" or "fsdp" not in name}
            model = made("qwen3_5", use_cache=False)
            if kind != "stock":
                sequence_parallel(model, comm=comm, layout=layout)
            return trainer_of(kind, model, output_dir, batch * (2 if kind == "stock" else 2 // groups), **options)

        for name in names:
            found[name] = CASES[name](make)
        comm.barrier()
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The ordinary trainer's results by case, computed once."""
    folder = str(tmp_path_factory.mktemp("stock"))
    with Ranks(1, "cpu") as ranks:
        yield functools.cache(lambda case: ranks.run(results, folder, "stock", 1, None, [case])[0][case])


def different(found, expected, most=2e-5):
    """Yield the results that differ by more than rounding."""
    for name, want in expected.items():
        have = found[name]
        if want is None or have is None:
            if want is not have:
                yield name, have, want
        elif np.shape(have) != np.shape(want) or not np.allclose(have, want, rtol=most, atol=most):
            yield name, have, want


PADDED = ["padded rows, labels smoothed", "padded rows, a loss function", "evaluation, labels smoothed"]
FULL = [name for name in CASES if name not in PADDED]
SOME = ["accumulation", "training after an evaluation", "evaluation", "evaluation without labels"]


@pytest.mark.slow(but="1-zigzag")
@pytest.mark.cpu
@pytest.mark.parametrize(
    "size, layout, names",
    [
        (1, "zigzag", SOME),
        (2, "contiguous", FULL),
        (3, "contiguous", SOME),
        (3, "zigzag", [*SOME, PADDED[0]]),
        (4, "contiguous", FULL),
        pytest.param(2, "zigzag", PADDED, marks=pytest.mark.slow),
        pytest.param(4, "contiguous", PADDED, marks=pytest.mark.slow),
    ],
)
def test_as_the_ordinary_trainer(reference, fresh, tmp_path, size, layout, names):
    """Means, sums and choices of rows are right over processes that each have a part of every row. Four ranks are two
    groups of two; batches have 4 rows, the last ones 3 and 1."""
    for found in fresh(size).run(results, str(tmp_path), "ours", SHAPES[size][0], layout, names):
        for case in names:
            assert not list(different(found[case], reference(case))), (case, *different(found[case], reference(case)))


def packed_case(folder):
    """Evaluate packed rows, split as rows and by document, against the ordinary model document by document. Return
    relative errors of the loss and of the logits, which are in the row's order."""
    errors = []
    with allscan.Communicator(begin(1)) as comm:
        lengths, data = [0, 4, 4, 16, LENGTH], rows(2, True)
        for row in data:
            row["labels"][lengths[:-1]] = -100

        def collated(some):
            batch = {name: torch.stack([row[name] for row in some]) for name in some[0]}
            return batch | dict(cu_seq_lens_q=torch.tensor(lengths))

        model, logits, losses = made("qwen3_5", use_cache=False), [], []
        with torch.no_grad():
            for row in data:
                ends = sorted({*lengths})
                parts = [model(input_ids=row["input_ids"][None, a:b]).logits for a, b in zip(ends, ends[1:])]
                logits.append(torch.cat(parts, 1))
                losses.append(torch.nn.functional.cross_entropy(logits[-1][0, :-1], row["labels"][1:]))
        wanted = torch.cat(logits).numpy()
        for per_document in (False, True):
            sequence_parallel(model, comm=comm, layout="zigzag", per_document=per_document)
            trainer = trainer_of("ours", model, folder, 1, data_collator=collated)
            found = trainer.predict(data)
            errors.append(float(np.abs(found.predictions - wanted).max() / np.abs(wanted).max()))
            errors.append(relative(torch.tensor(found.metrics["test_loss"]), sum(losses) / 2))
    return errors


@pytest.mark.cpu
def test_packed_rows_in_zigzag(fresh, tmp_path, size=2):
    for errors in fresh(size).run(packed_case, str(tmp_path)):
        assert max(errors) < 1e-5, errors


def flattened_case(folder):
    """Return the relative error of the loss of rows in one packed row, whose documents two groups have, to the loss of
    their logits: each document's first token has a label, which the other group's last token predicts."""

    def flattened(some):
        ids = torch.cat([row["input_ids"] for row in some])[None]
        return dict(input_ids=ids, labels=ids.clone(), position_ids=torch.arange(LENGTH).repeat(len(some))[None])

    data = rows(2, False)
    with allscan.Communicator(begin(2)) as comm:
        model = sequence_parallel(made("qwen3_5", use_cache=False), comm=comm)
        found = trainer_of("ours", model, folder, 1, data_collator=flattened).predict(data)
        logits, labels = torch.tensor(found.predictions)[0, :-1], flattened(data)["labels"][0, 1:]
        return relative(torch.tensor(found.metrics["test_loss"]), torch.nn.functional.cross_entropy(logits, labels))


@pytest.mark.cpu
@pytest.mark.slow
def test_labels_at_the_edge_of_groups(fresh, tmp_path, size=4):
    assert max(fresh(size).run(flattened_case, str(tmp_path))) < 1e-5


@pytest.mark.gpu
def test_as_the_ordinary_trainer_on_gpus(fresh, tmp_path, size=2):
    """With NCCL and other kernels, which round differently."""
    names = ["training", *SOME]
    (expected,) = fresh(1).run(results, str(tmp_path / "stock"), "stock", 1, None, names)
    for found in fresh(size).run(results, str(tmp_path), "ours", 1, "contiguous", names):
        for case in names:
            assert not list(different(found[case], expected[case], 1e-3)), (case, found[case], expected[case])


SHARDED = dict(fsdp=True, fsdp_config=dict(version=2, transformer_layer_cls_to_wrap=["Qwen3_5DecoderLayer"]))


@pytest.mark.gpu
def test_fsdp2_by_accelerate(fresh, tmp_path, monkeypatch, size=2):
    monkeypatch.setitem(CASES, "training", functools.partial(training, **SHARDED))
    (expected,) = fresh(1).run(results, str(tmp_path / "stock"), "stock", 1, None, ["training"])
    for found in fresh(size).run(results, str(tmp_path), "ours", 1, "contiguous", ["training"]):
        assert not list(different(found["training"], expected["training"], 1e-3)), (found, expected)


def compiled_case(folder):
    """Return (results of eager training, of compiled training, number of graphs)."""
    from torch._dynamo.utils import counters

    with allscan.Communicator(begin(1), timeout=600) as comm:

        def make(**options):
            model = sequence_parallel(made("qwen3_5", use_cache=False), comm=comm)
            return trainer_of("ours", model, folder, 2, **options)

        eager = training(make)
        torch._dynamo.reset()
        counters.clear()
        return eager, training(make, torch_compile=True, torch_compile_backend="aot_eager"), counters["stats"]


@pytest.mark.cpu
@pytest.mark.slow
def test_compiled_training(fresh, tmp_path, size=2):
    """Batches with other stamps compile nothing anew: two graphs, as of a split model alone."""
    for eager, compiled, stats in fresh(size).run(compiled_case, str(tmp_path)):
        assert not list(different(compiled, eager, 1e-4)), (compiled, eager)
        assert stats["unique_graphs"] == 2, stats


def fails_on_one_rank(some):
    if dist.get_rank() == 1:
        raise ValueError("the ranks have different batches, says a collator")
    return {name: torch.stack([row[name] for row in some]) for name in some[0]}


class Optimizers(tuple):
    """Fails in Trainer's constructor on one rank."""

    def __new__(cls, rank):
        return super().__new__(cls, (None, None))

    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        if self.rank == 1:
            raise ValueError("ValueError: an optimizer of this rank")
        return super().__iter__()


def rejected_case(folder):
    """Return this rank's {expected text: error} for options that SequenceParallelTrainer rejects."""
    from allscan.integrations.transformers import SequenceParallelTrainer

    mesh, rank, answers = begin(1), dist.get_rank(), {}
    with allscan.Communicator(mesh) as comm:

        def make(layout="contiguous", split=True, **options):
            model = made("qwen3_5", use_cache=False)
            if split:
                sequence_parallel(model, comm=comm, layout=layout)
            return trainer_of("ours", model, folder, 2, **options)

        rejected = {
            "not split": dict(split=False),
            "model_init": dict(model_init=lambda: sequence_parallel(made("qwen3_5"), comm=comm)),
            "use_liger_kernel": dict(use_liger_kernel=True),
            "neftune_noise_alpha": dict(neftune_noise_alpha=5.0),
            "auto_find_batch_size": dict(auto_find_batch_size=True),
            "train_sampling_strategy=group_by_length": dict(train_sampling_strategy="group_by_length"),
            "label_names": dict(label_names=["start"]),
            "split_batches": dict(accelerator_config=dict(split_batches=True)),
            "max_steps differs between ranks: rank 0: 3; rank 1: 4": dict(max_steps=3 + rank),
            "label_smoothing_factor differs between ranks": dict(label_smoothing_factor=0.1 * rank),
            "adam_beta1 differs between ranks: rank 0: 0.9; rank 1: 0.8": dict(adam_beta1=0.8 if rank else 0.9),
            "rank 0: None; rank 1: neftune_noise_alpha": dict(neftune_noise_alpha=5.0 if rank else None),
            "compute_loss_func differs": dict(compute_loss_func=summed if rank else None),
            "rank 0: None; rank 1: the model is not split": dict(split=not rank),
            "train_dataset differs between ranks: rank 0: list; rank 1: Stream": dict(
                train_dataset=Stream([]) if rank else []
            ),
            "ValueError: an optimizer of this rank": dict(optimizers=Optimizers(rank)),
            "compute_metrics differs": dict(compute_metrics=_Seen() if rank else None),
        }
        for text, options in rejected.items():
            answers[text] = raised(make, **options)
        model = sequence_parallel(made("qwen3_5", use_cache=False), comm=comm)
        default = raised(SequenceParallelTrainer, model, arguments(folder, 2) if rank else None)
        answers["accelerator_config differs between ranks: rank 0: None; rank 1: "] = default
        other = rows(4, True, seed=rank)
        before, after = torch.arange(LENGTH).ge(3), torch.arange(LENGTH).lt(3)
        padded, labelled = ([row | dict(attention_mask=mask) for row in rows(4, True)] for mask in (before, after))
        answers["did not return a loss"] = raised(make(train_dataset=rows(4, False)).train)
        different = "the ranks have different batches"
        longer = dict(train_dataset=rows(4 + rank, True), max_steps=-1)
        found = [
            raised(make(train_dataset=other).train),
            raised(make().predict, other),
            raised(make().evaluate, rows(4 + rank, False)),
            raised(make(**longer).train),
        ]
        answers |= {(different, i): answer for i, answer in enumerate(found)}
        answers["masks tokens before others"] = raised(make(train_dataset=padded).train)
        answers["labels of masked tokens must be -100"] = raised(make("zigzag").evaluate, labelled)
        function = make(compute_loss_func=averaged, train_dataset=rows(4, True))
        answers["compute_loss_func must sum over tokens and divide"] = raised(function.train)
        answers[different, "an evaluation"] = raised(make(data_collator=fails_on_one_rank).evaluate, rows(4, True))
        answers[different, "a collator"] = raised(
            make(train_dataset=rows(4, True), data_collator=fails_on_one_rank).train
        )
        trainer = make()
        answers["expected the model in DistributedDataParallel"] = raised(trainer.training_step, trainer.model, {})
        sequence_parallel(trainer.model, comm=trainer._comm, loss_in_slices=True)
        answers["loss_in_slices leaves no logits"] = raised(trainer.predict, rows(4, True))
        sequence_parallel(trainer.model, comm=None)
        answers["was split anew, or restored"] = raised(trainer.predict, rows(4, False))
        answers["FSDP is only for GPUs"] = raised(make, fsdp=True)
        os.environ.pop("ACCELERATE_USE_FSDP", None)
        begin(1)
        del os.environ["WORLD_SIZE"], os.environ["RANK"], os.environ["LOCAL_RANK"]
        answers["accelerate has 1 of 2 processes"] = raised(make, ddp_backend=None)
    return answers


@pytest.mark.cpu
def test_what_is_rejected(fresh, tmp_path, size=2):
    """Options are rejected whose results would differ from the ordinary Trainer's or between ranks."""
    for answers in fresh(size).run(rejected_case, str(tmp_path)):
        check_answers(answers)


@pytest.mark.quick
def test_other_trainers_are_rejected_by_name():
    from transformers import Seq2SeqTrainer

    from allscan.integrations.transformers import SequenceParallelMixin

    with pytest.raises(TypeError, match="Seq2SeqTrainer is not supported by SequenceParallelMixin: only Trainer, SFT"):
        type("Long", (SequenceParallelMixin, Seq2SeqTrainer), {})


def loop_case(whole):
    """Return the loss of each step of the documentation's program; with ``whole``, of the ordinary model."""
    page = os.path.join(ROOT, "docs", "integrations", "trainers.md")
    with open(page, encoding="utf-8") as text:
        (program,) = (
            block for block in re.findall(r"```python\n(.*?)```", text.read(), re.DOTALL) if "def train(" in block
        )
    mesh, names, data, model = begin(1), {}, rows(11, True), made("qwen3_5", use_cache=False)
    exec(program, names)
    with allscan.Communicator(mesh) as comm:
        if not whole:
            return names["train"](model, data, comm, 2, 2)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
        for first in range(0, len(data), 4):  # each step in one batch
            batch = {name: torch.stack([row[name] for row in data[first : first + 4]]) for name in data[0]}
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses


@pytest.mark.cpu
def test_the_documented_loop(fresh):
    (expected,) = fresh(1).run(loop_case, True)
    for found in fresh(2).run(loop_case, False):
        assert len(expected) == 3 and np.allclose(found, expected, rtol=2e-5), (found, expected)


def cut_case(comm, layout):
    """Return ([relative errors of the loss, number of wrong tokens in the joined parts], {expected text: error})."""
    from allscan.integrations.transformers import cut_batch

    zigzag = layout == "zigzag"
    size, rank, answers = comm.size, comm.rank, {}
    T = 8 * size + (0 if zigzag else 1)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(1, VOCABULARY, (2, T), generator=generator)
    labels = whole.masked_fill(torch.rand(2, T, generator=generator) < 0.3, -100)
    batch = dict(input_ids=whole, labels=labels, attention_mask=torch.ones_like(whole), use_cache=False)
    model = made("qwen3_5")
    want = model(**batch).loss.detach()
    sequence_parallel(model, comm=comm, layout=layout)

    def cut(**changed):
        return cut_batch(batch | changed, comm=comm, layout=layout)

    def share(part):
        return added_up(model(**part).loss, comm.group)

    part = cut(position_ids=torch.arange(T)[None])
    positions = [torch.empty(1, T // size + (r < T % size), dtype=torch.long) for r in range(size)]
    parts = [torch.empty(2, p.shape[1], dtype=torch.long) for p in positions]
    for r in range(size):  # gloo's all_gather requires equal sizes
        for found, of_rank in ((positions, part["position_ids"]), (parts, part["input_ids"])):
            if r == rank:
                found[r].copy_(of_rank)
            dist.broadcast(found[r], r, group=comm.group)
    joined = torch.empty_like(whole)
    joined[:, torch.cat(positions, 1)[0]] = torch.cat(parts, 1)
    errors = [relative(share(part), want), relative(share(cut()), want), float((joined != whole).sum())]
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    errors.append(relative(share(cut(shift_labels=shifted)), want))
    dealt = torch.randint(1, VOCABULARY, (2, T), generator=torch.Generator().manual_seed(rank))
    embedded = model.get_input_embeddings()(dealt).detach()
    last, other = rank == size - 1, comm.size > 1
    rejected = {
        "rows differ between ranks": {
            n: x[:1] if last and n != "use_cache" else x
            for n, x in part.items()
            if n in ("input_ids", "labels", "use_cache")
        },
        "have cut different batches": cut(input_ids=dealt),
        "ranks have cut different batches": cut(labels=dealt),
        "the ranks have cut different batches": cut(input_ids=None, inputs_embeds=embedded),
        "different batches; they must read": cut(input_ids=None, inputs_embeds=embedded * 0, labels=dealt),
        "others not": part if last else {n: x for n, x in part.items() if n != "allscan_cut"},
        "but the model has 2 rows": part | dict(input_ids=whole, labels=whole, position_ids=torch.arange(T)[None]),
        "but the model has 1 rows": {n: x[:1] if n in ("input_ids", "labels") else x for n, x in part.items()},
    }
    for text, wrong in rejected.items() if other else ():
        answers[text] = raised(model, **wrong)
    wrong = {
        "input_ids [B, T]": dict(input_ids=None),
        "masks tokens": dict(attention_mask=torch.arange(T).gt(0).expand(2, T)),
        "labels must be [2, ": dict(labels=labels[:, 1:]),
        "does not know how to cut it": dict(token_type_ids=labels),
        "multiple of 2 * " if zigzag else "cannot be cut": dict(
            input_ids=whole[:, : 2 * size - 1 if zigzag else size - 1], labels=None
        ),
    }
    for text, changed in wrong.items():
        answers[text] = raised(cut, **changed)
    errors.append(relative(share(cut()), want))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            model(input_ids=whole[:, :8])
    assert sum("every rank was given the same tokens" in str(w.message) for w in warned) == other  # once
    comm.debug = True
    if other:
        changed = part | dict(input_ids=part["input_ids"].flip(0) if last else part["input_ids"])
        answers["have other contents"] = raised(model, **changed)
        with pytest.warns(UserWarning, match="every rank was given the same tokens"):
            model(input_ids=whole[:, :8])
    errors.append(relative(share(cut()), want))
    return errors, answers


@pytest.mark.slow(but=("1-zigzag", "3-contiguous"))
@pytest.mark.cpu
@pytest.mark.parametrize("size, layout", [(1, "zigzag"), (2, "contiguous"), (3, "contiguous"), (3, "zigzag")])
def test_cut_batches(run, size, layout):
    """Without all parts of one batch from cut_batch, a split model raises: by cut_batch's stamp; without a stamp, if
    the numbers of rows differ or, at the first batch and in debug mode, all ranks have the same tokens."""
    for errors, answers in run(size, cut_case, layout):
        assert max(errors) < 1e-5
        check_answers(answers)
