// SPDX-License-Identifier: Apache-2.0
// tilesieve roofline: what the two loop orders move on a device, and where they cross.
#include "tilesieve/roofline.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <memory>
#include <string_view>
#include <utility>

#include "commands.h"
#include "execution_options.h"
#include "output.h"
#include "problem_option.h"
#include "values.h"

namespace tilesieve::cli {

namespace {

constexpr double kTera = 1e12;
// Every tensor one byte, o too, partials two, no stats: how the article that the model follows counts.
constexpr RooflineSizes kArticleSizes = {.q = 1, .kv = 1, .o = 1, .partial = 2, .stats = 0};

struct RooflineCommand {
  std::string problem;
  std::string device = "B200";
  double hbm = 0, l2 = 0, l2_mb = -1, peak = -1;  // TB/s, TB/s, MB, TFLOP/s; those below or at 0 leave the device's own
  RooflineSizes sizes = {.q = 0, .kv = 0, .o = 0};  // q, kv and o at 0: as the problem's types say
  std::vector<double> reuse;
  int64_t tile_tokens = 0;
  double union_blocks = 0;
  double work_items = 1;
  int64_t resident_heads = 1;
  bool measure = false;
  bool json = false;
};

// A crossover under one way of counting bytes.
struct Counted {
  RooflineSizes sizes;
  std::string note;
  std::vector<RooflineCrossover> crossovers;
};

RooflineDevice device_of(const RooflineCommand& command) {
  std::string lower = command.device;
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  RooflineDevice device;
  if (command.measure) {
    device = measure_roofline_device();
  } else if (lower != "custom") {
    try {
      device = roofline_device(command.device);
    } catch (const Error& error) {
      throw UsageError(fmt::format("--device: {}, custom", error.what()));
    }
  } else if (command.hbm == 0 || command.l2 == 0) {
    throw UsageError("--device custom: needs --hbm TB/s and --l2 TB/s");
  }
  if (command.hbm > 0) device.hbm_bandwidth = command.hbm * kTera;
  if (command.l2 > 0) device.l2_bandwidth = command.l2 * kTera;
  if (command.l2_mb >= 0) device.usable_l2_bytes = command.l2_mb * 1e6;
  if (command.peak >= 0) device.peak_flops = command.peak * kTera;
  return device;
}

RooflineSizes sizes_of(const RooflineCommand& command, const Problem& problem) {
  const RooflineSizes stored = RooflineSizes::of(problem);
  RooflineSizes sizes = command.sizes;
  if (sizes.q == 0) sizes.q = stored.q;
  if (sizes.kv == 0) sizes.kv = stored.kv;
  if (sizes.o == 0) sizes.o = stored.o;
  return sizes;
}

RooflineCase case_of(const RooflineCommand& command, double reuse) {
  RooflineCase given;
  if (!command.problem.empty()) given.problem = parse_problem("--for", command.problem);
  given.sizes = sizes_of(command, given.problem);
  given.num_selected_blocks = reuse * static_cast<double>(given.problem.total_q());
  given.tile_tokens = command.tile_tokens;
  given.union_blocks = command.union_blocks;
  given.work_items_per_block = command.work_items;
  given.num_resident_kv_heads = command.resident_heads;
  return given;
}

// The crossovers do not depend on how many blocks are selected, but much on what is counted.
std::vector<Counted> count_crossovers(const RooflineCommand& command, const RooflineDevice& device) {
  std::vector<Counted> result = {{kArticleSizes, "the article's (docs/roofline.md)", {}}};
  const auto add = [&](double stats, const std::string& note) {
    RooflineSizes sizes = case_of(command, 0).sizes;
    sizes.stats = stats;
    result.push_back({sizes, note + (stats == command.sizes.stats ? ", as in the rows" : ""), {}});
  };
  add(0, "no stats");
  add(4, "stats: lse");
  add(8, "stats: m and l");
  if (command.sizes.stats != 0 && command.sizes.stats != 4 && command.sizes.stats != 8) {
    add(command.sizes.stats, "stats: as given");
  }
  for (Counted& counted : result) {
    RooflineCase given = case_of(command, 0);
    given.sizes = counted.sizes;
    counted.crossovers = roofline(given, device).crossovers;
  }
  return result;
}

// What the model refuses, by the name of the option that it came from.
std::string with_option_names(const std::string& text) {
  constexpr std::pair<std::string_view, std::string_view> kOptions[] = {
      {"num_selected_blocks", "--reuse (times the query tokens)"},
      {"union_blocks", "--union-blocks"},
      {"work_items_per_block", "--work-items"},
      {"num_resident_kv_heads", "--resident-heads"},
      {"problem.", "--for: problem."}};
  for (const auto& [field, option] : kOptions) {
    if (text.starts_with(field)) return std::string(option) + text.substr(field.size());
  }
  return text;
}

double l2_to_hbm(const RooflineRow& row) { return row.hbm_seconds > 0 ? row.l2_seconds / row.hbm_seconds : 0; }

Json json_of(const RooflineSizes& sizes) {
  return {{"q", sizes.q}, {"kv", sizes.kv}, {"o", sizes.o}, {"partial", sizes.partial}, {"stats", sizes.stats}};
}

Json json_of(const Roofline& result) {
  Json object = {{"reuse", result.blocks_per_token},
                 {"l2_miss_rate", result.l2_miss_rate},
                 {"flops", result.flops},
                 {"rows", Json::array()}};
  for (const RooflineRow& row : result.rows) {
    object["rows"].push_back({{"name", row.name},
                              {"hbm_bytes", row.hbm_bytes},
                              {"l2_bytes", row.l2_bytes},
                              {"hbm_kv_bytes", row.hbm_kv_bytes},
                              {"l2_kv_bytes", row.l2_kv_bytes},
                              {"flops", row.flops},
                              {"hbm_seconds", row.hbm_seconds},
                              {"l2_seconds", row.l2_seconds},
                              {"compute_seconds", row.compute_seconds},
                              {"seconds", row.seconds},
                              {"l2_to_hbm", l2_to_hbm(row)},
                              {"binds", name_of(row.binds)},
                              {"speedup_over_q_outer", result.row("q_outer").seconds / row.seconds}});
  }
  return object;
}

Json json_of(const std::vector<Counted>& crossovers) {
  Json list = Json::array();
  for (const Counted& counted : crossovers) {
    for (const RooflineCrossover& crossover : counted.crossovers) {
      list.push_back({{"accounting", crossover.accounting},
                      {"sizes", json_of(counted.sizes)},
                      {"note", counted.note},
                      {"q_outer", crossover.q_outer},
                      {"q_outer_union", crossover.q_outer_union}});
    }
  }
  return list;
}

std::string text_of(const std::vector<Roofline>& results, bool has_tile) {
  Table table({"nsb/N", "<row", "HBM MB", "L2 MB", "HBM us", "L2 us", "L2/HBM", "time us", "<bound by", "TFLOP/s",
               "q_outer time / time"});
  for (const Roofline& result : results) {
    for (const RooflineRow& row : result.rows) {
      if (row.name == "q_outer_union" && !has_tile) continue;  // the same as q_outer
      table.add({short_number(result.blocks_per_token), row.name, short_number(row.hbm_bytes / 1e6),
                 short_number(row.l2_bytes / 1e6), short_number(1e6 * row.hbm_seconds),
                 short_number(1e6 * row.l2_seconds), fmt::format("{:.2f}", l2_to_hbm(row)),
                 short_number(1e6 * row.seconds), std::string(name_of(row.binds)),
                 row.name == "kv_outer_combine" ? "-" : short_number(result.flops / row.seconds / kTera),
                 fmt::format("{:.2f}", result.row("q_outer").seconds / row.seconds)});
    }
  }
  return table.text();
}

std::string text_of(const std::vector<Counted>& crossovers, bool has_tile) {
  std::vector<std::string> headers = {"q", "kv", "o", "partial", "stats", "moved_once", "written_and_read"};
  if (has_tile) headers.insert(headers.end(), {"moved_once, union", "written_and_read, union"});
  headers.push_back("<");
  Table table(headers);
  for (const Counted& counted : crossovers) {
    const RooflineSizes& sizes = counted.sizes;
    std::vector<std::string> cells;
    for (double bytes : {sizes.q, sizes.kv, sizes.o, sizes.partial, sizes.stats})
      cells.push_back(fmt::format("{}", bytes));
    for (const RooflineCrossover& crossover : counted.crossovers)
      cells.push_back(fmt::format("{:.2f}", crossover.q_outer));
    if (has_tile) {
      for (const RooflineCrossover& crossover : counted.crossovers) {
        cells.push_back(fmt::format("{:.2f}", crossover.q_outer_union));
      }
    }
    cells.push_back(counted.note);
    table.add(cells);
  }
  return table.text();
}

std::string cache_note(const RooflineCommand& command, const Roofline& result, int64_t num_tokens) {
  if (result.num_l2_blocks == 0) return "K and V are taken to fit the last cache (--l2-mb says what it holds).\n";
  return fmt::format(
      "K and V of {} KV head{} fit the last cache while nsb < {} blocks each, here nsb/N < {}; beyond it q_outer reads "
      "again.\n",
      command.resident_heads, command.resident_heads == 1 ? "" : "s", short_number(result.num_l2_blocks),
      short_number(result.num_l2_blocks / static_cast<double>(num_tokens)));
}

void run(const RooflineCommand& command) {
  const RooflineDevice device = device_of(command);
  const std::vector<double> reuse = command.reuse.empty() ? std::vector<double>{0.1, 0.25, 1} : command.reuse;
  std::vector<Roofline> results;
  std::vector<Counted> crossovers;
  try {
    for (double value : reuse) results.push_back(roofline(case_of(command, value), device));
    crossovers = count_crossovers(command, device);
  } catch (const Error& error) {  // the model refuses nothing but its arguments, and these are options
    throw UsageError(with_option_names(error.what()));
  }
  const RooflineCase shown = case_of(command, 0);
  const Problem& problem = shown.problem;
  const RooflineSizes& sizes = shown.sizes;
  if (command.json) {
    Json object = {{"problem", problem.to_line()},
                   {"device",
                    {{"name", device.name},
                     {"hbm_bandwidth", device.hbm_bandwidth},
                     {"l2_bandwidth", device.l2_bandwidth},
                     {"usable_l2_bytes", device.usable_l2_bytes},
                     {"peak_flops", device.peak_flops}}},
                   {"sizes", json_of(sizes)},
                   {"num_l2_blocks", results.front().num_l2_blocks},
                   {"cases", Json::array()},
                   {"crossovers", json_of(crossovers)}};
    for (const Roofline& result : results) object["cases"].push_back(json_of(result));
    return print_json(object);
  }
  const bool has_tile = command.tile_tokens != 0;
  std::string text = fmt::format("problem: {}\ndevice:  {}, HBM {} TB/s, L2 {} TB/s\n", problem.to_line(), device.name,
                                 short_number(device.hbm_bandwidth / kTera), short_number(device.l2_bandwidth / kTera));
  text += fmt::format("bytes:   q {}, kv {}, o {}, partial {}, stats {}\n\n", sizes.q, sizes.kv, sizes.o, sizes.partial,
                      sizes.stats);
  text += text_of(results, has_tile) + "\n" + cache_note(command, results.front(), problem.total_q());
  text +=
      "\nCrossover: kv-outer is faster while nsb/N is below, by bytes of an element and by accounting of the "
      "partials\n";
  text += text_of(crossovers, has_tile);
  text +=
      "\nmoved_once: partials cross main memory once. written_and_read: combine reads what attend wrote, the time of "
      "the operator.\nA model of bytes and bandwidths, not a measurement.\n";
  print_text(text);
}

}  // namespace

void add_roofline(CLI::App& app) {
  CLI::App* sub =
      app.add_subcommand("roofline", "Model what q-outer and kv-outer move, how long it takes, where they cross");
  const auto command = std::make_shared<RooflineCommand>();
  add_text(*sub, "--for", command->problem, "PROBLEM",
           "sizes and types; default: hq=64 hkv=4 d=128 q=8192 kv=131072 dtype=e4m3");
  add_reals(*sub, "--reuse", command->reuse, 0, kMaxReal,
            "nsb/N: distinct blocks selected under a KV head per query token (tilesieve route measures it); default "
            "0.1,0.25,1");
  add_text(*sub, "--device", command->device, "NAME", "B200, H200 or custom")->group("Device");
  sub->add_flag("--measure", command->measure, "take the bandwidths of the CUDA device of this machine, read now")
      ->group("Device")
      ->excludes("--device");
  add_real(*sub, "--hbm", command->hbm, kAboveZero, 1e6, "TB/s of main memory")->default_str("")->group("Device");
  add_real(*sub, "--l2", command->l2, kAboveZero, 1e6, "TB/s of the last cache")->default_str("")->group("Device");
  add_real(*sub, "--l2-mb", command->l2_mb, 0, 1e9, "MB of the last cache that K and V may occupy; 0 = endless")
      ->default_str("")
      ->group("Device");
  add_real(*sub, "--peak", command->peak, 0, 1e9, "TFLOP/s of the data's type; 0 = arithmetic is not modelled")
      ->default_str("")
      ->group("Device");
  const auto add_bytes = [&](const char* name, double& target, double low, const char* help) {
    return add_real(*sub, name, target, low, 1024, help)->group("Bytes of one element");
  };
  add_bytes("--q-bytes", command->sizes.q, kAboveZero, "q; default: of the problem's qdtype")->default_str("");
  add_bytes("--kv-bytes", command->sizes.kv, kAboveZero, "k and v; default: of its dtype")->default_str("");
  add_bytes("--o-bytes", command->sizes.o, kAboveZero, "o; default: as q, of bf16 where that is e4m3")->default_str("");
  add_bytes("--partial-bytes", command->sizes.partial, kAboveZero, "partial outputs of kv-outer");
  add_bytes("--stats-bytes", command->sizes.stats, 0, "per row and partial: 0 none, 4 lse, 8 m and l");
  const std::string detail = "Detail";
  CLI::Option* tile = add_whole(*sub, "--tile-tokens", command->tile_tokens, 1, kMaxCount,
                                "query tokens that q-outer takes over the union of their blocks");
  tile->default_str("")->group(detail);
  CLI::Option* blocks = add_real(*sub, "--union-blocks", command->union_blocks, kAboveZero, kMaxReal,
                                 "blocks of such a union (tilesieve route measures it)");
  blocks->default_str("")->group(detail)->needs(tile);
  tile->needs(blocks);
  add_real(*sub, "--work-items", command->work_items, 0, 1e9, "kv-outer's reads of each block, 1 or more")
      ->group(detail);
  add_whole(*sub, "--resident-heads", command->resident_heads, 1, 4096,
            "KV heads that share the last cache at one time")
      ->group(detail);
  add_json_flag(*sub, command->json);
  sub->footer(
      std::string(
          "q-outer reads a block for every query that chose it, mostly from the last cache (L2). kv-outer reads\n"
          "each block once, but writes partial outputs to main memory (HBM) and reads them again.\n\n") +
      kProblemHelp +
      "\n"
      "Examples:\n"
      "  tilesieve roofline --device H200 --reuse 0.05,0.25,1\n"
      "  tilesieve roofline --measure\n"
      "  tilesieve roofline --device custom --hbm 0.2 --l2 0.8 --l2-mb 100 --q-bytes 4 --kv-bytes 4\n"
      "  tilesieve roofline --tile-tokens 4 --union-blocks 22");
  sub->callback([command] { run(*command); });
}

}  // namespace tilesieve::cli
