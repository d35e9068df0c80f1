"""Gets the weight-transfer code of released vLLM wheels for the contract tests: `python -m tests.vllm_wheels`.

A wheel has some 300 MB, of which the tests need a few Python files. They are kept in `.cache/vllm/<release>`, the
wheel is not. The tests themselves never download; without the files they are skipped and say how to get them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

RELEASES = ("0.26.0", "0.28.0", "0.33.0")
"""Downloaded if nothing else is asked for: the last of the static trainer API, and both ends of the stateful one."""

ALL_RELEASES = (
    "0.22.0", "0.23.0", "0.24.0", "0.25.0", "0.26.0", "0.27.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.33.0",
)  # fmt: skip

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "vllm"
_KEEP = ("vllm/distributed/weight_transfer/", "vllm/model_executor/model_loader/reload/")
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_35_x86_64", "manylinux1_x86_64")


def root_of(release: str) -> Path | None:
    """The folder that holds the package `vllm` of a release, or None if it was not fetched."""
    root = CACHE / release
    return root if (root / _KEEP[0] / "ipc_engine.py").is_file() else None


def fetch(release: str) -> Path:
    """Download a release's wheel with pip, keep the needed files, and drop the wheel.

    Raises:
        subprocess.CalledProcessError: pip could not get it.
    """
    if (found := root_of(release)) is not None:
        return found
    with tempfile.TemporaryDirectory(prefix="vllm-wheel-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", "3.12", "--dest", folder]
        # Where there is no network, say so soon: the tests can do without.
        command += ["--disable-pip-version-check", "--retries", "1", "--timeout", "20"]
        command += [part for platform in _PLATFORMS for part in ("--platform", platform)]
        subprocess.run([*command, f"vllm=={release}"], check=True)
        (wheel,) = Path(folder).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(_KEEP) and name.endswith(".py")]
            archive.extractall(CACHE / release, names)
    return CACHE / release


def main() -> int:
    """Fetch the releases named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("releases", nargs="*", default=list(RELEASES), help="e.g. 0.28.0, or 'all'")
    releases = parser.parse_args().releases
    failed = []
    for release in ALL_RELEASES if releases == ["all"] else releases:
        try:
            sys.stdout.write(f"{release} {fetch(release)}\n")
        except (subprocess.CalledProcessError, OSError, ValueError) as error:
            failed.append(release)
            sys.stderr.write(f"{release} could not be had: {error}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
