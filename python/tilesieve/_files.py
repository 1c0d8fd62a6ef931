# SPDX-License-Identifier: Apache-2.0
"""Files of tensors: safetensors and .npy in, mapped and not copied, and out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from . import _core
from ._arrays import Array

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]

_ML_DTYPES = {"bf16": "bfloat16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "e4m3fnuz": "float8_e4m3fnuz",
              "e5m2fnuz": "float8_e5m2fnuz"}


class TensorFile(dict[str, np.ndarray[Any, Any]]):
    """The tensors of a file by name, in the order of their data: read-only arrays over the mapped file.

    Attributes:
        path: the file.
        metadata: the text pairs of a safetensors file; empty for .npy.
    """

    def __init__(self, tensors: Mapping[str, np.ndarray[Any, Any]], path: str, metadata: dict[str, str]) -> None:
        super().__init__(tensors)
        self.path = path
        self.metadata = metadata

    def __missing__(self, name: str) -> np.ndarray[Any, Any]:
        raise KeyError(f"{self.path}: has no tensor {name!r}; it has {', '.join(self) or 'none'}")


def _as_stored(array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Gives whole numbers their type of ml_dtypes back."""
    if dtype not in _ML_DTYPES:
        return array
    try:
        import ml_dtypes
    except ImportError:
        raise ImportError(f"a tensor of {dtype} needs the package ml_dtypes: pip install ml_dtypes") from None
    stored: np.ndarray[Any, Any] = array.view(getattr(ml_dtypes, _ML_DTYPES[dtype]))
    return stored


def encoded_path(path: Any) -> bytes:
    """A path as the system has it."""
    if not isinstance(path, str | bytes | os.PathLike):
        raise TypeError(f"path: got {type(path).__name__}, expected str, bytes or os.PathLike")
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise _core.Error(f"path: got {path!r}, expected one without a null byte")
    return encoded


def read_tensors(path: Path) -> TensorFile:
    """Reads a .safetensors or .npy file, told apart by content; a .npy file gives one tensor, named after the file.

    bf16 and fp8 come as types of ml_dtypes. Nothing is copied: the arrays lie in the mapped file, which lives as long
    as one of them, and must not be cut short by others meanwhile.

    Raises:
        OSError: a file that the system does not let be read, such as FileNotFoundError.
        ValueError: a file that is not exactly as its format says, by name and fault.
    """
    encoded = encoded_path(path)
    tensors, metadata = _core.read_tensors(encoded)
    return TensorFile({key: _as_stored(*value) for key, value in tensors.items()}, os.fsdecode(encoded), metadata)


def write_safetensors(
    path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes named arrays of any strides and libraries, on the CPU; through a temporary file, so that a failed write
    leaves an old file whole.

    Raises:
        OSError: a file that the system does not let be written, such as PermissionError.
        ValueError: a name or a type that the format does not have.
        TypeError: a name that is no str, a value that is no array.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors: got {type(tensors).__name__}, expected names and arrays, as of a dict")
    for name in tensors:
        if not isinstance(name, str):
            raise TypeError(f"tensors: got a name of type {type(name).__name__}, expected str")
    for key, value in (metadata or {}).items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise TypeError(f"metadata: got {key!r}: {value!r}, expected two of str")
    _core.write_safetensors(encoded_path(path), dict(tensors), dict(metadata or {}))


def write_npy(path: Path, tensor: Array) -> None:
    """Writes one array as .npy, which has no bf16 and no fp8. Errors as of `write_safetensors`."""
    _core.write_npy(encoded_path(path), tensor)
