// SPDX-License-Identifier: Apache-2.0
// The problem as Python holds it: an object with the fields of the dataclass tilesieve.Problem.
#pragma once

#include <nanobind/nanobind.h>

#include "tilesieve/problem.h"

namespace tilesieve::python {

// From an object with those attributes, types by their names. Does not validate.
Problem problem_from(nanobind::handle object);

}  // namespace tilesieve::python
