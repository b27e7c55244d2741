"""All-Scan in Megatron-core's context parallelism (tested with 0.19.2): Gated DeltaNet and Mamba2 mixers that send
their state between ranks. Megatron's own mixers exchange heads for tokens by all-to-all."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..base.checks import PER_DOCUMENT, is_zigzag
from ..comm.communicator import Communicator, check_communicator
from ..ops.delta import zeco_gated_delta_rule
from ..ops.ssd import zeco_ssd
from ..tokens.packing import CUTS, TokenRange, boundaries_on_host, flags_of, without_empty
from ..tokens.partition import partition_start
from . import needing
from .groups import Communicators
from .recurrent import conv_with_halo, run_delta_rule
from .softmax import reject

with needing(__name__, "megatron-core", "flash-linear-attention"):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from megatron.core.inference.utils import InferenceMode
    from megatron.core.ssm import mamba_mixer
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, gdn
    from megatron.core.ssm.mamba_mixer import MambaMixer
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
    from megatron.core.transformer.spec_utils import ModuleSpec, get_module

_communicators = Communicators()  # which live until the process ends


def sequence_parallel(
    spec: Any, *, layout: str = "zigzag", per_document: bool = True, comm: Communicator | None = None
) -> Any:
    """Copy a Megatron-core spec with Gated DeltaNet and Mamba2 mixers that pass their state by All-Scan.

    Parameters, their names and checkpoints are those of Megatron's mixers. With one rank of context parallelism the
    mixers are Megatron's own. With more ranks, each rank has all heads, so that the numbers of heads and groups do not
    limit the number of ranks. Parameter gradients cover this rank's tokens; Megatron sums them over the ranks.

    The mixers call Megatron's operators: ``allscan.zeco_gated_delta_rule`` replaces fla's gated delta rule; other delta
    rules (``self.gated_delta_rule``) are called for each piece; ``allscan.zeco_ssd`` replaces mamba_ssm's chunk
    scan; short convolutions of fla, causal_conv1d or torch get the tokens before a shard boundary by ``allscan.halo``.

    Packed sequences (``packed_seq_params``, format "thd") share one scan. If each sequence is cut, its length must be a
    multiple of 2P tokens, and the scan sends the states of all sequences. If the row is cut as a whole, sequences may
    have any length. As in Megatron, packed_seq_params of another format and without boundaries are ignored.

    Args:
        spec: a ModuleSpec, or submodules, with GatedDeltaNet or MambaMixer anywhere in it. It is not changed.
        layout: the distribution of tokens over ranks. "zigzag" is Megatron's own: rank p has chunks p and 2P - 1 - p of
            2P, as from its get_batch_on_this_cp_rank. "contiguous" is for models without softmax attention: consecutive
            tokens in rank order; their number may differ between ranks, and may be 0.
        per_document: for packed sequences in the zigzag layout. True: each sequence is cut, as in Megatron by default
            and as its attention requires. False: the row is cut as a whole (its use_per_sequence_balancing).
        comm: the Communicator of the ranks of context parallelism, in their order. By default the first mixer of a
            process group creates one, which lives until the process ends. Creation is collective on the host; the first
            one of a job is collective over all ranks of the job (``allscan.init``).

    Returns:
        The copy; ``spec`` stays as it is.

    Raises:
        ValueError: for a spec without such mixers. The mixers raise ValueError on every rank: in their constructor for
            CUDA graphs, hybrid context parallelism or a comm of other ranks; in calls for inference, for a batch with
            its own context parallel group, and for packed sequences that do not fit the tokens.

    Example:
        >>> spec = sequence_parallel(hybrid_stack_spec)                # megatron.core.models.hybrid.hybrid_layer_specs
        >>> model = HybridModel(config, spec, ...)                     # with context_parallel_size > 1
    """
    if comm is not None:
        check_communicator(comm)
    is_zigzag(layout)
    mixers = {GatedDeltaNet: AllScanGatedDeltaNet, MambaMixer: AllScanMambaMixer}
    params, found = dict(layout=layout, per_document=per_document, comm=comm), []

    def replaced(x: Any) -> Any:
        if type(x) in (list, tuple):
            return type(x)(replaced(y) for y in x)
        if isinstance(x, type):
            found.append(x in mixers)
            return ModuleSpec(mixers[x], params=params) if x in mixers else x
        if not dataclasses.is_dataclass(x):
            return x
        if isinstance(x, ModuleSpec) and (kind := get_module(x)) in mixers:
            found.append(True)
            return dataclasses.replace(x, module=mixers[kind], params={**x.params, **params})
        found_in: Any = x
        return dataclasses.replace(
            found_in, **{f.name: replaced(getattr(x, f.name)) for f in dataclasses.fields(x) if f.init}
        )

    spec = replaced(spec)
    if not any(found):
        raise ValueError("no GatedDeltaNet or MambaMixer of Megatron-core in this spec")
    return spec


class _Alone:
    """A group of one rank for Megatron's constructors, so that each rank has all heads."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class _Tokens(NamedTuple):
    """The layout of this rank's tokens."""

    pieces: list[TokenRange]
    where: Mapping[str, Any]  # layout arguments of the operators


