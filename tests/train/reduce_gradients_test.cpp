// Sums over tp and means over dp, and the global norm, on several ranks.
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>

#include "braid/train/optimizer.h"
#include "tests/support/ranks.h"

namespace braid {
namespace {

using test::rank_integers;
using test::run_ranks;

// A sharded matrix, a replicated one whose gradient every rank has whole, and a norm whose gradient
// is partial over tp.
std::vector<Parameter> make_parameters() {
  std::vector<Parameter> parameters(3);
  parameters[0].value = at::zeros({5, 3});
  parameters[0].sharded = true;
  parameters[1].value = at::zeros({2, 4});
  parameters[2].value = at::zeros({7});
  parameters[2].grad_partial_over_tp = true;
  return parameters;
}

std::shared_ptr<Group> alone() {
  return Group::create(c10::make_intrusive<c10d::HashStore>(), "alone", 0, 1);
}

TEST(ReduceGradients, SumsOverTpOnlyWhatIsPartial) {
  for (const int ranks : {1, 2, 3}) {
    run_ranks(ranks, [&](const std::shared_ptr<Group>& tp) {
      auto parameters = make_parameters();
      const auto grads = allocate_main_grads(parameters);
      for (auto& p : parameters) p.main_grad.copy_(rank_integers(tp->rank(), p.value.sizes()));
      reduce_gradients(grads, *tp, *alone());
      EXPECT_TRUE(parameters[0].main_grad.equal(rank_integers(tp->rank(), {5, 3})));
      EXPECT_TRUE(parameters[1].main_grad.equal(rank_integers(tp->rank(), {2, 4})));
      auto sum = at::zeros({7});
      for (int r = 0; r < ranks; ++r) sum += rank_integers(r, {7});
      EXPECT_TRUE(parameters[2].main_grad.equal(sum));
    });
  }
}

TEST(ReduceGradients, TakesTheMeanOverDp) {
  run_ranks(2, [&](const std::shared_ptr<Group>& dp) {
    auto parameters = make_parameters();
    parameters[1].value =
        at::zeros({kDpMessageElements * 5 / 2});  // several messages, the last one short
    const auto grads = allocate_main_grads(parameters);
    for (auto& p : parameters) p.main_grad.copy_(rank_integers(dp->rank(), p.value.sizes()));
    reduce_gradients(grads, *alone(), *dp);
    for (const auto& p : parameters) {
      const auto mean = (rank_integers(0, p.value.sizes()) + rank_integers(1, p.value.sizes())) / 2;
      EXPECT_TRUE(p.main_grad.equal(mean));
    }
  });
}

TEST(GradNorm, CountsShardedOnEveryRankAndTheOthersOnce) {
  for (const int ranks : {1, 2, 4}) {
    std::vector<double> norms;
    std::mutex mutex;
    run_ranks(ranks, [&](const std::shared_ptr<Group>& tp) {
      auto parameters = make_parameters();
      allocate_main_grads(parameters);
      parameters[0].main_grad.copy_(rank_integers(tp->rank(), {5, 3}));
      parameters[1].main_grad.copy_(rank_integers(9, {2, 4}));
      parameters[2].main_grad.copy_(rank_integers(8, {7}));
      const auto norm = grad_norm(parameters, *tp);
      const std::lock_guard lock(mutex);
      norms.push_back(norm);
    });
    const auto squares = [](const at::Tensor& x) {
      return x.to(at::kDouble).square().sum().item<double>();
    };
    double expected = squares(rank_integers(9, {2, 4})) + squares(rank_integers(8, {7}));
    for (int r = 0; r < ranks; ++r) expected += squares(rank_integers(r, {5, 3}));
    ASSERT_EQ(norms.size(), static_cast<std::size_t>(ranks));
    for (const auto norm : norms) {
      EXPECT_NEAR(norm, std::sqrt(expected), 1e-12 * norm);
      EXPECT_EQ(norm, norms[0]);
    }
  }
}

TEST(GradNorm, IsNotFiniteOnEveryRankWhereOneGradientIsNot) {
  run_ranks(2, [&](const std::shared_ptr<Group>& tp) {
    auto parameters = make_parameters();
    allocate_main_grads(parameters);
    if (tp->rank() == 1) parameters[0].main_grad[0][0] = std::nan("");
    EXPECT_TRUE(std::isnan(grad_norm(parameters, *tp)));
  });
}

}  // namespace
}  // namespace braid
