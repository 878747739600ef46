// Prefill, then steps until every sequence has ended.
#include "braid/generate/generate.h"

#include <algorithm>

#include "braid/comm/collectives.h"
#include "braid/core/check.h"
#include "braid/layers/cached_decoder.h"

namespace braid {

std::vector<Tokens> generate(const Transformer& model, const std::shared_ptr<Group>& group,
                             const std::vector<Tokens>& prompts, const GenerationOptions& options,
                             const OnToken& on_token) {
  BRAID_CHECK(options.max_new_tokens >= 1, "max_new_tokens is ", options.max_new_tokens,
              ", expected at least 1");
  BRAID_CHECK(!prompts.empty(), "generate: there are no prompts");
  const c10::InferenceMode inference;
  const auto longest = std::max_element(prompts.begin(), prompts.end(),
                                        [](auto& a, auto& b) { return a.size() < b.size(); });
  const auto num_prompts = std::ssize(prompts);
  // The last token is not fed back.
  CachedDecoder decoder(model, num_prompts, std::ssize(*longest) + options.max_new_tokens - 1);
  Sampler sampler(options.sampling, num_prompts);
  const bool is_first = !group || group->rank() == 0;

  std::vector<Tokens> all(prompts.size());
  std::vector<bool> ended(prompts.size());
  const auto& ends = options.eos_token_ids;
  for (at::Tensor logits = decoder.prefill(prompts);;) {
    at::Tensor choice = at::zeros({num_prompts + 1}, at::kLong);  // the tokens, and whether to stop
    choice.narrow(0, 0, num_prompts).copy_(sampler.choose(logits));
    auto* chosen = choice.mutable_data_ptr<std::int64_t>();
    for (std::size_t p = 0; is_first && p < prompts.size(); ++p)
      if (!ended[p] && on_token && !on_token(p, chosen[p])) chosen[num_prompts] = 1;
    if (group && group->size() > 1) choice = broadcast(*group, choice, 0);
    const auto* tokens = choice.const_data_ptr<std::int64_t>();
    for (std::size_t p = 0; p < prompts.size(); ++p) {
      if (ended[p]) continue;
      all[p].push_back(tokens[p]);
      ended[p] = std::ssize(all[p]) == options.max_new_tokens ||
                 std::find(ends.begin(), ends.end(), tokens[p]) != ends.end();
    }
    const bool all_ended = std::all_of(ended.begin(), ended.end(), [](bool end) { return end; });
    if (all_ended || tokens[num_prompts] != 0) return all;
    logits = decoder.step(choice.narrow(0, 0, num_prompts));
  }
}

}  // namespace braid
