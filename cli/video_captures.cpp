// SPDX-License-Identifier: Apache-2.0
#include "video_captures.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <set>

#include "output.h"
#include "tensor_sources.h"
#include "tilesieve/error.h"
#include "values.h"

namespace tilesieve::cli {

namespace {

constexpr int64_t kMaxPlace = 1 << 20;  // of layers and steps

// Takes "word.N." from the front.
std::optional<int64_t> take_number(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word) || text.size() <= word.size() || text[word.size()] != '.') return std::nullopt;
  const char* begin = text.data() + word.size() + 1;
  int64_t value = 0;
  const auto [end, error] = std::from_chars(begin, text.data() + text.size(), value);
  if (error != std::errc{} || end == text.data() + text.size() || *end != '.' || value < 0 || value > kMaxPlace) {
    return std::nullopt;
  }
  text.remove_prefix(static_cast<size_t>(end + 1 - text.data()));
  return value;
}

struct Place {
  int64_t layer = 0, step = 0;
  auto operator<=>(const Place&) const = default;
};

// Of a prefix "block.12.step.1.", "layer.12." or "".
std::optional<Place> place_of(std::string_view prefix) {
  Place place;
  std::optional<int64_t> layer = take_number(prefix, "block");
  if (!layer) layer = take_number(prefix, "layer");
  if (layer) place.layer = *layer;
  if (const std::optional<int64_t> step = take_number(prefix, "step")) place.step = *step;
  if (!prefix.empty()) return std::nullopt;
  return place;
}

bool is_wanted(const std::vector<int64_t>& wanted, int64_t number) {
  return wanted.empty() || std::find(wanted.begin(), wanted.end(), number) != wanted.end();
}

void check_all_found(const std::string& option, const std::vector<int64_t>& wanted, const std::set<int64_t>& found) {
  for (int64_t number : wanted) {
    if (!found.contains(number)) {
      throw UsageError(fmt::format("{}: the file has no {}; it has {}", option, number, fmt::join(found, " ")));
    }
  }
}

// --scale, or that of the model which the file's metadata may have.
double scale_of(const CaptureOptions& options, const TensorFile& file) {
  const auto found = file.metadata.find("softmax_scale");
  if (options.scale != 0 || found == file.metadata.end()) return options.scale;
  return parse_real("softmax_scale in the metadata of " + file.path, found->second, kAboveZero, kMaxReal);
}

Problem problem_of(const TokenSequence& sequence, const TensorView& q, const TensorView& k, double scale,
                   const CaptureOptions& options) {
  const size_t cross = options.blocks.find('x');
  if (cross == std::string::npos)
    throw UsageError(fmt::format("--blocks: '{}' is not of the form QxK", options.blocks));
  Problem problem;
  problem.q_block_size = parse_whole("--blocks", options.blocks.substr(0, cross), 1, 1024);
  problem.kv_block_size = parse_whole("--blocks", options.blocks.substr(cross + 1), 8, 1024);
  problem.q_lens = {sequence.num_tokens()};
  problem.kv_lens = problem.q_lens;
  problem.segments = sequence.segments;
  problem.num_q_heads = q.sizes[1];
  problem.num_kv_heads = k.sizes[1];
  problem.head_dim = q.sizes[2];
  problem.causal = false;
  problem.softmax_scale = scale;
  problem.q_dtype = q.dtype;
  problem.kv_dtype = k.dtype;
  problem.validate();
  return problem;
}

}  // namespace

void add_capture_options(CLI::App& app, CaptureOptions& options) {
  const std::string group = "Captured calls of a video model";
  add_text(app, "--segments", options.segments, "TEXT",
           "the sequence: text:594,audio:414,video:37x24x42; default: the file's metadata \"segments\"")
      ->group(group);
  add_wholes(app, "--layers", options.layers, 0, kMaxPlace, "of the file's block.N.step.M.q; default: all")
      ->group(group);
  add_wholes(app, "--steps", options.steps, 0, kMaxPlace, "default: all")->group(group);
  add_text(app, "--blocks", options.blocks, "QxK", "queries and keys that are routed together")->group(group);
}

