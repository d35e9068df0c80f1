"""Which process is meant, and whether it still lives: a process id alone is given to another one later."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class ProcessName:
    """A process, in terms that other processes of its host can check.

    Attributes:
        boot: Id of this boot of its host, which tells hosts apart.
        namespace: Inode of its PID namespace, 0 where /proc does not say.
        pid: Its id there.
        started: When it began, in clock ticks since boot; None where /proc does not say.
    """

    boot: str
    namespace: int
    pid: int
    started: int | None

    @classmethod
    def own(cls) -> Self:
        """This process."""
        boot = ""
        with contextlib.suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(boot, pid_namespace(), os.getpid(), start_time(os.getpid()))

    def sees(self, other: ProcessName) -> bool:
        """Whether this process can tell if the other one lives: same host, same PID namespace."""
        return (self.boot, self.namespace) == (other.boot, other.namespace) and bool(
            self.boot and self.namespace
        )

    def is_dead(self) -> bool:
        """Whether the process is gone, asked by one that sees it; no if that is not certain."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        started = start_time(self.pid)
        return None not in (started, self.started) and started != self.started


def start_time(pid: int) -> int | None:
    """Return when a process began, in clock ticks since boot; 0 for a zombie, None where /proc does not say."""
    try:
        # The command's name, in parentheses, may hold anything, so count fields from the last parenthesis.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return 0 if fields[0] in ("Z", "X") else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def pid_namespace() -> int:
    """Return the inode of this process's PID namespace, 0 where /proc does not say."""
    with contextlib.suppress(OSError):
        return Path("/proc/self/ns/pid").stat().st_ino
    return 0
