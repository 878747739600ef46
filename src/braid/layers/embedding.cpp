// Vocabulary-parallel embedding and cross-entropy as autograd functions over the row kernels.
#include "braid/layers/embedding.h"

#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <vector>

#include "braid/comm/collectives.h"
#include "braid/core/check.h"
#include "braid/core/trace.h"
#include "braid/layers/row_kernels.h"

namespace braid {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool is_split(const std::shared_ptr<Group>& group) { return group && group->size() > 1; }

void check_tokens(const at::Tensor& tokens, std::int64_t vocab_size, const char* what) {
  BRAID_CHECK_EQ(tokens.dim(), 1, what);
  BRAID_CHECK_EQ(tokens.scalar_type(), at::kLong, what);
  if (tokens.numel() == 0) return;
  const auto [least, largest] = at::aminmax(tokens);
  BRAID_CHECK(least.item<std::int64_t>() >= 0 && largest.item<std::int64_t>() < vocab_size, what,
              " are ", least.item<std::int64_t>(), " .. ", largest.item<std::int64_t>(),
              ", but the vocabulary has ", vocab_size);
}

/// With sequence parallelism: which rows of the table go where, from the rank that has one to the one whose token it
/// is. Every rank knows all tokens.
struct Routes {
  Routes(const Group& group, const at::Tensor& tokens, std::int64_t vocab_size) {
    const at::Tensor ends =
        at::cumsum(at::tensor(split_rows(vocab_size, group.size()), at::kLong), 0);
    const at::Tensor owners = at::bucketize(tokens, ends, /*out_int32=*/false, /*right=*/true);
    const auto parts = owners.split_with_sizes(split_rows(tokens.size(0), group.size()));
    const at::Tensor& own = parts[static_cast<std::size_t>(group.rank())];
    given = at::nonzero(at::eq(owners, group.rank())).flatten();
    taken = at::argsort(own, /*stable=*/true, 0);
    for (int peer = 0; peer < group.size(); ++peer) {
      const at::Tensor& part = parts[static_cast<std::size_t>(peer)];
      given_to.push_back(at::eq(part, group.rank()).sum().item<std::int64_t>());
      taken_from.push_back(at::eq(own, peer).sum().item<std::int64_t>());
    }
  }

  at::Tensor given;                                // places of the tokens whose rows are here
  at::Tensor taken;                                // places among the own tokens, by rank
  std::vector<std::int64_t> given_to, taken_from;  // by rank
};

struct Saved : torch::CustomClassHolder {
  explicit Saved(EmbeddingOptions o) : options(std::move(o)) {}
  EmbeddingOptions options;
  std::optional<Routes> routes;
};

struct Embedding : torch::autograd::Function<Embedding> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& weight, at::Tensor tokens,
                            std::int64_t begin, std::int64_t vocab_size,
                            const EmbeddingOptions& options) {
    auto saved = c10::make_intrusive<Saved>(options);
    if (is_split(options.group) && options.sequence_parallel) {
      saved->routes.emplace(*options.group, tokens, vocab_size);
      tokens = tokens.index_select(0, saved->routes->given);
    }
    at::Tensor y = at::empty({tokens.size(0), weight.size(1)}, weight.options());
    {
      const trace::Span span(trace::Kind::compute, "embedding");
      row_kernels::gather_rows(weight, tokens, begin, y);
    }
    ctx->save_for_backward({tokens});
    ctx->saved_data["begin"] = begin;
    ctx->saved_data["num_rows"] = weight.size(0);
    ctx->saved_data["state"] = c10::IValue::make_capsule(saved);
    if (!is_split(options.group)) return y;
    if (!saved->routes) return all_reduce(*options.group, y, ReduceOp::sum, y);
    const Routes& routes = *saved->routes;
    const at::Tensor rows =
        start_all_to_all(*options.group, y, routes.given_to, routes.taken_from).wait();
    return at::empty_like(rows).index_copy_(0, routes.taken, rows);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const at::Tensor tokens = ctx->get_saved_variables()[0];
    const auto saved =
        c10::static_intrusive_pointer_cast<Saved>(ctx->saved_data["state"].toCapsule());
    const EmbeddingOptions& options = saved->options;
    at::Tensor dy = grads[0];
    if (const auto& routes = saved->routes)
      dy = start_all_to_all(*options.group, dy.index_select(0, routes->taken), routes->taken_from,
                            routes->given_to)
               .wait();
    const trace::Span span(trace::Kind::compute, "embedding_backward");
    at::Tensor dw = options.main_grad;
    if (!dw.defined())
      dw = at::zeros({ctx->saved_data["num_rows"].toInt(), dy.size(1)}, dy.options());
    row_kernels::scatter_add_rows(dy.contiguous(), tokens, ctx->saved_data["begin"].toInt(), dw);
    return {options.main_grad.defined() ? at::Tensor() : dw, {}, {}, {}, {}};
  }
};