void add_scale_option(CLI::App& app, CaptureOptions& options) {
  add_real(app, "--scale", options.scale, kAboveZero, kMaxReal,
           "of the logits; default: the file's metadata \"softmax_scale\", or 1 / sqrt(head_dim)")
      ->default_str("")
      ->group("Captured calls of a video model");
}

std::string CapturedCall::name() const { return fmt::format("layer {} step {}", layer, step); }

bool Captures::is_middle(int64_t layer) const {
  std::set<int64_t> layers;
  for (const CapturedCall& call : calls) layers.insert(call.layer);
  const auto place = std::distance(layers.begin(), layers.find(layer));
  const auto count = std::ssize(layers), quarter = count / 4;
  return place >= quarter && place < count - quarter;
}

std::string segments_of(const CaptureOptions& options, const TensorFile& file) {
  return options.segments.empty() ? metadata_of(file, "segments") : options.segments;
}

Captures load_captures(const std::string& path, const CaptureOptions& options) {
  if (path.empty()) throw UsageError("captured calls need FILE");
  Captures captures;
  captures.file = read_file_or_folder(path);
  const std::string segments = segments_of(options, captures.file);
  const double scale = scale_of(options, captures.file);
  if (segments.empty()) throw UsageError("--segments: not given, and the file's metadata has none");
  captures.sequence = TokenSequence::parse(segments);
  std::map<Place, std::string> prefixes;
  std::set<int64_t> layers, steps;
  for (const std::string& prefix : prefixes_in(captures.file)) {
    const std::optional<Place> place = place_of(prefix);
    if (!place) continue;
    layers.insert(place->layer);
    steps.insert(place->step);
    if (!is_wanted(options.layers, place->layer) || !is_wanted(options.steps, place->step)) continue;
    if (!prefixes.emplace(*place, prefix).second) {
      throw Error(
          fmt::format("{}: {} and {} are of one layer and step", path, printable(prefix), printable(prefixes[*place])));
    }
  }
  check_all_found("--layers", options.layers, layers);
  check_all_found("--steps", options.steps, steps);
  if (prefixes.empty()) {
    throw Error(fmt::format("{}: holds no captured call: tensors named q and k, block.N.step.M.q or layer.N.q", path));
  }
  if (captures.sequence.num_tokens(SegmentKind::video) == 0) {
    throw Error(fmt::format("segments: {} has no video", captures.sequence.to_line()));
  }
  for (const auto& [place, prefix] : prefixes) {
    const TensorView &q = captures.file.at(prefix + "q"), &k = captures.file.at(prefix + "k");
    const int64_t tokens = captures.sequence.num_tokens();
    for (const auto& [name, view] : {std::pair{"q", &q}, std::pair{"k", &k}}) {
      if (view->num_dims != 3 || view->sizes[0] != tokens) {
        throw Error(fmt::format("{}: {}{}: got {}, expected [{}, heads, head_dim], as many tokens as the segments have",
                                path, printable(prefix), name, view->describe(), tokens));
      }
      if (view->sizes[2] > 1 && view->strides[2] != 1) {
        throw Error(fmt::format("{}: {}{}: the stride of the last dimension is {}, expected 1", path, printable(prefix),
                                name, view->strides[2]));
      }
    }
    if (q.sizes[2] != k.sizes[2]) {
      throw Error(fmt::format("{}: {}q and k: got {} and {}, expected one head_dim", path, printable(prefix),
                              q.describe(), k.describe()));
    }
    if (!captures.calls.empty() &&
        (q.sizes[1] != captures.calls[0].q.sizes[1] || k.sizes[1] != captures.calls[0].k.sizes[1])) {
      throw Error(fmt::format("{}: {}q and k: got {} and {} heads, {} has {} and {}", path, printable(prefix),
                              q.sizes[1], k.sizes[1], captures.calls[0].name(), captures.calls[0].q.sizes[1],
                              captures.calls[0].k.sizes[1]));
    }
    captures.calls.push_back({place.layer, place.step, q, k, problem_of(captures.sequence, q, k, scale, options)});
  }
  return captures;
}

}  // namespace tilesieve::cli
