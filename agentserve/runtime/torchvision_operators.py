"""Let transformers import torchvision beside a CPU torch that lacks torchvision's compiled operators.

torchvision's package registers fakes for ``nms`` and ``qnms`` at import time and fails when its binary, built for
another torch, could not define them. M3's text model runs nothing of torchvision, so declaring the two is enough.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# A torch.library.Library withdraws its definitions when it is collected.
_kept: list[object] = []


def declare() -> None:
    """Declare the operators that nobody defined; call before the first import of torchvision or transformers."""
    import torch

    if _kept or _defined_by_torchvision():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in _SCHEMAS:
        if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
            library.define(schema)  # type: ignore[no-untyped-call]
    _kept.append(library)


def _defined_by_torchvision() -> bool:
    """Load torchvision's binary; false where it fits another torch. To define an operator twice ends the process."""
    import torch

    package = importlib.util.find_spec("torchvision")
    places = package.submodule_search_locations if package is not None else None
    for place in places or ():
        for binary in Path(place).glob("_C*.so"):
            try:
                torch.ops.load_library(binary)  # type: ignore[no-untyped-call]
            except OSError:
                continue
            return hasattr(torch.ops.torchvision, "nms")
    return False
