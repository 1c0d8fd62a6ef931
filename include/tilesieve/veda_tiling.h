// SPDX-License-Identifier: Apache-2.0
// Layout: the tiles of Veda (arXiv 2605.30325; its code: Miowtion and Veda-on-ComfyUI). A video's grid is padded to
// whole boxes of 128 tokens, and each box is one tile of queries and one of keys, however few of its tokens are real.
// Here padding takes no room: a sequence has one video segment for each tile, no block spans two segments, and
// q_block_size = kv_block_size = 128.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tilesieve/layout.h"
#include "tilesieve/sequence.h"

namespace [[gnu::visibility("default")]] tilesieve {

struct VedaTiling {
  std::vector<int32_t> order;        // slot -> token of the grid, tile after tile: a bijection [grid.num_tokens()]
  std::vector<int32_t> valid_count;  // [tiles] tokens of each: 1 to 128, 128 where the box lies inside the grid
};

// Tiles go along t first, then w, then h; tokens of a tile are in raster order. Throws Error naming the grid, or the
// box where it has not 128 tokens.
VedaTiling veda_tiling(const Grid& grid, const Box& box);

// Of 8x4x4, 2x8x8, 4x4x8, 4x8x4, 8x2x8 and 8x8x2, in this order, those that pad the grid by at most max_padding slots
// for each token.
std::vector<Box> veda_menu(const Grid& grid, double max_padding = 0.2);

// The sequence with its video as one segment without a grid for each tile. All else stays as it is, and is attended to
// by all. Throws Error where there is not exactly one video segment with tokens, or it has no grid; other videos can be
// given as references.
TokenSequence veda_sequence(const TokenSequence& sequence, const Box& box);

// The order that goes with it: each head's video in the tiles of its box, all else as it lies. Heads of different boxes
// have different sequences. Errors as of veda_sequence() and veda_tiling().
TokenLayout veda_layout(const TokenSequence& sequence, std::span<const Box> box_of_head);

}  // namespace tilesieve
