"""The functions of the compiled library that take and return Python objects.

They are made from `tensor.c`, `recognizer.c`, `observer.c`, `module_call.c` and `lines.c`, which
get the functions of Python's stable ABI as pointers and therefore need no header of Python.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from otel_torch.statistics.native_layout import CALL_OBJECTS, OBSERVER_OBJECTS
from otel_torch.torch_private import count_function_modes

# fmt: off
# the functions of Python that the library calls, in the order of its struct
_PYTHON_FUNCTIONS = (
    "PyObject_Type", "PyObject_CallFunctionObjArgs", "PyObject_IsTrue", "PyErr_Clear",
    "PyLong_AsLongLong", "PyLong_FromLongLong", "PyFloat_FromDouble",
    "PyList_New", "PyList_SetItem", "PyTuple_New", "PyTuple_SetItem",
    "Py_IncRef", "Py_DecRef", "PyCFunction_NewEx",
    "PyList_Size", "PyList_GetItem", "PyList_Append", "PyTuple_Size", "PyTuple_GetItem",
    "PyDict_GetItem", "PyDict_SetItem",
    "PyBytes_FromStringAndSize", "PyBytes_AsString", "PyBytes_Size", "PyThread_get_thread_ident",
    "PyList_SetSlice", "PyDict_Next", "PyObject_GetAttr", "PyWeakref_NewRef",
    "PyObject_Call", "PyDict_Size", "PyObject_GenericGetDict", "PyObject_SetAttr",
)
# fmt: on
# DLPack's codes of kinds of numbers
_DLPACK_KINDS = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "bool": 6}


@dataclass(frozen=True, slots=True)
class ObjectFunctions:
    """The functions of one library; what they take and return is described in its sources.

    measure: `tensor.c`. enter, leave, count_call: `observer.c`, after `set_objects`. call_module:
    `module_call.c`, after `set_call_objects`.
    statistics, lines: `lines.c`.
    """

    library: ctypes.PyDLL
    measure: Callable[..., Any]
    enter: Callable[..., bool | None]
    leave: Callable[..., bool | None]
    count_call: Callable[..., int]
    call_module: Callable[..., Any]
    statistics: Callable[..., list[float]]
    lines: Callable[..., bytes]

    @classmethod
    def of(
        cls, library: ctypes.PyDLL, codes: Mapping[torch.dtype, int], max_numel: int
    ) -> ObjectFunctions | None:
        """Return the functions of a library that measures tensors of at most `max_numel` elements.

        None if torch or Python lacks what they call, or Python has no GIL, which they
        rely on.
        """
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            return None
        python = ctypes.pythonapi
        try:
            addresses = [
                ctypes.cast(getattr(python, name), ctypes.c_void_p).value
                for name in _PYTHON_FUNCTIONS
            ]
            python.PyCapsule_GetPointer.restype = ctypes.c_void_p
            python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
            exchange_table = python.PyCapsule_GetPointer(
                torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api"
            )
            types = torch.Tensor, torch.nn.Parameter
            methods = torch.Tensor.is_neg, torch.Tensor.storage_offset
            objects = (None, *types, *methods, count_function_modes)
        except (AttributeError, ValueError):
            return None
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        make = library.tensor_measure
        make.argtypes = [pointer, pointer, integer, *(ctypes.py_object for _ in objects)]
        functions = (pointer * len(addresses))(*addresses)
        measure = _make(make, functions, exchange_table, max_numel, *objects)
        if measure is None:
            return None
        for dtype, code in codes.items():
            name = str(dtype)
            kind = _DLPACK_KINDS.get(name.removeprefix("torch.").rstrip("0123456789"))
            if kind is not None:
                library.tensor_set_dtype(code, kind, 8 * dtype.itemsize, ctypes.py_object(name))
        library.recognizer_set_version_name(ctypes.py_object("_version"))
        enter, leave, count_call = (_make(library.observer_function, index) for index in range(3))
        call_module = _make(library.module_call_function)
        encode = _make(library.lines_statistics), _make(library.lines_lines)
        return cls(library, measure, enter, leave, count_call, call_module, *encode)

    def set_objects(self, **objects: object) -> None:
        """Set the objects that `observer.c` compares with and stores, by name."""
        self.library.observer_set_objects(_array_of([objects[name] for name in OBSERVER_OBJECTS]))

    def set_call_objects(self, **objects: object) -> None:
        """Set the objects that `module_call.c` uses, by name."""
        self.library.module_call_set_objects(_array_of([objects[name] for name in CALL_OBJECTS]))


def _array_of(objects: Sequence[object]) -> Any:
    array_type: Any = ctypes.py_object * len(objects)
    return array_type(*objects)


def _make(function: Any, *arguments: Any) -> Any:
    """Call a function of the library that returns a Python object."""
    function.restype = ctypes.py_object
    return function(*arguments)