class _Mixer:
    """Base of both mixers: determines the layout of the tokens and rejects unsupported input."""

    comm: Communicator | None
    zigzag: bool
    per_document: bool
    gathered: int  # number of tensor-parallel ranks over which the projection gathers tokens

    def __init__(
        self,
        config: Any,
        *arguments: Any,
        pg_collection: Any,
        layout: str = "zigzag",
        per_document: bool = True,
        comm: Communicator | None = None,
        **options: Any,
    ) -> None:
        group, alone = pg_collection.cp, copy.copy(pg_collection)
        zigzag = is_zigzag(layout)
        if group.size() > 1:
            _check(config, pg_collection, comm)
            alone.cp = _Alone()
        super().__init__(config, *arguments, pg_collection=alone, **options)  # type: ignore[call-arg]
        self.zigzag, self.per_document = zigzag, per_document
        self.gathered = pg_collection.tp.size() if config.sequence_parallel else 1
        self.comm = None if group.size() == 1 else comm or _communicators.of(group)

    def _tokens(self, hidden_states: Tensor, context: Any, packed: Any) -> _Tokens:
        """The layout of this rank's tokens, for hidden_states [T, B, ...]."""
        comm, batch, T = self.comm, hidden_states.shape[1], hidden_states.shape[0] * self.gathered
        assert comm is not None
        where: dict[str, Any] = dict(comm=comm, layout="zigzag" if self.zigzag else "contiguous")
        if context is not None or InferenceMode.is_active():
            reject(comm, "inference is not supported with context parallelism: use a model without")
        lengths: Any = None
        if packed is not None:
            if packed.cp_group is not None or packed.local_cp_size is not None:
                reject(comm, "packed_seq_params with a context parallel group of their own are not supported")
            lengths = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        n, begins = T - T // 2 if self.zigzag else T, comm.rank == 0
        row = [TokenRange(0, n, flags=flags_of(begins)), *([TokenRange(n, T, 1)] if self.zigzag else [])]
        # packed_seq_params of a format such as "bshd" and without boundaries carries no information
        if packed is None or (packed.qkv_format != "thd" and lengths is None and packed.seq_idx is None):
            return _Tokens(row, where)
        if packed.qkv_format != "thd" or lengths is None:
            reject(comm, f"packed_seq_params must be of the format 'thd' with cu_seqlens, got {packed.qkv_format!r}")
        if batch != 1:
            reject(comm, f"packed sequences require batch size 1, got {batch}")
        with comm.call():  # reports a rejection to the other ranks, which would otherwise wait
            numbers = boundaries_on_host(lengths)
            zigzag = PER_DOCUMENT if self.zigzag and self.per_document else int(self.zigzag)
            first = partition_start(comm, numbers, T, zigzag=zigzag)
        if zigzag == PER_DOCUMENT:
            numbers = without_empty(numbers)
            lengths = torch.tensor(numbers, device="cpu")
        where |= dict(cu_seqlens=lengths, first_token=first, per_document=zigzag == PER_DOCUMENT)
        pieces = [p for p in CUTS[zigzag](numbers, first, T, comm.rank == 0) if p.tokens]
        return _Tokens(pieces or row, where)  # a rank without tokens passes the incoming state on


