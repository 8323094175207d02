"""``attndsl doctor``: the environment, which backends work in it, and why others do not."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import warnings
from importlib import metadata
from typing import Any

import torch

from attndsl import __version__
from attndsl.call.dispatch import BACKENDS, get_backend
from attndsl.errors import AttnDSLError, visible
from attndsl.settings import read_settings

from .cache_command import describe_shipped, open_cache

_PACKAGES = (
    "torch", "triton", "lark", "sympy", "islpy", "numpy", "platformdirs", "PyYAML", "typer", "rich",
    "matplotlib", "ipython",
)  # fmt: skip
_VARIABLES = re.compile(
    r"ATTNDSL_\w+|TRITON_\w+|CUDA_VISIBLE_DEVICES|CUDA_LAUNCH_BLOCKING|OMP_NUM_THREADS|TORCH_LOGS"
)
"""Names of environment variables that change what calls do or show."""
_MOST_SHOWN = 200
"""Characters of the value of one."""


def doctor(as_json: bool) -> int:
    """Print what is found; 1 if no backend works on any device here, else 0."""
    facts = gather()
    if as_json:
        print(json.dumps(facts, indent=1))
    else:
        _print(facts)
    works = any(why is None for found in facts["backends"].values() for why in found.values())
    return 0 if works else 1


def gather() -> dict[str, Any]:
    """Versions, devices, variables, backends and cache as JSON values.

    ``backends[name][device]`` is None where the backend works, else the reason why it does not.
    """
    devices = ["cpu"] + [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return {
        "versions": {
            "attndsl": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in _PACKAGES},
        },
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpus": os.cpu_count(),
            "torch_build": _build(),
            "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        },
        "environment": {
            name: os.environ[name] for name in sorted(os.environ) if _VARIABLES.fullmatch(name)
        },
        "backends": {
            name: {device: _why_not(name, device) for device in devices} for name in BACKENDS
        },
        "cache": _cache(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _build() -> str:
    """Platform that torch was built for, with its version: ROCm, CUDA and cuDNN, or CPU."""
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    if torch.version.cuda is None:
        return "CPU"
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return f"CUDA {torch.version.cuda}, cuDNN {cudnn}"


def _gpu(index: int) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(index)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "memory_gib": round(found.total_memory / 2**30, 1),
        "multiprocessors": found.multi_processor_count,
        "shared_memory_per_block": getattr(found, "shared_memory_per_block_optin", None),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
    }


def _why_not(name: str, device: str) -> str | None:
    try:
        return get_backend(name).why_not(torch.device(device))
    except AttnDSLError as error:
        return error.message


def _cache() -> dict[str, Any]:
    settings = read_settings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        entries = open_cache().entries()
    folder = settings.cache_dir
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return {
        "folder": str(folder),
        "enabled": settings.cache,
        "exists": folder.is_dir(),
        "writable": os.access(existing, os.W_OK),
        "entries": len(entries),
        "bytes": sum(entry.bytes for entry in entries),
        "limit": settings.cache_bytes,
        "shipped": describe_shipped(),
        "warnings": [str(each.message) for each in caught],
    }


def _print(facts: dict[str, Any]) -> None:
    for name, version in facts["versions"].items():
        print(f"{name:<12} {version or 'not installed'}")
    machine = facts["machine"]
    print(
        f"\nmachine      {machine['system']}, {machine['cpus']} CPUs, {len(machine['gpus'])} GPUs"
    )
    for gpu in machine["gpus"]:
        print(
            f"  {gpu['name']}, compute capability {gpu['capability']}, {gpu['memory_gib']} GiB, "
            f"{gpu['multiprocessors']} multiprocessors, "
            f"{gpu['shared_memory_per_block']} bytes of shared memory a block"
        )
    print(f"  torch is built for {machine['torch_build']}")
    print("\nenvironment" + ("" if facts["environment"] else "  no variable is set"))
    for name, value in facts["environment"].items():
        print(f"  {name}={visible(value[:_MOST_SHOWN])}")
    print("\nbackends")
    for name, devices in facts["backends"].items():
        for device, why in devices.items():
            print(f"  {name:<10} {device:<8} {'works' if why is None else f'no: {why}'}")
    cache = facts["cache"]
    print(f"\ncache        {visible(cache['folder'])}")
    state = "enabled" if cache["enabled"] else "off (ATTNDSL_CACHE=0)"
    if not cache["writable"]:
        state += ", not writable"
    print(f"  {state}, {cache['entries']} entries, {cache['bytes']} of {cache['limit']} bytes")
    print(f"  kernels that came with attndsl: {visible(cache['shipped'])}")
    for warning in cache["warnings"]:
        print(f"  warning: {visible(warning)}", file=sys.stderr)
