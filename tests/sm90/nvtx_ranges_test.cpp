// SPDX-License-Identifier: Apache-2.0
// The ranges that a profiler sees: this binary is its own tool of NVTX and writes down what it is told.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/nvtx_range.h"
#include "sm90/prefill_case.h"

namespace tilesieve::testing {
namespace {

bool attached = false;
std::vector<std::string> events;  // "(" and the name where a range begins, ")" where it ends

nvtxDomainHandle_t create_domain(const char* name) {
  static int domains[2];
  return reinterpret_cast<nvtxDomainHandle_t>(&domains[std::string(name) == cuda::NvtxDomain::name]);
}

bool is_ours(nvtxDomainHandle_t domain) { return domain == create_domain(cuda::NvtxDomain::name); }

int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* attributes) {
  if (is_ours(domain)) events.push_back(std::string("(") + attributes->message.ascii);
  return 0;
}

int pop(nvtxDomainHandle_t domain) {
  if (is_ours(domain)) events.push_back(")");
  return 0;
}

int attach(NvtxGetExportTableFunc_t export_table) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable functions = nullptr;
  unsigned size = 0;
  if (callbacks == nullptr || callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &functions, &size) == 0) return 0;
  *functions[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(create_domain);
  *functions[NVTX_CBID_CORE2_DomainRangePushEx] = reinterpret_cast<NvtxFunctionPointer>(push);
  *functions[NVTX_CBID_CORE2_DomainRangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  attached = true;
  return 1;
}

// Where NVTX looks for a tool that is linked in; the variable is one for the whole binary.
[[maybe_unused]] const bool linked_in = [] {
  InitializeInjectionNvtx2_fnptr = attach;
  return true;
}();

class NvtxRanges : public ::testing::Test {
 protected:
  void SetUp() override {
    { const cuda::NvtxRange first("attaches the tool"); }
    if (!attached) GTEST_SKIP() << "skipped: another tool of NVTX is attached";
    events.clear();
  }
};

TEST_F(NvtxRanges, Nest) {
  {
    const cuda::NvtxRange outer("outer");
    const cuda::NvtxRange inner("inner");
  }
  EXPECT_EQ(events, (std::vector<std::string>{"(outer", "(inner", ")", ")"}));
}

TEST_F(NvtxRanges, ShowTheStagesOfACall) {
  const std::string why = sm90::why_no_prefill();
  if (!why.empty()) GTEST_SKIP() << "skipped: " << why;
  const auto events_of = [](LoopOrder loop_order) {
    DeviceCase device(make_prefill_case("hq=64 hkv=4 d=128 block=128 q=1500 kv=9000 topk=16",
                                        {"", DType::bf16, DType::f8_e4m3, loop_order}, 1));
    events.clear();
    device.launch();
    static_cast<void>(device.output());
    return events;
  };
  using Events = std::vector<std::string>;
  EXPECT_EQ(events_of(LoopOrder::kv_outer), (Events{"(sparse_prefill", "(sequence rows", ")", "(quantize q", ")",
                                                    "(map and schedule", ")", "(attend", ")", "(combine", ")", ")"}));
  EXPECT_EQ(events_of(LoopOrder::q_outer),
            (Events{"(sparse_prefill", "(sequence rows", ")", "(quantize q", ")", "(attend q-outer", ")", ")"}));
  EXPECT_EQ(events_of(LoopOrder::automatic),
            (Events{"(sparse_prefill", "(choose loop", ")", "(quantize q", ")", "(attend q-outer", ")",
                    "(map and schedule", ")", "(attend", ")", "(combine", ")", ")"}));
}

}  // namespace
}  // namespace tilesieve::testing
