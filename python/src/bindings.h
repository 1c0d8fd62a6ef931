// SPDX-License-Identifier: Apache-2.0
// The parts of the module tilesieve._core, one file each.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>

#include "tilesieve/tensor.h"

namespace tilesieve::python {

namespace nb = nanobind;

// An argument that takes None, as all of the module do: they say by name what they do not take.
inline auto operator""_any(const char* name, size_t) { return nb::arg(name).none(); }

void bind_problem(nb::module_& module);    // problem lines, kernels, instruction sets
void bind_veda(nb::module_& module);       // tiles, budgets, routing and files of Veda
void bind_veda_sm90(nb::module_& module);  // VedaRouteCall: routing of Veda on Hopper
void bind_attention(nb::module_& module);  // Call, Plan: route, plan, attend, measure
void bind_prefill(nb::module_& module);    // PrefillCall: the prefill on Hopper
void bind_route(nb::module_& module);      // RouteCall: routing on Hopper
void bind_dense(nb::module_& module);      // DenseCall: dense attention in bf16 on Hopper
void bind_sage(nb::module_& module);       // SageCall: Sage attention on Hopper
void bind_files(nb::module_& module);      // safetensors and .npy
void bind_roofline(nb::module_& module);
void bind_layout(nb::module_& module);           // boxes, orders and tables of a video model's tokens
void bind_video(nb::module_& module);            // VideoCall: video models on the CPU
void bind_video_tables(nb::module_& module);     // VideoTables: of video models on Hopper
void bind_video_sm90(nb::module_& module);       // VideoRouteCall, VideoAttendCall: video models on Hopper
void bind_video_mass_sm90(nb::module_& module);  // VideoMassCall: what their routes would keep

// A NumPy array over the tensor's own memory. f32 and whole numbers, as the library returns them.
nb::object numpy_of(const Tensor& tensor);

}  // namespace tilesieve::python
