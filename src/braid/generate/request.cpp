// Reading and checking what a generation is asked for.
#include "braid/generate/request.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "braid/core/check.h"
#include "braid/core/memory.h"
#include "braid/train/transformers_config.h"

namespace braid {
namespace {

using nlohmann::json;

Tokens parse_ids(const std::string& text) {
  Tokens ids;
  const char *at = text.data(), *last = at + text.size();
  while (true) {
    const auto [end, error] = std::from_chars(at, last, ids.emplace_back());
    BRAID_CHECK(error == std::errc{} && (end == last || *end == ','), "--prompt-tokens is '", text,
                "', expected token ids such as 1,2,3");
    if (end == last) return ids;
    at = end + 1;
  }
}

Tokens bytes_of(const std::string& text) {
  Tokens tokens;
  for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
  return tokens;
}

std::vector<std::string> lines_of(const std::string& path, int num_ranks) {
  std::error_code ignored;
  BRAID_CHECK(num_ranks == 1 || !std::filesystem::is_other(path, ignored), "--prompt-file ", path,
              ": is not a regular file, so ", num_ranks,
              " ranks can't each read all of it. HINT: write it into a file first");
  std::ifstream file(path, std::ios::binary);
  BRAID_CHECK(file && !std::filesystem::is_directory(path, ignored), "--prompt-file ", path,
              ": can't be read");
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    if (line.ends_with('\r')) line.pop_back();
    BRAID_CHECK(!line.empty(), "--prompt-file ", path, ": line ", lines.size() + 1, " is empty");
    lines.push_back(line);
  }
  BRAID_CHECK(!lines.empty(), "--prompt-file ", path, ": there is no prompt in it");
  return lines;
}

/// The file in the folder from which transformers would make a tokenizer; empty where there is none.
std::string tokenizer_of(const std::filesystem::path& folder) {
  std::error_code ignored;
  for (const char* name : {"tokenizer.json", "tokenizer.model", "tokenizer_config.json"})
    if (std::filesystem::exists(folder / name, ignored)) return name;
  return {};
}

std::vector<std::int64_t> eos_of(const json& object) {
  const auto value = object.value("eos_token_id", json());
  if (value.is_number_integer()) return {value.get<std::int64_t>()};
  std::vector<std::int64_t> ids;
  if (value.is_array())
    for (const auto& id : value)
      if (id.is_number_integer()) ids.push_back(id);
  return ids;
}

void check_temperature(double temperature, const std::string& name) {
  BRAID_CHECK(temperature >= 0 && std::isfinite(temperature), name, " ", temperature,
              ", expected a finite number of at least 0");
}

void check_top_p(double top_p, const std::string& name) {
  BRAID_CHECK(top_p > 0 && top_p <= 1, name, " ", top_p, ", expected above 0 and at most 1");
}

/// Takes temperature and top_p of a generation_config.json that samples. Gives what else it asks for and braid lacks.
std::string sampling_of(const json& object, const std::string& path, SamplingOptions& sampling) {
  const auto number = [&](const char* key, double neutral) {
    const json value = object.value(key, json());
    BRAID_CHECK(value.is_number() || value.is_null(), path, " has ", key, " ",
                value.dump(-1, ' ', true), ", expected a number");
    return value.is_null() ? neutral : value.get<double>();
  };
  std::string others;
  const auto lacks = [&](const char* key, double neutral, double absent) {
    if (const double value = number(key, absent); value != neutral)
      others += fmt::format("{}{} {}", others.empty() ? "" : ", ", key, value);
  };
  lacks("repetition_penalty", 1, 1);
  lacks("no_repeat_ngram_size", 0, 0);
  lacks("num_beams", 1, 1);
  if (object.value("do_sample", json()) != json(true)) return others;
  lacks("top_k", 0, 50);
  lacks("min_p", 0, 0);
  lacks("typical_p", 1, 1);
  sampling.temperature = number("temperature", 1);
  check_temperature(sampling.temperature, path + " has temperature");
  sampling.top_p = number("top_p", 1);
  check_top_p(sampling.top_p, path + " has top_p");
  return others;
}

/// What the flags ask for, with the checkpoint's word where they say nothing.
void complete_options(const RequestFlags& flags, Request& request) {
  const auto& checkpoint = request.checkpoint;
  auto& [max_new_tokens, eos_token_ids, sampling] = request.options;
  max_new_tokens = flags.max_new_tokens;
  sampling.seed = flags.seed;
  const auto generation = checkpoint.generation_config_json();
  const std::string path = checkpoint.folder() + "/generation_config.json";
  if (generation) {
    const std::string others = sampling_of(*generation, path, sampling);
    if (!others.empty())
      request.warnings.push_back(
          fmt::format("{} asks for {}, which has no effect: braid lacks it", path, others));
  }
  if (flags.temperature) sampling.temperature = *flags.temperature;
  if (flags.top_p) sampling.top_p = *flags.top_p;
  if (flags.top_p && *flags.top_p < 1 && sampling.temperature == 0)
    request.warnings.push_back(
        fmt::format("--top-p {} has no effect: --temperature is 0", *flags.top_p));
  eos_token_ids = eos_of(generation ? *generation : checkpoint.config_json());
  if (flags.eos_token_id.empty()) return;
  eos_token_ids = flags.eos_token_id;
  for (const auto id : eos_token_ids)
    BRAID_CHECK(id >= -1 && id < request.model.vocab_size, "--eos-token-id is ", id,
                ", expected -1 (none) or a token below the checkpoint's vocab_size ",
                request.model.vocab_size);
}

/// Errors: ValueError where the flags alone are wrong.
void check_numbers(const RequestFlags& flags) {
  BRAID_CHECK(flags.max_new_tokens >= 1, "--max-new-tokens is ", flags.max_new_tokens,
              ", expected at least 1");
  if (flags.temperature) check_temperature(*flags.temperature, "--temperature is");
  if (flags.top_p) check_top_p(*flags.top_p, "--top-p is");
}

void check_ranks(const TrainConfig& model, std::int64_t tp, int num_ranks) {
  const char* name = "--tensor-model-parallel-size";
  BRAID_CHECK(tp == 0 || tp == num_ranks, name, " is ", tp, ", but the number of ranks is ",
              num_ranks, ". HINT: --nproc N starts N ranks, which share every layer");
  const auto fits = [&](std::int64_t value, const char* what) {
    BRAID_CHECK(num_ranks <= value, name, " is ", num_ranks, ", above the checkpoint's ", what, " ",
                value);
  };
  fits(model.num_query_groups, "num_key_value_heads");
  fits(model.ffn_hidden_size, "intermediate_size");
  fits(model.vocab_size, "vocab_size");
}

void check_prompts(const Request& request) {
  const auto& model = request.model;
  for (std::size_t i = 0; i < request.prompts.size(); ++i) {
    const Tokens& prompt = request.prompts[i];
    for (const auto id : prompt)
      BRAID_CHECK(id >= 0 && id < model.vocab_size, "--prompt-tokens has ", id,
                  ", the checkpoint's vocab_size is ", model.vocab_size);
    const auto length = std::ssize(prompt);
    constexpr std::int64_t kMost = std::int64_t{1} << 31;  // so that sums of lengths are numbers
    BRAID_CHECK(request.options.max_new_tokens <= kMost, "--max-new-tokens is ",
                request.options.max_new_tokens, ", expected at most ", kMost);
    BRAID_CHECK(model.max_position_embeddings == 0 ||
                    length + request.options.max_new_tokens <= model.max_position_embeddings,
                "prompt ", i + 1, " has ", length, " tokens and --max-new-tokens is ",
                request.options.max_new_tokens, ", together above the checkpoint's ",
                "max_position_embeddings ", model.max_position_embeddings);
  }
}

/// Keys and values that no rank has the memory for would only show as a run that dies.
void check_memory(const Request& request, int num_ranks) {
  const auto d = [](std::int64_t n) { return static_cast<double>(n); };
  std::int64_t longest = 0;
  for (const Tokens& prompt : request.prompts) longest = std::max(longest, std::ssize(prompt));
  const auto& model = request.model;
  const double length = d(longest) + d(request.options.max_new_tokens);
  // Of half types at least; and sines and cosines of the positions.
  const double bytes = 2 * d(model.num_layers) * d(std::ssize(request.prompts)) * length *
                           d((model.num_query_groups + num_ranks - 1) / num_ranks) *
                           d(model.kv_channels) * 2 +
                       length * d(model.kv_channels) * 4;
  const double memory = host_memory_bytes();
  BRAID_CHECK(bytes <= memory, "--max-new-tokens is ", request.options.max_new_tokens, ": ",
              request.prompts.size(), " sequences of ", length, " tokens need at least ",
              fmt::format("{:.1f} GB a rank, this host has {:.1f}", 1e-9 * bytes, 1e-9 * memory));
}

}  // namespace

