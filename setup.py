"""Packaging of torch_ext. Never imports torch: native code is compiled on first use, not at install time."""

import os
from pathlib import Path

from setuptools import find_namespace_packages, setup

HERE = Path(__file__).resolve().parent
BUILT_FOR = os.environ.get("TORCH_EXT_WHEEL_FOR", "")  # set by .ci/wheel, which adds the built simulator

setup(
    name="torch_ext",
    version="0.1.0" + (f"+{BUILT_FOR}" if BUILT_FOR else ""),
    description="Distributed tests for PyTorch that run on any machine, with the layout and names of PyTorch's own",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    # No upper bound on torch, so that pip never replaces a nightly or a source build.
    install_requires=[
        "torch>=2.13",
        "numpy",
        "expecttest>=0.3",
        "hypothesis>=6",
    ],
    extras_require={"cluster": ["ray>=2.40"], "completion": ["argcomplete>=3"]},
    # torch_ext/testing is a symbolic link to testing/, so one search finds both.
    packages=find_namespace_packages(include=["torch_ext", "torch_ext.*"]),
    package_data={
        "torch_ext.sim": ["csrc/*", "csrc/races/*", "csrc/transport/*", "built/*/*"],
        "torch_ext.sim.races": ["*.json"],
        "torch_ext.sim.clock": ["models/*.json"],
        "torch_ext": ["py.typed"],
        "torch_ext.upstream": ["*.json"],
    },
    entry_points={
        "console_scripts": ["torch_ext=torch_ext.__main__:main"],
        # Torch calls it at the end of its import. It returns at once unless TORCH_EXT_SIM is set.
        "torch.backends": ["torch_ext=torch_ext.program.autoload:load"],
        # Called what it is, so that a conftest that names it as well does not load it twice.
        "pytest11": ["torch_ext.runner.pytest_plugin=torch_ext.runner.pytest_plugin"],
    },
    zip_safe=False,
)
