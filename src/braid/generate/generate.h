// The loop of a generation: prompts in, each continued token by token.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "braid/comm/group.h"
#include "braid/generate/sampler.h"
#include "braid/layers/transformer.h"

namespace braid {

using Tokens = std::vector<std::int64_t>;

struct GenerationOptions {
  std::int64_t max_new_tokens = 128;
  std::vector<std::int64_t> eos_token_ids;  // a sequence ends with any of these
  SamplingOptions sampling;
};

/// Called on rank 0 with each new token and the number of its prompt; false: no more are wanted.
using OnToken = std::function<bool(std::size_t prompt, std::int64_t token)>;

/// Continues each prompt by max_new_tokens, or up to and with its first end token.
///   group   the model's tensor-parallel ranks; null: a group of one
///   Gives   the new tokens of each prompt, the same on all ranks: rank 0 chooses
///   Order   collective, the same arguments on all ranks but on_token
///   Errors  ValueError as CachedDecoder's and Sampler's, or max_new_tokens below 1; c10::Error as
///           Sampler::choose, on all ranks
std::vector<Tokens> generate(const Transformer& model, const std::shared_ptr<Group>& group,
                             const std::vector<Tokens>& prompts, const GenerationOptions& options,
                             const OnToken& on_token = {});

}  // namespace braid
