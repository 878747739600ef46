// Vocabulary-parallel embedding and cross-entropy as autograd functions over the row kernels.
#include "braid/layers/embedding.h"

#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <tuple>
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

struct Holder : torch::CustomClassHolder {
  explicit Holder(EmbeddingOptions o) : options(std::move(o)) {}
  EmbeddingOptions options;
};

/// Counts of sorted values below each end, without those below the end before.
std::vector<std::int64_t> counts_by_part(const at::Tensor& sorted, const at::Tensor& ends) {
  const at::Tensor below = at::searchsorted(sorted, ends);
  const at::Tensor counts = at::diff(below, 1, 0, at::zeros({1}, at::kLong));
  return {counts.const_data_ptr<std::int64_t>(),
          counts.const_data_ptr<std::int64_t>() + counts.numel()};
}

/// With sequence parallelism: which rows of the table go where, from the rank that has one to the one whose token it
/// is. Every rank knows all tokens.
struct Routes {
  Routes(const std::shared_ptr<Group>& group, const at::Tensor& tokens, std::int64_t vocab_size) {
    const auto ends = [&](std::int64_t rows) {
      return at::cumsum(at::tensor(split_rows(rows, group->size()), at::kLong), 0);
    };
    const at::Tensor ranks_of_rows =
        at::bucketize(tokens, ends(vocab_size), /*out_int32=*/false, /*right=*/true);
    given = at::nonzero(at::eq(ranks_of_rows, group->rank())).flatten();
    given_to = counts_by_part(given, ends(tokens.size(0)));
    const RowRange own = own_part(group, tokens.size(0));
    at::Tensor sorted;
    std::tie(sorted, taken) = at::sort(ranks_of_rows.narrow(0, own.begin, own.length),
                                       /*stable=*/std::optional<bool>(true), 0);
    taken_from = counts_by_part(sorted, at::arange(1, group->size() + 1, at::kLong));
  }

  at::Tensor given,
      taken;  // positions: of the tokens whose rows are here; of the own tokens, by rank
  std::vector<std::int64_t> given_to, taken_from;  // by rank
};

struct Embedding : torch::autograd::Function<Embedding> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& weight,
                            const at::Tensor& tokens, std::int64_t begin, std::int64_t vocab_size,
                            const EmbeddingOptions& options) {
    ctx->save_for_backward({tokens});
    ctx->saved_data["begin"] = begin;
    ctx->saved_data["vocab_size"] = vocab_size;
    ctx->saved_data["num_rows"] = weight.size(0);
    ctx->saved_data["options"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(options));
    const auto look_up = [&](const at::Tensor& ids) {
      const trace::Span span(trace::Kind::compute, "embedding");
      at::Tensor rows = at::empty({ids.size(0), weight.size(1)}, weight.options());
      row_kernels::gather_rows(weight, ids, begin, rows);
      return rows;
    };
    if (!is_split(options.group)) return look_up(tokens);
    const Group& group = *options.group;
    if (!options.sequence_parallel) {
      const at::Tensor y = look_up(tokens);
      return all_reduce(group, y, ReduceOp::sum, y);
    }
    const Routes routes(options.group, tokens, vocab_size);
    const at::Tensor taken = start_all_to_all(group, look_up(tokens.index_select(0, routes.given)),
                                              routes.given_to, routes.taken_from)
                                 .wait();
    return at::empty_like(taken).index_copy_(0, routes.taken, taken);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    at::Tensor tokens = ctx->get_saved_variables()[0];
    const auto holder =
        c10::static_intrusive_pointer_cast<Holder>(ctx->saved_data["options"].toCapsule());
    const EmbeddingOptions& options = holder->options;
    at::Tensor dy = grads[0];
    if (is_split(options.group) && options.sequence_parallel) {
      const Routes routes(options.group, tokens, ctx->saved_data["vocab_size"].toInt());
      dy = start_all_to_all(*options.group, dy.index_select(0, routes.taken), routes.taken_from,
                            routes.given_to)
               .wait();
      tokens = tokens.index_select(0, routes.given);
    }
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
