// SPDX-License-Identifier: Apache-2.0
// tilesieve inspect: what a tensor file holds.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <memory>

#include "commands.h"
#include "execution_options.h"
#include "output.h"
#include "tensor_sources.h"
#include "tensor_statistics.h"
#include "values.h"

namespace tilesieve::cli {

namespace {

constexpr int64_t kSampleAbove = int64_t{1} << 24;

struct InspectOptions {
  std::string file;
  bool full = false;
  bool json = false;
};

std::string shape_of(const TensorView& view) {
  return fmt::format("[{}]", fmt::join(view.sizes.begin(), view.sizes.begin() + view.num_dims, ", "));
}

Json json_of(const std::string& name, const TensorView& view, const std::optional<TensorStatistics>& statistics) {
  Json object = {{"name", name},
                 {"dtype", name_of(view.dtype)},
                 {"shape", std::vector<int64_t>(view.sizes.begin(), view.sizes.begin() + view.num_dims)},
                 {"bytes", view.num_elements() * size_in_bytes(view.dtype)}};
  if (statistics) {
    object["measured_elements"] = statistics->num_measured;
    object["sampled"] = statistics->num_measured < view.num_elements();
    object["min"] = statistics->min;
    object["max"] = statistics->max;
    object["mean"] = statistics->mean;
    object["num_nan"] = statistics->num_nan;
    object["num_infinite"] = statistics->num_infinite;
  }
  return object;
}

std::vector<std::string> row_of(const std::string& name, const TensorView& view,
                                const std::optional<TensorStatistics>& statistics) {
  std::vector<std::string> row = {printable(name), std::string(name_of(view.dtype)), shape_of(view),
                                  with_commas(view.num_elements() * size_in_bytes(view.dtype))};
  if (!statistics) {
    row.insert(row.end(), {"-", "-", "-", "-", "-", "not measured"});
    return row;
  }
  for (double value : {statistics->min, statistics->max, statistics->mean}) row.push_back(fmt::format("{:.4g}", value));
  row.push_back(with_commas(statistics->num_nan));
  row.push_back(with_commas(statistics->num_infinite));
  const bool is_full = statistics->num_measured == view.num_elements();
  row.push_back(is_full ? "all" : with_commas(statistics->num_measured) + " sampled");
  return row;
}

void run(const InspectOptions& options) {
  const TensorFile file = read_file_or_folder(options.file);
  const std::vector<std::string> prefixes = prefixes_in(file);
  const int64_t max_elements = options.full ? std::numeric_limits<int64_t>::max() : kSampleAbove;

  Table table({"<name", "<dtype", "<shape", "bytes", "min", "max", "mean", "NaN", "inf", "<elements measured"});
  Json tensors = Json::array();
  for (const auto& [name, view] : file.tensors) {
    const std::optional<TensorStatistics> statistics = statistics_of(view, max_elements);
    table.add(row_of(name, view, statistics));
    tensors.push_back(json_of(name, view, statistics));
  }
  if (options.json) {
    return print_json(
        {{"file", options.file}, {"tensors", tensors}, {"prefixes", prefixes}, {"metadata", file.metadata}});
  }
  std::string text = table.text();
  if (!file.metadata.empty()) text += "\nmetadata\n";
  for (const auto& [key, value] : file.metadata) text += fmt::format("  {}: {}\n", printable(key), printable(value));
  if (!prefixes.empty() && !prefixes.front().empty()) {
    text += "\ncaptures, for --prefix (layer.N. for --layer N):";
    for (const std::string& prefix : prefixes) text += " " + printable(prefix);
    text += "\n";
  }
  print_text(text);
}

}  // namespace

void add_inspect(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("inspect", "Show the tensors of a file: names, types, shapes, values, metadata");
  const auto options = std::make_shared<InspectOptions>();
  add_text(*command, "FILE", options->file, "", "safetensors or .npy file, or a folder of .npy files")->required();
  command->add_flag("--full", options->full,
                    "look at every element of tensors over 16 million, not at evenly spaced ones");
  add_json_flag(*command, options->json);
  command->footer(
      "Values are of the elements measured; NaN are counted and otherwise left out.\n"
      "\n"
      "Examples:\n"
      "  tilesieve inspect model.safetensors\n"
      "  tilesieve inspect q.npy --json");
  command->callback([options] { run(*options); });
}

}  // namespace tilesieve::cli
