# SPDX-License-Identifier: Apache-2.0
"""Files of tensors, there and back."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tilesieve

TYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
         np.int64, np.int32, np.int16, np.int8, np.uint64, np.uint32, np.uint16, np.uint8, np.bool_]


def test_safetensors_come_back_as_they_went(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    tensors = {np.dtype(dtype).name: (rng.standard_normal((3, 5, 4)) * 4).astype(dtype)[:, ::2] for dtype in TYPES}
    tensors["empty"], tensors["scalar"] = np.zeros((0, 3), np.float32), np.array(2.5, np.float32)
    tilesieve.write_safetensors(tmp_path / "x.safetensors", tensors, {"about": "a test"})
    found = tilesieve.read_tensors(tmp_path / "x.safetensors")
    assert found.metadata == {"about": "a test"} and set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert found[name].tobytes() == tensor.tobytes(), name
        assert not found[name].flags.writeable


def test_npy_is_numpys(tmp_path: Path) -> None:
    tensor = np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4))
    tilesieve.write_npy(tmp_path / "a.npy", tensor)
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), tensor)
    np.save(tmp_path / "b.npy", tensor)
    np.testing.assert_array_equal(tilesieve.read_tensors(tmp_path / "b.npy")["b"], tensor)


def test_paths_may_be_bytes(tmp_path: Path) -> None:
    path = bytes(tmp_path) + b"/\xff.npy"  # no UTF-8
    tilesieve.write_npy(path, np.arange(3))
    assert tilesieve.read_tensors(path)["\udcff"].sum() == 3
    with pytest.raises(FileNotFoundError) as caught:
        tilesieve.read_tensors(path + b"x")
    assert os.fsencode(caught.value.filename) == path + b"x"
    Path(os.fsdecode(path)).write_bytes(b"nonsense")
    with pytest.raises(tilesieve.Error, match=r"\\xff"):
        tilesieve.read_tensors(path)


def test_arrays_keep_the_file_mapped(tmp_path: Path) -> None:
    tilesieve.write_safetensors(tmp_path / "x.safetensors", {"a": np.arange(1000)})
    array = tilesieve.read_tensors(tmp_path / "x.safetensors")["a"]
    (tmp_path / "x.safetensors").unlink()
    assert array.sum() == 499_500


def test_refuses_what_it_cannot(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="cannot open: No such file") as caught:
        tilesieve.read_tensors(tmp_path / "no_file.safetensors")
    assert caught.value.errno == errno.ENOENT and caught.value.filename == str(tmp_path / "no_file.safetensors")
    with pytest.raises(IsADirectoryError):
        tilesieve.read_tensors(tmp_path)
    with pytest.raises(FileNotFoundError):
        tilesieve.write_npy(tmp_path / "no_folder" / "x.npy", np.zeros(3))
    with pytest.raises(TypeError, match="path: got int"):
        tilesieve.read_tensors(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="path: got .*null byte"):
        tilesieve.read_tensors("a\0b")
    (tmp_path / "bad.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"bad\.safetensors"):
        tilesieve.read_tensors(tmp_path / "bad.safetensors")
    with pytest.raises(ValueError, match="bf16"):
        tilesieve.write_npy(tmp_path / "x.npy", np.zeros(3, ml_dtypes.bfloat16))
    for tensors, words in (({"a": 1}, "a: got int"), ({1: np.zeros(3)}, "tensors: got a name of type int"),
                           ([1], "tensors: got list")):
        with pytest.raises(TypeError, match=words):
            tilesieve.write_safetensors(tmp_path / "x.safetensors", tensors)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="metadata: got 'a': 1"):
        tilesieve.write_safetensors(tmp_path / "x.safetensors", {}, {"a": 1})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="tensor: got None"):
        tilesieve.write_npy(tmp_path / "x.npy", None)  # type: ignore[arg-type]
    tilesieve.write_safetensors(tmp_path / "x.safetensors", {"a": np.zeros(3)})
    with pytest.raises(KeyError, match="has no tensor 'q'; it has a"):
        tilesieve.read_tensors(tmp_path / "x.safetensors")["q"]
