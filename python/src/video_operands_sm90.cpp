// SPDX-License-Identifier: Apache-2.0
#include "video_operands_sm90.h"

#include "errors.h"
#include "values.h"

namespace tilesieve::python {

namespace {

constexpr int64_t kQBlockSize = 128, kKvBlockSize = 64;

void check_block_size(const char* argument, nb::handle got, int64_t expected) {
  const int64_t size = whole_number(argument, got);
  if (size == expected) return;
  throw Error(std::string(argument) + ": got " + std::to_string(size) + ", expected " + std::to_string(expected) +
              ", the size of CUDA devices");
}

}  // namespace

void check_video_block_sizes(nb::handle q_block_size, nb::handle kv_block_size) {
  check_block_size("q_block_size", q_block_size, kQBlockSize);
  check_block_size("kv_block_size", kv_block_size, kKvBlockSize);
}

sm90::VideoRouting video_routing_from(const char* router_argument, const VideoRouteOptions& options) {
  if (options.router != Router::mean_pool) {
    throw Error(std::string(router_argument) + ": got '" + std::string(name_of(options.router)) +
                "', expected mean_pool, the router of CUDA devices");
  }
  return {options.budget, options.forced_inside_budget, options.num_routed};
}

VideoOperands::VideoOperands(Stream stream, nb::handle q, nb::handle k, nb::handle tensor_layout,
                             const VideoTables* tables, nb::handle segments, const std::string& layout_argument,
                             nb::handle layout, nb::handle layer, nb::handle head_begin)
    : stream_(stream), q_("q", q, Access::read, stream_), k_("k", k, Access::read, stream_) {
  layout_ = renamed("layout", "tensor_layout",
                    [&] { return sm90::parse_dense_layout(text("tensor_layout", tensor_layout)); });
  check_dims("q", q_);
  check_dims("k", k_);
  check_device({"k", k_.view()}, named_q());
  tables_ = tables;
  if (tables_ == nullptr) {
    const TensorView& keys = k_.view();
    const int heads = keys.num_dims - (layout_ == sm90::DenseLayout::nhd ? 2 : 3);
    tables_ = &own_tables_.emplace(segments, layout_argument, layout, layer, head_begin, nb::int_(keys.sizes[heads]));
  } else {
    check_device(tables_->memory(), named_q());
  }
}

void VideoOperands::check_dims(const char* argument, const BorrowedArray& array) const {
  if (array.view().num_dims == 3 || array.view().num_dims == 4) return;
  throw Error(std::string(argument) + ": got " + (array.is_absent() ? "None" : array.view().describe()) +
              ", expected " +
              (layout_ == sm90::DenseLayout::nhd ? "[tokens, heads, head_dim]" : "[heads, tokens, head_dim]") +
              ", with a dimension of sequences in front or without");
}

std::vector<int64_t> VideoOperands::shape_of_rows(int64_t num_rows, int64_t num_columns) const {
  std::vector<int64_t> sizes;
  if (q().num_dims == 4) sizes.push_back(q().sizes[0]);
  sizes.insert(sizes.end(), {tables().num_kv_heads(), num_rows, num_columns});
  return sizes;
}

std::vector<int64_t> VideoOperands::shape_of_ids(const sm90::VideoRouting& routing) const {
  const int64_t capacity = call_by_argument([&] { return sm90::video_list_capacity(tables(), routing); });
  return shape_of_rows(tables().num_q_tiles(), capacity);
}

int64_t VideoOperands::route_workspace() const {
  return call_by_argument([&] { return sm90::route_video_workspace(q(), k(), layout_, tables()); });
}

void VideoOperands::route(const sm90::VideoRouting& routing, nb::handle ids, nb::handle workspace) const {
  const BorrowedArray written("ids", ids, Access::write, stream_);
  const BorrowedArray memory("workspace", workspace, Access::write, stream_);
  const int64_t bytes = bytes_of_workspace(memory.view());
  const nb::gil_scoped_release release;
  const CurrentDevice device(q().device.index);
  call_by_argument([&] {
    sm90::route_video(q(), k(), layout_, tables(), routing, written.view(), memory.view().data, bytes, *stream_);
  });
}

}  // namespace tilesieve::python
