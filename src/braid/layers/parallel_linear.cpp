// Column- and row-parallel layers as autograd functions over the collective matmuls.
#include "braid/layers/parallel_linear.h"

#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <vector>

#include "braid/comm/collectives.h"
#include "braid/comm/sums.h"
#include "braid/core/check.h"
#include "braid/ops/operands.h"
#include "braid/ops/tile_matmul.h"

namespace braid {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// What a layer's backward needs besides tensors; kept in the autograd context.
struct Saved : torch::CustomClassHolder {
  Saved(const LinearOptions& the_options, const at::Tensor& x, const at::Tensor& bias)
      : options(the_options), x_sizes(x.sizes().vec()), has_bias(bias.defined()) {}

  LinearOptions options;
  std::vector<std::int64_t> x_sizes;
  bool has_bias;  // else it has no place among the gradients
  bool x_is_gathered = false;
  std::vector<std::int64_t> rows;  // tokens of each rank on the split side
};

std::int64_t num_rows(at::IntArrayRef sizes) {
  return c10::multiply_integers(sizes.slice(0, sizes.size() - 1));
}

int num_ranks(const LinearOptions& options) { return options.group ? options.group->size() : 1; }

/// Rows of matmuls: 2-D, and dense enough that a matmul reads them in place (an expanded gradient is not).
at::Tensor rows_of(const at::Tensor& x) {
  at::Tensor rows = x.dim() == 2 ? x : x.reshape({num_rows(x.sizes()), x.size(-1)});
  const bool row_major = rows.stride(1) == 1 && rows.stride(0) >= rows.size(1);
  const bool column_major = rows.stride(0) == 1 && rows.stride(1) >= rows.size(0);
  return row_major || column_major ? rows : rows.contiguous();
}

void check_operands(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                    const LinearOptions& options) {
  BRAID_CHECK(x.defined() && x.dim() >= 1, "linear: x must have at least one dim");
  BRAID_CHECK_EQ(weight.dim(), 2, "linear: dims of the weight");
  BRAID_CHECK_EQ(x.size(-1), weight.size(1), "linear: features of x and of the weight");
  BRAID_CHECK_EQ(x.scalar_type(), weight.scalar_type(), "linear: dtypes of x and weight");
  if (bias.defined()) {
    BRAID_CHECK_EQ(bias.numel(), weight.size(0), "linear: bias and output features");
    BRAID_CHECK_EQ(bias.scalar_type(), weight.scalar_type(), "linear: dtypes of bias and weight");
  }
  if (options.main_grad.defined()) {
    BRAID_CHECK_EQ(options.main_grad.sizes(), weight.sizes(),
                   "linear: shapes of main_grad and weight");
    const auto dtype = options.main_grad.scalar_type();
    BRAID_CHECK(dtype == at::kFloat || dtype == weight.scalar_type(), "linear: main_grad is ",
                dtype, ", expected Float or the weight's ", weight.scalar_type());
  }
}

/// Checks the rows of the ranks, where given: this rank's, or all of them.
void check_rows(const LinearOptions& options, std::int64_t actual, bool is_total) {
  if (!options.sequence_parallel || options.rows.empty()) return;
  BRAID_CHECK_EQ(options.rows.size(), static_cast<std::size_t>(num_ranks(options)),
                 "linear: entries of rows and ranks");
  const auto rank = static_cast<std::size_t>(options.group ? options.group->rank() : 0);
  const auto given =
      is_total ? std::reduce(options.rows.begin(), options.rows.end()) : options.rows[rank];
  BRAID_CHECK_EQ(given, actual,
                 is_total ? "linear: the sum of rows and the rows of x"
                          : "linear: this rank's entry of rows and the rows of x");
}

/// The tensor that dW goes into: main_grad, or a new one that is returned as the gradient.
struct WeightGradient {
  WeightGradient(const LinearOptions& options, const at::Tensor& weight, bool needed) {
    if (!needed) return;
    accumulate = options.main_grad.defined();
    dw = accumulate ? options.main_grad : at::empty(weight.sizes(), weight.options());
  }
  at::Tensor returned() const { return accumulate ? at::Tensor() : dw; }

