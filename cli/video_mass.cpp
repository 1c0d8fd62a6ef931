// SPDX-License-Identifier: Apache-2.0
#include "video_mass.h"

#include <fmt/format.h>

namespace tilesieve::cli {

namespace {

std::vector<std::string> cells_of(const StudyRow& row, const std::string& call, const StudyRow::Means& means) {
  return {call,
          row.layout,
          row.router,
          fmt::format("{:.1f}", 100 * row.budget),
          fmt::format("{:.1f}", 100 * means.kept_share),
          fmt::format("{:.4f}", means.mass),
          fmt::format("{:.4f}", means.floor),
          fmt::format("{:.4f}", means.ceiling),
          fmt::format("{:.3f}", means.recall)};
}

Json per_head(const VideoMass& mass) {
  return {{"mass", mass.mass}, {"floor", mass.floor}, {"ceiling", mass.ceiling}, {"recall", mass.recall}};
}

Json json_of(const Captures& captures, const std::vector<StudyRow>& rows, bool with_heads) {
  Json object = {{"segments", captures.sequence.to_line()}, {"rows", Json::array()}};
  for (const StudyRow& row : rows) {
    Json item = json_of(row);
    item["mean"] = json_of(row.mean(captures, false));
    item["middle_half"] = json_of(row.mean(captures, true));
    item["calls"] = Json::array();
    for (size_t i = 0; i < row.calls.size(); ++i) {
      Json call = {{"layer", captures.calls[i].layer}, {"step", captures.calls[i].step}};
      call.update(json_of(row.call(i)));
      call.erase("num_calls");
      if (with_heads) call["heads"] = per_head(row.calls[i]);
      item["calls"].push_back(call);
    }
    object["rows"].push_back(item);
  }
  return object;
}

std::string text_per_head(const Captures& captures, const std::vector<StudyRow>& rows) {
  Table table({"<call", "<layout", "<router", "budget %", "KV head", "mass", "floor", "ceiling"});
  for (const StudyRow& row : rows) {
    for (size_t i = 0; i < row.calls.size(); ++i) {
      const VideoMass& mass = row.calls[i];
      for (size_t head = 0; head < mass.mass.size(); ++head) {
        table.add({captures.calls[i].name(), row.layout, row.router, fmt::format("{:.1f}", 100 * row.budget),
                   std::to_string(head), fmt::format("{:.4f}", mass.mass[head]),
                   fmt::format("{:.4f}", mass.floor[head]), fmt::format("{:.4f}", mass.ceiling[head])});
      }
    }
  }
  return table.text();
}

}  // namespace

void run_video_mass(const VideoMassCommand& command) {
  const Execution execution = command.execution.execution();
  const Captures captures = load_captures(command.file, command.captures);
  const std::vector<StudyRow> rows = study(captures, command.study, execution, !command.json);
  if (command.json) return print_json(json_of(captures, rows, command.per_head));
  Table table({"<call", "<layout", "<router", "budget %", "kept %", "mass", "floor", "ceiling", "recall"});
  for (const StudyRow& row : rows) {
    for (size_t i = 0; i < row.calls.size(); ++i) table.add(cells_of(row, captures.calls[i].name(), row.call(i)));
    if (row.calls.size() > 1) {
      table.add(cells_of(row, "mean", row.mean(captures, false)));
      table.add(cells_of(row, "middle half", row.mean(captures, true)));
    }
  }
  std::string text = heading(captures, command.study) + "\n" + table.text();
  if (command.per_head) text += "\n" + text_per_head(captures, rows);
  print_text(text);
}

}  // namespace tilesieve::cli
