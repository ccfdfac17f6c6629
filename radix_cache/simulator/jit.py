"""Numba, seen from typed code: a decorator that keeps a function's type, and policies as compiled functions.

Policies become C functions of one signature, called by address. The simulator's core is compiled once for that
signature and kept on disk; a new policy costs the compilation of one expression, not of the core.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

import numba

from radix_cache.admission.base import AdmissionPolicy
from radix_cache.eviction.base import EvictionPolicy
from radix_cache.features import FEATURE_COUNT, NodeFeatures

Function = TypeVar("Function", bound=Callable[..., Any])


def jit(function: Function) -> Function:
    """Compile on first call and cache on disk. Strict arithmetic: results equal those of plain Python."""
    return cast(Function, numba.njit(cache=True, error_model="numpy")(function))


def core(function: Function) -> Function:
    """As ``jit``, for functions called from compiled code alone.

    Without the wrappers for Python and without reference counts (they allocate nothing) the core compiles in a
    fraction of the time.
    """
    options: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False}
    return cast(Function, numba.njit(cache=True, error_model="numpy", **options)(function))


def inlined(function: Function) -> Function:
    """As ``core``, for small functions: what is handed on is not copied, however many words it has."""
    options: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False, "forceinline": True}
    return cast(Function, numba.njit(cache=True, error_model="numpy", **options)(function))


def _forget_stale() -> None:
    """Drop what is cached on disk when any source of the core changed.

    Numba looks at a function's own file only, not at those of the functions compiled into it.
    """
    here = Path(__file__).parent
    beside = (here.parent / "gaps.py", here.parent / "admission" / "host.py")
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in sorted([*here.glob("*.py"), *beside])))
    cache = here / "__pycache__"
    stamp = cache / "core.sha256"
    if stamp.exists() and stamp.read_text() == digest.hexdigest():
        return
    try:
        for entry in cache.glob("*.nb[ic]"):
            entry.unlink(missing_ok=True)
        cache.mkdir(exist_ok=True)
        stamp.write_text(digest.hexdigest())
    except OSError:  # read-only installation: its files change all at once, which numba does see
        return


_forget_stale()


_F8 = numba.types.float64
_GROUP = numba.types.int64(*([_F8] * FEATURE_COUNT))
_KEY = numba.types.float64(*([_F8] * FEATURE_COUNT))
_ADMIT = numba.types.int64(_F8, _F8, _F8)


def _compiled(function: Callable[..., Any]) -> Any:
    """A policy's function and the plain functions it calls. Policies themselves know nothing of compilers."""
    helpers = {
        name: _compiled(value)
        for name in function.__code__.co_names
        if isinstance(value := function.__globals__.get(name), FunctionType)
    }
    scope = {**function.__globals__, **helpers}
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    return numba.njit(copy)


def _over_features(function: Callable[[NodeFeatures], Any], signature: Any) -> Any:
    body = _compiled(function)
    assert FEATURE_COUNT == 13, "give scalars() one argument a feature"

    def scalars(a, b, c, d, e, f, g, h, i, j, k, m, n):  # type: ignore[no-untyped-def]
        return body(NodeFeatures(a, b, c, d, e, f, g, h, i, j, k, m, n))

    return numba.cfunc(signature)(scalars)


@functools.cache
def compiled_eviction(policy: EvictionPolicy) -> tuple[Any, Any]:
    """(group, key) as compiled C functions of the features, in the order of ``NodeFeatures``; None for the group where
    there is one only: it is not asked for then."""
    group = _over_features(policy.group, _GROUP) if policy.groups > 1 else None
    return group, _over_features(policy.key, _KEY)


@functools.cache
def compiled_admission(policy: AdmissionPolicy) -> tuple[Any, Any]:
    """(start, go_on) as compiled C functions of (others, own, capacity)."""
    return numba.cfunc(_ADMIT)(policy.start), numba.cfunc(_ADMIT)(policy.go_on)
