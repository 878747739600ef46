// Checks of the trainer's settings against each other, the world and the file system.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <charconv>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "braid/core/check.h"
#include "braid/core/env.h"
#include "braid/core/memory.h"
#include "braid/train/config.h"

namespace braid {
namespace {

namespace fs = std::filesystem;

void check_numbers(const TrainConfig& config, bool needs_data) {
  std::string missing;
  for (const auto& group : flag_table()) {
    for (const auto& flag : group.flags) {
      const bool set = std::visit(
          [&](auto field) { return config.*field != std::decay_t<decltype(config.*field)>{}; },
          flag.field);
      if (!set && flag.is_required(needs_data))
        missing += (missing.empty() ? "--" : ", --") + flag.name;
      if (!set && (flag.is_required(true) || !flag.unset.empty())) continue;
      const auto check = [&](auto value) {
        BRAID_CHECK(flag.range.contains(static_cast<double>(value)), "--", flag.name, " is ", value,
                    ", expected ", flag.range.text());
      };
      if (const auto* integer = std::get_if<std::int64_t TrainConfig::*>(&flag.field))
        check(config.**integer);
      if (const auto* number = std::get_if<double TrainConfig::*>(&flag.field))
        check(config.**number);
      if (const auto* text = std::get_if<std::string TrainConfig::*>(&flag.field)) {
        const auto& choices = flag.choices;
        BRAID_CHECK(choices.empty() ||
                        std::find(choices.begin(), choices.end(), config.**text) != choices.end(),
                    "--", flag.name, " is '", config.**text, "', expected one of ",
                    value_text(flag));
      }
    }
  }
  BRAID_CHECK(missing.empty(), "required: ", missing);
}

void check_divides(const char* divisor_name, std::int64_t divisor, const char* name,
                   std::int64_t value, const char* hint = "") {
  BRAID_CHECK(value % divisor == 0, divisor_name, " ", divisor, " does not divide ", name, " ",
              value, hint);
}

void complete_model(TrainConfig& c) {
  if (c.ffn_hidden_size == 0)
    c.ffn_hidden_size = std::max<std::int64_t>(64, c.hidden_size * 8 / 3 / 64 * 64);
  if (c.num_query_groups == 0)
    c.num_query_groups = c.group_query_attention ? 1 : c.num_attention_heads;
  check_divides("--num-query-groups", c.num_query_groups, "--num-attention-heads",
                c.num_attention_heads);
  if (c.kv_channels == 0) {
    check_divides("--num-attention-heads", c.num_attention_heads, "--hidden-size", c.hidden_size,
                  ". HINT: --kv-channels gives the width of a head");
    c.kv_channels = c.hidden_size / c.num_attention_heads;
  }
  BRAID_CHECK(c.kv_channels % 2 == 0, "--kv-channels ", c.kv_channels, " is odd (--hidden-size ",
              c.hidden_size, ", --num-attention-heads ", c.num_attention_heads,
              "); rotary positions turn pairs");
  if (c.max_position_embeddings == 0) c.max_position_embeddings = c.seq_length;
  BRAID_CHECK(c.seq_length <= c.max_position_embeddings, "--seq-length ", c.seq_length,
              " is above --max-position-embeddings ", c.max_position_embeddings);
}

void check_parallelism(TrainConfig& c, std::int64_t world_size,
                       std::vector<std::string>& warnings) {
  const auto tp = c.tensor_model_parallel_size;
  const char* name = "--tensor-model-parallel-size";
  check_divides(name, tp, "the number of ranks", world_size, ". HINT: --nproc N starts N ranks");
  check_divides(name, tp, "--num-attention-heads", c.num_attention_heads);
  check_divides(name, tp, "--num-query-groups", c.num_query_groups);
  check_divides(name, tp, "--hidden-size", c.hidden_size);
  check_divides(name, tp, "--ffn-hidden-size", c.ffn_hidden_size);
  BRAID_CHECK(tp <= c.vocab_size, name, " ", tp, " is above --vocab-size ", c.vocab_size);
  if (tp == 1 && c.sequence_parallel) {
    c.sequence_parallel = false;
    warnings.push_back("--sequence-parallel is turned off: --tensor-model-parallel-size is 1");
  }
  if (c.sequence_parallel) {
    check_divides(name, tp, "--seq-length", c.seq_length, ", which --sequence-parallel needs");
  }
}

void complete_grad_reduction(TrainConfig& c, std::int64_t world_size,
                             std::vector<std::string>& warnings) {
  if (!c.overlap_grad_reduce) {
    if (c.ddp_bucket_size > 0)
      warnings.push_back(fmt::format(
          "--ddp-bucket-size {} has no effect: --overlap-grad-reduce is off", c.ddp_bucket_size));
    return;
  }
  const auto dp = world_size / c.tensor_model_parallel_size;
  if (dp == 1)
    warnings.push_back("--overlap-grad-reduce has no effect: there is one data-parallel rank");
  if (c.ddp_bucket_size == 0) c.ddp_bucket_size = std::max<std::int64_t>(40000000, 1000000 * dp);
}

void check_coc(const TrainConfig& c, std::vector<std::string>& warnings) {
  const auto number = c.coc_parallel_num;
  if (!c.use_coc) {
    const char* needs = ", but --use-coc is off. HINT: add --use-coc";
    BRAID_CHECK(number <= 1, "--coc-parallel-num is ", number, needs);
    BRAID_CHECK(!c.coc_fused_kernel, "--coc-fused-kernel is on", needs);
    BRAID_CHECK(c.tuner_file.empty(), "--tuner-file is ", c.tuner_file, needs);
    BRAID_CHECK(c.coc_mode == "auto" || c.coc_mode == "serial", "--coc-mode is ", c.coc_mode,
                needs);
    return;
  }
  const bool not_fused = c.coc_mode == "serial" || c.coc_mode == "chunked";
  BRAID_CHECK(!c.coc_fused_kernel || !not_fused, "--coc-mode ", c.coc_mode,
              " contradicts --coc-fused-kernel (on)");
  BRAID_CHECK(c.coc_mode != "serial" || number <= 1,
              "--coc-mode serial contradicts --coc-parallel-num ", number);
  if (c.tensor_model_parallel_size == 1) {
    warnings.push_back(
        "--use-coc has no effect: --tensor-model-parallel-size is 1, there is nothing to overlap");
  } else if (number > 0 && (c.coc_fused_kernel || c.coc_mode == "fused")) {
    warnings.push_back(fmt::format("--coc-parallel-num {} has no effect: {} wins", number,
                                   c.coc_fused_kernel ? "--coc-fused-kernel" : "--coc-mode fused"));
  }
}

/// A model that no rank has the memory for would only show as a run that dies.
void check_memory(const TrainConfig& c) {
  const auto d = [](std::int64_t n) { return static_cast<double>(n); };
  // Weight, gradient and two moments, and activations of one layer.
  const double bytes = 16 * num_matmul_weights(c) / d(c.tensor_model_parallel_size) +
                       4 * d(c.micro_batch_size) * d(c.seq_length) * d(c.hidden_size);
  const double memory = host_memory_bytes();
  BRAID_CHECK(bytes <= memory, "--num-layers ", c.num_layers, ", --hidden-size ", c.hidden_size,
              ", --micro-batch-size ", c.micro_batch_size, ": a rank needs at least ",
              fmt::format("{:.1f} GB, this host has {:.1f}", 1e-9 * bytes, 1e-9 * memory));
}

void complete_schedule(TrainConfig& c, std::int64_t world_size) {
  const auto dp = world_size / c.tensor_model_parallel_size;
  const auto step = c.micro_batch_size * dp;
  if (c.global_batch_size == 0) c.global_batch_size = step;
  BRAID_CHECK(c.global_batch_size % step == 0, "--global-batch-size ", c.global_batch_size,
              " is not a multiple of --micro-batch-size ", c.micro_batch_size, " x ", dp,
              " data-parallel ranks = ", step);
  BRAID_CHECK(c.min_lr <= c.lr, "--min-lr ", c.min_lr, " is above --lr ", c.lr);
  if (c.lr_decay_iters == 0) c.lr_decay_iters = c.train_iters;
  BRAID_CHECK(c.lr_warmup_iters == 0 || c.lr_warmup_iters < c.lr_decay_iters, "--lr-warmup-iters ",
              c.lr_warmup_iters, " is not below --lr-decay-iters ", c.lr_decay_iters);
}

void complete_recomputation(TrainConfig& c) {
  BRAID_CHECK(c.recompute_granularity != "selective",
              "--recompute-granularity selective is not available: flash attention keeps nothing "
              "that it could drop. "
              "HINT: --recompute-granularity full");
  if (c.recompute_granularity.empty()) {
    const char* needs =
        ", but --recompute-granularity is not given. HINT: --recompute-granularity full";
    BRAID_CHECK(c.recompute_method.empty(), "--recompute-method is ", c.recompute_method, needs);
    BRAID_CHECK(c.recompute_num_layers == 0, "--recompute-num-layers is ", c.recompute_num_layers,
                needs);
    return;
  }
  if (c.recompute_method.empty()) c.recompute_method = "uniform";
  if (c.recompute_num_layers == 0) c.recompute_num_layers = 1;
  BRAID_CHECK(c.recompute_num_layers <= c.num_layers, "--recompute-num-layers ",
              c.recompute_num_layers, " is above --num-layers ", c.num_layers);
}

bool allowed(const fs::path& path, int what) {
  return faccessat(AT_FDCWD, path.c_str(), what, AT_EACCESS) == 0;
}

// The folder at `path` can be made or written.
void check_writable_folder(const char* flag, const fs::path& path) {
  auto existing = fs::absolute(path).lexically_normal();
  std::error_code error;
  while (!fs::exists(existing, error) && existing.has_relative_path())
    existing = existing.parent_path();
  BRAID_CHECK(fs::is_directory(existing, error), flag, " ", path.string(), ": ", existing.string(),
              " is not a folder");
  BRAID_CHECK(allowed(existing, W_OK | X_OK), flag, " ", path.string(),
              ": no permission to write in ", existing.string());
}

void check_readable(const char* flag, const std::string& path, bool folder) {
  std::error_code error;
  BRAID_CHECK(fs::exists(path, error), flag, " ", path, ": no such file or folder");
  const bool is_folder = fs::is_directory(path, error);
  BRAID_CHECK(!folder || is_folder, flag, " ", path, ": is not a folder");
  BRAID_CHECK(allowed(path, is_folder ? R_OK | X_OK : R_OK), flag, " ", path,
              ": no permission to read");
}

void complete_output(TrainConfig& c) {
  BRAID_CHECK(!c.output_dir.empty(), "--output-dir is '', expected a folder");
  const fs::path output_dir = c.output_dir, metrics = metrics_path(c);
  check_writable_folder("--output-dir", output_dir);
  if (c.save.empty()) c.save = output_dir / "checkpoint";
  check_writable_folder("--save", c.save);
  const std::string placeholder = "{output-dir}/";
  if (c.trace.starts_with(placeholder)) c.trace = output_dir / c.trace.substr(placeholder.size());
  if (!c.trace.empty()) {
    const fs::path trace = fs::absolute(c.trace);
    std::error_code error;
    BRAID_CHECK(!fs::is_directory(trace, error), "--trace ", c.trace,
                ": is a folder, expected a file");
    check_writable_folder("--trace", trace.parent_path());
    std::string begin(2, ' ');
    if (fs::is_regular_file(trace, error) && fs::file_size(trace, error) > 0)
      BRAID_CHECK(std::ifstream(trace).read(begin.data(), 2) && begin == "{\"", "--trace ", c.trace,
                  ": is a file, and no trace; it would be replaced");
    BRAID_CHECK(trace != fs::absolute(metrics), "--trace ", c.trace,
                ": is the metrics file of --output-dir ", c.output_dir);
  }
  if (!c.data_path.empty()) {
    std::error_code error;
    for (const fs::path& written : {fs::path(c.trace), metrics})
      BRAID_CHECK(!fs::equivalent(c.data_path, written, error) || error, "--data-path ",
                  c.data_path, ": is also ", written.string(), ", which the run writes");
  }
}

void check_input_paths(const TrainConfig& c) {
  if (!c.data_path.empty()) check_readable("--data-path", c.data_path, false);
  if (!c.load.empty()) check_readable("--load", c.load, true);
  if (!c.tuner_file.empty()) check_tuner_file(c.tuner_file);
}

}  // namespace

double num_matmul_weights(const TrainConfig& c) {
  const auto d = [](std::int64_t n) { return static_cast<double>(n); };
  const double layer =
      d(c.hidden_size) * (d(2 * c.num_attention_heads + 2 * c.num_query_groups) * d(c.kv_channels) +
                          3 * d(c.ffn_hidden_size));
  return d(c.num_layers) * layer + d(c.vocab_size) * d(c.hidden_size);
}

void check_tuner_file(const std::string& path) {
  const auto folder = fs::absolute(path).parent_path();
  std::error_code error;
  BRAID_CHECK(fs::is_directory(folder, error), "--tuner-file ", path, ": ", folder.string(),
              " is not a folder");
  BRAID_CHECK(!fs::exists(path, error) || fs::is_regular_file(path, error), "--tuner-file ", path,
              ": is not a regular file");
  check_writable_folder("--tuner-file", folder);
}

std::chrono::milliseconds timeout_of(const TrainConfig& config) {
  if (config.distributed_timeout_seconds == 0) return env().timeout;
  return std::chrono::milliseconds(
      static_cast<std::int64_t>(1000 * config.distributed_timeout_seconds));
}

std::string metrics_path(const TrainConfig& config) {
  return fs::path(config.output_dir) / "metrics.jsonl";
}

std::vector<std::string> validate(TrainConfig& config, std::int64_t world_size, bool needs_data) {
  std::vector<std::string> warnings;
  check_numbers(config, needs_data);
  complete_model(config);
  check_parallelism(config, world_size, warnings);
  complete_grad_reduction(config, world_size, warnings);
  check_coc(config, warnings);
  complete_schedule(config, world_size);
  complete_recomputation(config);
  if (split_fractions(config.split)[1] == 0 && config.eval_iters > 0) {
    warnings.push_back(
        fmt::format("no validation: --split {} has no validation part", config.split));
    config.eval_iters = 0;
  }
  check_memory(config);
  check_input_paths(config);
  if (needs_data) complete_output(config);
  return warnings;
}

MatmulOptions matmul_options(const TrainConfig& config) {
  const auto chunks = static_cast<int>(config.coc_parallel_num);
  if (!config.use_coc || config.coc_mode == "serial") return {Mode::serial, 1};
  if (config.coc_fused_kernel || config.coc_mode == "fused") return {Mode::fused, 1};
  if (chunks == 1) return {Mode::serial, 1};
  if (chunks > 1) return {Mode::chunked, chunks};
  if (config.coc_mode == "chunked") return {Mode::chunked, 2};
  return {Mode::automatic, 1};
}

std::vector<double> split_fractions(const std::string& split) {
  std::vector<double> weights;
  const auto* at = split.data();
  const auto* last = at + split.size();
  const auto check = [&](bool good) {
    BRAID_CHECK(good, "--split is '", split,
                "', expected one to three weights of at least 0 such as 95,5");
  };
  while (true) {
    while (at != last && *at == ' ') ++at;
    double weight = 0;
    const auto [end, error] = std::from_chars(at, last, weight);
    check(error == std::errc{} && Range{0}.contains(weight) && weights.size() < 3);
    weights.push_back(weight);
    at = end;
    if (at == last) break;
    check(*at == ',');
    ++at;
  }
  weights.resize(3);
  const auto sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  BRAID_CHECK(weights[0] > 0, "--split is '", split, "': its training part is 0");
  for (auto& weight : weights) weight /= sum;
  return weights;
}

}  // namespace braid
