// The model's settings as transformers' config.json.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "braid/train/config.h"

namespace braid {

/// config.json of the model, as transformers' LlamaForCausalLM reads it.   config  validated
nlohmann::json transformers_config(const TrainConfig& config);

/// The whole tensors of the model under transformers' names, with their shapes.   config  validated
std::map<std::string, std::vector<std::int64_t>> transformers_tensors(const TrainConfig& config);

/// The model's settings that a config.json stands for; the others as by default.
///   config_path  where it comes from, for the text
///   Errors       ValueError, one line: a number that is missing or of another kind; what braid's model does not have
TrainConfig model_settings(const nlohmann::json& config_json, const std::string& config_path);

/// Checks that a checkpoint is of the model that the settings describe.
///   config_path  where config_json comes from, for the text
///   Errors       ValueError, one line: the flag and both values; or what braid's model does not have (biases, ...)
void check_same_model(const TrainConfig& config, const nlohmann::json& config_json,
                      const std::string& config_path);

}  // namespace braid
