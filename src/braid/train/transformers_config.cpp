// Writes and checks transformers' config.json.
#include "braid/train/transformers_config.h"

#include "braid/core/check.h"

namespace braid {
namespace {

using nlohmann::json;

// What `key` must say, else the checkpoint is of a model that braid does not have.
void check_plain(const json& object, const char* key, const json& expected,
                 const std::string& path) {
  const json value = object.value(key, expected);
  BRAID_CHECK(value == expected, path, " has ", key, " ", value.dump(-1, ' ', true),
              ", braid's model has ", expected.dump());
}

/// Checks that it is a Llama as braid has it. Gives config_json with the base of the positions where
/// older versions of transformers have it: newer ones have an object of their own for it.
json checked(json config_json, const std::string& config_path) {
  check_plain(config_json, "model_type", "llama", config_path);
  check_plain(config_json, "hidden_act", "silu", config_path);
  check_plain(config_json, "attention_bias", false, config_path);
  check_plain(config_json, "mlp_bias", false, config_path);
  check_plain(config_json, "rope_scaling", nullptr, config_path);
  if (const auto rope = config_json.find("rope_parameters");
      rope != config_json.end() && rope->is_object()) {
    check_plain(*rope, "rope_type", "default", config_path);
    if (rope->contains("rope_theta")) config_json["rope_theta"] = json((*rope)["rope_theta"]);
  }
  return config_json;
}

/// Calls row(flag, key of config.json, setting, what a missing key stands for) for each number, those
/// on which the defaults of others depend first.
template <class Config, class Row>
void for_each_number(Config& c, const Row& row) {
  row("vocab-size", "vocab_size", c.vocab_size, json());
  row("hidden-size", "hidden_size", c.hidden_size, json());
  row("ffn-hidden-size", "intermediate_size", c.ffn_hidden_size, json());
  row("num-layers", "num_hidden_layers", c.num_layers, json());
  row("num-attention-heads", "num_attention_heads", c.num_attention_heads, json());
  row("num-query-groups", "num_key_value_heads", c.num_query_groups, json(c.num_attention_heads));
  row("kv-channels", "head_dim", c.kv_channels, json(c.hidden_size / c.num_attention_heads));
  row("norm-epsilon", "rms_norm_eps", c.norm_epsilon, json(1e-6));
  row("rotary-base", "rope_theta", c.rotary_base, json(10000.0));
}

/// Numbers that the flag allows.
Range range_of(const std::string& flag_name) {
  for (const auto& group : flag_table())
    for (const auto& flag : group.flags)
      if (flag.name == flag_name) return flag.range;
  TORCH_INTERNAL_ASSERT(false, flag_name);
}

/// Errors: ValueError where the sizes of heads do not fit each other.
void check_heads(const TrainConfig& c, bool has_head_dim, const std::string& config_path) {
  BRAID_CHECK(has_head_dim || c.hidden_size % c.num_attention_heads == 0, config_path,
              " has num_attention_heads ", c.num_attention_heads,
              ", which does not divide its hidden_size ", c.hidden_size);
  BRAID_CHECK(c.num_attention_heads % c.num_query_groups == 0, config_path,
              " has num_key_value_heads ", c.num_query_groups,
              ", which does not divide its num_attention_heads ", c.num_attention_heads);
  BRAID_CHECK(c.kv_channels % 2 == 0, config_path, " has heads of ", c.kv_channels,
              " features (head_dim, or hidden_size ", c.hidden_size, " / num_attention_heads ",
              c.num_attention_heads, "), rotary positions need an even number");
}

bool is_tied(const json& config_json) {
  return config_json.value("tie_word_embeddings", json(false)) == json(true);
}

}  // namespace

json transformers_config(const TrainConfig& config) {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"vocab_size", config.vocab_size},
          {"hidden_size", config.hidden_size},
          {"intermediate_size", config.ffn_hidden_size},
          {"num_hidden_layers", config.num_layers},
          {"num_attention_heads", config.num_attention_heads},
          {"num_key_value_heads", config.num_query_groups},
          {"head_dim", config.kv_channels},
          {"max_position_embeddings", config.max_position_embeddings},
          {"rms_norm_eps", config.norm_epsilon},
          {"rope_theta", config.rotary_base},
          {"tie_word_embeddings", !config.untie_embeddings_and_output_weights},
          {"hidden_act", "silu"},
          {"attention_bias", false},
          {"mlp_bias", false},
          {"initializer_range", config.init_method_std},
          // No token of a text of bytes begins or ends it.
          {"bos_token_id", nullptr},
          {"eos_token_id", nullptr},
          {"torch_dtype", config.bf16 ? "bfloat16" : "float32"}};
}