Request check_request(const RequestFlags& flags, int num_ranks) {
  BRAID_CHECK(!flags.load.empty(), "required: --load");
  check_numbers(flags);
  Checkpoint checkpoint(flags.load);
  const std::string& folder = checkpoint.folder();
  Request request{.checkpoint = checkpoint,
                  .model = model_settings(checkpoint.config_json(), folder + "/config.json"),
                  .prompts = {},
                  .options = {}};
  BRAID_CHECK(request.model.num_layers <= checkpoint.num_tensors(), folder,
              "/config.json has num_hidden_layers ", request.model.num_layers,
              ", but the checkpoint holds ", checkpoint.num_tensors(), " tensors");
  request.checkpoint.check(transformers_tensors(request.model));
  check_ranks(request.model, flags.tensor_model_parallel_size, num_ranks);

  std::vector<std::string> texts = flags.prompt;
  if (!flags.prompt_file.empty())
    for (auto& line : lines_of(flags.prompt_file, num_ranks)) texts.push_back(std::move(line));
  const std::string tokenizer = tokenizer_of(folder);
  request.is_bytes = request.model.vocab_size == 256 && tokenizer.empty();
  BRAID_CHECK(
      request.is_bytes || texts.empty(), "--load ", flags.load, ": its tokens are ",
      tokenizer.empty() ? fmt::format("{} unknown ones", request.model.vocab_size)
                        : "those of " + tokenizer,
      ", braid reads and writes bytes only. HINT: --prompt-tokens takes ids, and ids come out");
  for (const auto& text : texts) {
    BRAID_CHECK(!text.empty(), "--prompt is '', expected at least one token");
    request.prompts.push_back(bytes_of(text));
  }
  for (const auto& ids : flags.prompt_tokens) request.prompts.push_back(parse_ids(ids));
  BRAID_CHECK(!request.prompts.empty(),
              "no prompt given. HINT: --prompt TEXT, --prompt-file FILE or --prompt-tokens 1,2,3");
  complete_options(flags, request);
  check_prompts(request);
  check_memory(request, num_ranks);
  return request;
}

}  // namespace braid
