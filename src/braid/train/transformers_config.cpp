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

void check_same_model(const TrainConfig& config, const json& config_json,
                      const std::string& config_path) {
  check_plain(config_json, "model_type", "llama", config_path);
  check_plain(config_json, "hidden_act", "silu", config_path);
  check_plain(config_json, "attention_bias", false, config_path);
  check_plain(config_json, "mlp_bias", false, config_path);
  check_plain(config_json, "rope_scaling", nullptr, config_path);

  // Newer versions of transformers have the base of the positions in an object of its own.
  json theirs = config_json;
  if (const auto rope = theirs.find("rope_parameters"); rope != theirs.end() && rope->is_object()) {
    check_plain(*rope, "rope_type", "default", config_path);
    if (rope->contains("rope_theta")) theirs["rope_theta"] = (*rope)["rope_theta"];
  }
  const auto check = [&](const char* flag, const char* key, auto ours, const json& fallback) {
    const json value = theirs.value(key, fallback);
    BRAID_CHECK(value == json(ours) || (value.is_null() && fallback == json(ours)), "--", flag,
                " is ", ours, ", but ", config_path, " has ", key, " ", value.dump(-1, ' ', true));
  };
  check("vocab-size", "vocab_size", config.vocab_size, nullptr);
  check("hidden-size", "hidden_size", config.hidden_size, nullptr);
  check("ffn-hidden-size", "intermediate_size", config.ffn_hidden_size, nullptr);
  check("num-layers", "num_hidden_layers", config.num_layers, nullptr);
  check("num-attention-heads", "num_attention_heads", config.num_attention_heads, nullptr);
  check("num-query-groups", "num_key_value_heads", config.num_query_groups,
        config.num_attention_heads);
  check("kv-channels", "head_dim", config.kv_channels,
        config.hidden_size / config.num_attention_heads);
  check("norm-epsilon", "rms_norm_eps", config.norm_epsilon, 1e-6);
  check("rotary-base", "rope_theta", config.rotary_base, 10000.0);
  const bool tied = theirs.value("tie_word_embeddings", json(false)) == json(true);
  BRAID_CHECK(tied != config.untie_embeddings_and_output_weights,
              "--untie-embeddings-and-output-weights is ",
              config.untie_embeddings_and_output_weights ? "on" : "off", ", but ", config_path,
              " has tie_word_embeddings ", tied ? "true" : "false");
}

}  // namespace braid
