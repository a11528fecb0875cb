# SPDX-License-Identifier: Apache-2.0
"""GPUs by name: what their data sheets promise, dense (without structured sparsity)."""

from dataclasses import dataclass

from flashrl_verl.errors import ConfigError
from flashrl_verl.settings import Precision

GB = 1e9
TERA = 1e12
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
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
    """What one GPU sends to others of its node, bytes/s and direction (NVLink, else PCIe)."""
    capability: tuple[int, int]
    """CUDA compute capability."""
    devices: tuple[str, ...]
    """Names that ``torch.cuda.get_device_name`` gives it."""

    def compute(self, precision: Precision) -> float | None:
        """Operations/s of the linear layers in a precision; None where there is no tensor core for it."""
        return {Precision.BF16: self.bf16, Precision.INT8: self.int8, Precision.FP8: self.fp8}[precision]


# NVIDIA's data sheets: A100 (June 2021), RTX A6000 (May 2022), L40 and L40S (2023), H100 (SXM and PCIe 2023, NVL 2024),
# H200 (2024). Memory: an estimate, to a percent or two, of the total that torch.cuda.mem_get_info reports on such
# cards, where ECC and driver have taken their part; a benchmark takes the card's own figure. The bridges that join two
# PCIe cards by NVLink are left out.
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU(name="a100-40gb", memory_gib=39.4, bandwidth=1555 * GB, bf16=312 * TERA, int8=624 * TERA, fp8=None,
            link=300 * GB, capability=(8, 0), devices=("NVIDIA A100-SXM4-40GB",)),
        GPU(name="a100-80gb", memory_gib=79.2, bandwidth=2039 * GB, bf16=312 * TERA, int8=624 * TERA, fp8=None,
            link=300 * GB, capability=(8, 0), devices=("NVIDIA A100-SXM4-80GB",)),
        GPU(name="a100-80gb-pcie", memory_gib=79.2, bandwidth=1935 * GB, bf16=312 * TERA, int8=624 * TERA, fp8=None,
            link=32 * GB, capability=(8, 0), devices=("NVIDIA A100 80GB PCIe",)),
        GPU(name="a6000", memory_gib=47.5, bandwidth=768 * GB, bf16=154.8 * TERA, int8=309.7 * TERA, fp8=None,
            link=32 * GB, capability=(8, 6), devices=("NVIDIA RTX A6000",)),
        GPU(name="l40", memory_gib=44.4, bandwidth=864 * GB, bf16=181 * TERA, int8=362 * TERA, fp8=362 * TERA,
            link=32 * GB, capability=(8, 9), devices=("NVIDIA L40",)),
        GPU(name="l40s", memory_gib=44.4, bandwidth=864 * GB, bf16=362 * TERA, int8=733 * TERA, fp8=733 * TERA,
            link=32 * GB, capability=(8, 9), devices=("NVIDIA L40S",)),
        GPU(name="h100-pcie", memory_gib=79.2, bandwidth=2000 * GB, bf16=756 * TERA, int8=1513 * TERA, fp8=1513 * TERA,
            link=64 * GB, capability=(9, 0), devices=("NVIDIA H100 PCIe",)),
        GPU(name="h100-nvl", memory_gib=93.1, bandwidth=3938 * GB, bf16=835.5 * TERA, int8=1670.5 * TERA,
        fp8=1670.5 * TERA,
            link=64 * GB, capability=(9, 0), devices=("NVIDIA H100 NVL",)),
        GPU(name="h100", memory_gib=79.2, bandwidth=3350 * GB, bf16=989 * TERA, int8=1979 * TERA, fp8=1979 * TERA,
            link=450 * GB, capability=(9, 0), devices=("NVIDIA H100 80GB HBM3",)),
        GPU(name="h200", memory_gib=139.8, bandwidth=4800 * GB, bf16=989 * TERA, int8=1979 * TERA, fp8=1979 * TERA,
            link=450 * GB, capability=(9, 0), devices=("NVIDIA H200",)),
    )
}  # fmt: skip
"""Names that ``--gpu`` takes."""


def find(name: str) -> GPU:
    """Return a GPU by name, whatever its case.

    Raises:
        ConfigError: nobody wrote its data sheet down here.
    """
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise ConfigError(
            f"--gpu {name!r} is not one of {', '.join(GPUS)}. Name the one that is nearest in bandwidth, and give its "
            "memory by --gpu-memory-gib"
        )
    return gpu


def of_device(device: str) -> GPU | None:
    """The GPU that torch calls so; None for one whose data sheet is not written down here. A name counts as a whole:
    "NVIDIA H100 PCIe", "NVIDIA H100 NVL" and "NVIDIA GH200 480GB" are other GPUs than those whose names they
    contain."""
    return next((gpu for gpu in GPUS.values() if device in gpu.devices), None)
