// RMSNorm, rotary attention and SwiGLU as autograd functions over the row kernels and ATen's flash attention.
#include "braid/layers/attention.h"

#include <ATen/cpu/Utils.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <utility>
#include <vector>

#include "braid/core/check.h"
#include "braid/core/trace.h"
#include "braid/layers/row_kernels.h"

namespace braid {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct AddRmsNorm : torch::autograd::Function<AddRmsNorm> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                               const std::optional<at::Tensor>& delta, const NormOptions& options) {
    const trace::Span span(trace::Kind::compute, "norm");
    ctx->set_materialize_grads(false);
    const at::Tensor rows = x.contiguous();
    at::Tensor sum = delta ? at::empty_like(rows) : rows;
    at::Tensor norm = at::empty_like(rows);
    at::Tensor inverse_rms = at::empty({rows.size(0)}, rows.options().dtype(at::kFloat));
    row_kernels::add_rms_norm(rows, delta ? delta->contiguous() : at::Tensor(), weight.contiguous(),
                              options.epsilon, sum, norm, inverse_rms);
    ctx->save_for_backward({sum, weight, inverse_rms});
    ctx->saved_data["main_grad"] = options.main_grad;
    if (!delta) return {norm};
    return {norm, sum};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &sum = saved[0], &weight = saved[1];
    const trace::Span span(trace::Kind::compute, "norm_backward");
    const bool has_delta = grads.size() == 2;
    at::Tensor dx = has_delta && grads[1].defined() ? grads[1].contiguous() : at::Tensor();
    at::Tensor returned_dweight;
    if (grads[0].defined()) {
      at::Tensor dweight = ctx->saved_data["main_grad"].toTensor();
      const bool accumulate = dweight.defined(), needed = ctx->needs_input_grad(1);
      if (!accumulate && needed)
        dweight = at::zeros(weight.sizes(), weight.options().dtype(at::kFloat));
      const at::Tensor dsum = std::exchange(dx, at::empty_like(sum));
      row_kernels::rms_norm_backward(grads[0].contiguous(), dsum, sum, weight.contiguous(),
                                     saved[2], dx, needed ? dweight : at::Tensor());
      if (!accumulate && needed) returned_dweight = dweight.to(weight.scalar_type());
    }
    return {dx, returned_dweight, has_delta ? dx : at::Tensor(), {}};
  }
};

struct RotaryAttention : torch::autograd::Function<RotaryAttention> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& qkv, const at::Tensor& cosine,
                            const at::Tensor& sine, const AttentionShape& shape) {
    const trace::Span span(trace::Kind::compute, "attention");
    const auto b = shape.batch, s = qkv.size(0) / b, h = shape.num_heads,
               g = shape.num_query_groups;
    // Head-major copies: attention reads them faster than strided rows, and the rotation has to write anyway.
    at::Tensor heads = at::empty({b, h + 2 * g, s, shape.head_dim},
                                 qkv.options().dtype(attention_type(qkv.scalar_type())));
    row_kernels::rotate_to_heads(qkv.contiguous(), cosine, sine, h + g, heads);
    const auto [out, log_sum_exp] = at::_scaled_dot_product_flash_attention_for_cpu(
        heads.narrow(1, 0, h), heads.narrow(1, h, g), heads.narrow(1, h + g, g), 0.0,
        /*is_causal=*/true);
    ctx->save_for_backward({heads, out, log_sum_exp, cosine, sine});
    ctx->saved_data["num_heads"] = h;
    // [b, H, s, d] to [s * b, H * d]; ATen lays its output out as [b, s, H, d], so with b = 1 nothing is copied.
    const at::Tensor tokens = out.permute({2, 0, 1, 3}).to(qkv.scalar_type()).contiguous();
    return at::_unsafe_view(tokens, {s * b, h * shape.head_dim});
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const trace::Span span(trace::Kind::compute, "attention_backward");
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &heads = saved[0], &out = saved[1], &cosine = saved[3], &sine = saved[4];
    const auto h = ctx->saved_data["num_heads"].toInt(), g = (heads.size(1) - h) / 2;
    const auto b = heads.size(0), s = heads.size(2), d = heads.size(3);
    const at::Tensor dout =
        grads[0].to(heads.scalar_type()).contiguous().view({s, b, h, d}).permute({1, 2, 0, 3});
    const auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        dout, heads.narrow(1, 0, h), heads.narrow(1, h, g), heads.narrow(1, h + g, g), out,
        saved[2], 0.0,
        /*is_causal=*/true);
    at::Tensor dqkv = at::empty({s * b, (h + 2 * g) * d}, grads[0].options());
    row_kernels::rotate_from_heads(dq, cosine, sine, true, 0, dqkv);
    row_kernels::rotate_from_heads(dk, cosine, sine, true, h, dqkv);
    row_kernels::rotate_from_heads(dv, cosine, sine, false, h + g, dqkv);
    return {dqkv, {}, {}, {}};
  }
};

