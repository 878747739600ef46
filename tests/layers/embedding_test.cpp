// Vocabulary-parallel embedding and cross-entropy against unsharded torch.
#include "braid/layers/embedding.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <string>

#include "tests/layers/support.h"

namespace braid::test {
namespace {

at::Tensor some_tokens(std::int64_t t, std::int64_t vocab) {
  return at::remainder(at::arange(t, at::kLong) * 5 + 3, vocab);
}

TEST(VocabParallelEmbedding, EqualsTheWholeTable) {
  for (const int num_ranks : {1, 2, 3, 4}) {
    run_ranks(num_ranks, [&](const std::shared_ptr<Group>& group) {
      const int rank = group->rank();
      const std::int64_t t = 13, vocab = 10,
                         h = 6;  // tokens repeat; 10 rows don't divide by 3 or 4
      const auto tokens = some_tokens(t, vocab);
      const auto table = rank_values(0, {vocab, h}).set_requires_grad(true);
      const auto g = rank_values(1, {t, h});
      const auto y = at::embedding(table, tokens);
      y.backward(g);
      for (const bool sequence_parallel : {false, true}) {
        for (const bool main_grad : {false, true}) {
          const std::string what =
              "ranks " + std::to_string(num_ranks) + " sp " + std::to_string(sequence_parallel);
          const auto rows = [&](const at::Tensor& z) {
            return sequence_parallel ? part_of(z, 0, rank, num_ranks) : z;
          };
          const auto own =
              part_of(table, 0, rank, num_ranks).detach().clone().set_requires_grad(true);
          EmbeddingOptions options{group, sequence_parallel, {}};
          if (main_grad) options.main_grad = at::ones(own.sizes());
          const auto out = vocab_parallel_embedding(tokens, own, vocab, options);
          expect_close(out, rows(y), 0, what + " y");
          out.backward(rows(g));
          const auto expected = part_of(table.grad(), 0, rank, num_ranks);
          if (main_grad) {
            EXPECT_FALSE(own.grad().defined());
            expect_close(options.main_grad, expected + 1, 1e-6, what + " main_grad");
          } else {
            expect_close(own.grad(), expected, 1e-6, what + " dW");
          }
        }
      }
    });
  }
}

/// On one host and several; in half types; few tokens, few rows, all of one rank's; from every second place.
TEST(VocabParallelEmbedding, OfEveryShapeEqualsTheWholeTable) {
  const at::Tensor places = at::arange(22, at::kLong);
  const std::vector<std::pair<at::Tensor, std::int64_t>> cases{
      {at::empty({0}, at::kLong), 4},
      {at::tensor({2}, at::kLong), 4},
      {at::tensor({1, 0, 1, 1, 0}, at::kLong), 2},  // rank 2 has none of the rows
      {at::full({7}, 3, at::kLong), 12},
      {at::remainder(places, 9).slice(0, 0, 22, 2), 9}};
  for (const HostNumbers& hosts : {HostNumbers{}, apart(3), HostNumbers{0, 1, 1}}) {
    run_ranks(
        3,
        [&](const std::shared_ptr<Group>& group) {
          for (const auto dtype : {at::kFloat, at::kBFloat16}) {
            for (const auto& [tokens, vocab] : cases) {
              for (const bool sequence_parallel : {false, true}) {
                const std::string what = c10::str(dtype, ", ", tokens.size(0), " of ", vocab,
                                                  ", sp ", sequence_parallel);
                const auto table = rank_values(0, {vocab, 4}, dtype).set_requires_grad(true);
                const auto y = at::embedding(table, tokens);
                y.sum().backward();  // an expanded gradient
                const auto own =
                    part_of(table, 0, group->rank(), 3).detach().clone().set_requires_grad(true);
                const auto out =
                    vocab_parallel_embedding(tokens, own, vocab, {group, sequence_parallel, {}});
                expect_close(out, sequence_parallel ? part_of(y, 0, group->rank(), 3) : y, 0,
                             what + " y");
                out.sum().backward();
                expect_close(own.grad(), part_of(table.grad(), 0, group->rank(), 3), 1e-6,
                             what + " dW");
              }
            }
          }
        },
        on_hosts(hosts));
  }
}

TEST(VocabParallelEmbedding, TokensOutsideTheVocabulary) {
  const auto table = rank_values(0, {4, 2});
  EXPECT_THROW(vocab_parallel_embedding(at::tensor({0, 4}, at::kLong), table, 4, {}),
               c10::ValueError);
  EXPECT_THROW(vocab_parallel_embedding(at::tensor({-1, 0}, at::kLong), table, 4, {}),
               c10::ValueError);
  EXPECT_THROW(vocab_parallel_embedding(at::tensor({0}, at::kLong), table, 5, {}), c10::ValueError);
}

TEST(VocabParallelCrossEntropy, EqualsTheWholeSoftmax) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const double tolerance =
        dtype == at::kFloat ? 1e-6 : 4e-3;  // bf16: the gradient is rounded once
    for (const int num_ranks : {1, 2, 3, 4}) {
      run_ranks(num_ranks, [&](const std::shared_ptr<Group>& group) {
        const int rank = group->rank();
        const std::int64_t t = 11, vocab = 37;
        // Large logits: without the common maximum the exponentials would overflow.
        const auto whole =
            (rank_values(0, {t, vocab}, dtype) * 100).to(at::kFloat).set_requires_grad(true);
        const auto labels = some_tokens(t, vocab);
        const auto expected = at::cross_entropy_loss(whole, labels);
        (expected * 3).backward();
        const auto logits =
            part_of(whole, 1, rank, num_ranks).detach().to(dtype).clone().set_requires_grad(true);
        const auto loss = vocab_parallel_cross_entropy(logits * 1, labels, vocab, group);
        EXPECT_EQ(loss.scalar_type(), at::kFloat);
        expect_close(loss, expected, 1e-6, "loss");
        (loss * 3).backward();
        EXPECT_EQ(logits.grad().scalar_type(), dtype);
        expect_close(logits.grad(), part_of(whole.grad(), 1, rank, num_ranks), tolerance,
                     "dlogits");
      });
    }
  }
}

TEST(VocabParallelCrossEntropy, ASecondBackwardFails) {
  const auto logits = rank_values(0, {3, 5}).set_requires_grad(true);
  const auto loss = vocab_parallel_cross_entropy(logits * 1, some_tokens(3, 5), 5, nullptr);
  torch::autograd::backward({loss}, {}, /*retain_graph=*/true);
  EXPECT_THROW(torch::autograd::backward({loss}, {}, /*retain_graph=*/true), c10::Error);
}

}  // namespace
}  // namespace braid::test
