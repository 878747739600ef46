// The main gradients: one buffer, and its sums over ranks, after the backward pass or beside it.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "braid/comm/collectives.h"
#include "braid/layers/parameter.h"

namespace braid {

/// The main gradients of all parameters in one f32 tensor, so that sums over ranks are a few large
/// messages and zeroing one call.
struct MainGrads {
  at::Tensor flat;             // all of them
  at::Tensor partial_over_tp;  // the beginning of flat: parameters that have grad_partial_over_tp
};

/// Makes each parameter's main_grad a view of one zeroed tensor, in the parameters' order.
MainGrads allocate_main_grads(std::vector<Parameter>& parameters);

/// Sums over tp what is partial there (one message), then takes the mean over dp of everything
/// (messages of kDpMessageElements, two in flight). The trainer's part of the mean is the
/// micro-batches: it scales each one's loss by 1 / their number.
///   Order  collective over tp and dp
///   Gives  the same bits on every rank of dp, and of tp where not sharded
void reduce_gradients(const MainGrads& grads, const Group& tp, const Group& dp);
inline constexpr std::int64_t kDpMessageElements = std::int64_t{1} << 20;

/// All-reduces over dp, in place, that are waited for in the order in which they start.
class DpSums {
 public:
  explicit DpSums(const Group& dp) : dp_(dp) {}
  /// Starts one, and waits for the oldest first while `most` are in flight.
  void start(const at::Tensor& grads, std::size_t most);
  void wait_for_all();

 private:
  void wait_for_oldest();
  const Group& dp_;
  std::deque<Pending<at::Tensor>> in_flight_;
};

/// Whole parameters whose gradients lie side by side, and travel as one message.
struct GradBucket {
  at::Tensor grads;  // part of MainGrads::flat
  std::vector<std::size_t> parameters;
};

/// Cuts the buffer into buckets, from its end (backward comes to the last parameters first) to its
/// beginning: each takes parameters until it has `bucket_size` elements. What is partial over tp is
/// a bucket by itself, the last one.
std::vector<GradBucket> make_grad_buckets(const std::vector<Parameter>& parameters,
                                          const MainGrads& grads, std::int64_t bucket_size);

/// What reduce_gradients does, with dp's messages beside a backward pass. A bucket starts, in the
/// thread that runs backward, once autograd is done with all its parameters (with every use of
/// them: tied weights are whole) and the bucket before it has started. finish() starts the others:
/// of parameters that are not in this backward, or partial over tp.
///
/// NOTE [order of buckets]. Which buckets there are and in which order they start depends on the
/// parameters alone, not on the order in which a rank's backward comes to them. A start may wait for
/// peers in dp (for those in flight), while those wait in tp: all ranks run the same backward, so
/// whoever is least far in it waits for nobody.
class OverlappedReduction {
 public:
  /// From here to finish() one backward() may run, which completes all gradients. The arguments
  /// must outlive this.   buckets  of make_grad_buckets   dp  of more than one
  OverlappedReduction(const std::vector<Parameter>& parameters, const MainGrads& grads,
                      const std::vector<GradBucket>& buckets, const Group& tp, const Group& dp);
  /// Without finish(), as an exception passed, waits for what is in flight.
  ~OverlappedReduction();
  OverlappedReduction(const OverlappedReduction&) = delete;
  OverlappedReduction& operator=(const OverlappedReduction&) = delete;

  /// Once, after backward. Order, Gives: as reduce_gradients.
  void finish();

 private:
  struct Watch;
  void start_complete();

  const MainGrads& grads_;
  const std::vector<GradBucket>& buckets_;
  const Group& tp_;
  const Group& dp_;
  std::vector<std::size_t> num_missing_;  // gradients, by bucket
  std::size_t next_ = 0;                  // bucket to start
  DpSums sums_;
  std::vector<std::unique_ptr<Watch>> watches_;
};

}  // namespace braid
