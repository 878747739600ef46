// braid generate: continues prompts with a checkpoint's model.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <csignal>
#include <nlohmann/json.hpp>

#include "braid/cli/commands.h"
#include "braid/cli/numbers.h"
#include "braid/cli/output.h"
#include "braid/comm/group.h"
#include "braid/comm/join.h"
#include "braid/core/log.h"
#include "braid/generate/request.h"
#include "braid/ops/tuner.h"
#include "braid/ops/tuner_file.h"
#include "braid/train/trainer.h"

namespace braid::cli {
namespace {

struct Flags {
  RequestFlags request;
  std::optional<int> nproc;
  bool bf16 = false, int8 = false, json = false;
  std::string tuner_file;
};

void add_generate_flags(CLI::App& app, Flags& flags) {
  auto& [request, nproc, bf16, int8, json, tuner_file] = flags;
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  const auto texts = [&](const char* name, std::vector<std::string>& values, const char* meaning) {
    app.add_option(name, values, meaning)->allow_extra_args(false)->take_all();
  };
  app.add_option("--load", request.load,
                 "checkpoint: of braid train, or a folder of transformers (Llama)")
      ->option_text("DIR (required)");
  texts("--prompt", request.prompt, "text to continue; several make a batch");
  app.add_option("--prompt-file", request.prompt_file, "file with a text in each line");
  texts("--prompt-tokens", request.prompt_tokens,
        "token ids to continue, as 1,2,3; several make a batch");
  add_number(app, "max-new-tokens", request.max_new_tokens, kCount, "tokens to add to each text");
  add_number(app, "temperature", request.temperature, {0},
             "divides the logits before a token is drawn; 0: always the most probable one "
             "(generation_config.json's, else 0)");
  add_number(app, "top-p", request.top_p, {.least = 0, .open = true},
             "draw among the most probable tokens that have this probability together "
             "(generation_config.json's, else 1)");
  add_number(app, "seed", request.seed, {0}, "of what is drawn");
  app.add_option_function<std::vector<std::string>>(
         "--eos-token-id",
         [&request](const std::vector<std::string>& values) {
           for (const auto& text : values)
             request.eos_token_id.push_back(
                 number_of<std::int64_t>("eos-token-id", text, {-1, kCount.below}));
         },
         "token that ends a text; -1: none (generation_config.json's, else config.json's)")
      ->allow_extra_args(false)
      ->take_all()
      ->type_name("N");
  add_number(app, "nproc", nproc, kCount, "ranks to start on this host (1)");
  add_number(app, "tensor-model-parallel-size", request.tensor_model_parallel_size, kCount,
             "ranks that share each layer: all of them");
  app.add_flag("--bf16", bf16, "compute in bf16 instead of f32");
  app.add_flag("--int8", int8, "matmul weights in int8, a scale for each output feature");
  app.add_option("--tuner-file", tuner_file,
                 "choices of how operations run, to be used and added to");
  app.add_flag("--json", json, "one JSON line a prompt");
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// Tokens as they are written: bytes, or ids between commas.
std::string written(const Request& request, const Tokens& tokens) {
  return request.is_bytes ? std::string(tokens.begin(), tokens.end())
                          : fmt::format("{}", fmt::join(tokens, ","));
}

/// What must be the same on all ranks.
nlohmann::json facts_of(const Request& request, const Flags& flags) {
  const auto& options = request.options;
  const nlohmann::json prompts = request.prompts;
  nlohmann::json model, facts{{"--load", request.checkpoint.fingerprint()},
                              {"--tuner-file", flags.tuner_file.empty() ? "none" : "a file"},
                              {"--bf16", flags.bf16},
                              {"--int8", flags.int8},
                              {"--max-new-tokens", options.max_new_tokens},
                              {"--temperature", options.sampling.temperature},
                              {"--top-p", options.sampling.top_p},
                              {"--seed", options.sampling.seed},
                              {"--eos-token-id", options.eos_token_ids},
                              {"--prompt", fmt::format("{} in number (hash {:08x})", prompts.size(),
                                                       std::hash<nlohmann::json>{}(prompts))}};
  to_json(model, request.model);
  for (const auto& [name, value] : model.items()) facts["the model's " + name] = value;
  return facts;
}

void run_generation(const Request& request, const Flags& flags, const Place& place) {
  const auto store = join_run(place, env().timeout);
  check_same(place, *store, "request", facts_of(request, flags), env().timeout);
  // Measuring costs more than one run saves, unless it is kept.
  tuner::allow_live(!flags.tuner_file.empty());
  TransformerOptions options;
  options.group =
      Group::create(store, "tp", place.rank, place.world_size, {.store_rank = place.store_rank()});
  if (!flags.tuner_file.empty()) tuner::read_choices(*options.group, flags.tuner_file);
  options.dtype = flags.bf16 ? at::kBFloat16 : at::kFloat;
  options.trainable = false;
  Transformer model(llama_config(request.model), options);
  request.checkpoint.load(model.parameters(), nullptr);
  if (flags.int8) model.quantize_weights();

  const auto& prompts = request.prompts;
  const bool streams = prompts.size() == 1 && !flags.json;
  if (streams && place.rank == 0) write_output(written(request, prompts[0]));
  const auto begin = std::chrono::steady_clock::now();
  std::vector<double> first_s(prompts.size()), last_s(prompts.size());
  const auto on_token = [&](std::size_t prompt, std::int64_t token) {
    last_s[prompt] = seconds_since(begin);
    if (first_s[prompt] == 0) first_s[prompt] = last_s[prompt];
    return !streams || write_output((request.is_bytes ? "" : ",") + written(request, {token}));
  };
  const auto all = generate(model, options.group, prompts, request.options, on_token);
  if (place.rank != 0) return;
  if (streams) write_output("\n");
  for (std::size_t i = 0; i < prompts.size() && !streams; ++i) {
    if (!flags.json) {
      Tokens whole = prompts[i];
      whole.insert(whole.end(), all[i].begin(), all[i].end());
      write_output(written(request, whole) + "\n");
      continue;
    }
    nlohmann::json line{
        {"prompt_tokens", prompts[i]}, {"tokens", all[i]}, {"prefill_s", first_s[i]}};
    if (all[i].size() > 1)
      line["tokens_per_s"] = static_cast<double>(all[i].size() - 1) / (last_s[i] - first_s[i]);
    if (request.is_bytes) {
      line["prompt"] = written(request, prompts[i]);
      line["text"] = written(request, all[i]);
    }
    write_output(line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  }
  if (flags.tuner_file.empty()) return;
  try {
    tuner::write_choices(flags.tuner_file, tuner::measured());
  } catch (const c10::Error& error) {  // the text does not depend on it
    warn(fmt::format("--tuner-file: {}", error.what_without_backtrace()));
  }
  tuner::warn_of_unused_pins(flags.tuner_file);
}

}  // namespace

void add_generate(CLI::App& app, Body& body) {
  auto* generate = app.add_subcommand("generate", "continue prompts with a checkpoint's model");
  generate->prefix_command();  // parse() says what is wrong with what follows
  generate->set_help_flag();
  generate->callback([generate, &body] {
    body = [arguments = generate->remaining()] {
      Flags flags;
      CLI::App app_of_flags{"Continues prompts with a checkpoint's model.", "braid generate"};
      add_generate_flags(app_of_flags, flags);
      if (const auto text = parse(app_of_flags, arguments)) {
        print_text(*text);
        return 0;
      }
      const Place place = place_from_environment();
      speaks = place.rank == 0;
      const int ranks = place.source.empty() ? flags.nproc.value_or(1) : place.world_size;
      if (!flags.tuner_file.empty()) check_tuner_file(flags.tuner_file);
      const Request request = check_request(flags.request, ranks);
      if (!place.launched_by_itself)
        for (const auto& text : request.warnings) warn(text);
      if (const auto code = run_on_ranks(flags.nproc)) return *code;
      std::signal(SIGPIPE, SIG_IGN);  // a reader that goes ends all ranks, see write_output()
      run_generation(request, flags, place);
      return 0;
    };
  });
}

}  // namespace braid::cli
