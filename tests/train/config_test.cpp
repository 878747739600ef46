// The flag table: what it accepts, refuses, derives, and its renderings.
#include "braid/train/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "tests/support/errors.h"
#include "tests/support/folders.h"

namespace braid {
namespace {

using test::TemporaryFolder;
using test::value_error;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
namespace fs = std::filesystem;

class Config : public testing::Test {
 protected:
  Config() {
    folder.write("data.txt", "some text");
    good.num_layers = 2;
    good.hidden_size = 48;
    good.num_attention_heads = 4;
    good.seq_length = 12;
    good.micro_batch_size = 3;
    good.train_iters = 20;
    good.lr = 1e-3;
    good.data_path = folder.path() / "data.txt";
    good.output_dir = folder.path() / "run";
  }

  static TrainConfig parsed(std::vector<std::string> arguments, TrainConfig config = {}) {
    CLI::App app;
    add_flags(app, config);
    EXPECT_EQ(parse(app, std::move(arguments)), std::nullopt);
    return config;
  }

  // What parse() says to the arguments.
  static std::string parse_error(std::vector<std::string> arguments) {
    return value_error([&] { parsed(std::move(arguments)); });
  }

  // What validate() says to the good settings after a change.
  std::string refusal(const std::function<void(TrainConfig&)>& change,
                      std::int64_t world_size = 1) {
    auto config = good;
    change(config);
    return value_error([&] { (void)validate(config, world_size); });
  }

