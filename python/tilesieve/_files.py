# SPDX-License-Identifier: Apache-2.0
"""Files of tensors: safetensors and .npy in, mapped and not copied, and out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from . import _core
from ._arrays import Array

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


def read_tensors(path: str | os.PathLike[str]) -> TensorFile:
    """Reads a .safetensors or .npy file, told apart by content; a .npy file gives one tensor, named after the file.

    bf16 and fp8 come as types of ml_dtypes. Nothing is copied: the arrays lie in the mapped file, which lives as long
    as one of them, and must not be cut short by others meanwhile.

    Raises:
        ValueError: a file that cannot be read or is not exactly as its format says, by name and fault.
    """
    name = os.fspath(path)
    tensors, metadata = _core.read_tensors(name)
    return TensorFile({key: _as_stored(*value) for key, value in tensors.items()}, name, metadata)


def write_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes named arrays of any strides and libraries, on the CPU; through a temporary file, so that a failed write
    leaves an old file whole.

    Raises:
        ValueError: a file that cannot be written, a name or a type that the format does not have.
        TypeError: a value that is no array.
    """
    _core.write_safetensors(os.fspath(path), dict(tensors), dict(metadata or {}))


def write_npy(path: str | os.PathLike[str], tensor: Array) -> None:
    """Writes one array as .npy, which has no bf16 and no fp8. Errors as of `write_safetensors`."""
    _core.write_npy(os.fspath(path), tensor)