def _check(config: Any, groups: Any, comm: Communicator | None) -> None:
    problems = {
        "hybrid context parallelism": config.hybrid_context_parallel,
        "CUDA graphs of Megatron": config.cuda_graph_impl != "none",
    }
    if any(problems.values()):
        names = ", ".join(name for name, there in problems.items() if there)
        raise ValueError(f"not supported by allscan.integrations.megatron: {names}")
    if comm is not None:
        of_comm, wanted = (dist.get_process_group_ranks(group) for group in (comm.group, groups.cp))
        if of_comm != wanted:
            raise ValueError(f"comm must be of the ranks {wanted} of context parallelism, got one of {of_comm}")


def _rule(function: Callable[..., Any], tokens: _Tokens, *tensors: Tensor) -> torch.Tensor:
    """Run the gated delta rule over the sequence of all ranks."""
    invariant = tokens.where["comm"].invariant and function is gdn.torch_chunk_gated_delta_rule
    operator = zeco_gated_delta_rule if function is chunk_gated_delta_rule or invariant else None
    options: dict[str, Any] = dict(use_qk_l2norm_in_kernel=False, cu_seqlens=None)
    return run_delta_rule(operator, function, tensors, *tokens, **options)[0]


def _one_token(x: Tensor) -> torch.Tensor:
    """A token of zeros for x [B, 0, ...]: Megatron's Gated DeltaNet cannot reshape tensors without elements."""
    return F.pad(x, (0, 0) * (x.ndim - 2) + (0, 1))


