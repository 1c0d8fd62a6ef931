// SPDX-License-Identifier: Apache-2.0
// The tokens of a video model into the boxes of each head and back, against copying as many bytes as they lie.
#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <cstring>

#include "cases.h"

namespace tilesieve::bench {

namespace {

constexpr int64_t kHeads = 56, kHeadDim = 128;

// Of MiniMax-H3: [token, head, dim], as a projection writes them, and slots in memory [head, token, dim], as attention
// reads them head by head. Heads take all boxes of a menu in turn, so that neighbours have different orders.
struct VideoTokens {
  TokenSequence sequence = h3_sequence({});
  int64_t num_tokens = sequence.num_tokens();
  TokenLayout layout{sequence, boxes()};
  Tensor tokens{DType::bf16, {num_tokens, kHeads, kHeadDim}};
  Tensor memory{DType::bf16, {kHeads, num_tokens, kHeadDim}};
  TensorView slots = tokens.view();

  VideoTokens() {
    slots.data = memory.view().data;
    slots.strides = {kHeadDim, num_tokens * kHeadDim, 1};
    auto* bits = tokens.as<uint16_t>();
    for (int64_t i = 0; i < tokens.view().num_elements(); ++i) bits[i] = static_cast<uint16_t>(i * 40503 >> 8);
  }

  static std::vector<Box> boxes() {
    const std::vector<Box> menu = box_menu({37, 24, 42}, 64, 0.15);
    std::vector<Box> of_head;
    for (size_t head = 0; head < kHeads; ++head) of_head.push_back(menu[head % menu.size()]);
    return of_head;
  }

  // Throws Error unless every slot holds the row of its token.
  void check() const {
    for (int64_t head = 0; head < kHeads; ++head) {
      for (int64_t slot = 0; slot < num_tokens; ++slot) {
        const int64_t token = layout.order(head)[static_cast<size_t>(slot)];
        if (std::memcmp(memory.as<uint16_t>() + (head * num_tokens + slot) * kHeadDim,
                        tokens.as<uint16_t>() + (token * kHeads + head) * kHeadDim, kHeadDim * 2) != 0) {
          throw Error(fmt::format("bench: head {}, slot {} does not hold token {}", head, slot, token));
        }
      }
    }
  }
};

void copy_in_parts(const Tensor& from, const Tensor& to, int num_threads) {
  const int64_t bytes = from.view().num_elements() * size_in_bytes(from.view().dtype);
#pragma omp parallel num_threads(num_threads)
  {
    const int64_t part = (bytes + omp_get_num_threads() - 1) / omp_get_num_threads();
    const int64_t begin = std::min(bytes, part * omp_get_thread_num()), end = std::min(bytes, begin + part);
    std::memcpy(to.as<uint8_t>() + begin, from.as<uint8_t>() + begin, static_cast<size_t>(end - begin));
  }
}

}  // namespace

void Cases::add_video() {
  // Made when the first case runs: a gigabyte.
  const auto made = std::make_shared<std::unique_ptr<VideoTokens>>();
  const auto video = [made]() -> const VideoTokens& {
    if (!*made) *made = std::make_unique<VideoTokens>();
    return **made;
  };
  const int64_t num_tokens = h3_sequence({}).num_tokens();
  const auto add_case = [&](const std::string& what, const std::function<void()>& run,
                            const std::function<void()>& check) {
    cases_.push_back(std::make_unique<Case>());
    Case& added = *cases_.back();
    added.measurement.name = fmt::format("video/{}/bf16/{}x{}/-", what, num_tokens, kHeads);
    added.measurement.bytes = 2.0 * 2.0 * static_cast<double>(num_tokens * kHeads * kHeadDim);
    added.run = run;
    added.check = check;
  };
  const Execution execution = {num_threads_};
  const auto copy = [=, threads = num_threads_] { copy_in_parts(video().tokens, video().memory, threads); };
  const auto gather = [=] { gather_tokens(video().layout, video().tokens.view(), video().slots, 0, execution); };
  const auto scatter = [=] { scatter_tokens(video().layout, video().slots, video().tokens.view(), 0, execution); };
  add_case("copy", copy, copy);
  add_case("gather", gather, [=] {
    gather();
    video().check();
  });
  add_case("scatter", scatter, [=] {
    gather();
    const Tensor& tokens = video().tokens;  // cleared, so that each must be written
    std::memset(tokens.as<uint8_t>(), 0, static_cast<size_t>(tokens.view().num_elements() * 2));
    scatter();
    video().check();
  });
}

}  // namespace tilesieve::bench