  TemporaryFolder folder;
  TrainConfig good;
};

TEST_F(Config, EveryFieldIsInTheTableOnce) {
  const TrainConfig config;
  const auto address = [](const auto& x) { return reinterpret_cast<const char*>(&x); };
  std::map<const char*, const char*> fields;  // begin -> end
  std::set<std::string> names;
  std::size_t num_names = 0;
  for (const auto& group : flag_table()) {
    for (const auto& flag : group.flags) {
      std::visit(
          [&](auto field) {
            const auto* begin = address(config.*field);
            EXPECT_TRUE(fields.emplace(begin, begin + sizeof(config.*field)).second) << flag.name;
          },
          flag.field);
      names.insert(flag.name);
      names.insert(flag.aliases.begin(), flag.aliases.end());
      num_names += 1 + flag.aliases.size();
    }
  }
  for (const auto& flag : refused_flags()) names.insert(flag.name);
  EXPECT_EQ(names.size(), num_names + refused_flags().size());
  const char* end = address(config);
  for (const auto& field : fields) {  // between two fields there is padding only
    EXPECT_LT(field.first - end, 8);
    end = field.second;
  }
  EXPECT_LT(address(config) + sizeof(config) - end, 8);
}

TEST_F(Config, ParsesMegatronsFlags) {
  const auto c =
      parsed({"--num-layers", "4", "--hidden-size=512", "--lr", "3e-4", "--sequence-parallel",
              "--bf16", "--use-ascend-coc", "--coc-parallel-num", "3", "--lr-decay-style", "cosine",
              "--deterministic-mode", "--seed", "7", "--split", "95,5"});
  EXPECT_EQ(c.num_layers, 4);
  EXPECT_EQ(c.hidden_size, 512);
  EXPECT_EQ(c.lr, 3e-4);
  EXPECT_TRUE(c.sequence_parallel && c.bf16 && c.use_coc && c.deterministic);
  EXPECT_FALSE(c.coc_fused_kernel || c.untie_embeddings_and_output_weights);
  EXPECT_EQ(c.coc_parallel_num, 3);
  EXPECT_EQ(c.lr_decay_style, "cosine");
  EXPECT_EQ(c.seed, 7);
  EXPECT_EQ(c.split, "95,5");
}

TEST_F(Config, LastValueWins) {
  EXPECT_EQ(parsed({"--num-layers", "4", "--num-layers", "5"}).num_layers, 5);
}

TEST_F(Config, PresentValuesAreTheDefaults) {
  good.trace = "";
  EXPECT_EQ(parsed({}, good), good);
}

TEST_F(Config, BareTraceGoesToTheOutputFolder) {
  auto c = parsed({"--trace", "--seed", "3"}, good);
  EXPECT_THAT(validate(c, 1), IsEmpty());
  EXPECT_EQ(c.trace, fs::path(good.output_dir) / "trace.json");
  c = parsed({"--trace", "x.json"}, good);
  EXPECT_THAT(validate(c, 1), IsEmpty());
  EXPECT_EQ(c.trace, "x.json");
}

TEST_F(Config, WrongValuesNameTheFlagAndTheValue) {
  EXPECT_EQ(parse_error({"--num-layers", "abc"}),
            "--num-layers is 'abc', expected an integer at least 1 and below 2147483647");
  EXPECT_THAT(parse_error({"--num-layers", "4.5"}), HasSubstr("--num-layers is '4.5'"));
  EXPECT_THAT(parse_error({"--num-layers", "0"}), HasSubstr("--num-layers is '0'"));
  EXPECT_THAT(parse_error({"--num-layers", "-3"}), HasSubstr("--num-layers is '-3'"));
  EXPECT_THAT(parse_error({"--num-layers", ""}), HasSubstr("--num-layers is ''"));
  EXPECT_THAT(parse_error({"--num-layers", "99999999999999999999"}),
              HasSubstr("--num-layers is '9999"));
  EXPECT_THAT(parse_error({"--lr", "nan"}), HasSubstr("--lr is 'nan', expected a number above 0"));
  EXPECT_THAT(parse_error({"--lr", "inf"}), HasSubstr("--lr is 'inf'"));
  EXPECT_THAT(parse_error({"--adam-beta2", "1"}), HasSubstr("at least 0 and below 1"));
  EXPECT_THAT(parse_error({"--coc-parallel-num", "0"}), HasSubstr("--coc-parallel-num is '0'"));
  EXPECT_THAT(parse_error({"--coc-mode", "fast"}),
              HasSubstr("'fast', expected one of {auto,serial,chunked,fused}"));
  EXPECT_THAT(parse_error({"--seq-length"}), HasSubstr("--seq-length"));
  EXPECT_THAT(parse_error({"--use-coc=perhaps"}), HasSubstr("--use-coc"));
}

TEST_F(Config, UnknownFlagsAreRefusedWithTheClosest) {
  EXPECT_EQ(parse_error({"--num-layer", "4"}),
            "unknown flag --num-layer. HINT: did you mean --num-layers?");
  EXPECT_THAT(parse_error({"--tensor-parallel-size=2"}),
              HasSubstr("did you mean --tensor-model-parallel-size?"));
  EXPECT_EQ(parse_error({"--frobnicate"}), "unknown flag --frobnicate");
  EXPECT_EQ(parse_error({"stray"}), "unexpected argument 'stray'");
}

TEST_F(Config, RefusesWhatItKnowsAndDoesNotHave) {
  EXPECT_EQ(parse_error({"--optimize-recompute-communication-level", "2", "--use-coc"}),
            "--optimize-recompute-communication-level 2 is refused: the TP "
            "recomputation-communication optimisation is "
            "not available, and it excludes --use-coc, which is on");
  EXPECT_THAT(parse_error({"--optimize-recompute-communication-level", "2"}),
              Not(HasSubstr("--use-coc")));
  EXPECT_THAT(parse_error({"--use-ascend-mc2"}), HasSubstr("--use-ascend-mc2 is refused"));
  EXPECT_THAT(parse_error({"--overlap-param-gather"}),
              HasSubstr("--overlap-param-gather is refused"));
  EXPECT_THAT(parse_error({"--pipeline-model-parallel-size", "2"}),
              HasSubstr("--pipeline-model-parallel-size 2"));
  parsed({"--pipeline-model-parallel-size", "1"});
}

TEST_F(Config, HelpNamesEveryFlag) {
  CLI::App app;
  TrainConfig config;
  add_flags(app, config);
  const auto help = parse(app, {"--help"});
  ASSERT_TRUE(help.has_value());
  for (const auto& group : flag_table()) {
    for (const auto& flag : group.flags) EXPECT_THAT(*help, HasSubstr("--" + flag.name));
  }
}

TEST_F(Config, FlagsPageIsTheTable) {
  CLI::App app;
  TrainConfig config;
  add_flags(app, config);
  std::ifstream file(BRAID_SOURCE_DIR "/docs/flags.md");
  std::stringstream page;
  page << file.rdbuf();
  EXPECT_EQ(page.str(), parse(app, {"--help-markdown"}).value())
      << "HINT: build/braid train --help-markdown > docs/flags.md";
}

TEST_F(Config, JsonKeepsEveryField) {
  auto config = good;
  config.lr = 0.1;
  config.use_coc = true;
  config.seed = 1LL << 60;
  const auto text = nlohmann::json(config).dump();
  EXPECT_EQ(nlohmann::json::parse(text).get<TrainConfig>(), config);
}

TEST_F(Config, JsonRefusesWhatItDoesNotKnow) {
  const auto error = [](const char* text) {
    return value_error([&] { (void)nlohmann::json::parse(text).get<TrainConfig>(); });
  };
  EXPECT_THAT(error(R"({"num_layerz": 3})"), HasSubstr("num_layerz"));
  EXPECT_THAT(error(R"({"num_layers": "3"})"), HasSubstr("num_layers"));
  EXPECT_THAT(error(R"({"num_layers": 3.5})"), HasSubstr("num_layers"));
  EXPECT_THAT(error("[]"), HasSubstr("array"));
}

TEST_F(Config, DerivesWhatWasNotGiven) {
  good.hidden_size = 512;
  good.num_attention_heads = 8;
  EXPECT_THAT(validate(good, 4), IsEmpty());
  EXPECT_EQ(good.ffn_hidden_size, 1344);  // 512 * 8 / 3 = 1365, down to a multiple of 64
  EXPECT_EQ(good.num_query_groups, 8);
  EXPECT_EQ(good.kv_channels, 64);
  EXPECT_EQ(good.max_position_embeddings, 12);
  EXPECT_EQ(good.global_batch_size, 12);
  EXPECT_EQ(good.lr_decay_iters, 20);
  EXPECT_EQ(good.save, fs::path(good.output_dir) / "checkpoint");
  EXPECT_EQ(good.trace, "");
  auto again = good;
  EXPECT_THAT(validate(again, 4), IsEmpty());
  EXPECT_EQ(again, good);
  EXPECT_FALSE(fs::exists(good.output_dir));
}

TEST_F(Config, GroupQueryAttentionAloneIsOneGroup) {
  good.group_query_attention = true;
  EXPECT_THAT(validate(good, 1), IsEmpty());
  EXPECT_EQ(good.num_query_groups, 1);
}

TEST_F(Config, RequiredFlagsAreNamedTogether) {
  TrainConfig config;
  const auto error = value_error([&] { (void)validate(config, 1); });
  EXPECT_EQ(error,
            "required: --num-layers, --hidden-size, --num-attention-heads, --seq-length, "
            "--micro-batch-size, "
            "--train-iters, --lr, --data-path");
  good.data_path = "";
  good.train_iters = 0;
  EXPECT_THAT(validate(good, 1, /*needs_data=*/false), IsEmpty());
}

TEST_F(Config, RefusesWhatDoesNotFit) {
  using C = TrainConfig;
  const auto tp = [](std::int64_t n) { return [n](C& c) { c.tensor_model_parallel_size = n; }; };
  EXPECT_THAT(refusal(tp(2), 3),
              HasSubstr("--tensor-model-parallel-size 2 does not divide the number of ranks 3"));
  EXPECT_THAT(refusal(tp(2), 1), HasSubstr("HINT: --nproc N starts N ranks"));
  EXPECT_THAT(refusal(tp(8), 8),
              HasSubstr("--tensor-model-parallel-size 8 does not divide --num-attention-heads 4"));
  EXPECT_THAT(refusal([](C& c) { c.tensor_model_parallel_size = 4, c.num_query_groups = 2; }, 4),
              HasSubstr("--tensor-model-parallel-size 4 does not divide --num-query-groups 2"));
  EXPECT_THAT(refusal([](C& c) { c.tensor_model_parallel_size = 4, c.ffn_hidden_size = 30; }, 4),
              HasSubstr("does not divide --ffn-hidden-size 30"));
  EXPECT_THAT(
      refusal([](C& c) { c.tensor_model_parallel_size = 4, c.hidden_size = 50, c.kv_channels = 8; },
              4),
      HasSubstr("does not divide --hidden-size 50"));
  EXPECT_THAT(refusal([](C& c) { c.tensor_model_parallel_size = 4, c.vocab_size = 3; }, 4),
              HasSubstr("4 is above --vocab-size 3"));
  const auto sp = [](C& c) {
    c.tensor_model_parallel_size = 4, c.sequence_parallel = true, c.seq_length = 14;
  };
  EXPECT_THAT(refusal(sp, 4),
              HasSubstr("--tensor-model-parallel-size 4 does not divide --seq-length 14"));
  EXPECT_THAT(refusal([](C& c) { c.hidden_size = 50; }),
              HasSubstr("--num-attention-heads 4 does not divide --hidden-size 50"));
  EXPECT_THAT(refusal([](C& c) { c.num_query_groups = 3; }),
              HasSubstr("--num-query-groups 3 does not divide --num-attention-heads 4"));
  EXPECT_THAT(refusal([](C& c) { c.kv_channels = 7; }), HasSubstr("--kv-channels 7 is odd"));
  EXPECT_THAT(refusal([](C& c) { c.max_position_embeddings = 11; }),
              HasSubstr("--seq-length 12 is above --max-position-embeddings 11"));
  EXPECT_THAT(refusal([](C& c) { c.global_batch_size = 9; }, 2),
              HasSubstr("--global-batch-size 9 is not a multiple of --micro-batch-size 3 x 2 "
                        "data-parallel ranks = 6"));
  EXPECT_THAT(refusal([](C& c) { c.min_lr = 0.1; }), HasSubstr("--min-lr 0.1 is above --lr 0.001"));
  EXPECT_THAT(refusal([](C& c) { c.lr_warmup_iters = 20; }),
              HasSubstr("--lr-warmup-iters 20 is not below --lr-decay-iters 20"));
  EXPECT_THAT(refusal([](C& c) { c.weight_decay = -1; }),
              HasSubstr("--weight-decay is -1, expected at least 0"));
  EXPECT_THAT(refusal([](C& c) { c.num_layers = -2; }), HasSubstr("--num-layers is -2"));
  EXPECT_THAT(refusal([](C& c) { c.lr_decay_style = "steps"; }),
              HasSubstr("--lr-decay-style is 'steps'"));
}

TEST_F(Config, RefusesContradictingCoc) {
  using C = TrainConfig;
  EXPECT_THAT(refusal([](C& c) { c.coc_parallel_num = 4; }),
              HasSubstr("--coc-parallel-num is 4, but --use-coc is off"));
  EXPECT_THAT(refusal([](C& c) { c.coc_fused_kernel = true; }),
              HasSubstr("--coc-fused-kernel is on, but --use-coc is off"));
  EXPECT_THAT(refusal([](C& c) { c.coc_mode = "fused"; }),
              HasSubstr("--coc-mode is fused, but --use-coc is off"));
  EXPECT_THAT(refusal([](C& c) { c.use_coc = c.coc_fused_kernel = true, c.coc_mode = "chunked"; }),
              HasSubstr("--coc-mode chunked contradicts --coc-fused-kernel"));
  EXPECT_THAT(
      refusal([](C& c) { c.use_coc = true, c.coc_mode = "serial", c.coc_parallel_num = 4; }),
      HasSubstr("--coc-mode serial contradicts --coc-parallel-num 4"));
}

TEST_F(Config, CocFlagsChooseTheMode) {
  const auto mode = [](bool use, std::int64_t number, bool fused, const char* name) {
    TrainConfig c;
    c.use_coc = use, c.coc_parallel_num = number, c.coc_fused_kernel = fused, c.coc_mode = name;
    const auto options = matmul_options(c);
    return std::pair{options.mode, options.num_chunks};
  };
  EXPECT_EQ(mode(false, 0, false, "auto").first, Mode::serial);
  EXPECT_EQ(mode(true, 0, false, "auto").first, Mode::automatic);
  EXPECT_EQ(mode(true, 1, false, "auto").first, Mode::serial);
  EXPECT_EQ(mode(true, 5, false, "auto"), (std::pair{Mode::chunked, 5}));
  EXPECT_EQ(mode(true, 8, true, "auto").first, Mode::fused);
  EXPECT_EQ(mode(true, 0, false, "serial").first, Mode::serial);
  EXPECT_EQ(mode(true, 0, false, "chunked"), (std::pair{Mode::chunked, 2}));
  EXPECT_EQ(mode(true, 4, false, "chunked"), (std::pair{Mode::chunked, 4}));
  EXPECT_EQ(mode(true, 4, false, "fused").first, Mode::fused);
}

TEST_F(Config, GradientBuckets) {
  using C = TrainConfig;
  EXPECT_THAT(parse_error({"--ddp-bucket-size", "0"}),
              HasSubstr("--ddp-bucket-size is '0', expected an integer at least 1"));
  EXPECT_THAT(refusal([](C& c) { c.ddp_bucket_size = -1; }),
              HasSubstr("--ddp-bucket-size is -1, expected at least 1"));
  auto c = parsed({"--overlap-grad-reduce"});
  EXPECT_TRUE(c.overlap_grad_reduce);
  c = good;
  c.overlap_grad_reduce = true;
  c.global_batch_size = 3 * 64;
  EXPECT_THAT(validate(c, 2), IsEmpty());
  EXPECT_EQ(c.ddp_bucket_size, 40000000);  // as Megatron's
  c.ddp_bucket_size = 0;
  EXPECT_THAT(validate(c, 64), IsEmpty());
  EXPECT_EQ(c.ddp_bucket_size, 64000000);
  c.ddp_bucket_size = 7;
  EXPECT_THAT(validate(c, 2), IsEmpty());
  EXPECT_EQ(c.ddp_bucket_size, 7);
  EXPECT_THAT(validate(c, 1), ElementsAre("--overlap-grad-reduce has no effect: there is one "
                                          "data-parallel rank"));
  c.overlap_grad_reduce = false;
  EXPECT_THAT(validate(c, 2),
              ElementsAre("--ddp-bucket-size 7 has no effect: --overlap-grad-reduce is off"));
}

TEST_F(Config, WarnsOfWhatHasNoEffect) {
  auto c = good;
  c.sequence_parallel = true;
  EXPECT_THAT(validate(c, 1), ElementsAre(HasSubstr("--sequence-parallel is turned off")));
  EXPECT_FALSE(c.sequence_parallel);
  c = good;
  c.use_coc = true;
  EXPECT_THAT(validate(c, 1), ElementsAre(HasSubstr("--use-coc has no effect")));
  c.tensor_model_parallel_size = 2;
  c.coc_parallel_num = 4;
  EXPECT_THAT(validate(c, 2), IsEmpty());
  c.coc_fused_kernel = true;
  EXPECT_THAT(validate(c, 2),
              ElementsAre("--coc-parallel-num 4 has no effect: --coc-fused-kernel wins"));
  c = good;
  c.split = "1";
  EXPECT_THAT(validate(c, 1), ElementsAre(HasSubstr("no validation")));
  EXPECT_EQ(c.eval_iters, 0);
}

TEST_F(Config, Recomputation) {
  using C = TrainConfig;
  EXPECT_THAT(refusal([](C& c) { c.recompute_granularity = "selective"; }),
              HasSubstr("--recompute-granularity selective"));
  EXPECT_THAT(refusal([](C& c) { c.recompute_method = "block"; }),
              HasSubstr("--recompute-method is block, but --recompute-granularity is not given"));
  EXPECT_THAT(refusal([](C& c) { c.recompute_num_layers = 1; }),
              HasSubstr("--recompute-num-layers is 1, but"));
  EXPECT_THAT(refusal([](C& c) { c.recompute_granularity = "full", c.recompute_num_layers = 3; }),
              HasSubstr("--recompute-num-layers 3 is above --num-layers 2"));
  good.recompute_granularity = "full";
  EXPECT_THAT(validate(good, 1), IsEmpty());
  EXPECT_EQ(good.recompute_method, "uniform");
  EXPECT_EQ(good.recompute_num_layers, 1);
}

TEST_F(Config, PathsMustFit) {
  using C = TrainConfig;
  const auto file = good.data_path;
  EXPECT_THAT(refusal([](C& c) { c.data_path = "/nowhere/at/all"; }),
              HasSubstr("--data-path /nowhere/at/all: no such file"));
  EXPECT_THAT(refusal([](C& c) { c.load = "/nowhere"; }),
              HasSubstr("--load /nowhere: no such file"));
  EXPECT_THAT(refusal([&](C& c) { c.load = file; }),
              HasSubstr("--load " + file + ": is not a folder"));
  EXPECT_THAT(refusal([&](C& c) { c.save = file + "/x"; }),
              HasSubstr("--save " + file + "/x: " + file + " is not a folder"));
  EXPECT_THAT(refusal([&](C& c) { c.output_dir = file; }), HasSubstr("--output-dir " + file));
  EXPECT_THAT(refusal([&](C& c) { c.trace = folder.path(); }),
              HasSubstr("is a folder, expected a file"));
}

TEST_F(Config, FoldersMustBeWritable) {
  fs::permissions(folder.path(), fs::perms(0555));
  const bool is_root = geteuid() == 0;
  ASSERT_EQ(is_root ? seteuid(65534) : 0, 0);  // root may write anywhere
  const auto error =
      refusal([&](TrainConfig& c) { c.save = folder.path() / "new" / "checkpoint"; });
  ASSERT_EQ(is_root ? seteuid(0) : 0, 0);
  fs::permissions(folder.path(), fs::perms(0755));
  // The nearest folder that may be seen: not this one where other users may not enter those above it.
  EXPECT_THAT(error, HasSubstr("no permission to write in /"));
}

TEST_F(Config, SplitFractions) {
  EXPECT_THAT(split_fractions("95,5"), ElementsAre(0.95, 0.05, 0));
  EXPECT_THAT(split_fractions("969, 30, 1"), ElementsAre(0.969, 0.030, 0.001));
  EXPECT_THAT(split_fractions("2"), ElementsAre(1, 0, 0));
  for (const char* wrong : {"", "a", "95;5", "95,", "-1,2", "0,5", "1,2,3,4", "nan", "1e400"}) {
    EXPECT_THAT(value_error([&] { (void)split_fractions(wrong); }), HasSubstr(wrong)) << wrong;
  }
}

}  // namespace
}  // namespace braid
