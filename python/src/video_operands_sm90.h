// SPDX-License-Identifier: Apache-2.0
// What the calls of video models on Hopper have in common: queries, keys and the tables of a layout, and choosing.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "arrays.h"
#include "cuda_call.h"
#include "tilesieve/video_route.h"
#include "tilesieve/video_sm90.h"
#include "video_tables.h"

namespace tilesieve::python {

// Throws Error where block sizes, of which there is one each, are others.
void check_video_block_sizes(nb::handle q_block_size, nb::handle kv_block_size);

// Throws Error, naming the argument, where the router is not one of CUDA devices.
sm90::VideoRouting video_routing_from(const char* router_argument, const VideoRouteOptions& options);

class VideoOperands {
 public:
  // Tables that were given, or none: they are made here of segments and the layout, whose argument is named.
  VideoOperands(Stream stream, nb::handle q, nb::handle k, nb::handle tensor_layout, const VideoTables* tables,
                nb::handle segments, const std::string& layout_argument, nb::handle layout, nb::handle layer,
                nb::handle head_begin);
  VideoOperands(const VideoOperands&) = delete;
  VideoOperands& operator=(const VideoOperands&) = delete;

  // Bytes of memory to be given to upload_tables() before the call runs; 0 = the tables lie there.
  int64_t tables_bytes() const { return own_tables_ ? own_tables_->bytes() : 0; }
  void upload_tables(nb::handle memory) { own_tables_->upload(memory); }

  Stream stream() const { return stream_; }
  const TensorView& q() const { return q_.view(); }
  const TensorView& k() const { return k_.view(); }
  NamedView named_q() const { return {"q", q_.view()}; }
  sm90::DenseLayout layout() const { return layout_; }
  const sm90::VideoTables& tables() const { return tables_->tables(); }

  // Of one list for each KV head, with sequences in front where q has a dimension of them.
  std::vector<int64_t> shape_of_rows(int64_t num_rows, int64_t num_columns) const;

  // Of route_video(): ids and workspace are memory that nobody else has.
  std::vector<int64_t> shape_of_ids(const sm90::VideoRouting& routing) const;
  int64_t route_workspace() const;
  void route(const sm90::VideoRouting& routing, nb::handle ids, nb::handle workspace) const;

 private:
  void check_dims(const char* argument, const BorrowedArray& array) const;

  Stream stream_;
  BorrowedArray q_, k_;
  sm90::DenseLayout layout_;
  std::optional<VideoTables> own_tables_;
  const VideoTables* tables_ = nullptr;
};

}  // namespace tilesieve::python
