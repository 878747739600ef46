// What a generation is asked for: prompts, ends and defaults from the checkpoint, and one clear line for each mistake.
#include "braid/generate/request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "braid/train/transformers_config.h"
#include "tests/support/errors.h"
#include "tests/support/folders.h"

namespace braid::test {
namespace {

using testing::HasSubstr;

/// A folder with a checkpoint whose weights are 0, of a model with 4 heads in 2 groups and 32 positions.
class RequestTest : public testing::Test {
 protected:
  RequestTest() { write_checkpoint(256); }

  void write_checkpoint(std::int64_t vocab_size, const nlohmann::json& more = {}) const {
    TrainConfig model;
    model.num_layers = 1;
    model.hidden_size = 16;
    model.ffn_hidden_size = 24;
    model.num_attention_heads = 4;
    model.num_query_groups = 2;
    model.kv_channels = 4;
    model.max_position_embeddings = 32;
    model.vocab_size = vocab_size;
    nlohmann::json config = transformers_config(model);
    if (!more.is_null()) config.update(more);
    folder_.write("config.json", config.dump());
    std::vector<TensorInfo> infos;
    for (const auto& [name, shape] : transformers_tensors(model))
      infos.push_back({name, at::kFloat, shape});
    SafetensorsWriter writer(folder_ / "model.safetensors", infos);
    for (const auto& info : infos) writer.write(info.name, at::zeros(info.shape));
    writer.commit();
  }
  RequestFlags flags(const std::vector<std::string>& prompts = {"ab"}) const {
    RequestFlags flags;
    flags.load = folder_.path();
    flags.prompt = prompts;
    flags.max_new_tokens = 10;
    return flags;
  }
  /// What is said about the flags as `change` leaves them.
  template <class Change>
  std::string error(const Change& change, int num_ranks = 1) const {
    RequestFlags changed = flags();
    change(changed);
    return value_error([&] { (void)check_request(changed, num_ranks); });
  }

