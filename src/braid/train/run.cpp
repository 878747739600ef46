// The loop of a training run.
#include "braid/train/run.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <optional>

#include "braid/comm/join.h"
#include "braid/comm/texts.h"
#include "braid/core/check.h"
#include "braid/core/log.h"
#include "braid/ops/tuner_file.h"
#include "braid/train/report.h"
#include "braid/train/trainer.h"
#include "braid/train/transformers_config.h"

namespace braid {
namespace {

// Iterations of a run whose spans go into the trace: the first ones warm caches up, and a long run's would be too many.
constexpr std::int64_t kTraceBegin = 4, kTraceEnd = 8;

/// Whether the communication's cost is measured, by a serial step, after this many iterations of the process.
bool is_calibration(std::int64_t done) {
  return done == 2 || done == 4 || done == 8 || done % 50 == 0;
}

/// The flag of a key of the settings as JSON.
std::string flag_of(std::string key) {
  std::replace(key.begin(), key.end(), '_', '-');
  return "--" + key;
}

/// Says which settings make the data's order or the learning rates others than those of the run to
/// go on from.
void warn_of_other_course(const TrainConfig& config, std::int64_t data_tokens,
                          const TrainerState& state) {
  const nlohmann::json& loaded = state.config;
  if (state.data_tokens > 0 && data_tokens != state.data_tokens)
    warn(
        fmt::format("--data-path {} has {} tokens, the checkpoint's run had {}: the run goes on "
                    "with other data than it would have seen",
                    config.data_path, data_tokens, state.data_tokens));
  nlohmann::json now;
  to_json(now, config);
  for (const auto& [key, is_schedule] :
       {std::pair("seed", false), std::pair("global_batch_size", false),
        std::pair("seq_length", false), std::pair("split", false), std::pair("lr", true),
        std::pair("min_lr", true), std::pair("lr_decay_style", true),
        std::pair("lr_decay_iters", true), std::pair("lr_warmup_iters", true)}) {
    if (!loaded.contains(key) || loaded[key] == now[key]) continue;
    warn(fmt::format("{} is {}, the checkpoint's is {}: the run goes on {}", flag_of(key),
                     now[key].dump(), loaded[key].dump(),
                     is_schedule ? "at other learning rates than it would have had"
                                 : "with other data than it would have seen"));
  }
}

void make_folder(const char* flag, const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  BRAID_CHECK(!error, flag, " ", folder.string(), ": can't make the folder: ", error.message());
}

/// Connects the ranks, once they have the same settings.
///   data_tokens  of --data-path, compared too; 0: without data
///   Errors       as check_same's, naming the flag
Mesh connect(const TrainConfig& config, const Place& place,
             const c10::intrusive_ptr<c10d::Store>& store, std::int64_t data_tokens) {
  nlohmann::json settings, facts;
  to_json(settings, config);
  for (const char* key : {"nproc", "output_dir", "save", "log_interval"})
    settings.erase(key);  // may differ by host, or are rank 0's alone
  // Of files what they hold, or whether there is one: paths are the host's own.
  settings["trace"] = config.trace.empty() ? "none" : "a file";
  settings["tuner_file"] = config.tuner_file.empty() ? "none" : "a file";
  settings["load"] = config.load.empty() ? "none" : Checkpoint(config.load).fingerprint();
  settings["data_path"] = fmt::format("{} tokens", data_tokens);
  for (const auto& [key, value] : settings.items()) facts[flag_of(key)] = value;
  GroupOptions options;
  options.timeout = timeout_of(config);
  options.store_rank = place.store_rank();
  check_same(place, *store, "settings", facts, options.timeout);
  return make_mesh(store, place.rank, place.world_size,
                   static_cast<int>(config.tensor_model_parallel_size), options);
}

class Run {
 public:
  Run(const TrainConfig& config, const Place& place)
      : config_(config),
        store_(join_run(place, timeout_of(config))),  // before anything starts threads
        corpus_(Corpus::open(config.data_path)),
        data_(split_data(corpus_, config.split, config.seq_length, config.vocab_size, config.seed)),
        mesh_(connect(config, place, store_, corpus_->size())),
        trainer_(config, mesh_, [this](std::int64_t iteration, std::int64_t micro_batch) {
          return data_.train->batch(
              first_sample(iteration, micro_batch, mesh_.dp->rank(), mesh_.dp->size(),
                           config_.micro_batch_size, config_.global_batch_size),
              config_.micro_batch_size);
        }) {
    if (!config.load.empty()) first_ = trainer_.load(Checkpoint(config.load));
    if (first_ >= config.train_iters)
      warn(
          fmt::format("--load {} holds iteration {}, --train-iters is {}: nothing is left to train",
                      config.load, first_, config.train_iters));
    ReportOptions options;
    options.enabled = place.rank == 0;
    options.metrics_path = metrics_path(config);
    options.loaded_iteration = first_;
    options.num_iterations = config.train_iters;
    options.log_interval = config.log_interval;
    if (options.enabled) {
      make_folder("--output-dir", config.output_dir);
      if (!config.trace.empty())
        make_folder("--trace", std::filesystem::absolute(config.trace).parent_path());
    }
    report_.emplace(options);
    report_->note(headline());
  }

