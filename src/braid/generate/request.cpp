// Reading and checking what a generation is asked for.
#include "braid/generate/request.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "braid/core/check.h"
#include "braid/train/transformers_config.h"

namespace braid {
namespace {

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

std::vector<std::string> lines_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  BRAID_CHECK(file && !std::filesystem::is_directory(path), "--prompt-file ", path,
              ": can't be read");
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) {
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

std::vector<std::int64_t> eos_of(const nlohmann::json& config_json) {
  const auto value = config_json.value("eos_token_id", nlohmann::json());
  if (value.is_number_integer()) return {value.get<std::int64_t>()};
  std::vector<std::int64_t> ids;
  if (value.is_array())
    for (const auto& id : value)
      if (id.is_number_integer()) ids.push_back(id);
  return ids;
}

void check_numbers(const GenerationOptions& options) {
  BRAID_CHECK(options.max_new_tokens >= 1, "--max-new-tokens is ", options.max_new_tokens,
              ", expected at least 1");
  const auto& [temperature, top_p, seed] = options.sampling;
  BRAID_CHECK(temperature >= 0 && std::isfinite(temperature), "--temperature is ", temperature,
              ", expected at least 0");
  BRAID_CHECK(top_p > 0 && top_p <= 1, "--top-p is ", top_p, ", expected above 0 and at most 1");
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

}  // namespace

Request check_request(const RequestFlags& flags, int num_ranks) {
  BRAID_CHECK(!flags.load.empty(), "required: --load");
  check_numbers(flags.options);
  Checkpoint checkpoint(flags.load);
  const std::string& folder = checkpoint.folder();
  Request request{.checkpoint = checkpoint,
                  .model = model_settings(checkpoint.config_json(), folder + "/config.json"),
                  .prompts = {},
                  .options = flags.options};
  request.checkpoint.check(transformers_tensors(request.model));
  check_ranks(request.model, flags.tensor_model_parallel_size, num_ranks);

  std::vector<std::string> texts = flags.prompt;
  if (!flags.prompt_file.empty())
    for (auto& line : lines_of(flags.prompt_file)) texts.push_back(std::move(line));
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
  check_prompts(request);

  request.options.eos_token_ids =
      flags.eos_token_id.empty() ? eos_of(request.checkpoint.config_json()) : flags.eos_token_id;
  return request;
}

}  // namespace braid
