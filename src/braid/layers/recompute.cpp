// The autograd function that runs a block again in backward.
#include "braid/layers/recompute.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

namespace braid {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Holder : torch::CustomClassHolder {
  explicit Holder(Block b) : block(std::move(b)) {}
  Block block;
};

struct Recomputed : torch::autograd::Function<Recomputed> {
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs,
                               const std::optional<at::Tensor>& anchor, const Block& block) {
    const variable_list saved(inputs.begin(), inputs.end());
    ctx->save_for_backward(saved);
    ctx->saved_data["block"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(block));
    return block(saved);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto holder =
        c10::static_intrusive_pointer_cast<Holder>(ctx->saved_data["block"].toCapsule());
    variable_list inputs;
    for (const auto& input : ctx->get_saved_variables()) {
      inputs.push_back(input.detach().set_requires_grad(true));
    }
    {
      const at::AutoGradMode enabled(true);
      torch::autograd::backward(holder->block(inputs), grads);
    }
    variable_list gradients;
    for (const auto& input : inputs) gradients.push_back(input.grad());
    gradients.insert(gradients.end(), {at::Tensor(), at::Tensor()});  // anchor, block
    return gradients;
  }
};

}  // namespace

std::vector<at::Tensor> recomputed(const Block& block, std::vector<at::Tensor> inputs,
                                   const at::Tensor& anchor) {
  return Recomputed::apply(at::TensorList(inputs),
                           anchor.defined() ? std::optional(anchor) : std::nullopt, block);
}

}  // namespace braid
