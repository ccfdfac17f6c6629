"""Records by address, for compiled code.

A cache is some twenty arrays. Numba passes an array as seven words, so a call that hands all of them on would cost
more than most of what is called. Here a cache is one record of addresses, handed on as one word; who makes the record
keeps the arrays alive and promises their lengths, for nothing is checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

INDEX = np.dtype([("value", "i4")])
NUMBER = np.dtype([("value", "f8")])

_WORD = types.int64


def _record_at(typing: Any, address: Any, index: Any, dtype: Any) -> Any:
    """Record ``index`` of the array of ``dtype`` (a structured dtype) at ``address``."""
    record = dtype.dtype

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        offset = builder.mul(args[1], context.get_constant(_WORD, record.size))
        return builder.inttoptr(builder.add(args[0], offset), context.get_value_type(record))

    return record(_WORD, _WORD, dtype), generate


def _floats_at(typing: Any, address: Any, rows: Any, columns: Any) -> Any:
    """The float64 at ``address`` as an array of shape ``(rows, columns)`` that owns nothing."""
    kind = types.Array(types.float64, 2, "C")

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(kind)(context, builder)
        size = context.get_constant(types.intp, 8)
        data = builder.inttoptr(args[0], ir.DoubleType().as_pointer())
        strides = (builder.mul(args[2], size), size)
        shape = (args[1], args[2])
        populate_array(  # type: ignore[no-untyped-call]
            array, data=data, shape=shape, strides=strides, itemsize=size, meminfo=None
        )
        return array._getvalue()

    return kind(_WORD, _WORD, _WORD), generate


def _caller(result: Any, llvm_result: ir.Type, doc: str) -> Any:
    def call(typing: Any, address: Any, arguments: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(llvm_result, [ir.DoubleType()] * len(arguments))
            function = builder.inttoptr(args[0], kind.as_pointer())
            values = cgutils.unpack_tuple(builder, args[1], len(arguments))  # type: ignore[no-untyped-call]
            return builder.call(function, values)

        return result(_WORD, arguments), generate

    call.__doc__ = doc
    return intrinsic(call)


# Numba gives these the signature (typing, ...) of the code above; callers leave the first argument out.
record_at: Any = intrinsic(_record_at)
floats_at: Any = intrinsic(_floats_at)
call_float: Any = _caller(types.float64, ir.DoubleType(), "The function at an address, of a tuple of floats; a float.")
call_int: Any = _caller(types.int64, ir.IntType(64), "The function at an address, of a tuple of floats; an int64.")
