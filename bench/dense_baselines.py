#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What others reach at the problem of dense_sm90_bench, for its --baseline.

    python bench/dense_baselines.py OUT.json

  cudnn, flash   dense attention by PyTorch, with cuDNN's and with FlashAttention's kernels, in bf16
  fa3, fa3-e4m3  FlashAttention 3 in bf16 and in e4m3
  sage2          SageAttention 2's kernel for sm90, the whole call

56 heads of 128 channels, 38,304 tokens, not causal; keys have an offset in each channel. Packages that are not installed
are named and left out. Rows of o are first compared with float64. Medians of 11 single launches after three that do not
count, each after a pause of 2 ms. Needs PyTorch with CUDA.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention
except ImportError as error:
    sys.exit(f"dense_baselines: needs PyTorch: {error}")

TOKENS, HEADS, DIM = 38304, 56, 128
PROBLEM = "38304x56/1.00"
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v: [1, tokens, heads, dim]


def by_pytorch(backend: SDPBackend) -> Callable[[Tensors], Callable[[], torch.Tensor]]:
    def make(tensors: Tensors) -> Callable[[], torch.Tensor]:
        q, k, v = (x.transpose(1, 2) for x in tensors)

        def launch() -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v).transpose(1, 2)

        return launch

    return make


def by_flash_attn(e4m3: bool) -> Callable[[Tensors], Callable[[], torch.Tensor]]:
    def make(tensors: Tensors) -> Callable[[], torch.Tensor]:
        attend = importlib.import_module("flash_attn_interface").flash_attn_func
        given = [x.to(torch.float8_e4m3fn) if e4m3 else x for x in tensors]

        def launch() -> torch.Tensor:
            o = attend(*given)
            return o[0] if isinstance(o, tuple) else o

        return launch

    return make


def by_sage(tensors: Tensors) -> Callable[[], torch.Tensor]:
    attend = importlib.import_module("sageattention").sageattn_qk_int8_pv_fp8_cuda_sm90
    return lambda: attend(*tensors, tensor_layout="NHD", qk_quant_gran="per_thread")


# The dtype whose rows they go to, what to call, and the error that it may have.
BASELINES = {
    "cudnn": ("bf16", by_pytorch(SDPBackend.CUDNN_ATTENTION), 0.02),
    "flash": ("bf16", by_pytorch(SDPBackend.FLASH_ATTENTION), 0.02),
    "fa3": ("bf16", by_flash_attn(e4m3=False), 0.02),
    "fa3-e4m3": ("int8", by_flash_attn(e4m3=True), 0.3),
    "sage2": ("int8", by_sage, 0.06),
}


def error_of(o: torch.Tensor, tensors: Tensors) -> float:
    q, k, v = tensors
    worst = 0.0
    for token, head in ((0, 0), (TOKENS // 3, 17), (TOKENS - 1, HEADS - 1)):
        keys, values = k[0, :, head].double(), v[0, :, head].double()
        want = torch.softmax(keys @ q[0, token, head].double() * DIM**-0.5, 0) @ values
        worst = max(worst, ((o[0, token, head].double() - want).norm() / want.norm()).item())
    return worst


def median_ms(launch: Callable[[], object]) -> float:
    times = []
    for _ in range(14):
        time.sleep(0.002)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[3:])[5]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.manual_seed(1)
    shape = (1, TOKENS, HEADS, DIM)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    k += 2 * torch.randn(HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    versions = {"torch": torch.__version__, "cudnn": str(torch.backends.cudnn.version())}
    results: dict = {"device": torch.cuda.get_device_name(), "versions": versions, "rows": []}
    print(results["device"], versions, flush=True)
    for name, (dtype, make, limit) in BASELINES.items():
        try:
            launch = make((q, k, v))
            error = error_of(launch(), (q, k, v))
        except Exception as fault:  # what a package throws where it does not run is its own business
            print(f"{name}: left out: {type(fault).__name__}: {str(fault).splitlines()[:1]}", flush=True)
            continue
        assert error < limit, f"{name}: error {error}"
        ms = median_ms(launch)
        print(f"{name}: {ms:.2f} ms = {4 * TOKENS**2 * HEADS * DIM / ms * 1e-9:.0f} TFLOP/s, error {error:.4f}", flush=True)
        # What is quantised replaces bf16, too.
        cases = [f"video/dense-call/{dtype}/{PROBLEM}"] + [
            f"video/{what}/int8/{PROBLEM}" for what in ("dense-call", "dense-call-relaxed")]
        results["rows"] += [{"case": case, "baseline": name, "metric": "ms", "value": ms}
                            for case in dict.fromkeys(cases)]
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
