// SPDX-License-Identifier: Apache-2.0
#include "tilesieve/sequence.h"

#include <charconv>

#include "base/fail.h"

namespace tilesieve {

namespace {

constexpr SegmentKind kKinds[] = {SegmentKind::text, SegmentKind::conditioning, SegmentKind::reference,
                                  SegmentKind::audio, SegmentKind::video};
constexpr int64_t kMaxTokens = int64_t{1} << 31;  // as of a problem
constexpr size_t kMaxSegments = size_t{1} << 20;

int64_t parse_count(std::string_view word, std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < 0 || value > kMaxTokens) {
    fail("segments: '{}' of '{}' is not a whole number from 0 to 2^31", text, word);
  }
  return value;
}

Segment parse_segment(std::string_view word) {
  const size_t colon = word.find(':');
  if (colon == std::string_view::npos) fail("segments: '{}' is not of the form kind:tokens or kind:TxHxW", word);
  Segment segment;
  segment.kind = parse_segment_kind(word.substr(0, colon));
  const std::string_view size = word.substr(colon + 1);
  const size_t first = size.find('x'), second = first == size.npos ? size.npos : size.find('x', first + 1);
  if (first == size.npos) {
    segment.num_tokens = parse_count(word, size);
    return segment;
  }
  if (second == size.npos) fail("segments: '{}' is not of the form kind:tokens or kind:TxHxW", word);
  segment.grid = {parse_count(word, size.substr(0, first)),
                  parse_count(word, size.substr(first + 1, second - first - 1)),
                  parse_count(word, size.substr(second + 1))};
  segment.num_tokens = segment.grid.num_tokens_up_to(kMaxTokens + 1);
  return segment;
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
  fail("segments: got kind '{}', expected text, conditioning, reference, audio or video", name);
}

int64_t Grid::num_tokens_up_to(int64_t most) const {
  int64_t tokens = 1;
  for (int64_t side : {t, h, w}) {
    if (side == 0) return 0;
    if (tokens > most / side) return most;
    tokens *= side;
  }
  return tokens;
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
  while (!line.empty()) {
    const size_t comma = std::min(line.find(','), line.size());
    if (sequence.segments.size() == kMaxSegments) fail("segments: more than 2^20 of them");
    sequence.segments.push_back(parse_segment(line.substr(0, comma)));
    if (comma + 1 == line.size()) fail("segments: nothing behind the last comma");
    line.remove_prefix(std::min(comma + 1, line.size()));
  }
  sequence.validate();
  return sequence;
}

std::string TokenSequence::to_line() const {
  std::string line;
  for (const Segment& segment : segments) {
    if (!line.empty()) line += ',';
    const auto& [t, h, w] = segment.grid;
    line += segment.has_grid() ? fmt::format("{}:{}x{}x{}", name_of(segment.kind), t, h, w)
                               : fmt::format("{}:{}", name_of(segment.kind), segment.num_tokens);
  }
  return line;
}

void TokenSequence::validate() const {
  int64_t total = 0;
  for (size_t i = 0; i < segments.size(); ++i) {
    const Segment& segment = segments[i];
    const auto& [t, h, w] = segment.grid;
    if (segment.num_tokens < 0 || segment.num_tokens > kMaxTokens) {
      fail("segments: segment {} has {} tokens, expected 0 to 2^31", i, segment.num_tokens);
    }
    if (segment.has_grid() &&
        (t < 0 || h < 0 || w < 0 || segment.grid.num_tokens_up_to(kMaxTokens + 1) != segment.num_tokens)) {
      fail("segments: segment {} has a grid of {}x{}x{} for {} tokens", i, t, h, w, segment.num_tokens);
    }
    total += segment.num_tokens;
    if (total > kMaxTokens) fail("segments: more than 2^31 tokens together");
  }
}

}  // namespace tilesieve
