// The plain ops.
#include "braid/ops/reference.h"

#include "braid/comm/collectives.h"

namespace braid::reference {
namespace {

at::Tensor f64(const at::Tensor& x) { return x.defined() ? x.detach().to(at::kDouble) : x; }

}  // namespace

at::Tensor all_gather_matmul(const Group& group, const at::Tensor& x_shard,
                             const at::Tensor& weight, const at::Tensor& bias) {
  return at::linear(f64(all_gather(group, x_shard)), f64(weight), f64(bias))
      .to(x_shard.scalar_type());
}

at::Tensor matmul_all_reduce(const Group& group, const at::Tensor& x, const at::Tensor& weight,
                             const at::Tensor& bias) {
  at::Tensor y = all_reduce(group, at::linear(f64(x), f64(weight)));
  if (bias.defined()) y = y + f64(bias);
  return y.to(x.scalar_type());
}

at::Tensor matmul_reduce_scatter(const Group& group, const at::Tensor& x, const at::Tensor& weight,
                                 const at::Tensor& bias) {
  return matmul_all_reduce(group, x, weight, bias)
      .split_with_sizes(
          split_rows(x.size(0), group.size()))[static_cast<std::size_t>(group.rank())];
}

at::Tensor all_gather_wgrad(const Group& group, const at::Tensor& dy, const at::Tensor& x_shard) {
  return f64(dy).flatten(0, -2).t().mm(f64(all_gather(group, x_shard)).flatten(0, -2));
}

}  // namespace braid::reference
