// config.json: what is written is accepted again; every difference names the flag and both values.
#include "braid/train/transformers_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "braid/train/trainer.h"
#include "tests/support/errors.h"
#include "tests/support/folders.h"

namespace braid {
namespace {

using nlohmann::json;
using test::value_error;
using testing::HasSubstr;

TrainConfig some_config() {
  TrainConfig config;
  config.num_layers = 3;
  config.hidden_size = 48;
  config.ffn_hidden_size = 80;
  config.num_attention_heads = 4;
  config.num_query_groups = 2;
  config.kv_channels = 16;
  config.max_position_embeddings = 128;
  config.vocab_size = 300;
  config.rotary_base = 50000;
  config.norm_epsilon = 3e-5;
  return config;
}

TEST(TransformersConfig, EveryDifferenceNamesTheFlagAndBothValues) {
  const TrainConfig config = some_config();
  const json good = transformers_config(config);
  EXPECT_NO_THROW(check_same_model(config, good, "x/config.json"));
  EXPECT_NO_THROW(check_same_model(config, json::parse(good.dump()), "x/config.json"));

  const auto error_with = [&](const char* key, const json& value) {
    json changed = good;
    changed[key] = value;
    return value_error([&] { check_same_model(config, changed, "x/config.json"); });
  };
  EXPECT_EQ(error_with("vocab_size", 301),
            "--vocab-size is 300, but x/config.json has vocab_size 301");
  EXPECT_EQ(error_with("hidden_size", 64),
            "--hidden-size is 48, but x/config.json has hidden_size 64");
  EXPECT_EQ(error_with("intermediate_size", 88),
            "--ffn-hidden-size is 80, but x/config.json has intermediate_size 88");
  EXPECT_THAT(error_with("num_hidden_layers", 4), HasSubstr("--num-layers is 3"));
  EXPECT_THAT(error_with("num_attention_heads", 8), HasSubstr("--num-attention-heads is 4"));
  EXPECT_THAT(error_with("num_key_value_heads", 4), HasSubstr("--num-query-groups is 2"));
  EXPECT_THAT(error_with("head_dim", 8), HasSubstr("--kv-channels is 16"));
  EXPECT_THAT(error_with("rms_norm_eps", 1e-6), HasSubstr("--norm-epsilon is 3e-05"));
  EXPECT_THAT(error_with("rope_theta", 10000.0), HasSubstr("--rotary-base is 50000"));
  EXPECT_EQ(error_with("tie_word_embeddings", false),
            "--untie-embeddings-and-output-weights is off, but x/config.json has "
            "tie_word_embeddings false");
  EXPECT_EQ(error_with("model_type", "gpt2"),
            "x/config.json has model_type \"gpt2\", braid's model has \"llama\"");
  EXPECT_THAT(error_with("attention_bias", true), HasSubstr("attention_bias true"));
  EXPECT_THAT(error_with("mlp_bias", true), HasSubstr("mlp_bias true"));
  EXPECT_THAT(error_with("hidden_act", "gelu"), HasSubstr("hidden_act \"gelu\""));
  EXPECT_THAT(error_with("rope_scaling", {{"rope_type", "yarn"}}), HasSubstr("rope_scaling"));
  EXPECT_THAT(error_with("rope_parameters", {{"rope_theta", 1.0}}), HasSubstr("rope_theta 1.0"));
  EXPECT_THAT(error_with("rope_parameters", {{"rope_type", "yarn"}}),
              HasSubstr("rope_type \"yarn\""));
  EXPECT_THAT(error_with("hidden_size", "48"), HasSubstr("hidden_size \"48\""));
}

TEST(TransformersConfig, WhatIsMissingHasTransformersDefaults) {
  TrainConfig config = some_config();
  config.num_query_groups = 4;
  config.kv_channels = 12;
  config.rotary_base = 10000;
  config.norm_epsilon = 1e-6;
  config.untie_embeddings_and_output_weights = true;
  json bare = transformers_config(config);
  for (const char* key : {"num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta",
                          "tie_word_embeddings", "hidden_act", "attention_bias", "mlp_bias"}) {
    bare.erase(key);
  }
  EXPECT_NO_THROW(check_same_model(config, bare, "x"));
  bare["head_dim"] = nullptr;
  EXPECT_NO_THROW(check_same_model(config, bare, "x"));
  config.kv_channels = 16;
  EXPECT_THAT(value_error([&] { check_same_model(config, bare, "x"); }),
              HasSubstr("--kv-channels is 16"));
  EXPECT_THAT(value_error([&] { check_same_model(config, json::object(), "x"); }),
              HasSubstr("--vocab-size is 300"));
}

TEST(TransformersConfig, SettingsAreReadAsTheyAreWritten) {
  TrainConfig config = some_config();
  EXPECT_EQ(model_settings(transformers_config(config), "x"), config);
  config.untie_embeddings_and_output_weights = true;
  EXPECT_EQ(model_settings(transformers_config(config), "x"), config);
  json newer = transformers_config(config);
  newer.erase("rope_theta");
  newer["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 50000.0}};
  EXPECT_EQ(model_settings(newer, "x"), config);

  json bare = transformers_config(config);
  for (const char* key : {"num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta",
                          "max_position_embeddings", "tie_word_embeddings"})
    bare.erase(key);
  config.num_query_groups = 4;
  config.kv_channels = 12;
  config.norm_epsilon = 1e-6;
  config.rotary_base = 10000;
  config.max_position_embeddings = 0;
  EXPECT_EQ(model_settings(bare, "x"), config);
  bare.erase("vocab_size");
  EXPECT_EQ(value_error([&] { (void)model_settings(bare, "x"); }),
            "x has vocab_size null, expected a whole number of at least 1");
}

TEST(TransformersConfig, NamesTheTensorsThatTheModelHas) {
  for (const bool untied : {false, true}) {
    TrainConfig config = some_config();
    config.untie_embeddings_and_output_weights = untied;
    Transformer model(llama_config(config), {});
    EXPECT_EQ(transformers_tensors(config), whole_tensors(model.parameters()));
  }
}

}  // namespace
}  // namespace braid
