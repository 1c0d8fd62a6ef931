// SPDX-License-Identifier: Apache-2.0
// The segments of a sequence, and their line of text.
#include <algorithm>

#include "base/fail.h"
#include "base/show_name.h"
#include "base/whole_number.h"
#include "tensor/extents.h"

namespace tilesieve {

namespace {

constexpr size_t kMaxSegments = 65536;
constexpr SegmentKind kKinds[] = {SegmentKind::text, SegmentKind::conditioning, SegmentKind::reference,
                                  SegmentKind::audio, SegmentKind::video};

std::string segment_text(const Segment& segment) {
  return segment.has_grid() ? fmt::format("{}:{}", name_of(segment.kind), to_text(segment.grid))
                            : fmt::format("{}:{}", name_of(segment.kind), segment.num_tokens);
}

Segment parse_segment(std::string_view text) {
  const size_t colon = text.find(':');
  if (colon == text.npos) {
    fail("sequence: got {}, expected kind:tokens such as text:594 or video:37x24x42", show_name(text));
  }
  Segment segment;
  segment.kind = parse_segment_kind(text.substr(0, colon));
  const std::string_view size = text.substr(colon + 1);
  if (segment.kind == SegmentKind::video && size.find('x') != size.npos) {
    const auto sizes = parse_extents(size);
    if (!sizes) fail("sequence: {}: expected a grid of t x h x w such as video:37x24x42", show_name(text));
    segment.grid = {(*sizes)[0], (*sizes)[1], (*sizes)[2]};
    check_grid(fmt::format("sequence: {}", show_name(text)), segment.grid);  // before its sizes are multiplied
    segment.num_tokens = segment.grid.num_tokens();
  } else {
    const auto num_tokens = whole_number(size);
    if (!num_tokens) fail("sequence: {}: expected a whole number of tokens", show_name(text));
    segment.num_tokens = *num_tokens;
  }
  return segment;
}

void check_segment(const std::string& argument, const Segment& segment) {
  if (std::find(std::begin(kKinds), std::end(kKinds), segment.kind) == std::end(kKinds)) {
    fail("{}: got the kind {}, which is none", argument, static_cast<int>(segment.kind));
  }
  if (segment.kind == SegmentKind::video && segment.has_grid()) {
    check_grid(argument + ".grid", segment.grid);
    if (segment.num_tokens != segment.grid.num_tokens()) {
      fail("{}.num_tokens: got {}, expected {}, those of the grid {}", argument, segment.num_tokens,
           segment.grid.num_tokens(), to_text(segment.grid));
    }
  } else if (segment.has_grid()) {
    fail("{}.grid: got {}, expected none (all 0) for {}", argument, to_text(segment.grid), name_of(segment.kind));
  }
  if (segment.num_tokens < 0 || segment.num_tokens > kMaxSequenceTokens) {
    fail("{}.num_tokens: got {}, expected 0 to 2^31 - 1", argument, segment.num_tokens);
  }
}

}  // namespace

std::string_view name_of(SegmentKind kind) {
  switch (kind) {
    case SegmentKind::text:
      return "text";
    case SegmentKind::conditioning:
      return "conditioning";
    case SegmentKind::reference:
      return "reference";
    case SegmentKind::audio:
      return "audio";
    case SegmentKind::video:
      return "video";
  }
  return "unknown";
}

SegmentKind parse_segment_kind(std::string_view name) {
  for (SegmentKind kind : kKinds) {
    if (name == name_of(kind)) return kind;
  }
  fail("segment kind: got {}, expected text, conditioning, reference, audio or video", show_name(name));
}

int64_t TokenSequence::num_tokens() const {
  int64_t total = 0;
  for (const Segment& segment : segments) total += segment.num_tokens;
  return total;
}

int64_t TokenSequence::num_tokens(SegmentKind kind) const {
  int64_t total = 0;
  for (const Segment& segment : segments) total += segment.kind == kind ? segment.num_tokens : 0;
  return total;
}

TokenSequence TokenSequence::parse(std::string_view line) {
  TokenSequence sequence;
  bool more = !line.empty();  // the line of no segments
  while (more) {
    if (sequence.segments.size() == kMaxSegments) fail("sequence: lists over {} segments", kMaxSegments);
    const size_t comma = line.find(',');
    sequence.segments.push_back(parse_segment(line.substr(0, comma)));
    more = comma != line.npos;
    if (more) line.remove_prefix(comma + 1);
  }
  sequence.validate();
  return sequence;
}

std::string TokenSequence::to_line() const {
  std::string line;
  for (const Segment& segment : segments) {
    if (!line.empty()) line += ',';
    line += segment_text(segment);
  }
  return line;
}

void TokenSequence::validate() const {
  if (segments.size() > kMaxSegments) {
    fail("sequence: got {} segments, at most {} are supported", segments.size(), kMaxSegments);
  }
  int64_t total = 0;
  for (size_t i = 0; i < segments.size(); ++i) {
    const std::string argument = fmt::format("sequence.segments[{}]", i);
    check_segment(argument, segments[i]);
    total += segments[i].num_tokens;
    if (total > kMaxSequenceTokens) {
      fail("{}: with {} the sequence has {} tokens, at most 2^31 - 1 are supported", argument,
           segment_text(segments[i]), total);
    }
  }
}

}  // namespace tilesieve
