// SPDX-License-Identifier: Apache-2.0
// Arguments that are not arrays. Each of these throws a TypeError that names the argument where it is of another type,
// which is why the functions of the module take every argument as it comes.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "tilesieve/plan.h"

namespace tilesieve::python {

namespace nb = nanobind;

// "None", or the name of the type.
std::string kind_of(nb::handle object);

// int, or what has __index__, such as NumPy's whole numbers; no bool.
int64_t whole_number(const char* argument, nb::handle object);

// A whole number of 1 or more, or None for `none`.
int64_t count_or(const char* argument, nb::handle object, int64_t none);

// float, or what has __float__ or __index__; no bool.
double real_number(const char* argument, nb::handle object);

// bool, of Python or NumPy.
bool flag(const char* argument, nb::handle object);

// Of a str, for as long as it lives.
std::string_view text(const char* argument, nb::handle object);

// The factor of the logits: a positive number, or None for 0, which is the library's word for 1 / sqrt(head_dim).
double softmax_scale_of(nb::handle object);

// Of the router 'random'.
uint64_t seed_of(nb::handle object);

// Throws Error where attention over all keys is asked for in a loop order that it does not have.
void check_dense_loop_order(LoopOrder loop_order);

// Text of the library or of a file. Bytes that are no UTF-8 become what Python makes of those in the names of files, or
// what `errors` says.
nb::object decoded(std::string_view bytes, const char* errors = "surrogateescape");

}  // namespace tilesieve::python
