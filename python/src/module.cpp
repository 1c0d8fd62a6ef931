// SPDX-License-Identifier: Apache-2.0
// The module tilesieve._core: the C++ library as the Python files of the package call it. Its functions take all their
// arguments by position and are not for users; python/tilesieve has the names, defaults and descriptions.
#include <nanobind/nanobind.h>

#include "bindings.h"
#include "errors.h"

NB_MODULE(_core, module) {
  module.attr("VERSION") = TILESIEVE_VERSION;
  tilesieve::python::bind_errors(module);
  tilesieve::python::bind_problem(module);
  tilesieve::python::bind_veda(module);
  tilesieve::python::bind_attention(module);
  tilesieve::python::bind_prefill(module);
  tilesieve::python::bind_route(module);
  tilesieve::python::bind_dense(module);
  tilesieve::python::bind_sage(module);
  tilesieve::python::bind_files(module);
  tilesieve::python::bind_roofline(module);
  tilesieve::python::bind_layout(module);
  tilesieve::python::bind_video(module);
  tilesieve::python::bind_video_tables(module);  // before the calls that take them
  tilesieve::python::bind_video_sm90(module);
  tilesieve::python::bind_veda_sm90(module);
  tilesieve::python::bind_video_mass_sm90(module);
}
