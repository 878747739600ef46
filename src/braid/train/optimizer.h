// From summed gradients to new weights: the global norm, the learning rate, AdamW.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "braid/comm/group.h"
#include "braid/layers/parameter.h"
#include "braid/train/config.h"
#include "braid/train/gradients.h"

namespace braid {

/// The 2-norm of the whole model's gradient, after reduce_gradients: sharded parameters count on
/// every tp rank, the others once (rank 0's). Sums in f64.
///   Order  collective over tp
///   Gives  the same bits on every rank; infinite or NaN where a gradient is
double grad_norm(const std::vector<Parameter>& parameters, const Group& tp);

/// Scales the gradients by max_norm / norm where norm is above max_norm; max_norm 0 leaves them as they are.
void clip_grads(const MainGrads& grads, double norm, double max_norm);

/// The learning rate of an iteration (counts from 0): linear from 0 to lr over lr_warmup_iters (so
/// iteration 0 has 0), then lr_decay_style down to min_lr at lr_decay_iters, and min_lr after it;
/// "constant" stays at lr. The settings are validated ones.
double learning_rate(const TrainConfig& config, std::int64_t iteration);

/// AdamW as torch.optim.AdamW, on the f32 main weights; weight decay where the parameter says so.
class AdamW {
 public:
  /// Moments start at 0. `parameters` must outlive this and stay where they are.
  AdamW(std::vector<Parameter>& parameters, const TrainConfig& config);

  /// One step with the main gradients; then value = main in the compute dtype.
  void step(double lr);

  /// The moments, one a parameter in their order: f32, the main weight's shape. A checkpoint saves
  /// them and writes them in place.
  const std::vector<at::Tensor>& exp_avg() const { return exp_avg_; }
  const std::vector<at::Tensor>& exp_avg_sq() const { return exp_avg_sq_; }
  /// Steps done.
  std::int64_t num_steps() const { return num_steps_; }
  void set_num_steps(std::int64_t num_steps) { num_steps_ = num_steps; }

 private:
  void step_those(bool weight_decay, double lr);

  std::vector<Parameter>& parameters_;
  double beta1_, beta2_, eps_, weight_decay_;
  std::vector<at::Tensor> exp_avg_, exp_avg_sq_;
  std::int64_t num_steps_ = 0;
};

/// Copies each main weight into its value (a no-op where they are one tensor).
void copy_main_to_value(std::vector<Parameter>& parameters);

}  // namespace braid
