// SPDX-License-Identifier: Apache-2.0
// The tiles of a video's sequence in a layout, on a Hopper GPU.
#pragma once

#include <cstdint>
#include <memory>

#include "tilesieve/layout.h"
#include "tilesieve/sequence.h"

namespace [[gnu::visibility("default")]] tilesieve {
namespace sm90 {

struct VideoTiling;

// Which tokens lie in which tile of 128 queries or 64 keys, for a sequence in a layout, as calls read it on the device.
// Made once, for any number of calls of any batch of such sequences. The device memory is the caller's and must outlive
// the calls; copies of the object share it.
class VideoTables {
 public:
  // Tiles begin anew with each segment. The layout is of the KV heads. Throws Error where the two do not fit.
  VideoTables(const TokenSequence& sequence, const TokenLayout& layout);
  explicit VideoTables(VideoTiling tiling);  // that veda_tables() made (veda_sm90.h)

  int64_t bytes() const;
  // Copies them to `memory` on the current device, of bytes() bytes aligned to 256, and waits. Throws Error as a call.
  // Calls are then on this device, and none may be made, with this object or a copy, while another thread uploads.
  void upload(void* memory, int64_t memory_bytes);

  int64_t num_tokens() const;
  int64_t num_kv_heads() const;
  int64_t num_q_tiles() const;
  int64_t num_kv_tiles() const;

  const VideoTiling& tiling() const { return *tiling_; }

 private:
  std::shared_ptr<VideoTiling> tiling_;
};

}  // namespace sm90
}  // namespace tilesieve