std::map<std::string, std::vector<std::int64_t>> transformers_tensors(const TrainConfig& c) {
  const auto h = c.hidden_size, f = c.ffn_hidden_size, v = c.vocab_size;
  const auto q_rows = c.num_attention_heads * c.kv_channels;
  const auto kv_rows = c.num_query_groups * c.kv_channels;
  std::map<std::string, std::vector<std::int64_t>> shapes = {{"model.embed_tokens.weight", {v, h}},
                                                             {"model.norm.weight", {h}}};
  if (c.untie_embeddings_and_output_weights) shapes["lm_head.weight"] = {v, h};
  for (std::int64_t i = 0; i < c.num_layers; ++i) {
    const std::string layer = "model.layers." + std::to_string(i) + ".";
    shapes[layer + "input_layernorm.weight"] = {h};
    shapes[layer + "self_attn.q_proj.weight"] = {q_rows, h};
    shapes[layer + "self_attn.k_proj.weight"] = {kv_rows, h};
    shapes[layer + "self_attn.v_proj.weight"] = {kv_rows, h};
    shapes[layer + "self_attn.o_proj.weight"] = {h, q_rows};
    shapes[layer + "post_attention_layernorm.weight"] = {h};
    shapes[layer + "mlp.gate_proj.weight"] = {f, h};
    shapes[layer + "mlp.up_proj.weight"] = {f, h};
    shapes[layer + "mlp.down_proj.weight"] = {h, f};
  }
  return shapes;
}

TrainConfig model_settings(const json& config_json, const std::string& config_path) {
  const json theirs = checked(config_json, config_path);
  TrainConfig config;
  const auto read = [&](const char* flag, const char* key, auto& setting, const json& fallback) {
    json value = theirs.value(key, fallback);
    if (value.is_null()) value = fallback;
    const bool is_whole = std::is_integral_v<std::decay_t<decltype(setting)>>;
    const bool fits =
        is_whole ? value.is_number_integer() && value > 0 && value <= INT32_MAX : value.is_number();
    BRAID_CHECK(fits, config_path, " has ", key, " ", value.dump(-1, ' ', true), ", expected a ",
                is_whole ? "whole number of at least 1" : "number");
    const Range range = range_of(flag);
    BRAID_CHECK(range.contains(value.get<double>()), config_path, " has ", key, " ", value.dump(),
                ", expected ", range.text());
    value.get_to(setting);
  };
  for_each_number(config, read);
  if (theirs.contains("max_position_embeddings"))
    read("max-position-embeddings", "max_position_embeddings", config.max_position_embeddings,
         nullptr);
  check_heads(config, theirs.contains("head_dim") && !theirs["head_dim"].is_null(), config_path);
  config.untie_embeddings_and_output_weights = !is_tied(theirs);
  return config;
}

void check_same_model(const TrainConfig& config, const json& config_json,
                      const std::string& config_path) {
  const json theirs = checked(config_json, config_path);
  for_each_number(config, [&](const char* flag, const char* key, auto ours, const json& fallback) {
    const json value = theirs.value(key, fallback);
    BRAID_CHECK(value == json(ours) || (value.is_null() && fallback == json(ours)), "--", flag,
                " is ", ours, ", but ", config_path, " has ", key, " ", value.dump(-1, ' ', true));
  });
  const bool tied = is_tied(theirs);
  BRAID_CHECK(tied != config.untie_embeddings_and_output_weights,
              "--untie-embeddings-and-output-weights is ",
              config.untie_embeddings_and_output_weights ? "on" : "off", ", but ", config_path,
              " has tie_word_embeddings ", tied ? "true" : "false");
}

}  // namespace braid
