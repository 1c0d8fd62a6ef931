// SPDX-License-Identifier: Apache-2.0
// The command-line tool as users run it: exit codes, tables, JSON, and what it says to wrong arguments.
#if defined(TILESIEVE_CLI_PATH)

#include <cmath>

#include "cli_fixture.h"

namespace tilesieve::testing {
namespace {

std::vector<std::string> routers_of(const json& report) {
  std::vector<std::string> names;
  for (const json& row : report.at("rows")) names.push_back(row.at("router"));
  return names;
}

TEST_F(Cli, HelpAndVersionExitWithZero) {
  const Result help = run("--help");
  EXPECT_EQ(help.exit_code, 0);
  const Result version = run("--version");
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_EQ(version.out.find("tilesieve "), 0u) << version.out;
  for (const std::string command :
       {"inspect", "route", "attend", "mass", "sweep", "layout-search", "roofline", "kernels"}) {
    EXPECT_NE(help.out.find("\n  " + command + " "), std::string::npos) << command;
    const Result result = run(command + " --help");
    EXPECT_EQ(result.exit_code, 0) << command;
    EXPECT_NE(result.out.find("\n  tilesieve " + command), std::string::npos) << command << " has no example";
  }
}

TEST_F(Cli, InspectShowsWhatTheFileHolds) {
  q_.as<float>()[5] = NAN;
  q_.as<float>()[6] = 7.5f;
  q_.as<float>()[7] = -INFINITY;
  Tensor zeros(DType::f8_e5m2, {3, 2});
  write_safetensors(folder_.file("file"), {{"layer.3.q", q_.view()}, {"flags\x1b[1m", zeros.view()}},
                    {{"model", "a\nb"}});
  const json report = run_json("inspect " + folder_.file("file"));
  const json& q = report.at("tensors").at(0);
  EXPECT_EQ(q.at("name"), "layer.3.q");
  EXPECT_EQ(q.at("dtype"), "f32");
  EXPECT_EQ(q.at("shape"), (std::vector<int64_t>{kTokens, kQHeads, kHeadDim}));
  EXPECT_EQ(q.at("bytes"), kTokens * kQHeads * kHeadDim * 4);
  EXPECT_EQ(q.at("num_nan"), 1);
  EXPECT_EQ(q.at("num_infinite"), 1);
  EXPECT_EQ(q.at("max"), 7.5);
  EXPECT_TRUE(q.at("min").is_null());  // -inf is no number of JSON
  EXPECT_EQ(q.at("sampled"), false);
  EXPECT_FALSE(report.at("tensors").at(1).contains("min"));  // no conversion from f8_e5m2
  EXPECT_EQ(report.at("prefixes"), std::vector<std::string>{"layer.3."});
  EXPECT_EQ(report.at("metadata").at("model"), "a\nb");

  const Result text = run("inspect " + folder_.file("file"));
  EXPECT_EQ(text.exit_code, 0);
  EXPECT_EQ(text.out.find('\x1b'), std::string::npos);  // names go to terminals
  EXPECT_NE(text.out.find("flags\\x1b[1m"), std::string::npos) << text.out;
  EXPECT_NE(text.out.find("model: a\\x0ab\n"), std::string::npos) << text.out;
}

TEST_F(Cli, RouteWritesWhatTheLibraryChooses) {
  const std::string output = folder_.file("blocks");
  const json report = run_json("route " + qkv() + " --block 32 --top-k 3 --router qk-max --init 1 -o " + output);
  Problem problem = Problem::parse("hq=4 hkv=2 d=16 q=300 kv=300 block=32 topk=3 causal=1");
  EXPECT_EQ(report.at("problem"), problem.to_line());
  RouteOptions options;
  options.router = Router::qk_max;
  options.init_blocks = 1;
  const Tensor expected = route(problem, {q_.view(), k_.view(), {}, {}}, options);

  const TensorFile written = read_tensors(output);
  const TensorView& block_index = written.at("block_index");
  ASSERT_EQ(block_index.describe(), "i32[2, 300, 3]");
  for (int64_t i = 0; i < block_index.num_elements(); ++i) {
    ASSERT_EQ(block_index.as<int32_t>()[i], expected.as<int32_t>()[i]) << i;
  }
  EXPECT_EQ(written.metadata.at("problem"), problem.to_line());
  EXPECT_EQ(written.metadata.at("router"), "qk_max");

  // Every query is given all of its visible blocks while they are at most three: 32 see one, 32 two, the rest three.
  EXPECT_EQ(report.at("num_picks"), 2 * (32 + 2 * 32 + 3 * 236));
  EXPECT_EQ(report.at("min_picks"), 1);
  EXPECT_EQ(report.at("max_picks"), 3);
  EXPECT_EQ(report.at("distinct_blocks"), 10);  // each block is the local one of its own queries
  EXPECT_DOUBLE_EQ(report.at("reuse"), 10.0 / 300);
}

TEST_F(Cli, RouteCountsWhatNeighboursShare) {
  // Eight queries in one block of keys: one block for all of them, whatever the number of neighbours.
  const Tensor q = filled({8, 1, 8}, 1), k = filled({8, 1, 8}, 2);
  write_npy(folder_.file("q.npy"), q.view());
  write_npy(folder_.file("k.npy"), k.view());
  const json report = run_json("route " + folder_.file(""));  // the folder as one file
  for (const json& neighbours : report.at("neighbours")) {
    EXPECT_EQ(neighbours.at("union_blocks"), 1);
    EXPECT_EQ(neighbours.at("picks_per_read"), neighbours.at("tokens"));
  }
  EXPECT_EQ(report.at("kept_share"), 1);
}

TEST_F(Cli, AttendingToEveryBlockIsDenseAttention) {
  const std::string output = folder_.file("out");
  for (const std::string loop : {"q-outer", "kv_outer", "auto"}) {
    const json report =
        run_json("attend " + qkv() + " --block 32 --budget 1 --repeat 1 --loop " + loop + " -o " + output);
    const json& row = report.at("rows").at(0);
    EXPECT_LT(row.at("rel_l2"), 1e-6);
    EXPECT_NEAR(row.at("mass"), 1, 1e-5);
    EXPECT_EQ(row.at("kept_share"), 1);
    EXPECT_GT(row.at("attend_seconds"), 0);
    EXPECT_GT(report.at("dense_seconds"), 0);
    const std::string expected = loop == "q-outer" ? "q_outer" : "kv_outer";
    if (loop != "auto") {
      EXPECT_EQ(row.at("loop_order"), expected);
    }

    Tensor o(DType::f32, {kTokens, kQHeads, kHeadDim}), lse(DType::f32, {kTokens, kQHeads});
    dense_attention(Problem::parse("hq=4 hkv=2 d=16 q=300"), {q_.view(), k_.view(), v_.view()}, {o.view(), lse.view()});
    const TensorFile written = read_tensors(output);
    EXPECT_LT(compare(written.at("o"), o.view()).rel_l2, 1e-6);
    EXPECT_LT(compare(written.at("lse"), lse.view()).max_abs, 1e-4);
    EXPECT_EQ(written.at("block_index").describe(), "i32[2, 300, 10]");
  }
}

// The routes lose what 8 bits lose, dense attention nothing.
TEST_F(Cli, AttendingInInt8IsMeasuredAgainstStorage) {
  const std::string output = folder_.file("out");
  const json report = run_json("attend " + qkv() + " --block 32 --budget 1 --repeat 1 --arithmetic int8 -o " + output);
  EXPECT_EQ(report.at("arithmetic"), "int8");
  EXPECT_GT(report.at("rows").at(0).at("rel_l2"), 1e-4);
  EXPECT_LT(report.at("rows").at(0).at("rel_l2"), 3e-2);
  const std::string problem = read_tensors(output).metadata.at("problem");
  EXPECT_TRUE(problem.ends_with(" arithmetic=int8")) << problem;
}

TEST_F(Cli, RoutersThatTheInputPermits) {
  const std::string options = " --block 32 --top-k 3 --repeat 1 --router all";
  EXPECT_EQ(routers_of(run_json("attend " + qkv() + options)),
            (std::vector<std::string>{"qk_max", "mean_pool", "oracle", "random"}));
  EXPECT_EQ(routers_of(run_json("attend " + qkv_with_index() + options)),
            (std::vector<std::string>{"index", "qk_max", "mean_pool", "oracle", "random"}));
  EXPECT_EQ(routers_of(run_json("attend --repeat 1 --top-k 3 " + qkv_with_index())), std::vector<std::string>{"index"});
  EXPECT_EQ(routers_of(run_json("attend --repeat 1 --top-k 3 --no-dense " + qkv())),
            std::vector<std::string>{"qk_max"});
  EXPECT_EQ(routers_of(run_json("mass --router oracle,random --router qk_max " + qkv())),
            (std::vector<std::string>{"oracle", "random", "qk_max"}));
  expect_refused("route " + qkv() + " --router index", 2, {"--router index", "index_q"});
  expect_refused("route " + qkv() + " --router given", 2, {"--router given", "block_index"});
  expect_refused("route " + qkv() + " --router oracle,random", 2, {"--router", "2 routers"});
  expect_refused("attend " + qkv() + " --router oracle,random -o " + folder_.file("o"), 2, {"--output", "2 routers"});
}

TEST_F(Cli, AGivenBlockIndexGivesTheSameMassAsItsRouter) {
  const std::string blocks = folder_.file("blocks");
  ASSERT_EQ(run("route " + qkv() + " --block 32 --top-k 3 --router oracle -o " + blocks).exit_code, 0);
  const json report =
      run_json("mass " + qkv() + " --block 32 --top-k 3,5 --router oracle,given --block-index " + blocks);
  ASSERT_EQ(routers_of(report), (std::vector<std::string>{"oracle", "given", "oracle"}));  // given: at no budget
  const json& rows = report.at("rows");
  EXPECT_EQ(rows.at(0).at("mass"), rows.at(1).at("mass"));
  EXPECT_EQ(rows.at(0).at("mass"), rows.at(0).at("ceiling"));
  EXPECT_TRUE(rows.at(1).at("top_k").is_null());
  EXPECT_GT(rows.at(2).at("mass"), rows.at(0).at("mass"));
  const json attended = run_json("attend " + qkv() + " --block 32 --repeat 1 --router given --block-index " + blocks);
  EXPECT_EQ(attended.at("rows").at(0).at("mass"), rows.at(0).at("mass"));
  EXPECT_TRUE(attended.at("rows").at(0).at("route_seconds").is_null());
}

TEST_F(Cli, MassPerHeadAndSampled) {
  const json all = run_json("mass " + qkv() + " --block 32 --budget 0.2,0.5 --router oracle --per-head");
  EXPECT_EQ(all.at("rows").at(0).at("top_k"), 2);
  EXPECT_EQ(all.at("rows").at(1).at("top_k"), 5);
  EXPECT_EQ(all.at("rows").at(0).at("num_rows"), kTokens * kKvHeads);
  const std::vector<double> heads = all.at("rows").at(0).at("mass_per_head");
  ASSERT_EQ(heads.size(), 2u);
  EXPECT_NEAR((heads[0] + heads[1]) / 2, all.at("rows").at(0).at("mass"), 1e-12);
  EXPECT_NE(heads[0], heads[1]);
  const json sampled = run_json("mass " + qkv() + " --block 32 --sample 10 --router oracle");
  EXPECT_EQ(sampled.at("rows").at(0).at("num_rows"), kTokens / 10 * kKvHeads);
  EXPECT_NE(run("mass " + qkv() + " --sample 10").out.find("mass sampled: 1 of every 10"), std::string::npos);
}

TEST_F(Cli, PrefixesOfCaptures) {
  std::vector<std::pair<std::string, TensorView>> tensors;
  for (const std::string prefix : {"layer.0.", "layer.12."}) {
    for (const auto& [name, tensor] : {std::pair("q", &q_), {"k", &k_}, {"v", &v_}}) {
      tensors.emplace_back(prefix + name, tensor->view());
    }
  }
  const std::string two = folder_.file("two");
  write_safetensors(two, tensors);
  EXPECT_EQ(run_json("route --layer 12 " + two).at("prefix"), "layer.12.");
  EXPECT_EQ(run_json("route --prefix layer.0. " + two).at("prefix"), "layer.0.");
  EXPECT_EQ(run_json("route " + qkv("one", "block.3.step.10.")).at("prefix"), "block.3.step.10.");
  expect_refused("route " + two, 2, {"layer.0.", "layer.12.", "--layer"});
  expect_refused("route --layer 3 " + two, 2, {"--layer", "layer.0., layer.12."});
  expect_refused("route --layer 3 --prefix a " + two, 2, {"--layer"});
}

TEST_F(Cli, FilesOfTheirOwnAndNarrowTypes) {
  Tensor half(DType::f16, {kTokens, kQHeads, kHeadDim});
  for (int64_t i = 0; i < half.view().num_elements(); ++i) half.as<uint16_t>()[i] = 0x3c00;  // 1
  write_npy(folder_.file("any.npy"), half.view());
  write_npy(folder_.file("k.npy"), k_.view());
  const json report =
      run_json("mass --q " + folder_.file("any.npy") + " --k " + folder_.file("k.npy") + " --router oracle");
  EXPECT_EQ(report.at("problem"), "hq=4 hkv=2 d=16 q=300 kv=300 block=128 topk=3 causal=1 qdtype=f16");
  expect_refused("attend --q " + folder_.file("any.npy") + " --k " + folder_.file("k.npy"), 2, {"no v", "--v"});
}

TEST_F(Cli, BatchesAndScales) {
  const json report =
      run_json("attend " + qkv() + " --q-lens 5,0,295 --kv-lens 100,64,136 --repeat 1 --scale 0.5 --no-causal");
  EXPECT_EQ(report.at("problem"), "hq=4 hkv=2 d=16 q=5,0,295 kv=100,64,136 block=128 topk=2 causal=0 scale=0.5");
  expect_refused("attend " + qkv() + " --q-lens 5,0", 1, {"--q-lens", "5 tokens", "300"});
  expect_refused("attend " + qkv() + " --q-lens 5,295", 1, {"2"});

  const std::string scaled = folder_.file("scaled");
  write_safetensors(scaled, {{"q", q_.view()}, {"k", k_.view()}}, {{"softmax_scale", "0.125"}});
  EXPECT_EQ(run_json("route " + scaled).at("problem"),
            "hq=4 hkv=2 d=16 q=300 kv=300 block=128 topk=3 causal=1 scale=0.125");
  write_safetensors(scaled, {{"q", q_.view()}, {"k", k_.view()}}, {{"softmax_scale", "0.25"}});  // the usual one
  EXPECT_EQ(run_json("route " + scaled).at("problem"), "hq=4 hkv=2 d=16 q=300 kv=300 block=128 topk=3 causal=1");
}

TEST_F(Cli, NotANumberIsNullInJson) {
  q_.as<float>()[0] = NAN;
  const json row = run_json("attend " + qkv() + " --repeat 1").at("rows").at(0);
  EXPECT_TRUE(row.at("rel_l2").is_null());
}

TEST_F(Cli, RooflineGivesTheArticlesFigures) {
  const json report = run_json("roofline --device B200 --reuse 0.1");
  EXPECT_NEAR(report.at("num_l2_blocks"), 3200, 1);
  const auto crossover = [&](const std::string& accounting, double o, double stats) -> double {
    for (const json& item : report.at("crossovers")) {
      const json& sizes = item.at("sizes");
      if (item.at("accounting") == accounting && sizes.at("o") == o && sizes.at("stats") == stats)
        return item.at("q_outer");
    }
    return NAN;
  };
  EXPECT_NEAR(crossover("moved_once", 1, 0), 2.85, 0.005);
  EXPECT_NEAR(crossover("written_and_read", 2, 0), 0.80, 0.005);
  EXPECT_NEAR(crossover("written_and_read", 2, 4), 0.74, 0.005);
  EXPECT_NEAR(crossover("written_and_read", 2, 8), 0.68, 0.005);
  const json& rows = report.at("cases").at(0).at("rows");
  EXPECT_EQ(rows.back().at("name"), "kv_outer_moved_once");
  EXPECT_NEAR(rows.back().at("l2_to_hbm"), 0.7, 0.03);

  const std::string text = run("roofline --device b200").out;
  for (const std::string word : {"2.85", "0.80", "0.74", "0.68", "3,200", "moved_once", "written_and_read"}) {
    EXPECT_NE(text.find(word), std::string::npos) << word;
  }
}

TEST_F(Cli, RooflineOfACustomDevice) {
  const json report = run_json(
      "roofline --device custom --hbm 1 --l2 4 --l2-mb 50 --for 'hq=8 hkv=2 d=64 q=1000' --reuse 0.5,2 --tile-tokens 4 "
      "--union-blocks 20");
  EXPECT_EQ(report.at("device").at("hbm_bandwidth"), 1e12);
  EXPECT_EQ(report.at("device").at("usable_l2_bytes"), 5e7);
  ASSERT_EQ(report.at("cases").size(), 2u);
  EXPECT_EQ(report.at("cases").at(1).at("reuse"), 2);
  EXPECT_EQ(report.at("sizes"), json::parse(R"({"q": 4, "kv": 4, "o": 4, "partial": 2, "stats": 8})"));
  const json stored = run_json("roofline --for 'q=1000 dtype=bf16 qdtype=e4m3' --kv-bytes 0.5625");
  EXPECT_EQ(stored.at("sizes"), json::parse(R"({"q": 1, "kv": 0.5625, "o": 2, "partial": 2, "stats": 8})"));
  expect_refused("roofline --device custom --hbm 1", 2, {"--device custom", "--l2"});
  expect_refused("roofline --measure --device H200", 2, {"--measure", "--device"});
  expect_refused("roofline --device H100", 2, {"--device", "H100", "B200", "H200", "custom"});
  expect_refused("roofline --reuse 17", 2, {"--reuse", "139264"});
  expect_refused("roofline --work-items 0.5", 2, {"--work-items", "0.5"});
  expect_refused("roofline --resident-heads 5", 2, {"--resident-heads", "5"});
  expect_refused("roofline --tile-tokens 4", 2, {"--union-blocks"});
  expect_refused("roofline --kv-bytes 0", 2, {"--kv-bytes"});
  expect_refused("roofline --for 'q=0'", 2, {"q_lens"});
}

TEST_F(Cli, KernelsAreTheTableOfTheLibrary) {
  const std::string line = "hq=4 hkv=2 d=128 q=1 dtype=bf16";
  const json report = run_json("kernels --for '" + line + "'");
  const std::vector<Kernel> table = kernels();
  ASSERT_EQ(report.at("kernels").size(), table.size());
  for (size_t i = 0; i < table.size(); ++i) {
    EXPECT_EQ(report.at("kernels").at(i).at("name"), table[i].name);
    const json& row = report.at("kernels").at(i);
    const bool gpu = table[i].device == DeviceKind::cuda, available = table[i].unavailable.empty();
    EXPECT_EQ(row.at("device"), gpu ? "cuda" : "cpu") << table[i].name;
    EXPECT_EQ(row.at("available"), available) << table[i].name;
    EXPECT_EQ(row.at("unavailable").is_null(), available) << table[i].name;
    const bool fits = !gpu || (table[i].min_head_dim == 128 && table[i].kv_block_size == 128);
    const bool runs = available && table[i].dtype == DType::bf16 && table[i].arithmetic != DType::i8 && fits;
    EXPECT_EQ(row.at("runs"), runs) << table[i].name;
    EXPECT_EQ(row.at("why_not").is_null(), runs) << table[i].name;
  }
  // Where no GPU can run the prefill, the list says why, also where the build has no kernel for one.
  EXPECT_EQ(report.at("no_gpu").is_null(), table.back().device == DeviceKind::cuda);
  EXPECT_NE(run("kernels").out.find(sm90::why_no_prefill()), std::string::npos);
  expect_refused("kernels --for 'hq=3 hkv=2 q=1'", 2, {"--for", "num_kv_heads"});
  expect_refused("kernels --for nonsense", 2, {"--for", "nonsense"});
}

TEST_F(Cli, WrongArgumentsAreNamed) {
  const std::string file = qkv();
  const struct {
    std::string arguments;
    std::vector<std::string> words;
  } cases[] = {
      {"", {"--help"}},
      {"nonsense", {"nonsense"}},
      {"--nonsense", {"--nonsense"}},
      {"attend --nonsense " + file, {"--nonsense"}},
      {"attend " + file + " extra", {"extra"}},
      {"attend", {"FILE", "--q"}},
      {"inspect", {"FILE"}},
      {"inspect ''", {"FILE"}},
      {"attend --layer 1 --q a --k b --v c", {"--layer", "FILE"}},
      {"attend --top-k 0 " + file, {"--top-k", "'0'"}},
      {"attend --top-k -1 " + file, {"--top-k", "'-1'"}},
      {"attend --top-k 99999999999999999999 " + file, {"--top-k", "99999999999999999999"}},
      {"attend --top-k 1.5 " + file, {"--top-k", "1.5"}},
      {"attend --top-k '' " + file, {"--top-k"}},
      {"attend --top-k 3, " + file, {"--top-k"}},
      {"attend --top-k 3,4 " + file, {"--top-k", "2 values"}},
      {"attend --top-k 3 --budget 0.5 " + file, {"--top-k", "--budget"}},
      {"attend --budget 0 " + file, {"--budget"}},
      {"attend --budget 1.01 " + file, {"--budget", "1.01"}},
      {"attend --budget nan " + file, {"--budget", "nan"}},
      {"attend --budget 1e999 " + file, {"--budget", "1e999"}},
      {"attend --scale inf " + file, {"--scale", "inf"}},
      {"attend --scale -1 " + file, {"--scale", "-1"}},
      {"attend --block 12 " + file, {"--block", "12", "multiple of 8"}},
      {"attend --block 2048 " + file, {"--block", "2048"}},
      {"attend --block 0x40 " + file, {"--block", "0x40"}},
      {"attend --q-lens 5,-1,296 " + file, {"--q-lens", "-1"}},
      {"attend --q-lens a " + file, {"--q-lens", "'a'"}},
      {"attend --local -1 " + file, {"--local"}},
      {"attend --init 1e3 " + file, {"--init", "1e3"}},
      {"attend --seed 18446744073709551616 " + file, {"--seed"}},
      {"attend --threads 1000000 " + file, {"--threads", "1000000"}},
      {"attend --threads -1 " + file, {"--threads"}},
      {"attend --isa sse2 " + file, {"--isa", "sse2", "avx2"}},
      {"attend --loop inside-out " + file, {"--loop", "inside-out", "kv_outer"}},
      {"attend --arithmetic fp4 " + file, {"--arithmetic", "fp4", "int8"}},
      {"attend --workspace-limit 99999999999 " + file, {"--workspace-limit"}},
      {"attend --repeat 0 " + file, {"--repeat"}},
      {"attend --sample 0 " + file, {"--sample"}},
      {"attend --router best " + file, {"--router", "best", "mean_pool"}},
      {"attend --router '' " + file, {"--router"}},
      {"route --layer -1 " + file, {"--layer"}},
      {"route --prefix x. " + file, {"--prefix", "x."}},
      {"route -o " + file + " " + file, {"--output", "read"}},
  };
  for (const auto& [arguments, words] : cases) expect_refused(arguments, 2, words);
}

TEST_F(Cli, FaultyFilesAreNamed) {
  const std::string file = qkv();
  const std::string missing = folder_.file("missing"), garbage = folder_.write("garbage", "not a tensor file");
  expect_refused("inspect " + missing, 1, {missing});
  expect_refused("attend " + missing, 1, {missing});
  expect_refused("attend " + garbage, 1, {garbage});
  expect_refused("attend " + file + " --index-q " + missing + " --index-k " + missing, 1, {missing});
  expect_refused("route " + file + " -o " + missing + "/blocks", 1, {"--output", missing});
  expect_refused("route " + file + " -o /", 1, {"--output"});
  expect_refused("kernels >/dev/full", 1, {"standard output"});

  const auto refuse = [&](const std::string& name, const Tensor& tensor, const std::vector<std::string>& words) {
    const std::string own = folder_.file("own");
    write_safetensors(own, {{"tensor", tensor.view()}});
    expect_refused("attend --repeat 1 " + file + " --" + name + " " + own, 1, words);
  };
  refuse("q", Tensor(DType::i32, {kTokens, kQHeads, kHeadDim}), {"q", "i32[300, 4, 16]", "bf16"});
  refuse("q", Tensor(DType::f32, {kTokens, kQHeads}), {"q", "f32[300, 4]", "head_dim"});
  refuse("q", Tensor(DType::f32, {}), {"q", "f32[]"});
  refuse("q", Tensor(DType::f32, {kTokens, 3, kHeadDim}), {"num_kv_heads", "3"});
  refuse("q", Tensor(DType::f32, {kTokens, 0, kHeadDim}), {"num_q_heads", "0"});
  refuse("q", Tensor(DType::f32, {kTokens, 4, 12}), {"head_dim", "12"});
  refuse("k", Tensor(DType::f32, {kTokens, kKvHeads, 8}), {"k", "f32[300, 2, 8]"});
  refuse("v", Tensor(DType::f32, {kTokens - 1, kKvHeads, kHeadDim}), {"v", "f32[299, 2, 16]"});
  refuse("index-q", Tensor(DType::f32, {kTokens, kKvHeads, 8}), {"index_q", "index_k"});
  refuse("block-index", Tensor(DType::i64, {kKvHeads, kTokens, 2}), {"block_index", "i64[2, 300, 2]"});
  refuse("block-index", Tensor(DType::i32, {kKvHeads, kTokens + 1, 2}), {"block_index", "i32[2, 301, 2]"});
  expect_refused("attend " + folder_.file("own"), 1, {"own", "q"});  // holds no q
}

TEST_F(Cli, NothingToAttendIsNoFailure) {
  const Tensor q(DType::f32, {0, kQHeads, kHeadDim}), k(DType::f32, {0, kKvHeads, kHeadDim});
  const std::string empty = folder_.file("empty");
  write_safetensors(empty, {{"q", q.view()}, {"k", k.view()}, {"v", k.view()}});
  for (const std::string command : {"inspect ", "route ", "attend --repeat 1 --router all ", "mass --per-head "}) {
    EXPECT_EQ(run(command + empty).exit_code, 0) << command;
    run_json(command + empty);
  }
  write_safetensors(empty, {{"q", q_.view()}, {"k", k.view()}, {"v", k.view()}});  // queries that see no key
  const json row = run_json("attend --repeat 1 " + empty).at("rows").at(0);
  EXPECT_EQ(row.at("rel_l2"), 0);
}

}  // namespace
}  // namespace tilesieve::testing

#endif  // defined(TILESIEVE_CLI_PATH)
