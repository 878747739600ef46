// The library alone: every rank holds rows of x and columns of the product; gathering x is woven into the matmul.
#include <braid/comm/join.h>
#include <braid/ops/collective_matmul.h>

#include <cstdio>

int main() {
  const braid::Place place = braid::place_from_environment();
  const auto store = braid::join_run(place, braid::env().timeout);
  const auto group = braid::Group::create(store, "tp", place.rank, place.world_size);

  at::manual_seed(1);  // the same whole tensors on every rank, each of which takes its part
  const at::Tensor x = at::randn({1024, 512});
  const at::Tensor x_shard = x.tensor_split(group->size())[group->rank()];
  const at::Tensor weight = at::randn({512, 512}).tensor_split(group->size())[group->rank()];

  const at::Tensor y =
      braid::all_gather_matmul(*group, x_shard, weight, /*bias=*/{}, {braid::Mode::fused});

  const double error = (y - at::linear(x, weight)).abs().max().item<double>();
  std::printf("rank %d of %d: off by %g at most\n", group->rank(), group->size(), error);
  return error < 1e-3 ? 0 : 1;
}
