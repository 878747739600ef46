// Training steps.
#include "braid/train/trainer.h"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "braid/comm/collectives.h"
#include "braid/comm/texts.h"
#include "braid/core/log.h"
#include "braid/ops/tuner.h"
#include "braid/ops/tuner_file.h"
#include "braid/train/transformers_config.h"

namespace braid {
namespace {

TransformerOptions transformer_options(const TrainConfig& config,
                                       const std::shared_ptr<Group>& tp) {
  TransformerOptions options;
  options.group = tp;
  options.sequence_parallel = config.sequence_parallel;
  options.matmul = matmul_options(config);
  options.dtype = config.bf16 ? at::kBFloat16 : at::kFloat;
  if (!config.recompute_granularity.empty()) {
    options.recompute_method =
        config.recompute_method == "block" ? RecomputeMethod::block : RecomputeMethod::uniform;
    options.recompute_num_layers = config.recompute_num_layers;
  }
  options.seed = static_cast<std::uint64_t>(config.seed);
  return options;
}

/// The mean over dp of a number that all ranks of tp know.
double mean_over(const Group& dp, double value) {
  return all_reduce(dp, at::scalar_tensor(value, at::kDouble)).item<double>() / dp.size();
}

}  // namespace

LlamaConfig llama_config(const TrainConfig& config) {
  LlamaConfig llama;
  llama.hidden_size = config.hidden_size;
  llama.num_layers = config.num_layers;
  llama.ffn_hidden_size = config.ffn_hidden_size;
  llama.num_attention_heads = config.num_attention_heads;
  llama.num_query_groups = config.num_query_groups;
  llama.kv_channels = config.kv_channels;
  llama.vocab_size = config.vocab_size;
  llama.rotary_base = config.rotary_base;
  llama.norm_epsilon = config.norm_epsilon;
  llama.untie_embeddings_and_output_weights = config.untie_embeddings_and_output_weights;
  llama.init_method_std = config.init_method_std;
  return llama;
}

Trainer::Trainer(const TrainConfig& config, const Mesh& mesh, BatchSource batch)
    : config_(config),
      mesh_(mesh),
      batch_(std::move(batch)),
      model_(llama_config(config), transformer_options(config, mesh.tp)),
      grads_(allocate_main_grads(model_.parameters())),
      optimizer_(model_.parameters(), config),
      num_micro_batches_(config.global_batch_size / (config.micro_batch_size * mesh.dp->size())) {
  if (config.overlap_grad_reduce && mesh.dp->size() > 1) {
    buckets_ = make_grad_buckets(model_.parameters(), grads_, config.ddp_bucket_size);
    if (buckets_.front().grads.numel() + grads_.partial_over_tp.numel() == grads_.flat.numel()) {
      buckets_.clear();
      warn(
          fmt::format("--overlap-grad-reduce overlaps nothing: the {} gradients of a rank are one "
                      "bucket. HINT: --ddp-bucket-size {}",
                      grads_.flat.numel(), grads_.flat.numel() / 8));
    }
  }
  tuner::allow_live(!config.deterministic);
  read_tuner_file();
}

void Trainer::read_tuner_file() {
  if (!config_.tuner_file.empty()) tuner::read_choices(*mesh_.world, config_.tuner_file);
  num_choices_ = tuner::choices().size();
}

double Trainer::forward_backward(std::int64_t iteration) {
  grads_.flat.zero_();
  double loss_sum = 0;
  std::optional<OverlappedReduction> overlapped;
  for (std::int64_t i = 0; i < num_micro_batches_; ++i) {
    const Batch batch = batch_(iteration, i);
    const at::Tensor loss = model_.forward(batch.tokens, batch.labels);
    if (!buckets_.empty() && !serial_ && i + 1 == num_micro_batches_)
      overlapped.emplace(model_.parameters(), grads_, buckets_, *mesh_.tp, *mesh_.dp);
    (loss / static_cast<double>(num_micro_batches_)).backward();
    loss_sum += loss.item<double>();
  }
  if (overlapped)
    overlapped->finish();
  else
    reduce_gradients(grads_, *mesh_.tp, *mesh_.dp);
  return mean_over(*mesh_.dp, loss_sum / static_cast<double>(num_micro_batches_));
}

Trainer::StepResult Trainer::step(std::int64_t iteration) {
  (void)trace::take_totals();
  const auto begin = std::chrono::steady_clock::now();
  StepResult result;
  result.loss = forward_backward(iteration);
  result.grad_norm = grad_norm(model_.parameters(), *mesh_.tp);
  // The same on every rank, and before a weight is touched. Stubs of groups make numbers up.
  const bool is_stub = mesh_.world == nullptr;
  TORCH_CHECK(is_stub || (std::isfinite(result.loss) && std::isfinite(result.grad_norm)),
              "iteration ", iteration + 1, ": the loss is ", result.loss,
              ", the gradient's norm is ", result.grad_norm,
              "; the run ends, the last checkpoint is as it was. HINT: a lower --lr (it is ",
              config_.lr, "), longer --lr-warmup-iters or a smaller --clip-grad");
  clip_grads(grads_, result.grad_norm, config_.clip_grad);
  result.lr = learning_rate(config_, iteration);
  optimizer_.step(result.lr);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  result.step_s = elapsed.count();
  result.totals = trace::take_totals();
  share_choices();
  return result;
}

void Trainer::share_choices() {
  if (matmul_options(config_).mode == Mode::automatic && !std::exchange(told_choices_, true)) {
    const std::vector<Plan> plans = tuner::plans_in_use();
    if (!plans.empty() && std::all_of(plans.begin(), plans.end(),
                                      [](const Plan& plan) { return plan.num_chunks == 1; }))
      warn(
          fmt::format("--use-coc overlaps nothing: mode auto runs all {} operations of these "
                      "shapes serially",
                      plans.size()));
  }
  const nlohmann::json mine = tuner::choices();
  // The same on all of dp: their tp groups run the same operations.
  if (mine.size() == num_choices_) return;
  if (mesh_.dp->size() > 1)
    tuner::set_choices(nlohmann::json::parse(broadcast_text(*mesh_.dp, mine.dump(), 0)));
  num_choices_ = tuner::choices().size();
  if (config_.tuner_file.empty() || mesh_.world->rank() != 0) return;
  try {
    tuner::write_choices(config_.tuner_file, tuner::measured());
    tuner::forget_measured();
  } catch (const c10::Error& error) {  // the run itself does not depend on it
    warn(fmt::format("--tuner-file: {}", error.what_without_backtrace()));
  }
}

bool Trainer::overlaps() const {
  return !buckets_.empty() ||
         (mesh_.tp->size() > 1 && matmul_options(config_).mode != Mode::serial);
}

void Trainer::set_serial(bool serial) {
  serial_ = serial;
  model_.set_matmul(serial ? MatmulOptions{Mode::serial} : matmul_options(config_));
}

std::map<std::string, trace::Totals> Trainer::serial_step(std::int64_t iteration) {
  (void)trace::take_totals();
  set_serial(true);
  forward_backward(iteration);
  (void)grad_norm(model_.parameters(), *mesh_.tp);
  set_serial(false);
  return trace::take_totals();
}

double Trainer::validation_loss(const Dataset& data, std::int64_t num_batches) {
  const at::NoGradGuard no_grad;
  num_batches =
      std::clamp<std::int64_t>(data.num_sequences() / config_.global_batch_size, 1, num_batches);
  double sum = 0;
  for (std::int64_t i = 0; i < num_batches; ++i) {
    for (std::int64_t j = 0; j < num_micro_batches_; ++j) {
      const Batch batch =
          data.batch(first_sample(i, j, mesh_.dp->rank(), mesh_.dp->size(),
                                  config_.micro_batch_size, config_.global_batch_size),
                     config_.micro_batch_size);
      sum += model_.forward(batch.tokens, batch.labels).item<double>();
    }
  }
  return mean_over(*mesh_.dp, sum / static_cast<double>(num_batches * num_micro_batches_));
}

double Trainer::flops_per_step() const {
  const auto& c = config_;
  const double heads = static_cast<double>(c.num_attention_heads * c.kv_channels);
  // Scores and values: 2 products of s/2 * heads multiply-adds a token, three times with backward.
  const double attention = static_cast<double>(c.num_layers * c.seq_length) * heads * 6;
  return static_cast<double>(tokens_per_step()) * (6 * num_matmul_weights(c) + attention);
}

void Trainer::save(const std::string& dir, std::int64_t iteration, std::int64_t data_tokens) {
  TrainerState state;
  state.iteration = iteration;
  state.consumed_samples = iteration * config_.global_batch_size;
  state.seed = static_cast<std::uint64_t>(config_.seed);
  state.data_tokens = data_tokens;
  to_json(state.config, config_);
  state.tuner = tuner::choices();
  save_checkpoint(dir, *mesh_.tp, *mesh_.dp, model_.parameters(), optimizer_, state,
                  transformers_config(config_));
}

std::int64_t Trainer::load(const Checkpoint& checkpoint) {
  checkpoint.load(model_.parameters(), &optimizer_);
  if (!checkpoint.state()) return 0;
  tuner::set_choices(checkpoint.state()->tuner);
  read_tuner_file();  // what a person wrote there goes before what the checkpoint's run measured
  return checkpoint.state()->iteration;
}

}  // namespace braid
