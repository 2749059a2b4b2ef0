"""Compilation of the Numba kernels: lazy, cached per host and version, never stopped by its cache.

Ranks that share a directory race for it, over NFS too, and a file cut short by a full disk raises
when it is loaded. So a cache belongs to one host, Python and Numba, the ranks of a node fill it one
after another, and what cannot be loaded is deleted and compiled again.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
from numba import njit
from numba.core.dispatcher import Dispatcher

__all__ = ["kernel", "warm_up"]

_LOCK_LIMIT_S = 120.0
_CONFIG: Any = numba.config  # its names are made at run time
_KERNELS: list[Dispatcher] = []


def _cache_dir() -> str:
    """First usable of $NUMBA_CACHE_DIR, the user's cache and the temporary directory, else ''."""
    leaf = f"numba-{numba.__version__}-py{platform.python_version()}-{platform.node()}"
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "aladdin_mpi")
    private = Path(tempfile.gettempdir(), f"aladdin_mpi-{os.getuid()}")
    chosen = [Path(_CONFIG.CACHE_DIR)] if _CONFIG.CACHE_DIR else []
    for path in (*chosen, *([home / leaf] if home.is_absolute() else []), private / leaf):
        with contextlib.suppress(OSError):
            if path.parent == private:
                private.mkdir(mode=0o700, exist_ok=True)
                owner = private.lstat()
                if owner.st_uid != os.getuid() or owner.st_mode & 0o022:
                    continue  # a cache holds code: load nothing that others could have put there
            path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
            return str(path.absolute())
    return ""


_CACHE_DIR = _cache_dir()


@contextlib.contextmanager
def _numba_caches_in(path: str) -> Iterator[None]:
    """Only while our functions are set up: the user's own keep their cache."""
    before, _CONFIG.CACHE_DIR = _CONFIG.CACHE_DIR, path
    try:
        yield
    finally:
        _CONFIG.CACHE_DIR = before


def kernel(function: Callable) -> Dispatcher:
    """Decorator: ``njit(nogil=True, cache=True)`` in our cache directory; compiles nothing yet."""
    with _numba_caches_in(_CACHE_DIR):
        _KERNELS.append(njit(nogil=True, cache=bool(_CACHE_DIR))(function))
    return _KERNELS[-1]


def _forget_cache() -> None:
    """Delete what the cache holds of our kernels, for every later process too."""
    for one in _KERNELS:
        stem = Path(one.py_func.__code__.co_filename).stem
        for entry in Path(str(one.stats.cache_path)).glob(f"{stem}.{one.py_func.__qualname__}-*"):
            entry.unlink(missing_ok=True)


def _leave_cache() -> None:
    """Go on with an empty cache directory of this process's own."""
    path = tempfile.mkdtemp(prefix="aladdin_mpi-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    with _numba_caches_in(path):
        for one in _KERNELS:
            one.enable_caching()


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """The first rank of a node compiles, the others then load; after two minutes nobody waits."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a file system without locks, a full disk
            lock = stack.enter_context(open(Path(_CACHE_DIR, "warm_up.lock"), "w"))
            limit = time.monotonic() + _LOCK_LIMIT_S
            while time.monotonic() < limit:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.02)
        yield


def warm_up(call_all: Callable[[], None]) -> float:
    """Compile the kernels, or load them from the cache; a broken cache is repaired, else left.

    Parameters
    ----------
    call_all : callable
        Calls every kernel with every signature that will be used.

    Returns
    -------
    float
        [s] how long it took, waiting for another rank of this host included.
    """
    began = time.perf_counter()
    if not _CACHE_DIR:
        call_all()
        return time.perf_counter() - began
    with _one_at_a_time():
        for repair in (_forget_cache, _leave_cache):
            try:
                call_all()
                break
            except Exception as error:  # an unreadable pickle may raise anything
                logging.getLogger(__name__).warning("kernel cache %s: %r", _CACHE_DIR, error)
                with contextlib.suppress(OSError):
                    repair()
        else:
            call_all()
    return time.perf_counter() - began