struct CrossEntropy : torch::autograd::Function<CrossEntropy> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits,
                            const at::Tensor& labels, std::int64_t begin,
                            const std::shared_ptr<Group>& group) {
    const auto t = logits.size(0);
    const at::Tensor rows = logits.contiguous();
    at::Tensor maximum = at::empty({t}, rows.options().dtype(at::kFloat));
    at::Tensor sums =
        at::empty({2, t}, maximum.options());  // of the exponentials; the label's logit
    at::Tensor sum = sums[0], target = sums[1];
    {
      const trace::Span span(trace::Kind::compute, "cross_entropy");
      row_kernels::softmax_statistics(rows, labels, begin, maximum, sum, target);
    }
    if (is_split(group)) {
      const at::Tensor own_maximum = maximum;
      maximum = all_reduce(*group, own_maximum, ReduceOp::max);
      sum.mul_(at::exp(own_maximum - maximum));
      all_reduce(*group, sums, ReduceOp::sum, sums);
    }
    const at::Tensor log_sum = sum.log().add_(maximum);
    ctx->save_for_backward({rows, labels, log_sum});
    ctx->saved_data["begin"] = begin;
    return (log_sum - target).mean();
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const trace::Span span(trace::Kind::compute, "cross_entropy_backward");
    at::Tensor gradient = saved[0].detach();
    gradient.unsafeGetTensorImpl()
        ->bump_version();  // a second backward through the overwritten logits must fail
    const float scale =
        grads[0].item<float>() / static_cast<float>(std::max<std::int64_t>(1, gradient.size(0)));
    row_kernels::softmax_backward(gradient, saved[1], ctx->saved_data["begin"].toInt(), saved[2],
                                  scale);
    return {gradient, {}, {}, {}};
  }
};

}  // namespace

at::Tensor vocab_parallel_embedding(const at::Tensor& tokens, const at::Tensor& weight,
                                    std::int64_t vocab_size, const EmbeddingOptions& options) {
  check_tokens(tokens, vocab_size, "embedding: tokens");
  const auto range = own_part(options.group, vocab_size);
  BRAID_CHECK_EQ(weight.dim(), 2, "embedding: dims of the weight");
  BRAID_CHECK_EQ(weight.size(0), range.length,
                 "embedding: rows of the weight and this rank's part of the vocabulary");
  if (options.main_grad.defined()) {
    BRAID_CHECK_EQ(options.main_grad.sizes(), weight.sizes(),
                   "embedding: shapes of main_grad and weight");
    BRAID_CHECK_EQ(options.main_grad.scalar_type(), at::kFloat, "embedding: dtype of main_grad");
  }
  return Embedding::apply(weight, tokens.contiguous(), range.begin, vocab_size, options);
}

at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& labels,
                                        std::int64_t vocab_size,
                                        const std::shared_ptr<Group>& group) {
  check_tokens(labels, vocab_size, "cross_entropy: labels");
  const auto range = own_part(group, vocab_size);
  BRAID_CHECK_EQ(logits.dim(), 2, "cross_entropy: dims of the logits");
  BRAID_CHECK_EQ(logits.size(0), labels.size(0), "cross_entropy: rows of the logits and labels");
  BRAID_CHECK_EQ(logits.size(1), range.length,
                 "cross_entropy: columns and this rank's part of the vocabulary");
  return CrossEntropy::apply(logits, labels.contiguous(), range.begin, group);
}

}  // namespace braid
