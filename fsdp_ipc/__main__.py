"""`python -m fsdp_ipc doctor`: tell what is wrong before a job starts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fsdp_ipc.doctor import examine
from fsdp_ipc.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Words of the command line; None: those of the process.

    Returns:
        0, or 1 if a check failed.
    """
    parser = argparse.ArgumentParser(prog="python -m fsdp_ipc", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor", help="check this machine, its environment, and a server if one is named"
    )
    doctor.add_argument(
        "--url", action="append", default=[], help="base URL of a running vLLM server; may be repeated"
    )
    options = parser.parse_args(argv)
    findings = examine(options.url)
    for finding in findings:
        print(finding)
    failed = sum(finding.level == "fail" for finding in findings)
    print(
        f"{failed} of {len(findings)} checks failed" if failed else f"nothing wrong in {len(findings)} checks"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
