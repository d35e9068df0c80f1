"""Known vulnerabilities in what the package itself needs, as installed here; left out, and said so, where that can't be asked.

    python -m tests.audit

Asks with pip-audit. The exit code is 1 only for a vulnerability that was found.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

_TIMEOUT_S = 90


def needed(name: str) -> dict[str, str]:
    """Versions of what a distribution needs without its extras, as far as they are installed."""
    found: dict[str, str] = {}
    waiting = [name]
    while waiting:
        for line in importlib.metadata.requires(waiting.pop()) or ():
            if "extra ==" in line:
                continue
            other = re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0].lower()
            if other in found:
                continue
            try:
                # The local part, as in 2.13.0+cpu, is no part of the release that the advisories speak of.
                found[other] = importlib.metadata.version(other).partition("+")[0]
            except importlib.metadata.PackageNotFoundError:
                continue  # for another platform
            waiting.append(other)
    return found


def main() -> int:
    """Audit; print the outcome in one line, or all that was found."""
    if importlib.util.find_spec("pip_audit") is None:
        sys.stdout.write("pip-audit: left out, it is not installed (it is in the extra `dev`)\n")
        return 0
    packages = needed("fsdp-ipc")
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder, "requirements.txt")
        listed.write_text("".join(f"{name}=={version}\n" for name, version in sorted(packages.items())))
        command = [
            sys.executable,
            "-m",
            "pip_audit",
            "--no-deps",
            "--disable-pip",
            "--progress-spinner",
            "off",
        ]
        try:
            done = subprocess.run(
                [*command, "-r", str(listed)], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            sys.stdout.write(f"pip-audit: left out, its service did not answer within {_TIMEOUT_S} s\n")
            return 0
    if done.returncode == 0:
        sys.stdout.write(f"pip-audit: nothing known against {len(packages)} packages\n")
        return 0
    if re.search(r"Found \d+ known vulnerabilit", done.stderr + done.stdout):
        sys.stdout.write(done.stdout + done.stderr)
        return 1
    last = (done.stderr.strip() or done.stdout.strip() or "no word").splitlines()[-1]
    sys.stdout.write(f"pip-audit: left out, its service can't be asked from here ({last[:200]})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
