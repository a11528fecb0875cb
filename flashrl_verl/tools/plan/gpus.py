# SPDX-License-Identifier: Apache-2.0
"""GPUs by name: what their data sheets promise, dense (without structured sparsity)."""

from dataclasses import dataclass

from flashrl_verl.errors import ConfigError
from flashrl_verl.settings import Precision

GIB = 2**30


@dataclass(frozen=True)
class GPU:
    """A GPU as its data sheet has it."""

    name: str
    memory_gib: float
    """GiB that CUDA reports as total, somewhat less than the name says."""
    bandwidth: float
    """Memory bandwidth, bytes/s."""
    bf16: float
    """BF16 tensor cores, FLOP/s."""
    int8: float
    """INT8 tensor cores, operations/s."""
    fp8: float | None
    """FP8 tensor cores, FLOP/s; None without them."""
    link: float
    """What one GPU sends to others of its node, bytes/s in one direction (NVLink, else PCIe)."""
    capability: tuple[int, int]
    """CUDA compute capability."""

    def compute(self, precision: Precision) -> float | None:
        """Operations/s of the linear layers in a precision; None where there is no tensor core for it."""
        return {Precision.BF16: self.bf16, Precision.INT8: self.int8, Precision.FP8: self.fp8}[precision]


# NVIDIA's data sheets: A100 (June 2021), RTX A6000 (May 2022), L40 and L40S (2023), H100 (SXM and PCIe 2023, NVL 2024),
# H200 (2024). Memory is an estimate, to a percent or two, of what torch.cuda.mem_get_info reports as total.
# Columns: GiB, TB/s of memory, then BF16, INT8 and FP8 in TFLOP/s, GB/s to other GPUs.
_SHEETS = [
    ("a100-40gb", 39.4, 1.555, 312, 624, None, 300, (8, 0)),
    ("a100-80gb", 79.2, 2.039, 312, 624, None, 300, (8, 0)),
    ("a100-80gb-pcie", 79.2, 1.935, 312, 624, None, 32, (8, 0)),
    ("a6000", 47.5, 0.768, 154.8, 309.7, None, 32, (8, 6)),
    ("l40", 44.4, 0.864, 181, 362, 362, 32, (8, 9)),
    ("l40s", 44.4, 0.864, 362, 733, 733, 32, (8, 9)),
    ("h100-pcie", 79.2, 2.0, 756, 1513, 1513, 64, (9, 0)),
    ("h100-nvl", 93.1, 3.938, 835.5, 1670.5, 1670.5, 64, (9, 0)),
    ("h100", 79.2, 3.35, 989, 1979, 1979, 450, (9, 0)),
    ("h200", 139.8, 4.8, 989, 1979, 1979, 450, (9, 0)),
]
GPUS = {
    name: GPU(name, gib, tb * 1e12, bf16 * 1e12, int8 * 1e12, fp8 and fp8 * 1e12, link * 1e9, capability)
    for name, gib, tb, bf16, int8, fp8, link, capability in _SHEETS
}
"""Names that ``--gpu`` takes."""


def of_device(device: str) -> GPU | None:
    """The GPU that PyTorch calls ``device``, as ``NVIDIA H100 80GB HBM3``; None of one that is not written down."""
    found = [name for name in GPUS if all(part in device.lower() for part in name.split("-"))]
    return GPUS[max(found, key=len)] if found else None


def find(name: str) -> GPU:
    """Return a GPU by name, whatever its case.

    Raises:
        ConfigError: its data sheet is not written down here.
    """
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise ConfigError(
            f"--gpu {name!r} is not one of {', '.join(GPUS)}. Name the one that is nearest in bandwidth, and give its "
            "memory by --gpu-memory-gib"
        )
    return gpu