struct SwiGlu : torch::autograd::Function<SwiGlu> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate_up) {
    const trace::Span span(trace::Kind::compute, "swiglu");
    const at::Tensor rows = gate_up.contiguous();
    at::Tensor y = at::empty({rows.size(0), rows.size(1) / 2}, rows.options());
    row_kernels::swiglu(rows, y);
    ctx->save_for_backward({rows});
    return y;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const trace::Span span(trace::Kind::compute, "swiglu_backward");
    const at::Tensor gate_up = ctx->get_saved_variables()[0];
    at::Tensor dgate_up = at::empty_like(gate_up);
    row_kernels::swiglu_backward(grads[0].contiguous(), gate_up, dgate_up);
    return {dgate_up};
  }
};

}  // namespace

ResidualNorm add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight,
                          const NormOptions& options) {
  BRAID_CHECK_EQ(x.dim(), 2, "rms_norm: dims of x");
  BRAID_CHECK_EQ(x.size(1), weight.numel(), "rms_norm: features of x and of the weight");
  BRAID_CHECK_EQ(x.scalar_type(), weight.scalar_type(), "rms_norm: dtypes of x and of the weight");
  if (delta.defined()) {
    BRAID_CHECK_EQ(x.sizes(), delta.sizes(), "rms_norm: shapes of x and delta");
    BRAID_CHECK_EQ(x.scalar_type(), delta.scalar_type(), "rms_norm: dtypes of x and delta");
  }
  auto outputs =
      AddRmsNorm::apply(x, weight, delta.defined() ? std::optional(delta) : std::nullopt, options);
  return {delta.defined() ? outputs[1] : x, outputs[0]};
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, const NormOptions& options) {
  return add_rms_norm(x, {}, weight, options).norm;
}

RotaryTable rotary_table(std::int64_t s, std::int64_t d, double base) {
  BRAID_CHECK_EQ(d % 2, 0, "rotary_table: head_dim modulo 2 and 0");
  // In f32 as transformers computes it: at far positions the rounding of the angle is seen.
  const at::Tensor exponent =
      at::arange(0, d, 2, at::kLong).to(at::kFloat) / static_cast<double>(d);
  const at::Tensor frequency =
      at::reciprocal(at::pow(at::scalar_tensor(base, at::kFloat), exponent));
  const at::Tensor angle = at::outer(at::arange(s, at::kFloat), frequency);
  return {angle.cos(), angle.sin()};
}

at::ScalarType attention_type(at::ScalarType dtype) {
  static const bool native_half = [] {
    const auto capabilities = at::cpu::get_cpu_capabilities();
    const auto amx = capabilities.find("amx_bf16");
    return amx != capabilities.end() && amx->second.toBool();
  }();
  return native_half ? dtype : at::kFloat;
}

at::Tensor rotary_causal_attention(const at::Tensor& qkv, const RotaryTable& table,
                                   const AttentionShape& shape) {
  BRAID_CHECK_EQ(qkv.dim(), 2, "attention: dims of qkv");
  BRAID_CHECK(shape.batch >= 1 && shape.num_query_groups >= 1, "attention: batch is ", shape.batch,
              ", num_query_groups ", shape.num_query_groups, ", expected at least 1");
  BRAID_CHECK_EQ(qkv.size(1), (shape.num_heads + 2 * shape.num_query_groups) * shape.head_dim,
                 "attention: features of qkv and heads");
  BRAID_CHECK_EQ(qkv.size(0) % shape.batch, 0, "attention: rows of qkv modulo the batch and 0");
  BRAID_CHECK_EQ(shape.num_heads % shape.num_query_groups, 0,
                 "attention: heads modulo query groups and 0");
  BRAID_CHECK_EQ(table.cosine.size(1) * 2, shape.head_dim,
                 "attention: features of the rotary table and head_dim");
  BRAID_CHECK(table.cosine.size(0) >= qkv.size(0) / shape.batch,
              "attention: ", qkv.size(0) / shape.batch, " positions, but the rotary table has ",
              table.cosine.size(0));
  return RotaryAttention::apply(qkv, table.cosine, table.sine, shape);
}

at::Tensor swiglu(const at::Tensor& gate_up) {
  BRAID_CHECK_EQ(gate_up.dim(), 2, "swiglu: dims of gate_up");
  BRAID_CHECK_EQ(gate_up.size(1) % 2, 0, "swiglu: features of gate_up modulo 2 and 0");
  return SwiGlu::apply(gate_up);
}

}  // namespace braid
