// Inference with a key/value cache against whole forward passes of the same model.
#include "braid/layers/cached_decoder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "tests/layers/support.h"
#include "tests/support/errors.h"

namespace braid::test {
namespace {

using Prompts = std::vector<std::vector<std::int64_t>>;

LlamaConfig small_llama(bool tied) {
  LlamaConfig config;
  config.hidden_size = 48;
  config.num_layers = 3;
  config.ffn_hidden_size = 91;
  config.num_attention_heads = 8;
  config.num_query_groups = 4;
  config.kv_channels = 6;
  config.vocab_size = 131;
  config.untie_embeddings_and_output_weights = !tied;
  config.init_method_std = 0.2;
  return config;
}

TransformerOptions over(const std::shared_ptr<Group>& group, at::ScalarType dtype = at::kFloat,
                        Mode mode = Mode::serial) {
  TransformerOptions options;
  options.group = group;
  options.dtype = dtype;
  options.matmul = {mode};
  return options;
}

/// A token that depends on sequence and position.
std::int64_t token(std::int64_t sequence, std::int64_t position) {
  return (sequence * 37 + position * 11 + position * position) % 131;
}

/// Logits after each token of a sequence by one forward pass over all of it, [s, V].
at::Tensor whole_logits(Transformer& model, std::int64_t sequence, std::int64_t length) {
  at::Tensor tokens = at::empty({length, 1}, at::kLong);
  for (std::int64_t i = 0; i < length; ++i) tokens[i][0] = token(sequence, i);
  return model.logits(tokens).squeeze(1).to(at::kFloat);
}

/// Prompts of these lengths and 30 steps give the logits of whole forward passes.
void check(int num_ranks, bool tied, at::ScalarType dtype, double tolerance,
           const std::vector<std::int64_t>& lengths, Mode mode = Mode::serial) {
  run_ranks(num_ranks, [&](const std::shared_ptr<Group>& group) {
    Transformer model(small_llama(tied), over(group, dtype, mode));
    constexpr std::int64_t kSteps = 30;
    const auto b = std::ssize(lengths);
    CachedDecoder decoder(model, b, *std::max_element(lengths.begin(), lengths.end()) + kSteps);
    Prompts prompts(lengths.size());
    std::vector<at::Tensor> expected;
    for (std::int64_t i = 0; i < b; ++i) {
      for (std::int64_t j = 0; j < lengths[i]; ++j) prompts[i].push_back(token(i, j));
      expected.push_back(whole_logits(model, i, lengths[i] + kSteps));
    }
    at::Tensor logits = decoder.prefill(prompts);
    for (std::int64_t step = 0;; ++step) {
      for (std::int64_t i = 0; i < b; ++i)
        expect_close(logits[i], expected[i][lengths[i] - 1 + step], tolerance,
                     "ranks " + std::to_string(num_ranks) + " sequence " + std::to_string(i) +
                         " step " + std::to_string(step));
      if (step == kSteps) break;
      at::Tensor tokens = at::empty({b}, at::kLong);
      for (std::int64_t i = 0; i < b; ++i) tokens[i] = token(i, lengths[i] + step);
      logits = decoder.step(tokens);
    }
  });
}

TEST(CachedDecoder, EqualsWholeForwardPasses) {
  for (const int num_ranks : {1, 2, 3}) {
    check(num_ranks, false, at::kFloat, 1e-5, {1});
    check(num_ranks, true, at::kFloat, 1e-5, {7, 1, 40, 7});
    check(num_ranks, false, at::kFloat, 1e-5, {5, 5});
  }
}

TEST(CachedDecoder, InEveryMode) {
  for (const Mode mode : {Mode::chunked, Mode::fused, Mode::automatic}) {
    check(2, false, at::kFloat, 1e-5, {300, 3}, mode);
    check(3, true, at::kFloat, 1e-5, {2}, mode);
  }
}

TEST(CachedDecoder, Bf16StaysNear) {
  for (const int num_ranks : {1, 2}) check(num_ranks, false, at::kBFloat16, 3e-2, {9, 4});
}

TEST(CachedDecoder, EveryRankHasTheSameBits) {
  std::vector<at::Tensor> of_ranks(3);
  run_ranks(3, [&](const std::shared_ptr<Group>& group) {
    Transformer model(small_llama(false), over(group));
    CachedDecoder decoder(model, 2, 10);
    const at::Tensor first = decoder.prefill({{1, 2, 3}, {4}});
    of_ranks[group->rank()] = at::stack({first, decoder.step(at::tensor({5, 6}, at::kLong))});
  });
  EXPECT_TRUE(at::equal(of_ranks[0], of_ranks[1]) && at::equal(of_ranks[0], of_ranks[2]));
}

TEST(CachedDecoder, CallersMistakes) {
  const Transformer model(small_llama(false), {});
  EXPECT_THROW(CachedDecoder(model, 0, 5), c10::ValueError);
  CachedDecoder decoder(model, 2, 5);
  const auto one = at::tensor({1}, at::kLong), two = at::tensor({1, 2}, at::kLong);
  EXPECT_THROW(decoder.step(two), c10::ValueError);  // before the prefill
  for (const Prompts& wrong :
       {Prompts{{1}}, {{1}, {}}, {{1}, {1, 2, 3, 4, 5, 6}}, {{1}, {131}}, {{1}, {-1}}})
    EXPECT_THROW(decoder.prefill(wrong), c10::ValueError);
  decoder.prefill({{1, 2, 3, 4}, {1}});  // none of them has changed anything
  EXPECT_THROW(decoder.prefill({{1}, {1}}), c10::ValueError);
  EXPECT_THROW(decoder.step(one), c10::ValueError);
  decoder.step(two);
  EXPECT_EQ(value_error([&] { decoder.step(two); }),
            "decoder: sequence 0 would have 6 tokens, it can hold 5");
}

}  // namespace
}  // namespace braid::test
