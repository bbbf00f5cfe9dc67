"""What an operating system process needs: to die with its parent, to stay on its cores, signals."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int | None) -> None:
    """Make this process end, at once and whatever it does, when its parent process is gone.

    On Linux the kernel sends SIGKILL when the *thread* that started this process ends, so a parent
    must start its children from a thread that lives as long as they should. Elsewhere (macOS)
    a daemon thread waits for the end of the parent process. None does nothing (started by hand).
    """
    if parent_pid is None:
        return
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    else:
        threading.Thread(
            target=_watch_parent, args=(parent_pid,), name="parent-watch", daemon=True
        ).start()
    if os.getppid() != parent_pid:  # it went before the line above
        os.kill(os.getpid(), signal.SIGKILL)


if sys.platform != "linux":

    def _watch_parent(parent_pid: int) -> None:
        with select.kqueue() as queue, contextlib.suppress(ProcessLookupError):
            gone = select.kevent(
                parent_pid,
                filter=select.KQ_FILTER_PROC,
                flags=select.KQ_EV_ADD,
                fflags=select.KQ_NOTE_EXIT,
            )
            queue.control([gone], 1, None)
        os.kill(os.getpid(), signal.SIGKILL)


def available_cores() -> tuple[int, ...]:
    """The CPUs this process may run on, in order."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def num_usable_cores() -> int:
    """How many cores this process, and others like it, may keep busy: a container may allow less
    time than its CPUs have."""
    num_cores = len(available_cores())
    quota = Path("/sys/fs/cgroup/cpu.max")  # "max 100000", or microseconds in each so many
    if quota.exists():
        allowed, period = quota.read_text().split()
        if allowed != "max":
            num_cores = min(num_cores, -(-int(allowed) // int(period)))
    return num_cores


def pin_to_cores(cores: Iterable[int] | None) -> None:
    """Run this process on these CPUs only. Call it before any library starts threads.

    None, or a platform without affinity (macOS), leaves it unpinned.
    """
    if cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(cores))


@contextlib.contextmanager
def on_signals(
    action: Callable[[int], None],
    signals: Iterable[signal.Signals] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
) -> Iterator[None]:
    """Call `action(signal number)` for these signals within the block, then restore handlers.

    Main thread only. The action runs between two bytecodes of the main thread: keep it short.
    """
    previous = {number: signal.getsignal(number) for number in signals}
    for number in previous:
        signal.signal(number, lambda received, _frame: action(received))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def allow_many_files() -> None:
    """Raise the soft limit on file descriptors to the hard one: each connection takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS has a limit of its own below it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def python_executable() -> str:
    """This interpreter, as `python` where its folder has that name for it.

    It is how roles show in the process list: `.../python -m coordinator`.
    """
    plain = Path(sys.executable).with_name("python")
    same = plain.exists() and plain.samefile(sys.executable)
    return str(plain) if same else sys.executable


def describe_exit(exit_code: int) -> str:
    """An exit code in words; negative codes are signals, as subprocess reports them."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"
