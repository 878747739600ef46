// The global norm, the learning rate, AdamW.
#include "braid/train/optimizer.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "braid/comm/collectives.h"
#include "braid/core/check.h"

namespace braid {

double grad_norm(const std::vector<Parameter>& parameters, const Group& tp) {
  double squares = 0;
  for (const auto& p : parameters) {
    if (!p.sharded && tp.rank() != 0) continue;
    const auto norm = at::linalg_vector_norm(p.main_grad, 2, {}, false, at::kDouble).item<double>();
    squares += norm * norm;
  }
  const auto sum = at::scalar_tensor(squares, at::kDouble);
  return std::sqrt((tp.size() == 1 ? sum : all_reduce(tp, sum)).item<double>());
}

void clip_grads(const MainGrads& grads, double norm, double max_norm) {
  const auto scale = max_norm / (norm + 1e-6);  // as torch.nn.utils.clip_grad_norm_
  if (max_norm > 0 && scale < 1) grads.flat.mul_(scale);
}

double learning_rate(const TrainConfig& config, std::int64_t iteration) {
  const auto warmup = config.lr_warmup_iters;
  if (warmup > 0 && iteration <= warmup) {
    return config.lr * static_cast<double>(iteration) / static_cast<double>(warmup);
  }
  if (config.lr_decay_style == "constant") return config.lr;
  if (iteration > config.lr_decay_iters) return config.min_lr;
  const auto done =
      static_cast<double>(iteration - warmup) / static_cast<double>(config.lr_decay_iters - warmup);
  const auto left =
      config.lr_decay_style == "linear" ? 1 - done : 0.5 * (std::cos(std::numbers::pi * done) + 1);
  return config.min_lr + left * (config.lr - config.min_lr);
}

AdamW::AdamW(std::vector<Parameter>& parameters, const TrainConfig& config)
    : parameters_(parameters),
      beta1_(config.adam_beta1),
      beta2_(config.adam_beta2),
      eps_(config.adam_eps),
      weight_decay_(config.weight_decay) {
  for (const auto& p : parameters_) {
    exp_avg_.push_back(at::zeros(p.main.sizes(), at::kFloat));
    exp_avg_sq_.push_back(at::zeros(p.main.sizes(), at::kFloat));
  }
}

void AdamW::step(double lr) {
  const at::NoGradGuard no_grad;
  ++num_steps_;
  step_those(true, lr);
  step_those(false, lr);
  copy_main_to_value(parameters_);
}

void AdamW::step_those(bool weight_decay, double lr) {
  std::vector<at::Tensor> weights, grads, exp_avgs, exp_avg_sqs;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].weight_decay != weight_decay) continue;
    weights.push_back(parameters_[i].main);
    grads.push_back(parameters_[i].main_grad);
    exp_avgs.push_back(exp_avg_[i]);
    exp_avg_sqs.push_back(exp_avg_sq_[i]);
  }
  if (weights.empty()) return;
  const std::vector<at::Tensor> steps(weights.size(), at::scalar_tensor(num_steps_, at::kFloat));
  at::_fused_adamw_(weights, grads, exp_avgs, exp_avg_sqs, {}, steps, lr, beta1_, beta2_,
                    weight_decay ? weight_decay_ : 0, eps_, /*amsgrad=*/false, /*maximize=*/false);
}

void copy_main_to_value(std::vector<Parameter>& parameters) {
  const at::NoGradGuard no_grad;
  for (auto& p : parameters) {
    if (!p.main.is_same(p.value)) p.value.copy_(p.main);
  }
}

}  // namespace braid
