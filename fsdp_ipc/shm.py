"""Private files in shared memory: made, opened with every check, and swept after a crash.

Each file belongs to one user (mode 0600), has an unguessable name, and carries a shared `flock` for as long as its
maker lives. The lock is what tells a file in use from one left behind: unlike a process id it means the same in
every PID namespace that shares this `/dev/shm`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from multiprocessing.util import Finalize
from pathlib import Path

SHM_DIR = Path("/dev/shm")  # noqa: S108 - files there are ours alone: 0600, unguessable, opened without links
DATA_NAME = re.compile(r"fsdp_ipc-[0-9]{1,10}-[0-9a-f]{32}")
CONTROL_NAME = re.compile(r"fsdp_ipc-[0-9]{1,10}-[0-9a-f]{32}\.ctl")
DIGEST_NAME = re.compile(r"fsdp_ipc-[0-9]{1,10}-[0-9a-f]{32}\.dig")
_ANY_NAME = re.compile(r"fsdp_ipc-([0-9]{1,10})-[0-9a-f]{32}(\.ctl|\.dig)?")


class SharedFile:
    """A shared-memory file that this process made; unlinked by `close`, when it is dropped, and at exit.

    Attributes:
        name: File name without a directory.
        fd: Open descriptor, which also holds the lock that marks the file as in use.
        nbytes: Size of the file.
    """

    def __init__(self, name: str, fd: int, nbytes: int) -> None:
        self.name = name
        self.fd = fd
        self.nbytes = nbytes
        # Unlike `atexit`, this also runs at the end of forked worker processes, and not in a child that merely
        # inherited the object: there the file is still its parent's.
        self._finalize = Finalize(self, _unlink, args=(SHM_DIR / name, fd), exitpriority=10)

    def close(self) -> None:
        """Unlink the file and drop the lock; a second call does nothing. Existing mappings stay valid."""
        self._finalize()


def _unlink(path: Path, fd: int) -> None:
    path.unlink(missing_ok=True)
    os.close(fd)


def free_bytes() -> int:
    """Return how many bytes shared memory still has for this user."""
    status = os.statvfs(SHM_DIR)
    return status.f_bavail * status.f_frsize


def create(nbytes: int, suffix: str = "") -> SharedFile:
    """Make a new zero-filled file whose pages are already reserved.

    Args:
        nbytes: Size of the file, at least 1.
        suffix: Appended to the name; `".ctl"` for control blocks, `".dig"` for digests.

    Raises:
        ValueError: `nbytes` is not positive.
        MemoryError: Shared memory has less than `nbytes` left.
        OSError: There is no `/dev/shm` to write to.
    """
    if nbytes < 1:
        raise ValueError(f"expected at least 1 byte, got {nbytes}")
    free = free_bytes()
    if nbytes > free:
        raise MemoryError(_no_room(nbytes, free))
    while True:
        name = f"fsdp_ipc-{os.getpid()}-{secrets.token_hex(16)}{suffix}"
        path = SHM_DIR / name
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            if os.fstat(fd).st_nlink == 0:  # swept by another process before the lock was ours
                os.close(fd)
                continue
            os.fchmod(fd, 0o600)
            # Reserving the pages turns a full /dev/shm into an error here; a sparse file would be a SIGBUS later.
            os.posix_fallocate(fd, 0, nbytes)
        except BaseException as error:
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                os.close(fd)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise MemoryError(_no_room(nbytes, free_bytes())) from error
            raise
        return SharedFile(name, fd, nbytes)


def _no_room(wanted: int, free: int) -> str:
    return (
        f"{SHM_DIR} has {free} bytes free, {wanted} are wanted; in a container give it more "
        "(for Docker: --shm-size, or --ipc=host)"
    )


def open_checked(name: str, pattern: re.Pattern[str], nbytes: int) -> int:
    """Open a file that another process of this user made, and return its descriptor.

    The checks are made on the descriptor, so what is mapped is what was checked.

    Args:
        name: File name without a directory.
        pattern: What the whole name must match, `DATA_NAME`, `CONTROL_NAME` or `DIGEST_NAME`.
        nbytes: Exact size that the file must have.

    Raises:
        ValueError: The name is not one of ours, the file is a link or no regular file, or has another size.
        PermissionError: The file belongs to another user or others may access it.
        FileNotFoundError: There is no such file on this side.
    """
    if pattern.fullmatch(name) is None:
        raise ValueError(f"shared-memory file name {name!r} is not of the form {pattern.pattern}")
    path = SHM_DIR / name
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise FileNotFoundError(
            errno.ENOENT,
            "no such shared-memory file: the trainer has closed it or is gone, or trainer and server do not share "
            "/dev/shm (containers: --ipc=host or one IPC namespace)",
            str(path),
        ) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path} is a symbolic link; expected a regular file") from None
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a regular file")
        if status.st_uid != os.geteuid():
            raise PermissionError(
                f"{path} belongs to uid {status.st_uid}, this process runs as uid {os.geteuid()}; trainer and server "
                "must run as the same user"
            )
        if status.st_mode & 0o077:
            raise PermissionError(f"{path} has mode {stat.S_IMODE(status.st_mode):04o}; expected 0600")
        if status.st_size != nbytes:
            raise ValueError(f"{path} has {status.st_size} bytes; expected {nbytes}")
    except BaseException:
        os.close(fd)
        raise
    return fd


def sweep_stale() -> int:
    """Unlink this user's files whose maker is gone, and return how many; safe to call at any time.

    A file goes when the process id in its name is dead *and* nobody holds its lock. A process in another PID
    namespace looks dead from here, but its lock does not.
    """
    swept = 0
    with contextlib.suppress(FileNotFoundError), os.scandir(SHM_DIR) as entries:
        for entry in entries:
            match = _ANY_NAME.fullmatch(entry.name)
            if match is not None and not _pid_exists(int(match[1])):
                swept += _sweep_one(Path(entry.path))
    return swept


def _sweep_one(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return 0
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return 0
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except OSError:  # locked: its maker lives; gone: another process swept it
        return 0
    finally:
        os.close(fd)
    return 1


def _pid_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
