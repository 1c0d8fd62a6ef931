// SPDX-License-Identifier: Apache-2.0
#include "tensor_sources.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "output.h"
#include "tilesieve/error.h"
#include "values.h"

namespace tilesieve::cli {

namespace {

namespace fs = std::filesystem;

std::string joined(const std::vector<std::string>& names) {
  std::vector<std::string> shown;
  for (const std::string& name : names) shown.push_back(name.empty() ? "no prefix" : printable(name));
  return fmt::format("{}", fmt::join(shown, ", "));
}

// Which prefix the tensors of `file` carry, by the options or because there is one only.
std::string find_prefix(const TensorFile& file, const std::string& prefix, int64_t layer) {
  const std::vector<std::string> prefixes = prefixes_in(file);
  const bool has_layer = layer >= 0;
  if (has_layer || !prefix.empty()) {
    const std::string wanted = has_layer ? fmt::format("layer.{}.", layer) : prefix;
    if (std::find(prefixes.begin(), prefixes.end(), wanted) != prefixes.end()) return wanted;
    throw UsageError(fmt::format("{}: {} has no tensor {}q; prefixes of q in it: {}",
                                 has_layer ? "--layer" : "--prefix", file.path, printable(wanted),
                                 prefixes.empty() ? "none" : joined(prefixes)));
  }
  if (prefixes.size() == 1) return prefixes.front();
  if (prefixes.empty() || prefixes.front().empty()) return "";
  throw UsageError(fmt::format("{} holds several captures ({}): choose one by --layer N or --prefix P", file.path,
                               joined(prefixes)));
}

}  // namespace

TensorSources::TensorSources(const std::string& file, const std::string& prefix, int64_t layer) : path_(file) {
  if (file.empty()) {
    if (layer >= 0 || !prefix.empty()) throw UsageError("--layer and --prefix need FILE");
    return;
  }
  files_.push_back(read_file_or_folder(file));
  prefix_ = find_prefix(files_.front(), prefix, layer);
}

std::optional<TensorView> TensorSources::find(const std::string& name, const std::string& own_file) {
  if (!own_file.empty()) {
    files_.push_back(read_file_or_folder(own_file));
    const TensorFile& file = files_.back();
    return file.tensors.size() == 1 ? file.tensors.front().second : file.at(name);
  }
  if (path_.empty() || !files_.front().contains(prefix_ + name)) return std::nullopt;
  return files_.front().at(prefix_ + name);
}

std::optional<TensorView> TensorSources::find_numbers(const std::string& name, const std::string& own_file,
                                                      int num_dims, const std::string& shape) {
  const std::optional<TensorView> view = find(name, own_file);
  if (!view) return std::nullopt;
  const std::string& path = own_file.empty() ? path_ : own_file;
  if (view->num_dims != num_dims) {
    throw Error(fmt::format("{}: {}: got {}, expected {}", path, name, view->describe(), shape));
  }
  switch (view->dtype) {
    case DType::f32:
    case DType::f16:
    case DType::bf16:
    case DType::f8_e4m3:
      if (view->strides[static_cast<size_t>(num_dims) - 1] == 1) return view;
      [[fallthrough]];
    case DType::f64:
      widened_.push_back(to_f32(*view));
      return widened_.back().view();
    default:
      throw Error(fmt::format("{}: {}: got {}, expected f32, bf16, f16, f64 or e4m3", path, name, view->describe()));
  }
}

TensorView TensorSources::require_numbers(const std::string& name, const std::string& own_file, int num_dims,
                                          const std::string& shape) {
  if (const std::optional<TensorView> view = find_numbers(name, own_file, num_dims, shape)) return *view;
  if (path_.empty()) throw UsageError(fmt::format("no {}: give FILE or --{}", name, name));
  return files_.front().at(prefix_ + name);  // throws, and lists what there is
}

std::string TensorSources::metadata(const std::string& key) const {
  if (path_.empty()) return "";
  return metadata_of(files_.front(), key);
}

std::string metadata_of(const TensorFile& file, const std::string& key) {
  const auto found = file.metadata.find(key);
  return found == file.metadata.end() ? "" : found->second;
}

std::vector<std::string> prefixes_in(const TensorFile& file) {
  std::vector<std::string> prefixes;
  for (const auto& [name, view] : file.tensors) {
    if (name == "q") prefixes.insert(prefixes.begin(), "");
    if (name.ends_with(".q")) prefixes.push_back(name.substr(0, name.size() - 1));
  }
  return prefixes;
}

TensorFile read_file_or_folder(const std::string& path) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) return read_tensors(path);
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(path, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->path().extension() == ".npy") names.push_back(entry->path().string());
  }
  if (error) throw Error(fmt::format("{}: {}", path, error.message()));
  if (names.empty()) throw Error(fmt::format("{}: the folder holds no .npy file", path));
  std::sort(names.begin(), names.end());
  TensorFile folder;
  folder.path = path;
  auto files = std::make_shared<std::vector<TensorFile>>();
  for (const std::string& name : names) {
    files->push_back(read_tensors(name));
    folder.tensors.push_back(files->back().tensors.front());
  }
  folder.mapping = files;
  return folder;
}

}  // namespace tilesieve::cli
