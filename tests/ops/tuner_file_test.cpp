// The tuner's file: what is measured goes in, what others and people wrote stays, what can be no key is refused.
#include "braid/ops/tuner_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "braid/core/log.h"
#include "braid/ops/tuner.h"
#include "tests/support/errors.h"
#include "tests/support/folders.h"
#include "tests/support/ranks.h"

namespace braid::tuner {
namespace {

using nlohmann::json;
using test::value_error;
using testing::AllOf;
using testing::HasSubstr;

std::string key(int n) {
  return "all_gather_matmul m=64 n=" + std::to_string(n) + " k=8 f32 ranks=2 host";
}
constexpr const char* kPin = "* m=* n=8 k=* * * host";

class TunerFile : public testing::Test {
 protected:
  json choices() const { return json::parse(test::read_text(path_)).at("choices"); }
  void write(const json& choices, const json& more = json::object()) const {
    json file{{"choices", choices}};
    file.update(more);
    test::write_text(path_, file.dump());
  }
  /// What two ranks know once they have read the file, of which only rank 0 has the path.
  json read() const {
    json known;
    test::run_ranks(2, [&](const auto& group) {
      read_choices(*group, group->rank() == 0 ? path_ : "rank 0 reads");
      if (group->rank() == 1) known = tuner::choices(/*with_pins=*/true);
    });
    return known;
  }
  std::string error() const {
    std::string text;
    test::run_ranks(2, [&](const auto& group) {
      const std::string mine = value_error([&] { read_choices(*group, path_); });
      if (group->rank() == 1) text = mine;
    });
    return text;
  }

  test::TemporaryFolder folder_;
  std::string path_ = folder_ / "tuner.json";
};

TEST_F(TunerFile, WhatIsWrittenIsReadAgain) {
  EXPECT_EQ(read(), json::object());  // no file yet
  write_choices(path_, {{key(1), "serial"}, {key(2), "fused ring native"}});
  EXPECT_EQ(read(), choices());
  EXPECT_EQ(read().at(key(2)), "fused ring native");
  EXPECT_THAT(test::names_in(folder_.path()), testing::ElementsAre("tuner.json"));
}

TEST_F(TunerFile, WhatOthersWroteStaysAndWhatIsMeasuredReplacesTheOlder) {
  write({{key(1), "serial"}, {key(2), "serial"}, {kPin, "fused"}});
  write_choices(path_, {{key(2), "fused"}, {key(3), "chunked 2"}});
  EXPECT_EQ(choices(),
            (json{{key(1), "serial"}, {key(2), "fused"}, {key(3), "chunked 2"}, {kPin, "fused"}}));
  std::filesystem::create_hard_link(path_, folder_ / "the same");
  write_choices(path_, json::object());
  EXPECT_TRUE(std::filesystem::equivalent(path_, folder_ / "the same"));
}

TEST_F(TunerFile, RunsAtOnceLoseNothing) {
  std::vector<std::thread> runs;
  for (int run = 0; run < 4; ++run)
    runs.emplace_back([&, run] {
      for (int i = 1; i <= 10; ++i) write_choices(path_, {{key(100 * run + i), "serial"}});
    });
  for (auto& run : runs) run.join();
  EXPECT_EQ(choices().size(), 40u);
}

TEST_F(TunerFile, OfAnotherCpuOnlyThePinsAreUsedAndKept) {
  write({{key(1), "serial"}, {kPin, "fused"}}, {{"cpu", "another"}});
  testing::internal::CaptureStderr();
  EXPECT_EQ(read(), (json{{kPin, "fused"}}));
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr(path_), HasSubstr("another CPU")));
  write_choices(path_, {{key(2), "fused"}});
  EXPECT_EQ(choices(), (json{{key(2), "fused"}, {kPin, "fused"}}));
}

TEST_F(TunerFile, WhatIsNoFileOfChoicesIsNamedAndLeft) {
  for (const char* text : {"", "{", "{}", "[1]", R"({"choices": []})",
                           R"({"choices": {"* * * * * * *": "chunked 1"}})"}) {
    test::write_text(path_, text);
    EXPECT_THAT(error(), HasSubstr(path_ + " is not a file of the tuner's choices")) << text;
    EXPECT_THROW(write_choices(path_, {{key(1), "serial"}}), c10::ValueError) << text;
    EXPECT_EQ(test::read_text(path_), text);
  }
  EXPECT_THROW(write_choices(folder_ / "none/tuner.json", {{key(1), "serial"}}), c10::Error);
}

