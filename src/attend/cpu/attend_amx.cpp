// SPDX-License-Identifier: Apache-2.0
// The CPU attention kernels on AMX tiles.
#include "attend/cpu/amx_engine.h"

namespace tilesieve::TILESIEVE_ISA {

namespace {

// The loop forms inside a configured tile unit: an item configures the core it runs on and leaves it clean, so that
// nothing else on the thread pays for 8 KiB of state.
template <class Item, void (*run)(const Item&, uint8_t*)>
void with_tiles(const Item& item, uint8_t* scratch) {
  configure_tiles();
  run(item, scratch);
  release_tiles();
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