class AllScanGatedDeltaNet(_Mixer, GatedDeltaNet):
    """Megatron-core's GatedDeltaNet; see ``sequence_parallel``."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        sequence_len_offset: Any = None,
        *,
        inference_params: Any = None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        context = inference_context if inference_context is not None else inference_params
        if self.comm is None:
            return super().forward(
                hidden_states, attention_mask, context, packed_seq_params, sequence_len_offset, **options
            )
        n = self.conv_kernel_dim - 1
        tokens = self._tokens(hidden_states, context, packed_seq_params)
        projected = self.in_proj(hidden_states)[0].transpose(0, 1)
        batch, T = projected.shape[:2]
        qkv, gate, beta, alpha = projected.split(self.feat_dim_split, -1)
        weights = self.conv1d.weight.squeeze(1), self.conv1d.bias, self.activation
        qkv = conv_with_halo(self._convolve, n, qkv, tokens.pieces, {}, weights=weights, **tokens.where)
        gate = gate.unflatten(-1, (-1, self.value_head_dim))
        q, k, v, gate, beta, alpha = self._prepare_input_for_gated_delta_rule(qkv, gate, batch, T, beta, alpha)
        g, beta = self._compute_g_and_beta(self.A_log, self.dt_bias, alpha, beta)
        o = _rule(self.gated_delta_rule, tokens, q, k, v, g, beta)
        norm = functools.partial(self._gated_norm_and_a2a, thd_cp_a2a_inv=None, batch=batch, seq_len=T)  # one rank's
        if not self.recompute_norm_out:
            return self.out_proj(norm(o, gate))
        self.norm_out_checkpoint = CheckpointWithoutOutput()
        out, bias = self.out_proj(self.norm_out_checkpoint.checkpoint(norm, o, gate))
        self.norm_out_checkpoint.discard_output_and_register_recompute(out)
        return out, bias

    def _prepare_input_for_gated_delta_rule(
        self, qkv: Tensor, gate: Tensor, batch: int, seq_len: int, *more: Tensor
    ) -> Any:
        prepare = super()._prepare_input_for_gated_delta_rule
        if seq_len:
            return prepare(qkv, gate, batch, seq_len, *more)
        features = (_one_token(x) for x in more)
        return tuple(x[:, :0] for x in prepare(_one_token(qkv), _one_token(gate), batch, 1, *features))

    def _gated_norm_and_a2a(self, o: Tensor, gate: Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        norm = super()._gated_norm_and_a2a
        if o.shape[1]:
            return norm(o, gate, *arguments, **options)
        return norm(_one_token(o), _one_token(gate), None, batch=len(o), seq_len=1)[:0]

    def _convolve(self, x: Tensor) -> torch.Tensor:
        weight, bias = self.conv1d.weight, self.conv1d.bias
        if self.config.deterministic_mode:
            y = F.conv1d(x.mT, weight, bias, padding=self.conv1d.padding, groups=len(weight))
            return self.act_fn(y[..., : x.shape[1]]).mT
        return gdn.causal_conv1d(
            x=x,
            weight=weight.squeeze(1),
            bias=bias,
            activation=self.activation,
            initial_state=None,
            output_final_state=False,
            cu_seqlens=None,
        )[0]


class AllScanMambaMixer(_Mixer, MambaMixer):
    """Megatron-core's MambaMixer; see ``sequence_parallel``."""

    def forward(
        self,
        hidden_states: Tensor,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
        packed_seq_params: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        context = inference_context if inference_context is not None else inference_params
        if self.comm is None:
            return super().forward(hidden_states, context, packed_seq_params=packed_seq_params)
        n = self.d_conv - 1
        tokens = self._tokens(hidden_states, context, packed_seq_params)
        projected = self.in_proj(hidden_states)[0].transpose(0, 1)
        inner, states = self.d_inner_local_tp, self.ngroups_local_tp * self.d_state
        z, xBC, dt = projected.split([inner, inner + 2 * states, self.nheads_local_tp], -1)
        weights = self.conv1d_weight.squeeze(1), self.conv1d_bias, self.activation
        xBC = conv_with_halo(self._convolve, n, xBC, tokens.pieces, {}, weights=weights, **tokens.where)
        x, B, C = xBC.split([inner, states, states], -1)
        x, z = (t.unflatten(-1, (-1, self.headdim)) for t in (x, z))
        B, C = (t.unflatten(-1, (-1, self.d_state)) for t in (B, C))
        y = self._scan(tokens, x, dt, B, C, None if self.rmsnorm else z).flatten(2).transpose(0, 1).contiguous()
        return self.out_proj(self.norm(y, z.flatten(2).transpose(0, 1).contiguous()) if self.rmsnorm else y)

    def _convolve(self, x: Tensor) -> torch.Tensor:
        if mamba_mixer.causal_conv1d_fn is None:
            return self.act(self.cp.conv1d(x.mT)[..., : x.shape[1]]).mT
        weight = self.conv1d_weight.squeeze(1)
        return mamba_mixer.causal_conv1d_fn(
            x=x.mT.contiguous(), weight=weight, bias=self.conv1d_bias, activation=self.activation, seq_idx=None
        ).mT

    def _scan(self, tokens: _Tokens, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor | None) -> Any:
        D = self.D.float().view(-1, self.headdim) if self.D_has_hdim else self.D
        A, options = -self.A_log.float().exp(), dict(dt_bias=self.dt_bias, dt_softplus=True)
        return zeco_ssd(x, dt, A, B, C, self.chunk_size, D=D, z=z, **options, **tokens.where)
