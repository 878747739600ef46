// The loop: prompts continue alike whatever ranks and batch mates there are, and end where they should.
#include "braid/generate/generate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "tests/support/ranks.h"

namespace braid::test {
namespace {

constexpr std::int64_t kNewTokens = 60;
const std::vector<Tokens> kPrompts{{5, 6, 7, 8, 9}, {1}, {250, 3, 3, 100, 7, 7, 7, 30, 1, 2, 4}};

GenerationOptions greedy() {
  GenerationOptions options;
  options.max_new_tokens = kNewTokens;
  return options;
}
GenerationOptions sampled() {
  GenerationOptions options = greedy();
  options.sampling = {0.8, 0.9, 11};
  return options;
}

/// On `num_ranks` ranks; every rank must give the same.
std::vector<Tokens> generate_on(int num_ranks, const std::vector<Tokens>& prompts,
                                const GenerationOptions& options, const OnToken& on_token = {}) {
  LlamaConfig config;
  config.hidden_size = 64;
  config.num_layers = 2;
  config.ffn_hidden_size = 112;
  config.num_attention_heads = 8;
  config.num_query_groups = 4;
  config.kv_channels = 8;
  config.vocab_size = 257;
  config.init_method_std = 0.2;
  std::vector<std::vector<Tokens>> of_ranks(num_ranks);
  run_ranks(num_ranks, [&](const std::shared_ptr<Group>& group) {
    TransformerOptions transformer_options;
    transformer_options.group = group;
    transformer_options.matmul = {Mode::serial};
    const Transformer model(config, transformer_options);
    of_ranks[group->rank()] =
        generate(model, group, prompts, options, group->rank() == 0 ? on_token : OnToken{});
  });
  for (const auto& other : of_ranks) EXPECT_EQ(other, of_ranks[0]);
  return of_ranks[0];
}

TEST(Generate, RanksAndBatchMatesChangeNothing) {
  for (const auto& options : {greedy(), sampled()}) {
    const auto alone = generate_on(1, {kPrompts[0]}, options);
    ASSERT_EQ(alone[0].size(), std::size_t{kNewTokens});
    EXPECT_GT(std::set<std::int64_t>(alone[0].begin(), alone[0].end()).size(), 10u);
    const auto batch = generate_on(1, kPrompts, options);
    EXPECT_EQ(batch[0], alone[0]);
    for (const int num_ranks : {2, 3, 4})
      EXPECT_EQ(generate_on(num_ranks, kPrompts, options), batch);
  }
  for (const auto& prompt : kPrompts)
    EXPECT_EQ(generate_on(1, {prompt}, greedy())[0],
              generate_on(1, {kPrompts[1], prompt, kPrompts[2]}, greedy())[1]);
}

TEST(Generate, TheSeedDecides) {
  GenerationOptions options = sampled();
  const auto first = generate_on(2, kPrompts, options);
  EXPECT_EQ(first, generate_on(2, kPrompts, options));
  options.sampling.seed = 12;
  EXPECT_NE(first, generate_on(2, kPrompts, options));
  // Equal prompts are several samples.
  const auto twice = generate_on(1, {kPrompts[0], kPrompts[0]}, options);
  EXPECT_NE(twice[0], twice[1]);
}

TEST(Generate, ASequenceEndsWithItsEndToken) {
  const auto endless = generate_on(1, kPrompts, greedy());
  GenerationOptions options = greedy();
  options.eos_token_ids = {endless[0][9], endless[2][20]};
  for (const int num_ranks : {1, 2}) {
    const auto ended = generate_on(num_ranks, kPrompts, options);
    for (std::size_t p = 0; p < kPrompts.size(); ++p) {
      const auto& all = endless[p];
      const auto end = std::find_first_of(all.begin(), all.end(), options.eos_token_ids.begin(),
                                          options.eos_token_ids.end());
      EXPECT_EQ(ended[p], Tokens(all.begin(), end == all.end() ? end : end + 1)) << p;
    }
    EXPECT_LE(ended[0].size(), 10u);
  }
}

TEST(Generate, TokensAreToldAsTheyCome) {
  for (const int num_ranks : {1, 2}) {
    std::vector<Tokens> told(kPrompts.size());
    GenerationOptions options = greedy();
    options.eos_token_ids = {generate_on(1, kPrompts, greedy())[1][4]};
    const auto all =
        generate_on(num_ranks, kPrompts, options, [&](std::size_t p, std::int64_t token) {
          told.at(p).push_back(token);
          return true;
        });
    EXPECT_EQ(told, all);
    int left = 7;
    const auto stopped =
        generate_on(num_ranks, {kPrompts[0]}, greedy(), [&](auto, auto) { return --left > 0; });
    EXPECT_EQ(stopped[0].size(), 7u);
  }
}

TEST(Generate, CallersMistakes) {
  GenerationOptions options = greedy();
  options.max_new_tokens = 0;
  EXPECT_THROW(generate_on(1, kPrompts, options), c10::ValueError);
  EXPECT_THROW(generate_on(1, {}, greedy()), c10::ValueError);
  EXPECT_THROW(generate_on(1, {{1}, {}}, greedy()), c10::ValueError);
  EXPECT_THROW(generate_on(2, {{257}}, greedy()), c10::ValueError);
}

}  // namespace
}  // namespace braid::test