TEST_F(TunerFile, KeysThatNoOperationHasAreNamed) {
  for (const auto& [wrong, expected] : std::vector<std::pair<std::string, std::string>>{
           {"all_gather_matmull m=* n=* k=* * * *", "'all_gather_matmull', expected all_gather_ma"},
           {"* m=100 n=* k=* * * *", "'m=100', expected m=a power of two"},
           {"* m=0 n=* k=* * * *", "'m=0'"},
           {"* m=* n=-4 k=* * * *", "'n=-4', expected n=a number or *"},
           {"* m=* n=04 k=* * * *", "'n=04'"},
           {"* m=* n=4x k=* * * *", "'n=4x'"},
           {"* m=* k=* n=* * * *", "'k=*', expected n=a number"},
           {"* m=* n=* k=* float32 * *", "'float32', expected f32, bf16, fp16"},
           {"* m=* n=* k=* * rank=2 *", "'rank=2', expected ranks=a number or *"},
           {"* m=* n=* k=* * * hots", "'hots', expected host, network or *"},
           {"* m=* n=* k=* * *", "has 6 fields, expected 7"},
           {"* m=* n=* k=* * * * *", "has 8 fields, expected 7"},
           {"", "has 0 fields"}}) {
    write({{wrong, "fused"}});
    EXPECT_THAT(error(),
                AllOf(HasSubstr(path_), HasSubstr("'" + wrong + "'"), HasSubstr(expected)));
  }
}

// Were an operation or a type missing from the keys that are accepted, its choices could be written and not read.
TEST_F(TunerFile, TheKeysOfAllOperationsAreAccepted) {
  test::run_ranks(2, [&](const auto& group) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      const at::Tensor x = test::rank_values(group->rank(), {8, 4}, dtype),
                       w = test::rank_values(group->rank(), {4, 4}, dtype);
      (void)all_gather_matmul(*group, x, w);
      (void)all_gather_matmul_v2(*group, x, w);
      (void)matmul_reduce_scatter(*group, x, w);
      (void)matmul_all_reduce(*group, x, w);
      const at::Tensor dw = at::zeros({4, 4}, dtype), whole = test::rank_values(0, {16, 4}, dtype);
      all_gather_wgrad(*group, whole, x, dw, false);
      for (const auto& [need_dx, need_dw] : {std::pair(true, true), {true, false}, {false, true}})
        (void)all_gather_matmul_backward(*group, x, w, whole, need_dx, need_dw ? dw : at::Tensor(),
                                         false, {});
      if (dtype != at::kDouble) (void)matmul_all_reduce(*group, x, quantize_weight(w));
    }
    if (group->rank() == 0) write_choices(path_, measured());
  });
  EXPECT_EQ(choices().size(), 9u * 4 - 1);
  EXPECT_EQ(read(), choices());
}

TEST_F(TunerFile, PinsThatNothingIsRunByAreTold) {
  json pins;
  for (const char* n : {"3", "4", "5", "6", "7"})
    pins[std::string("* m=* n=") + n + " k=* * * *"] = "serial";
  pins["* m=* n=9 k=* * * *"] = "serial";
  write(pins);
  std::string said;
  test::run_ranks(1, [&](const auto& group) {
    read_choices(*group, path_);
    (void)choose(*group, {"all_gather_matmul", 32, 9, 9, at::kFloat}, {}, [](const Plan&) {});
    testing::internal::CaptureStderr();
    warn_of_unused_pins(path_);
    said = testing::internal::GetCapturedStderr();
  });
  EXPECT_EQ(said, "braid: warning: --tuner-file " + path_ +
                      ": no operation of this run went by 5 pins: '* m=* n=3 k=* * * *', "
                      "'* m=* n=4 k=* * * *', '* m=* n=5 k=* * * *', ...\n");
}

}  // namespace
}  // namespace braid::tuner