  void train() {
    for (std::int64_t iteration = first_; iteration < config_.train_iters; ++iteration)
      one_iteration(iteration);
    if (!trace_written_) write_trace();
    report_->finish(num_measured_ > 0
                        ? overlap_by_operation(measured_, num_measured_, serial_, num_serial_)
                        : std::vector<OperationOverlap>{});
    if (const std::size_t bytes = mesh_.shared_memory_bytes(); bytes > 0)
      report_->note(fmt::format("shared memory: {} bytes a rank", bytes));
    if (!config_.tuner_file.empty()) tuner::warn_of_unused_pins(config_.tuner_file);
    if (corpus_->is_text() && data_.validation != nullptr && mesh_.world->rank() == 0 &&
        validation_loss_) {
      const NgramLoss tables = ngram_loss(*corpus_, *data_.train, *data_.validation);
      report_->note(
          fmt::format("validation loss {:.4f} nats per byte; tables of the same text: bigram "
                      "{:.4f}, trigram {:.4f}",
                      *validation_loss_, tables.bigram, tables.trigram));
    }
  }

 private:
  std::string headline() const {
    double parameters = 0;
    for (const auto& [name, shape] : transformers_tensors(config_))
      parameters += static_cast<double>(c10::multiply_integers(shape));
    const std::string skipped =
        corpus_->num_skipped() > 0
            ? fmt::format(" ({} skipped: binary or unreadable)", corpus_->num_skipped())
            : "";
    return fmt::format(
        "{:.2f} M parameters, {}; {} rank{} (TP {}), {} thread{} each; {} tokens in {} file{}{}; "
        "output in {}",
        1e-6 * parameters, config_.bf16 ? "bf16" : "f32", mesh_.world->size(),
        mesh_.world->size() > 1 ? "s" : "", mesh_.tp->size(), at::get_num_threads(),
        at::get_num_threads() > 1 ? "s" : "", corpus_->size(), corpus_->num_files(),
        corpus_->num_files() > 1 ? "s" : "", skipped, config_.output_dir);
  }

