# SPDX-License-Identifier: Apache-2.0
"""Read and write captures: bf16 tensors and string metadata in one safetensors file.

The format is small enough to write by hand: 8 bytes with the header's length (little-endian), a JSON header that names
each tensor's type, shape and byte range, then the raw data. Nothing else is needed here, so no library is used.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Bf16Bits = npt.NDArray[np.uint16]

LENGTH_BYTES = 8
ALIGNMENT = 8
# The format's own limit; a longer header means that the file is something else.
MAX_HEADER_BYTES = 100_000_000


class CaptureFileError(Exception):
    """A file that is not a readable capture, or values that cannot be saved as one."""


def to_bf16(values: Float32) -> Bf16Bits:
    """Round float32 to bf16 bits, nearest with ties to even; same shape. a value that is not finite is an error."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if not np.isfinite(values).all():
        raise CaptureFileError("a value to be saved is not finite")
    bits = values.view(np.uint32)
    # Adding just under half of the dropped range, plus the lowest kept bit, carries exactly when rounding goes up.
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def from_bf16(bits: Bf16Bits) -> Float32:
    """Widen bf16 bits to the float32 values that they stand for (exact); same shape."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def encode_header(tensors: dict[str, Bf16Bits], metadata: dict[str, str]) -> bytes:
    """The length field and the JSON header for `tensors` laid out one after the other, in the dict's order."""
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, bits in tensors.items():
        end = offset + bits.nbytes
        header[name] = {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    # Readers map the data in place, so it must start aligned; the format allows trailing spaces for that.
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def write_capture(path: Path, tensors: dict[str, Bf16Bits], metadata: dict[str, str]) -> None:
    """Write a capture so that `path` holds either its old content or the whole new file, never a part."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as stream:
            stream.write(encode_header(tensors, metadata))
            for bits in tensors.values():
                stream.write(np.ascontiguousarray(bits, dtype="<u2").tobytes())
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
        raise


def read_header(path: Path) -> tuple[dict[str, dict], dict[str, str], int]:
    """Tensor entries, metadata and the byte at which the data starts."""
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise CaptureFileError(f"{path}: not a safetensors file")
            header = json.loads(stream.read(length))
    except ValueError as error:
        raise CaptureFileError(f"{path}: not a safetensors file") from error
    if not isinstance(header, dict) or not isinstance(metadata := header.pop("__metadata__", {}), dict):
        raise CaptureFileError(f"{path}: not a safetensors file")
    return header, metadata, LENGTH_BYTES + length


def read_capture(path: Path) -> tuple[dict[str, Float32], dict[str, str]]:
    """All tensors of a capture as float32 in their saved shapes, and its metadata."""
    entries, metadata, start = read_header(path)
    data = path.read_bytes()[start:]
    tensors = {}
    for name, entry in entries.items():
        try:
            begin, end = entry["data_offsets"]
            if entry["dtype"] != "BF16":
                raise ValueError("not bf16")
            tensors[name] = from_bf16(np.frombuffer(data[begin:end], dtype="<u2").reshape(entry["shape"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CaptureFileError(f"{path}: tensor {name} is cut short or not as expected ({error})") from error
    return tensors, metadata
