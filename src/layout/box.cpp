// SPDX-License-Identifier: Apache-2.0
#include "layout/box.h"

#include "base/fail.h"
#include "base/show_name.h"
#include "tensor/extents.h"

namespace tilesieve {

namespace {

constexpr std::string_view kRaster = "raster";

}  // namespace

void check_box(std::string_view argument, const Box& box) {
  if (box == Box{} || are_extents(box.t, box.h, box.w)) return;
  fail("{}: got {}, expected t x h x w of 1 or more each, at most 2^31 - 1 tokens together, or all 0 for raster",
       argument, extents_text(box.t, box.h, box.w));
}

Box Box::parse(std::string_view text) {
  if (text == kRaster) return {};
  const auto sizes = parse_extents(text);
  const Box box = sizes ? Box{(*sizes)[0], (*sizes)[1], (*sizes)[2]} : Box{};
  if (box == Box{}) fail("box: got {}, expected raster or t x h x w such as 4x4x4", show_name(text));
  check_box("box", box);
  return box;
}

std::string Box::to_text() const { return is_raster() ? std::string(kRaster) : extents_text(t, h, w); }

}  // namespace tilesieve
