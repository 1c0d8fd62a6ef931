// SPDX-License-Identifier: Apache-2.0
// How many tiles Veda keeps, as Python says it on any device.
#pragma once

#include <nanobind/nanobind.h>

#include "tilesieve/veda_route.h"

namespace tilesieve::python {

// At most one of the two; the library knows the bounds of the first.
VedaBudget veda_budget_from(nanobind::handle keep_ratio, nanobind::handle tiles_per_row);

}  // namespace tilesieve::python
