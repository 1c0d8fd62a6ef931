// SPDX-License-Identifier: Apache-2.0
// 2^f on [-0.5, 0.5], degree 6: largest relative error 1.6e-8 with these coefficients rounded to f32 (fitted by
// Lawson's iteration on the relative error), and exactly 1 at 0.
#pragma once

namespace tilesieve {

inline constexpr float kExp2Polynomial[7] = {1.0f,
                                             0.6931471824645996f,
                                             0.24022646248340607f,
                                             0.05550328642129898f,
                                             0.009618489071726799f,
                                             0.0013399930903688073f,
                                             0.0001534581242594868f};

// Below this a result is flushed to 0: the smallest normal f32 is 2^-126.
inline constexpr float kExp2Lowest = -126.0f;

}  // namespace tilesieve
