"""Admission policies, one file each: which session may start, and which must wait."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from radix_cache.admission.base import ADMISSION, AdmissionPolicy
from radix_cache.spec import build_from_spec

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


@functools.lru_cache(maxsize=256)
def admission_policy(spec: str) -> AdmissionPolicy:
    """The policy that ``spec`` names, such as ``none`` or ``gate:0.9``.

    Equal specs give the same object, so that what is compiled for one is compiled once.

    Raises:
        ValueError: unknown name or parameter; the message lists what there is.
    """
    return build_from_spec("admission policy", spec, ADMISSION)


def admission_names() -> list[str]:
    return sorted(ADMISSION)


__all__ = ["AdmissionPolicy", "admission_names", "admission_policy"]
