# SPDX-License-Identifier: Apache-2.0
"""Package metadata and entry points; tool settings live in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
README = ROOT / "README.md"
INIT = (ROOT / "flashrl_verl" / "__init__.py").read_text()
VERSION = re.search(r'^__version__ = "(.+)"$', INIT, re.M).group(1)

# torch, verl and vllm are never in here: pip would replace a user's fork, or a CUDA build by another one.
INSTALL_REQUIRES = [
    "hydra-core>=1.3,<1.4",
    "omegaconf>=2.3,<2.4",
    "numpy>=1.26,<3",
    "pyarrow>=19",  # verl's own lower bound: older ones cannot read what datasets writes
    "matplotlib>=3.8",
    "rich>=13",
    "typer>=0.12",
    "packaging>=23",
    "pyzmq>=26",
    "orjson>=3.10",
    "psutil>=6",
    "wrapt>=1.15",
]

setup(
    name="flashrl-verl",
    version=VERSION,
    description="FlashRL for verl: INT8 and FP8 rollouts on vLLM with truncated importance sampling",
    long_description=README.read_text(encoding="utf-8") if README.is_file() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["flashrl_verl", "flashrl_verl.*"]),
    package_data={"flashrl_verl": ["configs/**/*.yaml"]},
    install_requires=INSTALL_REQUIRES,
    entry_points={
        "console_scripts": ["flashrl = flashrl_verl.__main__:main"],
        # verl imports the module in each of its processes; vLLM calls the function in each of its own.
        "verl.plugins": ["flashrl = flashrl_verl.plugins.verl"],
        "vllm.general_plugins": ["flashrl = flashrl_verl.plugins.vllm:register"],
    },
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    zip_safe=False,
)