  at::Tensor dw;
  bool accumulate = false;
};

/// dw (+)= dy^T x without communication, summed in f32 whatever the types.
void weight_gradient(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& dw,
                     bool accumulate) {
  through_sum_dtype(dw, accumulate,
                    [&](const at::Tensor& sum, bool add) { add_weight_grad(dy, x, sum, add); });
}

at::Tensor bias_gradient(const at::Tensor& dy) {
  return dy.scalar_type() == at::kDouble ? dy.sum(0)
                                         : dy.sum(0, false, at::kFloat).to(dy.scalar_type());
}

/// Function::apply takes no undefined tensors.
std::optional<at::Tensor> optional(const at::Tensor& x) {
  return x.defined() ? std::optional(x) : std::nullopt;
}

void save(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
          c10::intrusive_ptr<Saved> saved) {
  ctx->save_for_backward({x, weight});
  ctx->saved_data["state"] = c10::IValue::make_capsule(std::move(saved));
}

c10::intrusive_ptr<Saved> state_of(AutogradContext* ctx) {
  return c10::static_intrusive_pointer_cast<Saved>(ctx->saved_data.at("state").toCapsule());
}

struct ColumnLinear : torch::autograd::Function<ColumnLinear> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& optional_bias,
                            const LinearOptions& options, bool grad_mode) {
    const at::Tensor bias = optional_bias.value_or(at::Tensor());
    auto saved = c10::make_intrusive<Saved>(options, x, bias);
    const bool needs_dw = grad_mode && weight.requires_grad();
    at::Tensor rows = rows_of(x), y;
    if (num_ranks(options) == 1 || !options.sequence_parallel) {
      y = multiply_whole(rows, weight, bias);
    } else {
      const auto& counts = saved->rows =
          options.rows.empty() ? all_gather_rows(*options.group, rows) : options.rows;
      if (options.keep_gathered && needs_dw) {
        std::tie(y, rows) = gathered(options, rows, weight, bias, counts);
        saved->x_is_gathered = true;
      } else {
        y = all_gather_matmul(*options.group, rows, weight, bias, options.matmul, counts);
      }
    }
    save(ctx, needs_dw ? rows : at::Tensor(), weight, saved);
    return with_leading_dims(y, saved->x_sizes);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = state_of(ctx);
    const LinearOptions& options = saved->options;
    const auto tensors = ctx->get_saved_variables();
    const at::Tensor& x = tensors[0];
    const at::Tensor& weight = tensors[1];
    const bool sharded = num_ranks(options) > 1;
    const at::Tensor dy = rows_of(grads[0]);
    const bool needs_dx = ctx->needs_input_grad(0);

    WeightGradient gradient(options, weight, ctx->needs_input_grad(1));
    if (needs_dx && sharded && options.sequence_parallel)  // before anything is in flight
      tune_matmul_reduce_scatter(*options.group, dy, weight.t(), options.matmul, saved->rows);
    // x is published before dx is started and dx is on its way while dW is computed.
    Pending<void> dw_pending;
    if (gradient.dw.defined() && sharded && options.sequence_parallel && !saved->x_is_gathered)
      dw_pending = start_all_gather_wgrad(*options.group, dy, x, gradient.dw, gradient.accumulate,
                                          options.matmul, saved->rows);
    Pending<at::Tensor> dx_pending;
    at::Tensor dx;
    if (needs_dx && !sharded) dx = multiply_whole(dy, weight.detach().t(), {});
    if (needs_dx && sharded) {
      dx_pending =
          options.sequence_parallel
              ? start_matmul_reduce_scatter(*options.group, dy, weight.t(), {}, options.matmul,
                                            saved->rows)
              : start_matmul_all_reduce(*options.group, dy, weight.t(), {}, options.matmul);
    }
    if (dw_pending.valid())
      dw_pending.wait();
    else if (gradient.dw.defined())
      weight_gradient(dy, x, gradient.dw, gradient.accumulate);
    const at::Tensor db =
        saved->has_bias && ctx->needs_input_grad(2) ? bias_gradient(dy) : at::Tensor();
    if (dx_pending.valid()) dx = dx_pending.wait();
    if (dx.defined()) dx = dx.view(saved->x_sizes);
    return {dx, gradient.returned(), db, {}, {}};
  }

 private:
  static std::tuple<at::Tensor, at::Tensor> gathered(const LinearOptions& options,
                                                     const at::Tensor& x, const at::Tensor& weight,
                                                     const at::Tensor& bias,
                                                     const std::vector<std::int64_t>& counts) {
    auto result = all_gather_matmul_v2(*options.group, x, weight, bias, options.matmul, counts);
    return {std::move(result.y), std::move(result.x_full)};
  }
};

