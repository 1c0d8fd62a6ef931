// SPDX-License-Identifier: Apache-2.0
// The sequence of a request to MiniMax-H3.
#include "base/fail.h"
#include "layout/box.h"
#include "tensor/extents.h"

namespace tilesieve {

namespace {

constexpr int64_t kPixels = 32;  // of a token's side
constexpr int64_t kFirstFrames = 5, kFirstLatents = 2;
constexpr int64_t kGroupFrames = 17, kGroupLatents = 5;
constexpr int64_t kAudioChannels = 2;
constexpr int64_t kMaxSize = int64_t{1} << 20;  // frames and pixels: 2^49 video tokens, which the limit then refuses

// round(frames / 24 a second * 40 a second), which is never half way between two numbers.
int64_t audio_tokens_of_channel(int64_t frames) { return (10 * frames + 3) / 6; }

void check_count(std::string_view field, int64_t count) {
  if (count < 0 || count > kMaxSequenceTokens) fail("request.{}: got {}, expected 0 to 2^31 - 1", field, count);
}

void check_side(std::string_view field, int64_t pixels) {
  if (pixels < kPixels || pixels > kMaxSize || pixels % kPixels != 0) {
    fail("request.{}: got {}, expected a multiple of {} from {} to 2^20", field, pixels, kPixels, kPixels);
  }
}

}  // namespace

TokenSequence h3_sequence(const H3Request& request) {
  if (request.frames < kFirstFrames || request.frames > kMaxSize ||
      (request.frames - kFirstFrames) % kGroupFrames != 0) {
    fail("request.frames: got {}, expected 17 n + 5, from 5 to 2^20", request.frames);
  }
  check_side("width", request.width);
  check_side("height", request.height);
  check_count("text_tokens", request.text_tokens);
  check_count("keyframes", request.keyframes);
  check_count("reference_tokens", request.reference_tokens);

  const int64_t latents = (request.frames - kFirstFrames) / kGroupFrames * kGroupLatents + kFirstLatents;
  const Grid grid = {latents, request.height / kPixels, request.width / kPixels};
  const int64_t audio = request.audio ? kAudioChannels * audio_tokens_of_channel(request.frames) : 0;
  TokenSequence sequence;
  for (const Segment& segment :
       {Segment{SegmentKind::text, request.text_tokens, {}},
        Segment{SegmentKind::conditioning, request.keyframes * grid.h * grid.w, {}},
        Segment{SegmentKind::reference, request.reference_tokens, {}}, Segment{SegmentKind::audio, audio, {}},
        Segment{SegmentKind::video, grid.num_tokens(), grid}}) {
    if (segment.num_tokens > 0) sequence.segments.push_back(segment);
  }
  try {
    sequence.validate();  // of what the request's fields make, only the number of tokens may be too large
  } catch (const Error& error) {
    fail("request: {} frames of {} x {} pixels and {} keyframes: {}", request.frames, request.width, request.height,
         request.keyframes, error.what());
  }
  return sequence;
}

}  // namespace tilesieve
