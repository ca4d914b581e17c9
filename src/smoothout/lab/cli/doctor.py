"""`smoothout doctor`: versions, devices, data, disk, and what is wrong."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path
from typing import Annotated

import torch
import typer

import smoothout
from smoothout.extras import install
from smoothout.lab import data

PACKAGES = ("torch", "numpy", "scipy", "typer", "rich", "safetensors", "scikit-learn", "pillow", "matplotlib", "jinja2")
EXTRAS = ("tensorboard", "lightning", "transformers", "accelerate", "peft", "pytorch_optimizer")
LITTLE_DISK = 2e9

HELP = """Say what is installed, which devices and data there are, and what is wrong. Exits with 1 if something is.

\b
smoothout doctor
smoothout doctor --out runs --data-root ~/data
"""


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command(help=HELP)
    def doctor(
        out: Annotated[Path, typer.Option(help="where runs are going to be written")] = Path("."),
        data_root: Annotated[Path | None, typer.Option(help="where data are looked for first")] = None,
    ) -> None:
        problems = [*_packages(), *_devices(), *_data(data_root), *_disk(out)]
        print("problems: none" if not problems else "problems:")
        for problem in problems:
            print(f"  - {problem}")
        raise typer.Exit(1 if problems else 0)


def _packages() -> list[str]:
    print(f"smoothout {smoothout.__version__}, Python {platform.python_version()}, {platform.platform()}")
    versions = {name: _version(name) for name in PACKAGES}
    print("packages: " + ", ".join(f"{name} {version}" for name, version in versions.items() if version))
    extras = {name: _version(name) for name in EXTRAS}
    print("extras: " + (", ".join(f"{name} {version}" for name, version in extras.items() if version) or "none"))
    return [f"{name} is missing: {install('lab')}" for name, version in versions.items() if not version]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    print(f"cpu: {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        print("cuda: none" + (", CUDA_VISIBLE_DEVICES hides all" if is_hidden else ""))
        if torch.version.cuda is None or is_hidden or not _has_nvidia_gpu():
            return []
        hiding = "whether CUDA_VISIBLE_DEVICES or a container hides it"
        return [f"torch is built for CUDA but finds no device, though there is one: check the driver, and {hiding}"]
    problems = []
    for index in range(torch.cuda.device_count()):
        name = f"cuda:{index}: {torch.cuda.get_device_name(index)}"
        try:
            free, total = torch.cuda.mem_get_info(index)  # fails, too, where the device is full or another's alone
            print(f"{name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free")
            torch.ones(8, device=f"cuda:{index}").sum().item()
        except RuntimeError as error:
            problems.append(f"{name} does not compute: {str(error).splitlines()[0]}")
    return problems


def _has_nvidia_gpu() -> bool:
    """Whether this machine seems to have one, with or without a driver."""
    displays = (folder for folder in Path("/sys/bus/pci/devices").glob("*") if _reads(folder / "class", "0x03"))
    return shutil.which("nvidia-smi") is not None or any(_reads(folder / "vendor", "0x10de") for folder in displays)


def _reads(file: Path, beginning: str) -> bool:
    return file.is_file() and file.read_text().startswith(beginning)


def _data(root: Path | None) -> list[str]:
    problems = []
    for each in data.status(root):
        print(f"data: {each.name} {'here' if each.is_here else 'not here'}" + (f" ({each.path})" if each.path else ""))
        if each.path is not None and not each.path.is_dir():
            problems.append(f"{each.path}: is no folder")
    return problems


def _disk(out: Path) -> list[str]:
    place = out.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    print(f"disk: {free / 1e9:.1f} GB free at {place}")
    problems = [] if os.access(place, os.W_OK) else [f"{place}: cannot be written"]
    return problems + ([f"{place}: only {free / 1e9:.2f} GB free"] if free < LITTLE_DISK else [])
