"""Eviction policies, one file each: which cached prefix to give up first."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from radix_cache.eviction.base import EVICTION, EvictionPolicy
from radix_cache.spec import build_from_spec

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


@functools.lru_cache(maxsize=256)
def eviction_policy(spec: str) -> EvictionPolicy:
    """The policy that ``spec`` names, such as ``lru`` or ``ttl:handicap=30``.

    Equal specs give the same object, so that what is compiled for one is compiled once.

    Raises:
        ValueError: unknown name or parameter; the message lists what there is.
    """
    return build_from_spec("eviction policy", spec, EVICTION)


def eviction_names() -> list[str]:
    return sorted(EVICTION)


__all__ = ["EvictionPolicy", "eviction_names", "eviction_policy"]
