// The trainer's settings: one table of flags, from which come the command line, docs/flags.md and
// the JSON of checkpoints.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "braid/ops/collective_matmul.h"

namespace CLI {
class App;
}

namespace braid {

/// What each field means, its unit and its default's meaning: the table in config_table.cpp
/// (rendered as docs/flags.md). A field has its flag's name. 0 or an empty text stands for "not
/// given" where the table says what then holds; validate() fills those in.
struct TrainConfig {
  // model
  std::int64_t num_layers = 0;
  std::int64_t hidden_size = 0;
  std::int64_t ffn_hidden_size = 0;
  std::int64_t num_attention_heads = 0;
  bool group_query_attention = false;
  std::int64_t num_query_groups = 0;
  std::int64_t kv_channels = 0;
  std::int64_t seq_length = 0;
  std::int64_t max_position_embeddings = 0;
  double rotary_base = 10000;
  double norm_epsilon = 1e-5;
  std::int64_t vocab_size = 256;
  bool untie_embeddings_and_output_weights = false;
  double init_method_std = 0.02;
  // parallelism
  std::int64_t nproc = 0;
  std::int64_t tensor_model_parallel_size = 1;
  bool sequence_parallel = false;
  bool overlap_grad_reduce = false;
  std::int64_t ddp_bucket_size = 0;
  double distributed_timeout_seconds = 0;
  // computation and communication in one pipeline
  bool use_coc = false;
  std::int64_t coc_parallel_num = 0;
  bool coc_fused_kernel = false;
  std::string coc_mode = "auto";
  std::string tuner_file;
  // batches and optimizer
  std::int64_t micro_batch_size = 0;
  std::int64_t global_batch_size = 0;
  std::int64_t train_iters = 0;
  double lr = 0;
  double min_lr = 0;
  std::string lr_decay_style = "linear";
  std::int64_t lr_decay_iters = 0;
  std::int64_t lr_warmup_iters = 0;
  double weight_decay = 0.01;
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.999;
  double adam_eps = 1e-8;
  double clip_grad = 1.0;
  // numbers and memory
  bool bf16 = false;
  std::int64_t seed = 1234;
  bool deterministic = false;
  std::string recompute_granularity;
  std::string recompute_method;
  std::int64_t recompute_num_layers = 0;
  // data
  std::string data_path;
  std::string split = "969,30,1";
  // output
  std::string output_dir = "runs/train";
  std::string save;
  std::int64_t save_interval = 0;
  std::string load;
  std::int64_t eval_interval = 1000;
  std::int64_t eval_iters = 100;
  std::int64_t log_interval = 100;
  std::string trace;

  bool operator==(const TrainConfig&) const = default;
};

/// Allowed numbers of a flag: at least `least` (above it where `open`), and below `below`.
struct Range {
  double least = std::numeric_limits<double>::lowest();
  double below = std::numeric_limits<double>::infinity();
  bool open = false;

  bool contains(double x) const { return (open ? x > least : x >= least) && x < below; }
  std::string text() const;
};

/// One row of the table.
struct ConfigFlag {
  using Field = std::variant<bool TrainConfig::*, std::int64_t TrainConfig::*,
                             double TrainConfig::*, std::string TrainConfig::*>;
  std::string name;  // with dashes
  Field field;
  /// What is written after the flag; empty for a switch and where the choices say it.
  std::string value = {};
  std::string meaning;
  /// What holds when it is not given, where the field's default does not say it.
  std::string unset = {};
  Range range = {};                       // of numbers
  std::vector<std::string> choices = {};  // of texts; empty: any
  std::vector<std::string> aliases = {};
  bool required = false, required_to_train = false;  // the second: a bench does without it
  /// The text that the flag stands for when it is written without a value.
  std::optional<std::string> bare = {};

  bool is_required(bool needs_data) const { return required || (required_to_train && needs_data); }
  /// The field's name, and its key in JSON.
  std::string key() const;
};

/// The field's value in `config`, as written after the flag; "on" or "off" for a switch.
std::string text_of(const ConfigFlag& flag, const TrainConfig& config);
/// What is written after the flag: "N", "{a,b}"; empty for a switch.
std::string value_text(const ConfigFlag& flag);

struct FlagGroup {
  std::string title;
  std::vector<ConfigFlag> flags;
  bool to_train = false;  // of no use for a bench
};

/// The table, in the order in which it is shown.
const std::vector<FlagGroup>& flag_table();

/// A flag of Megatron or MindSpeed that braid knows and does not have.
struct RefusedFlag {
  std::string name;
  bool takes_value;
  std::string harmless;  // a value that means what braid does anyway, and is accepted
  std::string why;
  bool excludes_coc = false;
};
const std::vector<RefusedFlag>& refused_flags();

/// docs/flags.md.
std::string flags_markdown();

/// Keys are the field names. from_json keeps the present value of keys that are missing.
///   Errors  ValueError naming the key: unknown, or its value is of another type
void to_json(nlohmann::json& json, const TrainConfig& config);
void from_json(const nlohmann::json& json, TrainConfig& config);

/// Adds every flag of the table to `app`; parsing writes into `config`, whose present values are
/// the defaults. `config` must outlive `app`.
///   needs_data  false: those that a bench has no use for are not in the help
void add_flags(CLI::App& app, TrainConfig& config, bool needs_data = true);

/// The number that `text` after the flag `name` (with dashes) stands for. T: std::int64_t, std::uint64_t or double.
///   Errors  ValueError naming the flag, the text and what was expected
template <class T>
T number_of(const std::string& name, const std::string& text, const Range& range);

/// Parses the arguments (without the program's name). Returns a text where that is all the caller
/// should print: the help, or docs/flags.md for --help-markdown.
///   Errors  ValueError, one line naming the flag: unknown (with the closest flag there is),
///           without its value, a value that does not parse or is out of range, refused
std::optional<std::string> parse(CLI::App& app, std::vector<std::string> arguments);

/// Throws what parse() does for arguments that `app`, or the subcommand that was chosen, does not know.
[[noreturn]] void explain_extras(const CLI::App& app);

/// Weights that a token is multiplied with: those of all layers and the output.   config  validated
double num_matmul_weights(const TrainConfig& config);

/// Checks, without writing, that a file of choices can be there. Errors: ValueError naming --tuner-file.
void check_tuner_file(const std::string& path);

/// The longest wait for another rank that the settings ask for.
std::chrono::milliseconds timeout_of(const TrainConfig& config);

/// The metrics file in the output folder.
std::string metrics_path(const TrainConfig& config);

/// Checks the settings against each other, the world and the file system, and fills in what was not
/// given. Writes no file and reads only the first bytes of one that the trace would replace, sends
/// nothing; the same on all ranks. Idempotent.
///   needs_data  false: --data-path, --train-iters and --lr may be missing, and nothing is written (a bench)
///   Gives       warnings that the caller shows once, of settings that have no effect
///   Errors      ValueError, one line naming the flags and their values
[[nodiscard]] std::vector<std::string> validate(TrainConfig& config, std::int64_t world_size,
                                                bool needs_data = true);

/// The mode of the tensor-parallel matmuls that the CoC flags stand for.
MatmulOptions matmul_options(const TrainConfig& config);

/// Parts of the data for training, validation and (unused) test that --split stands for; they sum to 1.
///   Errors  ValueError: the text is not one to three numbers >= 0 whose first is > 0
std::vector<double> split_fractions(const std::string& split);

}  // namespace braid
