"""Packaging of fastamp: `pip install -e .` and its extras."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "fastamp/__init__.py").read_text(encoding="utf-8")).group(1)

EXTRAS = {
    "test": [
        "pytest>=9.0",
        "pytest-xdist>=3.5",
        "hypothesis>=6.100",
        "timm",
        "matplotlib",
        "pyarrow",
        "h5py",
        "pytorch-metric-learning>=2.9",
        "onnx",
        "onnxruntime",
        "onnxscript",
    ],
    "cuhk03": ["h5py"],
    "vis": ["matplotlib"],
    "parquet": ["pyarrow"],
    "export": ["onnx", "onnxruntime", "onnxscript"],
    "timm": ["timm"],
    "metric-learning": ["pytorch-metric-learning>=2.9"],
    "tune": ["ray[tune]>=2.60", "hyperopt", "optuna"],
    "bohb": ["ray[tune]>=2.60", "hpbandster", "ConfigSpace>=1.2,<2"],
}
# Without bohb: a package that it needs is compiled, which would keep the others away from who has no compiler.
EXTRAS["all"] = sorted({package for name, packages in EXTRAS.items() if name != "bohb" for package in packages})

setup(
    name="fastamp",
    version=VERSION,
    description="Re-identification training and evaluation with mixed precision that cannot fail silently",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["fastamp", "fastamp.*"]),
    package_data={"fastamp.report": ["templates/*"]},
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.6",
        "torchvision>=0.21",
        "yacs>=0.1.8",
        "numpy>=1.26",
        "scipy>=1.13",
        "faiss-cpu>=1.9",
        "tabulate>=0.9",
        "tensorboard>=2.21",
        "jinja2>=3.1",
        "tqdm>=4.66",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["fastamp = fastamp.cli:main"]},
)
