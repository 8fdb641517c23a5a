"""Packaging: `pipelines/` at the top level is installed as `marigold_uq.pipelines`."""

from pathlib import Path

from setuptools import find_packages, setup

EXR, HDF5, LORA, SCENES, TRACKING = ["OpenEXR>=3.3"], ["h5py"], ["peft"], ["scikit-image"], ["tensorboard"]
DEMO = ["gradio>=6.31"]  # holds Pillow below 13
ONNX = ["onnx>=1.16", "onnxruntime>=1.18"]
# numcodecs from 0.16.6 on refuses its pickle codec
WEATHER, SKPRO = ["xarray", "zarr>=3", "numcodecs>=0.16.6", "netCDF4", "h5py", "fsspec"], ["skpro>=2.9"]
TEST = [
    "pytest>=8",
    "pytest-xdist>=3.6",
    "pandas",
    "scoringrules>=0.8,<0.11",
    *EXR,
    *HDF5,
    *LORA,
    *ONNX,
    *SCENES,
    *SKPRO,
    *TRACKING,
    *WEATHER,
]
EXTRAS = {
    "test": TEST,
    "dev": [*TEST, "ruff==0.17.4", "mypy>=1.15", "pre-commit"],
    "demo": DEMO,
    "exr": EXR,
    "fields": HDF5,
    "hypersim": HDF5,
    "huggingface": ["datasets"],
    "lora": LORA,
    "onnx": ONNX,
    "pde": ["py-pde"],
    "scenes": SCENES,
    "skpro": SKPRO,
    "tracking": TRACKING,
    "video": ["imageio-ffmpeg>=0.5"],
    "weather": WEATHER,
}

PIPELINES = ["marigold_uq.pipelines", *(f"marigold_uq.pipelines.{name}" for name in find_packages("pipelines"))]

setup(
    name="marigold_uq",
    version="0.1.0",
    description="Probabilistic regression with diffusion models that say how sure they are",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE", "NOTICE"],
    python_requires=">=3.11",
    classifiers=[f"Programming Language :: Python :: {version}" for version in ("3.11", "3.12", "3.13")],
    packages=[*find_packages(include=["marigold_uq", "marigold_uq.*"]), *PIPELINES],
    package_dir={"marigold_uq": "marigold_uq", "marigold_uq.pipelines": "pipelines"},
    package_data={"marigold_uq": ["py.typed", "assets/**/*"]},
    install_requires=[
        "torch>=2.6,<2.14",  # newer wheels bring CUDA wherever they are installed; see docs/reliability.md
        "diffusers>=0.40",
        "transformers>=5.0",
        "accelerate>=1.2",
        "safetensors>=0.8",
        "huggingface-hub>=1.23",
        "opencv-python>=4.10",
        "matplotlib>=3.9",
        "numpy>=1.26",
        "scipy>=1.13",
        "scikit-learn>=1.6",
        "jsonargparse[signatures]>=4.49",
        "pillow>=10.1",
        "pyyaml>=6.0.1",
        "tqdm>=4.66",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["marigold-uq=marigold_uq.cli:main"]},
)
