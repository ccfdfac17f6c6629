"""When ROCm's quantized all-reduce is eligible: configured is not enough.

SGLang 0.5.23 asks of each message whether it is large enough for the codec at this number of ranks
(``srt/distributed/device_communicators/quick_all_reduce.py``); only then the codec runs. The messages of a decode step
are below that size up to about 170 tokens.
"""

from __future__ import annotations

_MIB = 1 << 20

CODECS = ("FP", "INT8", "INT6", "INT4")

# (element type as the kernel sees it, ranks) -> smallest message in bytes, by codec.
MIN_BYTES = {
    ("float16", 2): (1 * _MIB, 2 * _MIB, 2 * _MIB, 1 * _MIB),
    ("float16", 4): (1 * _MIB, 16 * _MIB, 4 * _MIB, 2 * _MIB),
    ("float16", 8): (16 * _MIB, 4 * _MIB, 4 * _MIB, 2 * _MIB),
    ("bfloat16", 2): (2 * _MIB, 8 * _MIB, 8 * _MIB, 8 * _MIB),
    ("bfloat16", 4): (8 * _MIB, 64 * _MIB, 64 * _MIB, 16 * _MIB),
    ("bfloat16", 8): (16 * _MIB, 2048 * _MIB, 2048 * _MIB, 2048 * _MIB),
}


def min_message_bytes(codec: str, tp: int, *, cast_to_fp16: bool = True) -> int | None:
    """Smallest all-reduce of 16-bit activations that the codec takes; None where it never runs.

    Args:
        codec: ``ROCM_QUICK_REDUCE_QUANTIZATION``.
        tp: ranks of the all-reduce.
        cast_to_fp16: ``ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16``, on unless set to 0: bfloat16 messages then go by the
            lower thresholds of float16.
    """
    sizes = MIN_BYTES.get(("float16" if cast_to_fp16 else "bfloat16", tp))
    return sizes[CODECS.index(codec)] if sizes is not None and codec in CODECS else None
