// SPDX-License-Identifier: Apache-2.0
// The tiles of a video's sequence as Python holds them: made on the host, then in the memory of a CUDA device.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "cuda_call.h"
#include "tilesieve/video_tables_sm90.h"

namespace tilesieve::python {

class VideoTables {
 public:
  // `num_kv_heads` None = as many as the layout, whose argument is named, has boxes for, from head_begin.
  VideoTables(nanobind::handle segments, const std::string& layout_argument, nanobind::handle layout,
              nanobind::handle layer, nanobind::handle head_begin, nanobind::handle num_kv_heads);
  // Of Veda's tiles, a box for each head.
  static VideoTables of_veda(nanobind::handle segments, nanobind::handle boxes, nanobind::handle keep_ratio,
                             nanobind::handle tiles_per_row);

  int64_t bytes() const { return tables_.bytes(); }
  // Copies them to memory of bytes() bytes, which is kept, and waits: for the current stream of its library too, on
  // which the memory may have been somebody else's.
  void upload(nanobind::handle memory);

  const sm90::VideoTables& tables() const { return tables_; }
  bool has_veda_tiles() const { return has_veda_tiles_; }
  // Where they lie; without data before they were uploaded.
  NamedView memory() const { return {"tables", view_}; }

 private:
  VideoTables(sm90::VideoTables tables, bool has_veda_tiles);

  sm90::VideoTables tables_;
  bool has_veda_tiles_ = false;
  nanobind::object memory_;
  TensorView view_;
};

}  // namespace tilesieve::python
