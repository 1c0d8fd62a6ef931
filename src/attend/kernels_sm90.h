// SPDX-License-Identifier: Apache-2.0
// The rows of the kernel table that run on a Hopper GPU.
#pragma once

#include <string>
#include <vector>

#include "tilesieve/attend.h"

namespace tilesieve {

// None in a build without CUDA.
std::vector<Kernel> sm90_kernels();

// What only these kernels ask of a problem: empty when it is met, else the reason why not.
std::string why_not_sm90(const Kernel& kernel, const Problem& problem);

}  // namespace tilesieve
