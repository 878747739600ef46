// The buffer of main gradients, and its sums over ranks.
#include "braid/train/gradients.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "braid/core/trace.h"

namespace braid {
namespace {

constexpr const char* kOperation = "grad_reduce";
// After backward only the start of one need be beside the end of another. Beside backward more can be on their way,
// but only so many operations of a group may be (SharedMemory::kInFlight).
constexpr std::size_t kInFlightAfter = 2, kInFlightBeside = 8;

void sum_over_tp(const MainGrads& grads, const Group& tp) {
  if (tp.size() == 1 || grads.partial_over_tp.numel() == 0) return;
  const trace::Operation operation(kOperation);
  all_reduce(tp, grads.partial_over_tp, ReduceOp::sum, grads.partial_over_tp);
}

}  // namespace

MainGrads allocate_main_grads(std::vector<Parameter>& parameters) {
  std::int64_t total = 0, partial = 0;
  for (const auto& p : parameters) {
    total += p.value.numel();
    if (p.grad_partial_over_tp) partial += p.value.numel();
  }
  MainGrads grads;
  grads.flat = at::zeros({total}, at::kFloat);
  grads.partial_over_tp = grads.flat.narrow(0, 0, partial);
  std::int64_t next_partial = 0, next = partial;
  for (auto& p : parameters) {
    auto& at = p.grad_partial_over_tp ? next_partial : next;
    p.main_grad = grads.flat.narrow(0, at, p.value.numel()).view(p.value.sizes());
    at += p.value.numel();
  }
  return grads;
}

void DpSums::start(const at::Tensor& grads, std::size_t most) {
  while (in_flight_.size() >= most) wait_for_oldest();
  const trace::Operation operation(kOperation);
  in_flight_.push_back(start_all_reduce(dp_, grads, ReduceOp::sum, grads));
}

void DpSums::wait_for_all() {
  while (!in_flight_.empty()) wait_for_oldest();
}

void DpSums::wait_for_oldest() {
  const trace::Operation operation(kOperation, trace::resumed);
  in_flight_.front().wait();
  in_flight_.pop_front();
}

void reduce_gradients(const MainGrads& grads, const Group& tp, const Group& dp) {
  sum_over_tp(grads, tp);
  if (dp.size() == 1) return;
  DpSums sums(dp);
  for (const auto& message : grads.flat.split(kDpMessageElements))
    sums.start(message, kInFlightAfter);
  sums.wait_for_all();
  grads.flat.div_(dp.size());
}

std::vector<GradBucket> make_grad_buckets(const std::vector<Parameter>& parameters,
                                          const MainGrads& grads, std::int64_t bucket_size) {
  std::vector<GradBucket> buckets;
  std::int64_t begin = grads.flat.numel(), end = begin;
  std::vector<std::size_t> members;
  const auto close = [&] {
    if (!members.empty())
      buckets.push_back({grads.flat.narrow(0, begin, end - begin), std::exchange(members, {})});
    end = begin;
  };
  for (const bool partial : {false, true}) {
    for (std::size_t i = parameters.size(); i-- > 0;) {
      if (parameters[i].grad_partial_over_tp != partial) continue;
      members.push_back(i);
      begin -= parameters[i].value.numel();
      if (!partial && end - begin >= bucket_size) close();
    }
    close();
  }
  return buckets;
}

/// Sits at the end of a parameter's part in the backward pass: the node of autograd that collects its gradients, which
/// runs once all that feed it have, also where they gave nothing but added to main_grad.
struct OverlappedReduction::Watch {
  struct Hook : torch::autograd::FunctionPostHook {
    explicit Hook(std::function<void()> the_call) : call(std::move(the_call)) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                              const torch::autograd::variable_list&) override {
      call();
      return outputs;
    }
    std::function<void()> call;
  };

  Watch(const Parameter& parameter, std::function<void()> complete)
      : node(torch::autograd::impl::grad_accumulator(parameter.value)),
        hook(node->add_post_hook(std::make_unique<Hook>(
            [name = parameter.name, complete = std::move(complete), done = false]() mutable {
              TORCH_INTERNAL_ASSERT(!std::exchange(done, true), "the gradient of ", name,
                                    " was complete already, its sum may have started");
              complete();
            }))) {}
  ~Watch() { node->del_post_hook(hook); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  c10::intrusive_ptr<torch::autograd::Node> node;
  std::uintptr_t hook;
};

OverlappedReduction::OverlappedReduction(const std::vector<Parameter>& parameters,
                                         const MainGrads& grads,
                                         const std::vector<GradBucket>& buckets, const Group& tp,
                                         const Group& dp)
    : grads_(grads), buckets_(buckets), tp_(tp), dp_(dp), num_missing_(buckets.size()), sums_(dp) {
  for (std::size_t bucket = 0; bucket < buckets.size(); ++bucket) {
    for (const std::size_t i : buckets[bucket].parameters) {
      const Parameter& parameter = parameters[i];
      const bool partial = parameter.grad_partial_over_tp;  // then it is complete in finish() only
      if (!partial && !parameter.value.requires_grad()) continue;
      ++num_missing_[bucket];
      if (partial) continue;
      watches_.push_back(std::make_unique<Watch>(parameter, [this, bucket] {
        --num_missing_[bucket];
        start_complete();
      }));
    }
  }
}

OverlappedReduction::~OverlappedReduction() = default;

void OverlappedReduction::start_complete() {
  for (; next_ < buckets_.size() && num_missing_[next_] == 0; ++next_)
    sums_.start(buckets_[next_].grads, kInFlightBeside);
}

void OverlappedReduction::finish() {
  watches_.clear();
  sum_over_tp(grads_, tp_);
  for (; next_ < buckets_.size(); ++next_) sums_.start(buckets_[next_].grads, kInFlightAfter);
  sums_.wait_for_all();
  grads_.flat.div_(dp_.size());
}

}  // namespace braid
