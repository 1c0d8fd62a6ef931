// SPDX-License-Identifier: Apache-2.0
// Layout: of which segments a video model's sequence consists, and in which order each head takes its video tokens, so
// that a tile of consecutive tokens is a box of space and time.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tilesieve/execution.h"
#include "tilesieve/sequence.h"
#include "tilesieve/tensor.h"

namespace [[gnu::visibility("default")]] tilesieve {

// A request to MiniMax-H3, whose latents have 32 pixels a token and 5 latent frames for 17 of the video. Sources: the
// model's config.json and the token packing of FastVideo.
struct H3Request {
  int64_t frames = 124;                // 17 n + 5, at 24 a second
  int64_t width = 1344, height = 768;  // pixels, multiples of 32
  int64_t text_tokens = 594;
  int64_t keyframes = 0;  // conditioning images of the size of a frame
  int64_t reference_tokens = 0;
  bool audio = true;  // 40 tokens a second for each of two channels
};

// [ text | conditioning | reference | audio | video ], empty segments left out. Throws Error naming the field.
TokenSequence h3_sequence(const H3Request& request);

// t latent frames x h rows x w tokens of a row, in raster order inside; all 0 = raster: the whole grid is one box.
struct Box {
  int64_t t = 0, h = 0, w = 0;
  bool is_raster() const { return t == 0; }
  int64_t num_tokens() const { return t * h * w; }

  // "4x4x4" or "raster".
  static Box parse(std::string_view text);
  std::string to_text() const;

  bool operator==(const Box&) const = default;
};

// The boxes of powers of two with num_tokens tokens that fit into the grid and leave at most max_cut of the slots empty
// when every box that crosses the grid's edge is counted whole; least cut first, then larger t, then larger h.
std::vector<Box> box_menu(const Grid& grid, int64_t num_tokens, double max_cut);

// Slot -> token of the grid, a bijection [grid.num_tokens()]: whole boxes first, so that tiles of the box's size hold
// exactly one; then those that the grid's edge cuts short, face by face. Boxes follow each other there and back, so
// that one borders on the next; inside a box tokens are in raster order. A box may be larger than the grid.
std::vector<int32_t> box_order(const Grid& grid, const Box& box);

// The order in which each head takes the tokens of a sequence: video segments in boxes, all others as they lie.
class TokenLayout {
 public:
  // One box for each head. Throws Error naming the segment or the box.
  TokenLayout(const TokenSequence& sequence, std::span<const Box> box_of_head);
  // Orders slot -> token, all of as many tokens, and for each head the place of its own among them. Throws Error naming
  // the order that is no bijection, or the head without one.
  TokenLayout(std::vector<std::vector<int32_t>> orders, std::vector<int32_t> order_of_head);

  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_heads() const { return static_cast<int64_t>(order_of_head_.size()); }
  // Slot -> token of the sequence, [num_tokens], of a head of 0 to num_heads - 1. Heads with the same box share one.
  std::span<const int32_t> order(int64_t head) const { return orders_[static_cast<size_t>(order_of_head_[head])]; }
  // Token -> slot: order(head)[inverse_order(head)[i]] = i.
  std::span<const int32_t> inverse_order(int64_t head) const {
    return inverse_orders_[static_cast<size_t>(order_of_head_[head])];
  }
  bool is_identity(int64_t head) const;

 private:
  int64_t num_tokens_;
  std::vector<std::vector<int32_t>> orders_, inverse_orders_;
  std::vector<int32_t> order_of_head_;
};

// slots[s, h, ...] = tokens[order(head_begin + h)[s], h, ...]. Both [num_tokens, num_heads of the view] or with one
// more dimension, of one dtype, on the CPU, with any strides, and apart from each other. Throws Error naming the
// argument.
void gather_tokens(const TokenLayout& layout, const TensorView& tokens, const TensorView& slots, int64_t head_begin = 0,
                   const Execution& execution = {});

// The inverse: tokens[order(head_begin + h)[s], h, ...] = slots[s, h, ...].
void scatter_tokens(const TokenLayout& layout, const TensorView& slots, const TensorView& tokens,
                    int64_t head_begin = 0, const Execution& execution = {});

// A static choice of a box for each (layer, head) of a model, for one grid.
struct LayoutTable {
  Grid grid;
  std::vector<Box> menu;
  std::vector<std::vector<int32_t>> box_of_head;  // [num_layers][num_heads] places in the menu

  // JSON: {"format": "tilesieve-layout-1", "grid": [37, 24, 42], "menu": ["raster", "4x4x4"], "box_of_head": [[0, 1]]}.
  // Unknown fields, and fields that are missing or come twice, are refused; numbers and sizes are checked: at most 256
  // boxes, 1024 layers and 4096 heads, and as many heads in each layer.
  static LayoutTable parse(std::string_view json);
  std::string to_json() const;
  void validate() const;

  // The layout of num_heads heads from head_begin of a layer; num_heads -1 = all from there. Throws Error when the
  // sequence has a video segment of another grid.
  TokenLayout layout(const TokenSequence& sequence, int64_t layer, int64_t head_begin = 0,
                     int64_t num_heads = -1) const;

  bool operator==(const LayoutTable&) const = default;
};

// The grid of the sequence's video segments. Throws Error where there is none, or more than one.
Grid video_grid(const TokenSequence& sequence);

// What a search tries where nobody says what else: raster, and the boxes of a block of keys of box_menu() that cut at
// most 15 % of the slots.
std::vector<Box> search_menu(const Grid& grid, int64_t kv_block_size);

// The mass that a captured call's route keeps in each box of a menu, [menu boxes][num_heads].
struct BoxMasses {
  int64_t layer = 0;
  std::vector<std::vector<double>> mass;
};

struct LayoutSearch {
  struct Layer {
    int64_t layer = 0;
    std::vector<double> mass;  // [num_heads] of the chosen boxes, mean over the layer's calls
  };
  LayoutTable table;
  double chosen_mass = 0;           // of the table, mean over captured layers and heads
  std::vector<double> box_mass;     // [menu boxes] of each box alone, likewise
  std::vector<int64_t> num_chosen;  // [menu boxes] captured (layer, head) pairs that it is the best of
  std::vector<Layer> layers;        // captured ones, ascending
};

// For each (layer, head) the box that keeps the most, mean over the calls of the layer; ties go to the earlier entry of
// the menu. Layers below the last one that no call is of take the best box overall. Throws Error naming the call.
LayoutSearch search_layouts(const Grid& grid, std::span<const Box> menu, std::span<const BoxMasses> calls);

}  // namespace tilesieve
