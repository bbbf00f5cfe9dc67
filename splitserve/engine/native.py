"""C++ kernels: compiled for this CPU when first needed, kept under the user's cache directory."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
import subprocess
import tempfile
from pathlib import Path

from splitserve.config import user_cache_dir

logger = logging.getLogger(__name__)

_COMMAND = ("c++", "-std=c++20", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
_COMPILE_TIMEOUT_S = 120.0


def load_library(source: Path) -> ctypes.CDLL | None:
    """The library built from one C++ file; None, with a warning, where it can't be built or loaded.

    It must come after torch: both then share torch's OpenMP.
    """
    target = library_path(source)
    try:
        if target.exists():
            try:
                return ctypes.CDLL(str(target))
            except OSError as error:
                logger.warning("%s can't be loaded and is built again: %s", target, error)
        _compile(source, target)
        return ctypes.CDLL(str(target))
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip()[-1000:]
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    logger.warning("%s: slower plain torch is used, because: %s", source.name, reason)
    return None


def library_path(source: Path) -> Path:
    """Where the library of a source is kept: splitserve/native under XDG_CACHE_HOME or ~/.cache.

    By the hash of the source and the headers beside it, the command and the CPU's abilities:
    another CPU that shares the cache builds its own.
    """
    texts = (path.read_text() for path in (source, *sorted(source.parent.glob("*.h"))))
    parts = (*texts, " ".join(_COMMAND), platform.machine(), _cpu_flags())
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return user_cache_dir() / "native" / f"{source.stem}-{name}.so"


def _compile(source: Path, target: Path) -> None:
    logger.info("compiling %s (once)", source.name)
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Several workers may start at once: each builds its own, and the last one stays.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        subprocess.run(
            [*_COMMAND, str(source), "-o", str(built)],
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMPILE_TIMEOUT_S,
        )
        built.rename(target)


def _cpu_flags() -> str:
    """What the CPU can do, as Linux tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = [line for line in lines if line.lower().startswith(("flags", "features"))]
    return flags[0] if flags else platform.processor()
