"""A kernel whose products ptxas compiles wrongly is compiled with other options before its first launch."""

from __future__ import annotations

import types

import pytest
import torch

from allscan.launch import machine_code
from allscan.shmem_kernels import gla_bwd
from support.launches import VERSION, Launches, compiled_launches, launch_gla

pytestmark = pytest.mark.cpu


class Kernel:
    """value_grad_kernel with 16 columns, compiled for sm_90 instead of this machine's GPU."""

    __name__ = "value_grad_kernel"

    def __init__(self, monkeypatch, wrong=()):
        self.stages, self.wrong = [], wrong
        launch_gla(160, 16, torch.bfloat16, False, monkeypatch)
        [self.launch] = [launch for launch in Launches.made if launch[0] is gla_bwd.value_grad_kernel]
        monkeypatch.setattr(machine_code, "JITFunction", Kernel)

    def warmup(self, grid, BV, num_stages):
        self.stages.append(num_stages)
        kernel, values, options = self.launch
        options = options | dict(d=options["d"]._replace(BV=BV), num_stages=num_stages)
        Launches.made = [(kernel, values, options)]
        [(_, found)] = compiled_launches(look=False)
        asm = dict(ptx=found.ptx, cubin=found.cubin)
        return types.SimpleNamespace(asm=asm, metadata=types.SimpleNamespace(shared=found.shared))


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(machine_code, "_right", {})
    if VERSION != (3, 6):
        pytest.skip("which products are wrong differs with ptxas")


def chosen(kernel, **options):
    return machine_code.options_of_right_code(kernel, (1,), (), {}, options)["num_stages"]


def test_a_missing_disassembler_is_named(monkeypatch):
    monkeypatch.setattr(machine_code, "TOOLS", "/nowhere")
    compiled = types.SimpleNamespace(asm=dict(ptx="wgmma.mma_async", cubin=b"code"))
    with pytest.warns(UserWarning, match="not checked for wrong code of ptxas: FileNotFoundError: .*nvdisasm"):
        assert not machine_code.reads_unset_registers(compiled)


def test_stages_are_chosen_whose_code_is_right(monkeypatch):
    kernel = Kernel(monkeypatch)
    assert chosen(kernel, BV=32, num_stages=3) == 3
    assert chosen(kernel, BV=16, num_stages=3) == 2
    assert kernel.stages == [3, 3, 2]
    assert chosen(kernel, BV=16, num_stages=3) == 2 and kernel.stages == [3, 3, 2]  # cached in this process
    monkeypatch.setattr(machine_code, "disassembled", lambda cubin: pytest.fail("this code has been looked at"))
    monkeypatch.setattr(machine_code, "_right", {})
    assert chosen(kernel, BV=16, num_stages=3) == 2  # cached on this machine


def test_a_kernel_without_right_code_is_rejected(monkeypatch):
    kernel = Kernel(monkeypatch)
    monkeypatch.setattr(machine_code, "STAGES", (3, 1))
    with pytest.raises(RuntimeError, match="miscompiles value_grad_kernel .* TRITON_PTXAS_PATH"):
        chosen(kernel, BV=16, num_stages=3)


CODE = """
        /*0000*/                   UMOV UR4, 0x1 ;
.L_x_0:
        /*0010*/                   ULDC.64 UR6, c[0x0][0x208] ;
        /*0020*/              @!P0 BRA `(.L_x_1) ;
        /*0030*/                   UMOV UR9, UR4 ;
        /*0040*/                   BRA `(.L_x_0) ;
.L_x_1:
        /*0050*/                   UIADD3 UR10, UR7, UR9, URZ ;
        /*0060*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR4], R24, !UPT ;
        /*0070*/                   EXIT ;
        /*0080*/                   UIADD3 UR10, UR20, UR21, URZ ;
"""


def test_every_way_from_the_beginning_is_followed():
    """UR5, of the descriptor UR4, is set nowhere; UR9 on one path only; code after EXIT is unreachable."""
    [found] = machine_code.unset_registers(CODE.splitlines())
    assert "gdesc[UR4]" in found
    found = machine_code.unset_registers(CODE.replace("UMOV UR4, 0x1", "ULDC.64 UR4, c[0x0][0x210]").splitlines())
    assert found == []
    found = machine_code.unset_registers(CODE.replace("UMOV UR9, UR4", "UMOV UR8, UR4").splitlines())
    assert len(found) == 2 and "UR9" in found[0]
