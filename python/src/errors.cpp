// SPDX-License-Identifier: Apache-2.0
#include "errors.h"

#include <exception>

#include "values.h"

namespace tilesieve::python {

namespace nb = nanobind;

namespace {

struct Renaming {
  std::string_view field, argument;
};

// Sizes that the library has as fields of a problem come out of arrays here: "q: got head_dim 9, expected ...".
constexpr Renaming kRenamings[] = {{"o: ", "out: "},
                                   {"routes: ", "block_index: "},
                                   {"problem.q_lens: ", "cu_seqlens_q: "},
                                   {"problem.num_q_heads: got ", "q: got num_q_heads "},
                                   {"problem.num_kv_heads: got ", "k: got num_kv_heads "},
                                   {"problem.num_kv_heads: ", "k: "},
                                   {"problem.head_dim: got ", "q: got head_dim "},
                                   {"problem.q_dtype: ", "q: "},
                                   {"problem.kv_dtype: ", "k: "},
                                   {"problem.", ""},
                                   {"sequence: ", "segments: "},
                                   {"sequence.", ""},
                                   {"segment kind: ", "segments: "},
                                   {"request.", ""},
                                   {"layout table: ", ""},
                                   {"execution.", ""}};

constexpr const char* kShown = "backslashreplace";  // of bytes that are no UTF-8

}  // namespace

std::string by_argument(std::string_view text) {
  std::string renamed(text);
  for (const auto& [field, argument] : kRenamings) {
    if (!text.starts_with(field)) continue;
    renamed.replace(0, field.size(), argument);
    break;
  }
  if (text.ends_with(": overlaps o")) renamed.append("ut");
  constexpr std::string_view kAbsent = ": got nothing,";
  if (const size_t at = renamed.find(kAbsent); at != std::string::npos) {
    renamed.replace(at, kAbsent.size(), ": got None,");
  }
  return renamed;
}

void bind_errors(nb::module_& module) {
  const nb::exception<Error> type(module, "Error", PyExc_ValueError);
  nb::register_exception_translator(
      [](const std::exception_ptr& thrown, void* error_type) {
        try {
          std::rethrow_exception(thrown);
        } catch (const FileError& error) {
          // OSError itself picks its subclass by the first of the three.
          const nb::tuple facts = nb::make_tuple(error.code, decoded(error.fault, kShown), decoded(error.path));
          PyErr_SetObject(PyExc_OSError, facts.ptr());
        } catch (const Error& error) {
          PyErr_SetObject(static_cast<PyObject*>(error_type), decoded(error.what(), kShown).ptr());
        }
      },
      type.inc_ref().ptr());
}

}  // namespace tilesieve::python