  void one_iteration(std::int64_t iteration) {
    const std::int64_t done = iteration + 1;
    const std::int64_t here = iteration - first_;  // of this process
    trace::keep_events(!config_.trace.empty() && here >= kTraceBegin && here < kTraceEnd);
    const auto step = trainer_.step(iteration);
    trace::keep_events(false);
    if (here + 1 == kTraceEnd) write_trace();

    if (trainer_.overlaps() && is_calibration(here + 1)) {
      for (const auto& [op, totals] : trainer_.serial_step(iteration)) serial_[op] += totals;
      ++num_serial_;
    }
    if (here > 0) {  // the first iteration warms up: tuning, pages, caches
      for (const auto& [op, totals] : step.totals) measured_[op] += totals;
      ++num_measured_;
    }
    IterationMetrics metrics;
    metrics.iteration = done;
    metrics.loss = step.loss;
    metrics.grad_norm = step.grad_norm;
    metrics.lr = step.lr;
    metrics.step_s = step.step_s;
    metrics.tokens_per_s = static_cast<double>(trainer_.tokens_per_step()) / step.step_s;
    metrics.tflop_s_per_rank =
        trainer_.flops_per_step() / step.step_s / mesh_.world->size() * 1e-12;
    metrics.overlap = total_overlap(overlap_by_operation(step.totals, 1, serial_, num_serial_));
    metrics.overlap.compute_s = step.step_s - metrics.overlap.exposed_s;
    if (data_.validation != nullptr && config_.eval_iters > 0 &&
        (done == config_.train_iters ||
         (config_.eval_interval > 0 && done % config_.eval_interval == 0))) {
      validation_loss_ = trainer_.validation_loss(*data_.validation, config_.eval_iters);
      metrics.validation_loss = validation_loss_;
    }
    report_->iteration(metrics);
    if (!config_.save.empty() && (done == config_.train_iters ||
                                  (config_.save_interval > 0 && done % config_.save_interval == 0)))
      trainer_.save(config_.save, done, corpus_->size());
  }

  void write_trace() {
    trace_written_ = true;
    if (config_.trace.empty()) return;
    const auto texts =
        gather_texts(*mesh_.world, trace::chrome_events(mesh_.world->rank(), trace::take_events()));
    if (mesh_.world->rank() != 0) return;
    try {
      trace::write_chrome_trace(config_.trace, texts);
    } catch (const c10::Error& error) {  // not worth a run
      report_->note(fmt::format("warning: {}", error.what_without_backtrace()));
    }
  }

  TrainConfig config_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<const Corpus> corpus_;
  DataSplit data_;
  Mesh mesh_;
  Trainer trainer_;
  std::optional<Report> report_;
  std::int64_t first_ = 0;  // iterations done before this process
  bool trace_written_ = false;
  std::optional<double> validation_loss_;
  std::map<std::string, trace::Totals> measured_, serial_;
  std::int64_t num_measured_ = 0, num_serial_ = 0;
};

}  // namespace

void check_inputs(const TrainConfig& config) {
  const auto corpus = Corpus::open(config.data_path);
  (void)split_data(corpus, config.split, config.seq_length, config.vocab_size, config.seed);
  if (!config.load.empty()) {
    const Checkpoint checkpoint(config.load);
    check_same_model(config, checkpoint.config_json(), checkpoint.folder() + "/config.json");
    checkpoint.check(transformers_tensors(config));
    if (checkpoint.state()) warn_of_other_course(config, corpus->size(), *checkpoint.state());
  }
  const auto metrics = metrics_path(config);
  BRAID_CHECK(!std::filesystem::is_directory(metrics), "--output-dir ", config.output_dir, ": ",
              metrics, " is a folder, expected a file");
  if (!config.save.empty()) check_save_folder(config.save);
  if (config.load.empty() && std::filesystem::exists(metrics))
    warn(
        fmt::format("--output-dir {} holds a run, whose metrics.jsonl will be replaced (its "
                    "checkpoints stay). HINT: --load {} to go on from it, or another --output-dir",
                    config.output_dir, config.save));
}

Mesh start_training(const TrainConfig& config, const Place& place) {
  return connect(config, place, join_run(place, timeout_of(config)), 0);
}

void run_training(const TrainConfig& config, const Place& place) { Run(config, place).train(); }

}  // namespace braid