  TemporaryFolder folder_;
};

TEST_F(RequestTest, PromptsOfAllKindsInOrder) {
  RequestFlags all = flags({"ab", "\xff [1,2]"});
  all.prompt_file = folder_.write("prompts.txt", "one\r\ntwo words\n");
  all.prompt_tokens = {"0", "7,255"};
  const Request request = check_request(all, 1);
  EXPECT_TRUE(request.is_bytes);
  EXPECT_EQ(request.prompts, (std::vector<Tokens>{{'a', 'b'},
                                                  {255, ' ', '[', '1', ',', '2', ']'},
                                                  {'o', 'n', 'e'},
                                                  {'t', 'w', 'o', ' ', 'w', 'o', 'r', 'd', 's'},
                                                  {0},
                                                  {7, 255}}));
  EXPECT_EQ(request.model.num_query_groups, 2);
  EXPECT_EQ(request.model.max_position_embeddings, 32);
  EXPECT_TRUE(request.options.eos_token_ids.empty());
}

TEST_F(RequestTest, EndsAreTheCheckpointsUnlessGiven) {
  using Ids = std::vector<std::int64_t>;
  write_checkpoint(256, {{"eos_token_id", 5}});
  EXPECT_EQ(check_request(flags(), 1).options.eos_token_ids, Ids{5});
  write_checkpoint(256, {{"eos_token_id", {5, 6}}});
  EXPECT_EQ(check_request(flags(), 1).options.eos_token_ids, (Ids{5, 6}));
  RequestFlags given = flags();
  given.eos_token_id = {-1};
  EXPECT_EQ(check_request(given, 1).options.eos_token_ids, Ids{-1});
}

TEST_F(RequestTest, WhatTransformersWouldTakeHoldsUnlessAFlagSaysOtherwise) {
  using Ids = std::vector<std::int64_t>;
  write_checkpoint(256, {{"eos_token_id", 5}});
  const auto with = [&](const nlohmann::json& generation, RequestFlags given) {
    folder_.write("generation_config.json", generation.dump());
    return check_request(given, 1);
  };
  const nlohmann::json samples{{"do_sample", true},
                               {"temperature", 0.6},
                               {"top_p", 0.9},
                               {"top_k", 0},
                               {"eos_token_id", {7, 8}}};
  Request request = with(samples, flags());
  EXPECT_EQ(request.options.eos_token_ids, (Ids{7, 8}));
  EXPECT_EQ(request.options.sampling.temperature, 0.6);
  EXPECT_EQ(request.options.sampling.top_p, 0.9);
  EXPECT_TRUE(request.warnings.empty());
  RequestFlags given = flags();
  given.temperature = 0;
  given.top_p = 0.5;
  given.eos_token_id = {9};
  request = with(samples, given);
  EXPECT_EQ(request.options.eos_token_ids, Ids{9});
  EXPECT_EQ(request.options.sampling.temperature, 0);
  EXPECT_EQ(request.options.sampling.top_p, 0.5);
  EXPECT_THAT(request.warnings, testing::ElementsAre(HasSubstr("--top-p 0.5 has no effect")));

  // Greedy: as transformers, which then leaves both aside; the file counts alone, also where it ends nothing.
  request = with({{"temperature", 0.6}, {"top_p", 0.9}, {"do_sample", false}}, flags());
  EXPECT_EQ(request.options.sampling.temperature, 0);
  EXPECT_EQ(request.options.sampling.top_p, 1);
  EXPECT_TRUE(request.options.eos_token_ids.empty());
  request = with({{"do_sample", true}}, flags());
  EXPECT_EQ(request.options.sampling.temperature, 1);
  EXPECT_THAT(request.warnings,
              testing::ElementsAre(HasSubstr("asks for top_k 50,")));  // by default
  EXPECT_THAT(with({{"repetition_penalty", 1.5}, {"top_k", 9}}, flags()).warnings,
              testing::ElementsAre(HasSubstr("generation_config.json asks for repetition_penalty "
                                             "1.5, which has no effect")));

  const auto said = [&](const nlohmann::json& generation) {
    return value_error([&] { (void)with(generation, flags()); });
  };
  EXPECT_THAT(said({{"do_sample", true}, {"temperature", -1}}),
              HasSubstr("generation_config.json has temperature -1"));
  EXPECT_THAT(said({{"do_sample", true}, {"top_p", "most"}}), HasSubstr("has top_p \"most\""));
  EXPECT_THAT(said({1}), HasSubstr("generation_config.json is damaged"));
}

TEST_F(RequestTest, SizesBeyondReasonAreRefusedBeforeMemoryIsTaken) {
  const auto said = [&](const nlohmann::json& more) {
    write_checkpoint(256, more);
    return error([](auto&) {});
  };
  EXPECT_THAT(said({{"num_hidden_layers", 1000000000}}),
              HasSubstr("num_hidden_layers 1000000000, but the checkpoint holds 11 tensors"));
  EXPECT_THAT(said({{"num_hidden_layers", -1}}), HasSubstr("num_hidden_layers -1, expected"));
  EXPECT_THAT(said({{"vocab_size", 4294967296}}), HasSubstr("vocab_size 4294967296, expected"));
  EXPECT_THAT(said({{"hidden_size", 18}, {"head_dim", nullptr}}),
              HasSubstr("num_attention_heads 4, which does not divide its hidden_size 18"));
  EXPECT_THAT(said({{"num_key_value_heads", 3}}),
              HasSubstr("num_key_value_heads 3, which does not divide its num_attention_heads 4"));
  EXPECT_THAT(said({{"head_dim", 3}}), HasSubstr("heads of 3 features"));
  EXPECT_THAT(said({{"rope_theta", -1}}), HasSubstr("rope_theta -1, expected"));
  EXPECT_THAT(said({{"rms_norm_eps", 0}}), HasSubstr("rms_norm_eps 0, expected above 0"));
  write_checkpoint(256, {{"max_position_embeddings", 2147483646}});
  EXPECT_THAT(error([](auto& f) {
                f.max_new_tokens = 2147483640;
                f.prompt.resize(10000, "a");
              }),
              testing::AllOf(HasSubstr("--max-new-tokens is 2147483640: 10000 sequences"),
                             HasSubstr("GB a rank, this host has")));
}

TEST_F(RequestTest, NamesTheFlagAndBothValues) {
  EXPECT_EQ(error([](auto& f) { f.load = ""; }), "required: --load");
  EXPECT_THAT(error([](auto& f) { f.load = "/no/such"; }), HasSubstr("/no/such does not exist"));
  EXPECT_EQ(error([](auto& f) { f.max_new_tokens = 0; }),
            "--max-new-tokens is 0, expected at least 1");
  EXPECT_EQ(error([](auto& f) { f.temperature = -1; }),
            "--temperature is -1, expected a finite number of at least 0");
  EXPECT_THAT(error([](auto& f) { f.temperature = std::nan(""); }),
              HasSubstr("--temperature is nan"));
  for (const double top_p : {0.0, -0.5, 1.5})
    EXPECT_THAT(error([&](auto& f) { f.top_p = top_p; }),
                HasSubstr("expected above 0 and at most 1"));
  EXPECT_THAT(error([](auto& f) { f.prompt = {}; }), HasSubstr("no prompt given. HINT: --prompt"));
  EXPECT_EQ(error([](auto& f) {
              f.prompt = {"a", ""};
            }),
            "--prompt is '', expected at least one token");
  EXPECT_EQ(error([](auto& f) { f.prompt_tokens = {"1,256"}; }),
            "--prompt-tokens has 256, the checkpoint's vocab_size is 256");
  for (const char* wrong : {"", "1,", "1,,2", "a", "1 2"})
    EXPECT_THAT(error([&](auto& f) { f.prompt_tokens = {wrong}; }),
                HasSubstr("expected token ids such as 1,2,3"));
  EXPECT_THAT(error([](auto& f) { f.prompt_tokens = {"-1"}; }),
              HasSubstr("--prompt-tokens has -1"));
  EXPECT_EQ(error([](auto& f) { f.max_new_tokens = 31; }),
            "prompt 1 has 2 tokens and --max-new-tokens is 31, together above the checkpoint's "
            "max_position_embeddings 32");
  EXPECT_NO_THROW(check_request(
      [&] {
        RequestFlags most = flags();
        most.max_new_tokens = 30;
        return most;
      }(),
      1));
  EXPECT_EQ(
      error([](auto& f) {
        f.eos_token_id = {-1, 256};
      }),
      "--eos-token-id is 256, expected -1 (none) or a token below the checkpoint's vocab_size "
      "256");
  EXPECT_THAT(error([](auto& f) { f.eos_token_id = {-2}; }), HasSubstr("--eos-token-id is -2"));
  EXPECT_THAT(error([](auto& f) { f.prompt_file = "/no/such"; }),
              HasSubstr("--prompt-file /no/such"));
  const std::string gap = folder_.write("gap.txt", "a\n\nb\n");
  EXPECT_THAT(error([&](auto& f) { f.prompt_file = gap; }), HasSubstr("line 2 is empty"));
}

TEST_F(RequestTest, RanksMustFitTheModel) {
  EXPECT_THAT(error([](auto& f) { f.tensor_model_parallel_size = 2; }),
              HasSubstr("--tensor-model-parallel-size is 2, but the number of ranks is 1"));
  EXPECT_EQ(error([](auto&) {}, 3),
            "--tensor-model-parallel-size is 3, above the checkpoint's num_key_value_heads 2");
  EXPECT_NO_THROW(check_request(flags(), 2));
}

TEST_F(RequestTest, TokensThatBraidCantRead) {
  write_checkpoint(300);
  EXPECT_THAT(error([](auto&) {}),
              testing::AllOf(HasSubstr("300"), HasSubstr("HINT: --prompt-tokens")));
  RequestFlags ids = flags({});
  ids.prompt_tokens = {"299"};
  EXPECT_FALSE(check_request(ids, 1).is_bytes);
  write_checkpoint(256);
  folder_.write("tokenizer.json", "{}");
  EXPECT_THAT(error([](auto&) {}), HasSubstr("those of tokenizer.json"));
}

TEST_F(RequestTest, CheckpointsOfOtherModels) {
  const auto said = [&](const nlohmann::json& more) {
    write_checkpoint(256, more);
    return error([](auto&) {});
  };
  EXPECT_THAT(said({{"model_type", "gpt2"}}), HasSubstr("model_type \"gpt2\""));
  EXPECT_THAT(said({{"attention_bias", true}}), HasSubstr("attention_bias true"));
  EXPECT_THAT(said({{"hidden_size", nullptr}}),
              HasSubstr("hidden_size null, expected a whole number"));
  EXPECT_THAT(said({{"num_attention_heads", 0}}), HasSubstr("num_attention_heads 0"));
  EXPECT_THAT(said({{"rms_norm_eps", "small"}}),
              HasSubstr("rms_norm_eps \"small\", expected a number"));
  EXPECT_THAT(said({{"hidden_size", 32}}), HasSubstr("the model's has"));
}

}  // namespace
}  // namespace braid::test
