// SPDX-License-Identifier: Apache-2.0
// The best box for each (layer, head) of a model, from what boxes keep of captured calls.
#include <algorithm>
#include <map>

#include "base/fail.h"
#include "layout/layout_table_json.h"
#include "tilesieve/layout.h"

namespace tilesieve {

namespace {

constexpr double kMaxCut = 0.15;

using Masses = std::vector<std::vector<double>>;  // [menu boxes][num_heads]

void check_calls(std::span<const BoxMasses> calls, size_t num_boxes) {
  if (calls.empty()) fail("calls: got none, expected a captured call or more");
  for (size_t i = 0; i < calls.size(); ++i) {
    const auto& [layer, mass] = calls[i];
    if (layer < 0 || layer >= static_cast<int64_t>(kMaxTableLayers)) {
      fail("calls[{}].layer: got {}, expected 0 to {}", i, layer, kMaxTableLayers - 1);
    }
    if (mass.size() != num_boxes) fail("calls[{}].mass: got {} boxes, the menu has {}", i, mass.size(), num_boxes);
    const size_t num_heads = calls[0].mass[0].size();
    for (const std::vector<double>& of_box : mass) {
      if (of_box.size() != num_heads || num_heads == 0) {
        fail("calls[{}]: got {} heads, expected {}, as in calls[0], and 1 or more", i, of_box.size(), num_heads);
      }
    }
  }
}

// Mean over the calls of each layer.
std::map<int64_t, Masses> mean_of_layers(std::span<const BoxMasses> calls) {
  std::map<int64_t, int64_t> num_calls;
  for (const BoxMasses& call : calls) ++num_calls[call.layer];
  std::map<int64_t, Masses> means;
  for (const auto& [layer, mass] : calls) {
    Masses& mean = means[layer];
    mean.resize(mass.size(), std::vector<double>(mass[0].size(), 0.0));
    for (size_t box = 0; box < mass.size(); ++box) {
      for (size_t head = 0; head < mass[box].size(); ++head) {
        mean[box][head] += mass[box][head] / static_cast<double>(num_calls[layer]);
      }
    }
  }
  return means;
}

// The first of the largest.
template <class MassOf>
size_t best_box(size_t num_boxes, const MassOf& mass_of) {
  size_t best = 0;
  for (size_t box = 1; box < num_boxes; ++box) best = mass_of(box) > mass_of(best) ? box : best;
  return best;
}

}  // namespace

Grid video_grid(const TokenSequence& sequence) {
  Grid grid;
  for (const Segment& segment : sequence.segments) {
    if (segment.kind != SegmentKind::video) continue;
    if (!segment.has_grid()) fail("sequence: a video segment without a grid has no layouts");
    if (grid != Grid{} && grid != segment.grid) fail("sequence: video segments of several grids");
    grid = segment.grid;
  }
  if (grid == Grid{}) fail("sequence: no video segment");
  return grid;
}

std::vector<Box> search_menu(const Grid& grid, int64_t kv_block_size) {
  std::vector<Box> menu = box_menu(grid, kv_block_size, kMaxCut);
  menu.insert(menu.begin(), Box{});
  return menu;
}

LayoutSearch search_layouts(const Grid& grid, std::span<const Box> menu, std::span<const BoxMasses> calls) {
  if (menu.empty()) fail("menu: got no box, expected one or more");
  check_calls(calls, menu.size());
  const std::map<int64_t, Masses> means = mean_of_layers(calls);
  const size_t num_heads = calls[0].mass[0].size();
  const double num_pairs = static_cast<double>(means.size() * num_heads);

  LayoutSearch search;
  search.box_mass.assign(menu.size(), 0.0);
  search.num_chosen.assign(menu.size(), 0);
  for (const auto& [layer, mean] : means) {
    for (size_t box = 0; box < menu.size(); ++box) {
      for (double mass : mean[box]) search.box_mass[box] += mass;
    }
  }
  for (double& mass : search.box_mass) mass /= num_pairs;
  const size_t overall = best_box(menu.size(), [&](size_t box) { return search.box_mass[box]; });

  search.table.grid = grid;
  search.table.menu.assign(menu.begin(), menu.end());
  search.table.box_of_head.assign(static_cast<size_t>(means.rbegin()->first + 1),
                                  std::vector<int32_t>(num_heads, static_cast<int32_t>(overall)));
  for (const auto& [layer, mean] : means) {
    std::vector<double>& chosen = search.layers.emplace_back(LayoutSearch::Layer{layer, {}}).mass;
    for (size_t head = 0; head < num_heads; ++head) {
      const size_t best = best_box(menu.size(), [&](size_t box) { return mean[box][head]; });
      search.table.box_of_head[static_cast<size_t>(layer)][head] = static_cast<int32_t>(best);
      chosen.push_back(mean[best][head]);
      search.chosen_mass += mean[best][head] / num_pairs;
      ++search.num_chosen[best];
    }
  }
  search.table.validate();
  return search;
}

}  // namespace tilesieve