struct RowLinear : torch::autograd::Function<RowLinear> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& optional_bias,
                            const LinearOptions& options, bool grad_mode) {
    const at::Tensor bias = optional_bias.value_or(at::Tensor());
    auto saved = c10::make_intrusive<Saved>(options, x, bias);
    const at::Tensor rows = rows_of(x);
    at::Tensor y;
    if (num_ranks(options) == 1) {
      y = multiply_whole(rows, weight, bias);
    } else if (options.sequence_parallel) {
      saved->rows =
          options.rows.empty() ? split_rows(rows.size(0), num_ranks(options)) : options.rows;
      y = matmul_reduce_scatter(*options.group, rows, weight, bias, options.matmul, saved->rows);
    } else {
      y = matmul_all_reduce(*options.group, rows, weight, bias, options.matmul);
    }
    save(ctx, grad_mode && weight.requires_grad() ? rows : at::Tensor(), weight, saved);
    return with_leading_dims(y, saved->x_sizes);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = state_of(ctx);
    const LinearOptions& options = saved->options;
    const auto tensors = ctx->get_saved_variables();
    const at::Tensor& x = tensors[0];
    const at::Tensor& weight = tensors[1];
    const at::Tensor dy = rows_of(grads[0]);
    const bool needs_dx = ctx->needs_input_grad(0),
               needs_db = saved->has_bias && ctx->needs_input_grad(2);
    WeightGradient gradient(options, weight, ctx->needs_input_grad(1));
    at::Tensor dx, db;
    if (num_ranks(options) > 1 && options.sequence_parallel && !needs_dx &&
        !gradient.dw.defined()) {
      if (needs_db)  // only [n] travels
        db = all_reduce(*options.group, dy.sum(0, false, sum_dtype(dy.scalar_type())))
                 .to(dy.scalar_type());
    } else if (num_ranks(options) > 1 && options.sequence_parallel) {
      const auto num_tokens = num_rows(saved->x_sizes);
      if (needs_db) db = at::zeros({weight.size(0)}, weight.options());
      // A frozen weight's x was not kept: only its shape is asked for.
      const at::Tensor x_or_shape =
          x.defined() ? x : at::empty({1}, dy.options()).expand({num_tokens, weight.size(1)});
      dx = all_gather_matmul_backward(*options.group, dy, weight, x_or_shape, needs_dx, gradient.dw,
                                      gradient.accumulate, db, options.matmul, saved->rows);
    } else {
      if (needs_dx) dx = multiply_whole(dy, weight.detach().t(), {});
      if (gradient.dw.defined()) weight_gradient(dy, x, gradient.dw, gradient.accumulate);
      if (needs_db) db = bias_gradient(dy);
    }
    if (dx.defined()) dx = dx.view(saved->x_sizes);
    return {dx, gradient.returned(), db, {}, {}};
  }
};

}  // namespace

at::Tensor column_parallel_linear(const at::Tensor& x, const at::Tensor& weight,
                                  const at::Tensor& bias, const LinearOptions& options) {
  check_operands(x, weight, bias, options);
  check_rows(options, num_rows(x.sizes()), /*is_total=*/false);
  return ColumnLinear::apply(x, weight, optional(bias), options, at::GradMode::is_enabled());
}

at::Tensor row_parallel_linear(const at::Tensor& x, const at::Tensor& weight,
                               const at::Tensor& bias, const LinearOptions& options) {
  check_operands(x, weight, bias, options);
  const auto tokens = num_rows(x.sizes());
  check_rows(options, tokens, /*is_total=*/true);
  if (options.sequence_parallel && x.dim() > 2) {
    const auto inner = x.size(0) == 0 ? 1 : tokens / x.size(0);
    for (const auto n :
         options.rows.empty() ? split_rows(tokens, num_ranks(options)) : options.rows)
      BRAID_CHECK_EQ(inner == 0 ? 0 : n % inner, 0,
                     "row_parallel_linear: a rank's rows modulo the inner dims of x and 0");
  }
  return RowLinear::apply(x, weight, optional(bias), options, at::GradMode::is_enabled());
}

}  // namespace braid
