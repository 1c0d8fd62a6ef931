# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention for CPUs and Hopper GPUs: which blocks of keys matter, and attention over them.

    block_index = tilesieve.route(q, k, router="qk_max", top_k=16)      # which blocks
    o = tilesieve.attend(q, k, v, block_index)                          # attention over them
    kept = tilesieve.mass(q, k, block_index)                            # what that has lost

Arrays are NumPy's (bf16 and fp8 through ml_dtypes), or those of any library with DLPack: PyTorch, CuPy, JAX. They are
borrowed, never copied. Tensors come first, in the order of their names above; all else is by keyword, and a keyword
means the same in every call.
"""

from ._arrays import Array
from ._attend import Plan, attend, explain, plan, workspace_bytes
from ._combine import combine
from ._core import VERSION as __version__
from ._core import Error
from ._dense import dense_attention
from ._files import TensorFile, read_tensors, write_npy, write_safetensors
from ._layout import Layout, LayoutTable, box_menu, box_order, gather_tokens, h3_segments, scatter_tokens
from ._mass import Difference, Mass, compare, mass
from ._options import Arithmetic, Isa, LoopOrder, Router, VideoRouter
from ._problem import DType, Kernel, Problem, available_isas, kernels
from ._quality import Quality, QualityMeasure, quality
from ._roofline import (
    Roofline,
    RooflineCrossover,
    RooflineDevice,
    RooflineRow,
    RooflineSizes,
    measure_roofline_device,
    roofline,
    roofline_devices,
)
from ._route import route, route_scores, sparse_prefill
from ._sage import sage_attention
from ._veda import (
    VedaPlan,
    VedaPredictor,
    read_veda_predictor,
    route_veda,
    veda_budgets,
    veda_menu,
    veda_sequence,
    veda_tiling,
)
from ._video import (
    DensePolicy,
    VideoBudget,
    VideoMass,
    layout_search,
    route_video,
    video_attention,
    video_budget,
    video_mass,
)
from ._video_cuda import VideoTables

__all__ = [
    "Arithmetic",
    "Array",
    "DType",
    "DensePolicy",
    "Difference",
    "Error",
    "Isa",
    "Kernel",
    "Layout",
    "LayoutTable",
    "LoopOrder",
    "Mass",
    "Plan",
    "Problem",
    "Quality",
    "QualityMeasure",
    "Roofline",
    "RooflineCrossover",
    "RooflineDevice",
    "RooflineRow",
    "RooflineSizes",
    "Router",
    "TensorFile",
    "VedaPlan",
    "VedaPredictor",
    "VideoBudget",
    "VideoMass",
    "VideoRouter",
    "VideoTables",
    "__version__",
    "attend",
    "available_isas",
    "box_menu",
    "box_order",
    "combine",
    "compare",
    "dense_attention",
    "explain",
    "gather_tokens",
    "h3_segments",
    "kernels",
    "layout_search",
    "mass",
    "measure_roofline_device",
    "plan",
    "quality",
    "read_tensors",
    "read_veda_predictor",
    "roofline",
    "roofline_devices",
    "route",
    "route_scores",
    "route_veda",
    "route_video",
    "sage_attention",
    "scatter_tokens",
    "sparse_prefill",
    "veda_budgets",
    "veda_menu",
    "veda_sequence",
    "veda_tiling",
    "video_attention",
    "video_budget",
    "video_mass",
    "workspace_bytes",
    "write_npy",
    "write_safetensors",
]

for _name in __all__:  # where users find them, which is what tracebacks, pickles and help() are to say
    if getattr(globals()[_name], "__module__", "").startswith("tilesieve."):
        globals()[_name].__module__ = "tilesieve"
del _name
