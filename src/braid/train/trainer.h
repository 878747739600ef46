// One rank's part of a training step: forward, backward, sums over ranks, AdamW; and the serial steps that measure what
// communication costs without overlap.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "braid/comm/mesh.h"
#include "braid/core/trace.h"
#include "braid/layers/transformer.h"
#include "braid/train/checkpoint.h"
#include "braid/train/config.h"
#include "braid/train/data.h"
#include "braid/train/optimizer.h"
#include "braid/train/overlap.h"

namespace braid {

/// The model that the flags describe.
LlamaConfig llama_config(const TrainConfig& config);

/// The groups, model, gradients and optimizer of a run.
class Trainer {
 public:
  /// `batch(iteration, micro_batch)` gives this rank's tokens (iteration counts from 0).
  using BatchSource = std::function<Batch(std::int64_t, std::int64_t)>;

  /// Order  collective. Errors: ValueError as Transformer's.   mesh  its world null: of stubs, for timing
  Trainer(const TrainConfig& config, const Mesh& mesh, BatchSource batch);

  struct StepResult {
    double loss = 0, grad_norm = 0, lr = 0, step_s = 0;
    std::map<std::string, trace::Totals> totals;  // of this step's operations
  };
  /// One iteration: its micro-batches, then one step of the optimizer. Order: collective.
  ///   Errors  c10::Error on every rank, weights unchanged: the loss or the gradient's norm is not finite
  StepResult step(std::int64_t iteration);

  Transformer& model() { return model_; }

  /// Whether the flags overlap anything: else a serial step measures nothing but noise.
  bool overlaps() const;
  /// Nothing is overlapped from now on: serial matmuls, gradients are reduced after backward; or
  /// (false) what the flags say.
  void set_serial(bool serial);
  /// Forward, backward and the sums over ranks of an iteration in serial mode; its gradients are thrown away.
  /// Gives the operations' totals. Order: collective.
  std::map<std::string, trace::Totals> serial_step(std::int64_t iteration);

  /// Mean loss of the first `num_batches` global batches of the validation data, over all ranks. Order: collective.
  double validation_loss(const Dataset& data, std::int64_t num_batches);

  /// Floating-point operations of one iteration over all ranks: 6 per token and weight of a matmul,
  /// and attention's scores over half of the square; recomputation is not counted (as Megatron's model FLOPs).
  double flops_per_step() const;
  std::int64_t tokens_per_step() const { return config_.global_batch_size * config_.seq_length; }

  /// Saves after `iteration` iterations; loads weights, and where there are any moments and the tuner's choices.
  ///   Gives   load: iterations done; 0 when only weights were there
  ///   Errors  as train/checkpoint.h
  void save(const std::string& dir, std::int64_t iteration, std::int64_t data_tokens);
  std::int64_t load(const Checkpoint& checkpoint);

 private:
  double forward_backward(std::int64_t iteration);
  /// The tuner's choices of dp rank 0 become everyone's: each tp group has measured for itself, but a
  /// checkpoint holds one set. Collective over dp.
  void share_choices();
  void read_tuner_file();

  TrainConfig config_;
  Mesh mesh_;
  BatchSource batch_;
  Transformer model_;
  MainGrads grads_;
  std::vector<GradBucket> buckets_;  // where they are reduced beside backward
  AdamW optimizer_;
  std::int64_t num_micro_batches_;
  std::size_t num_choices_ = 0;  // of the tuner, shared so far
  bool told_choices_ = false;    // that nothing is overlapped
  bool serial_ = false;
};

}  // namespace braid
