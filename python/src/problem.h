// SPDX-License-Identifier: Apache-2.0
// The problem as Python holds it: an object with the fields of the dataclass tilesieve.Problem.
#pragma once

#include <nanobind/nanobind.h>

#include "tilesieve/problem.h"

namespace tilesieve::python {

// "text:594,audio:414,video:37x24x42", or "" for none, of an argument or a field named segments.
TokenSequence segments_from(nanobind::handle object);

// From an object with those attributes, types by their names. Does not validate.
Problem problem_from(nanobind::handle object);

}  // namespace tilesieve::python
