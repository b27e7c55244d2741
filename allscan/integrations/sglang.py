"""A prefill kernel for sglang's linear-attention layers over the ranks of a communicator (written for 0.5.23)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..base.checks import boundaries
from ..comm.communicator import Communicator, check_communicator
from ..comm.process_groups import collective
from ..ops.delta import zeco_gated_delta_rule, zeco_kda
from ..serving import prefill
from ..tokens.packing import boundaries_on_host

RULES = {"gdn": zeco_gated_delta_rule, "kda": zeco_kda}


class PrefillKernel:
    """A kernel with the interface of sglang's ``LinearAttnKernelBase`` whose ``extend`` runs over all ranks.

    All ranks run the same batches. The states are in sglang's pool, [slots, HV, V, K], and are the same on all ranks
    after each batch. Everything but ``extend`` is the given kernel's: decode, target_verify, packed_decode and what it
    says of itself. sglang has no name for this kernel: assign it after the model is loaded, on every rank.

    Args:
        kernel: the kernel that it replaces, for example sglang's TritonKDAKernel.
        comm: the communicator.
        rule: "gdn", Gated DeltaNet, or "kda".
        whole_rows: True: each rank's ``extend`` gets and returns the tokens of all ranks, as in sglang without context
            parallelism; it computes every P-th part of them, and outputs are gathered. False: it gets and returns this
            rank's tokens, and ``query_start_loc`` is that of the tokens of all ranks: rank r has tokens r c to
            (r + 1) c - 1 of them, c their number over P, rounded up.

    Raises:
        TypeError: comm is no communicator.
        ValueError: rule is another.
        NotImplementedError: ``extend`` is to return or to track states inside of a request (prefix caches of states),
            or not to change the pool (multi-item scoring).

    Example:
        >>> for backend in linear_attention_backends:                      # sglang's GDNAttnBackend, KDAAttnBackend
        ...     dispatcher = backend.kernel_dispatcher
        ...     dispatcher.extend_kernel = PrefillKernel(dispatcher.extend_kernel, comm=comm, rule="gdn")
    """

    uses_state_checkpoints = False
    supports_track_state_snapshot = False
    supports_safe_gate = True  # otherwise sglang calls another kernel for a lower_bound
    prefill_graph_wrapper_cls = None  # otherwise its prefill graphs call the kernel that is replaced

    def __init__(self, kernel: Any, *, comm: Communicator, rule: str, whole_rows: bool = True) -> None:
        check_communicator(comm)
        if rule not in RULES:
            raise ValueError(f"rule must be 'gdn' or 'kda', got {rule!r}")
        self.kernel, self.comm, self.rule, self.whole_rows = kernel, comm, rule, whole_rows

    def __getattr__(self, name: str) -> Any:
        if name == "kernel":  # not set yet, as in a copy
            raise AttributeError(name)
        return getattr(self.kernel, name)

    @torch.no_grad()
    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        inplace_update: bool = True,
        return_intermediate_states: bool = False,
        track_state: Tensor | None = None,
        num_state_checkpoints: int | None = None,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        lower_bound: float | None = None,
        beta_is_raw: bool = False,
        **_: Any,
    ) -> Any:
        """Run a batch of requests, and update their states in the pool. sglang's backends call it.

        Args:
            q, k, v: [1, T, H, K], [1, T, HV, V]; q and k are divided by their norms here.
            g, beta: as sglang's own kernels take them: for KDA with A_log both are raw.
            ssm_states, cache_indices, query_start_loc: the pool, slots, and boundaries of ``allscan.serving.prefill``.
            A_log, dt_bias, lower_bound, beta_is_raw: of KDA's gate, as in ``allscan.zeco_kda``.
            inplace_update, return_intermediate_states, track_state, num_state_checkpoints: only their defaults.
            _: other arguments of sglang's kernels, without effect.

        Returns:
            o [1, T, HV, V]; for Gated DeltaNet (o, None, None).

        Raises:
            NotImplementedError: as the class says; other errors are those of ``allscan.serving.prefill``.

        Example:
            >>> o, *_ = kernel.extend(q, k, v, g, beta, ssm_states=pool, cache_indices=slots, query_start_loc=starts)
        """
        for name, wanted in (
            ("inplace_update=False", not inplace_update),
            ("return_intermediate_states", return_intermediate_states),
            ("track_state", track_state is not None),
            ("num_state_checkpoints", num_state_checkpoints),
        ):
            if wanted:
                with self.comm.call():  # the other ranks hear of it
                    raise NotImplementedError(f"allscan's kernel for sglang does not support {name}")
        total = boundaries_on_host(boundaries(query_start_loc))[-1]
        size, rank = self.comm.size, self.comm.rank
        each = -(-total // size)  # tokens of a rank, rounded up
        first, end = (min(r * each, total) for r in (rank, rank + 1))
        tensors = [x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v, g, beta)]
        if self.whole_rows:
            tensors = [x[:, first:end] for x in tensors]
        options: dict[str, Any] = dict(
            use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=beta_is_raw, first_token=first
        )
        if A_log is not None:
            bias = None if dt_bias is None else dt_bias.flatten()
            options |= dict(use_gate_in_kernel=True, A_log=A_log.flatten(), dt_bias=bias, lower_bound=lower_bound)
        options |= dict(pool=ssm_states, slots=cache_indices, query_start_loc=query_start_loc, state_v_first=True)
        o = prefill(RULES[self.rule], *tensors, comm=self.comm, **options)
        if self.whole_rows and size > 1:
            parts = o.new_empty(size, each, *o.shape[2:])
            with collective(self.comm.group):
                own = F.pad(o[0], (0, 0, 0, 0, 0, each - o.shape[1])).contiguous()
                dist.all_gather_into_tensor(parts.flatten(0, 1), own, group=self.comm.group)
            o = parts.flatten(0, 1)[None, :total]
        if self.whole_rows:
            o = F.pad(o, (0, 0, 0, 0, 0, v.shape[1] - total))  # sglang may pad a row
        return (o, None, None) if self.rule == "gdn" else o
