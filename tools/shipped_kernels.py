"""Compile the kernels that a wheel brings along, for one version of Triton, without a GPU.

    python tools/shipped_kernels.py [--triton FOLDER] [--check]

Writes a bundle of the programs in ``shipped_kernels.yaml`` to ``attndsl/shipped/triton-VERSION``,
which git ignores, and of which a wheel that is built afterwards has a copy. It is for the very
sources of this checkout: after any change to them it is made again, or no process uses it. Kernels
have no line numbers, which are two thirds of their bytes.

Prints bytes of each kernel, as they are and as a wheel compresses them. ``--check`` compiles
nothing, and fails if there is no bundle, or if one is for other sources.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
INTO = ROOT / "attndsl" / "shipped"
PROGRAMS = Path(__file__).with_suffix(".yaml")
PROBE = """
from importlib.metadata import version
import attndsl, attndsl.backends, attndsl.grammar
print(version("triton"), attndsl.__file__, attndsl.backends.__file__, attndsl.grammar.__file__)
"""


class Size(NamedTuple):
    """Bytes of files."""

    files: int
    bytes: int
    compressed: int
    """By deflate, as in wheels."""


def size_of(folder: Path, pattern: str = "**/*") -> Size:
    """The files of a bundle whose names match ``pattern``."""
    contents = [path.read_bytes() for path in folder.glob(pattern) if path.is_file()]
    compressed = sum(len(zlib.compress(content)) for content in contents)
    return Size(len(contents), sum(map(len, contents)), compressed)


def environment_of(triton: Path | None, scratch: Path) -> dict[str, str]:
    """The environment of a build: empty caches, no other bundles, and a Triton of its own."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    # Folders of Triton's whole installations come before what this Python has.
    paths = [str(triton.resolve()), *paths] if triton is not None else paths
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "ATTNDSL_CACHE_DIR": str(scratch / "attndsl"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "ATTNDSL_BUNDLES": "",
        "ATTNDSL_SHIPPED": "0",
        "TRITON_DISABLE_LINE_INFO": "1",
    }


def triton_of(environment: dict[str, str]) -> str:
    """The version of Triton that a build will have.

    Raises:
        SystemExit: The build would compile kernels of another checkout.
    """
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"attndsl cannot be imported: {done.stderr.strip().splitlines()[-1]}")
    version, *files = done.stdout.split()
    foreign = [file for file in files if not Path(file).resolve().is_relative_to(ROOT)]
    if foreign:
        sys.exit(f"{foreign[0]} is not of {ROOT}: install this checkout, pip install -e .")
    return version


def check(into: Path) -> int:
    """Print which bundles are for the sources of this checkout; 1 if one is not, or if none is."""
    from attndsl.foundation.fingerprint import source_fingerprint
    from attndsl.runtime.bundles import open_bundle

    bundles = [open_bundle(folder) for folder in sorted(into.glob("triton-*"))]
    fits = [bundle.versions.fingerprint == source_fingerprint() for bundle in bundles]
    for bundle, fit in zip(bundles, fits, strict=True):
        print(f"{bundle.folder}: for {'these' if fit else 'other'} sources")
    if not bundles:
        print(f"{into}: no bundle")
    return int(not fits or not all(fits))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--triton", type=Path, help="folder of pip install --target; else our own")
    parser.add_argument("--programs", type=Path, default=PROGRAMS)
    parser.add_argument("--target", default="cuda:90")
    parser.add_argument("--head-dim", default="64,128")
    parser.add_argument("--lengths", default="1024")
    parser.add_argument("--into", type=Path, default=INTO)
    parser.add_argument("--check", action="store_true", help="whether they are for these sources")
    options = parser.parse_args()
    if options.check:
        return check(options.into)
    with tempfile.TemporaryDirectory() as scratch:
        environment = environment_of(options.triton, Path(scratch))
        folder = options.into.resolve() / f"triton-{triton_of(environment)}"
        command = [
            sys.executable, "-m", "attndsl", "build", str(options.programs.resolve()),
            "--target", options.target, "--dtype", "bf16", "--head-dim", options.head_dim,
            "--lengths", options.lengths, "--heads", "8/8", "--backward", "--json",
            "-o", str(folder),
        ]  # fmt: skip
        done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return done.returncode
    built = json.loads(done.stdout)
    for kernel in built["kernels"]:
        print(f"{kernel['bytes']:>8} bytes  {kernel['kernel']} D{kernel['head_dim']}: "
              f"{kernel['function']}  {kernel['program']}")  # fmt: skip
    for name in ("code", "entries", "launchers"):
        size = size_of(folder / name)
        print(f"{name}: {size.files} files, {size.bytes} bytes, {size.compressed} compressed")
    whole = size_of(folder)
    print(f"{folder}: {len(built['kernels'])} kernels in {built['seconds']:.0f} s, {whole.bytes} "
          f"bytes, {whole.compressed} compressed; digest {built['digest']}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
