// SPDX-License-Identifier: Apache-2.0
// The segments of a video model's sequence: text, images that it is conditioned on, sound, video.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace [[gnu::visibility("default")]] tilesieve {

enum class SegmentKind : uint8_t { text, conditioning, reference, audio, video };

std::string_view name_of(SegmentKind kind);
SegmentKind parse_segment_kind(std::string_view name);  // Error when unknown

// Latent frames x rows x tokens of a row, in raster order: token (f, y, x) is number (f * h + y) * w + x.
struct Grid {
  int64_t t = 0, h = 0, w = 0;
  int64_t num_tokens() const { return t * h * w; }
  bool operator==(const Grid&) const = default;
};

struct Segment {
  SegmentKind kind = SegmentKind::video;
  int64_t num_tokens = 0;
  Grid grid;  // of the num_tokens tokens of a video; all 0 = none, for what has no order in space or needs no layout
  bool has_grid() const { return grid != Grid{}; }
  bool operator==(const Segment&) const = default;
};

// The tokens that attend to each other, segment after segment. No block of queries or keys spans two segments.
struct TokenSequence {
  std::vector<Segment> segments;

  int64_t num_tokens() const;
  int64_t num_tokens(SegmentKind kind) const;

  // "text:594,audio:414,video:37x24x42", or "video:1000" without a grid; parse(to_line()) gives the same sequence back.
  static TokenSequence parse(std::string_view line);
  std::string to_line() const;

  // Throws Error naming the first segment that is not as described above. At most 65,536 segments and 2^31 - 1 tokens.
  void validate() const;

  bool operator==(const TokenSequence&) const = default;
};

}  // namespace tilesieve
