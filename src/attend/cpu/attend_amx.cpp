// SPDX-License-Identifier: Apache-2.0
// The CPU attention kernels on AMX tiles.
#include "attend/cpu/amx_engine.h"

namespace tilesieve::TILESIEVE_ISA {

namespace {

// The loop forms, item by item inside a configured tile unit.
template <class Item, void (*run)(const Item&, uint8_t*)>
void with_tiles(const Item& item, uint8_t* scratch) {
  const ConfiguredTiles tiles;
  run(item, scratch);
}

}  // namespace

extern const AttendOps kAttendOps;
const AttendOps kAttendOps = {AmxEngine::kRowsPerTile,
                              AmxEngine::kRowStep,
                              scratch_bytes<AmxEngine>,
                              with_tiles<QOuterItem, q_outer_tiles<AmxEngine>>,
                              with_tiles<QOuterItem, q_outer_gather<AmxEngine>>,
                              with_tiles<KvOuterItem, kv_outer<AmxEngine>>,
                              store_row};

}  // namespace tilesieve::TILESIEVE_ISA
