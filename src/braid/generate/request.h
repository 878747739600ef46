// What a generation is asked for: the flags' values, and with them the checkpoint and the prompts' tokens, checked.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "braid/generate/generate.h"
#include "braid/train/checkpoint.h"
#include "braid/train/config.h"

namespace braid {

/// As written after the flags of `braid generate`, which have the fields' names.
struct RequestFlags {
  std::string load;
  std::vector<std::string> prompt;         // texts
  std::string prompt_file;                 // a text each line
  std::vector<std::string> prompt_tokens;  // ids, "1,2,3" each
  std::vector<std::int64_t> eos_token_id;  // empty: as the checkpoint says; -1: none
  std::int64_t max_new_tokens = GenerationOptions{}.max_new_tokens;
  std::optional<double> temperature, top_p;  // empty: as the checkpoint says
  std::uint64_t seed = SamplingOptions{}.seed;
  std::int64_t tensor_model_parallel_size = 0;  // 0: all ranks
};

struct Request {
  Checkpoint checkpoint;
  TrainConfig model;  // its settings of the model
  std::vector<Tokens> prompts;
  GenerationOptions options;
  /// Whether tokens are bytes: 256 of them, and no tokenizer in the checkpoint's folder.
  bool is_bytes = false;
  std::vector<std::string> warnings = {};  // of what has no effect, for the caller to show once
};

/// Opens the checkpoint, reads the prompts, and checks all of it against each other. Sends nothing; the
/// same on all ranks.
///   Gives   the prompts in the order of --prompt, --prompt-file (without a carriage return at a line's end),
///           --prompt-tokens; where flags say nothing, what transformers' generate would take: end tokens and, if
///           it sampled, temperature and top_p of generation_config.json, without that file config.json's end tokens
///   Errors  ValueError, one line naming the flags and their values
Request check_request(const RequestFlags& flags, int num_ranks);

}  // namespace braid
