// Inference with a Transformer's weights: keys and values of the tokens seen are kept, so that a further token costs
// one row of every product.
//
// Rows are the new tokens of all sequences side by side, without padding. Only attention sees sequences; all else is by
// rows, so that what a sequence gets depends on the others no more than a matmul's rounding depends on its rows.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "braid/layers/transformer.h"

namespace braid {

class CachedDecoder {
 public:
  /// Empty sequences that can hold max_length tokens each.
  ///   Memory  2 * layers * sequences * max_length * this rank's query groups * head features, in
  ///           attention_type(dtype); pages come as the sequences grow
  ///   Keeps   model: it must outlive this, with the same weights
  ///   Errors  ValueError: a number is not positive
  CachedDecoder(const Transformer& model, std::int64_t num_sequences, std::int64_t max_length);

  /// Begins every sequence with its prompt; once.
  ///   Gives   logits after each prompt's last token: [sequences, V] f32, whole, the same bits on all ranks
  ///   Order   collective
  ///   Errors  ValueError before any message: not one prompt a sequence, an empty one, one above
  ///           max_length, a second prefill; a token outside the vocabulary
  at::Tensor prefill(const std::vector<std::vector<std::int64_t>>& prompts);
  /// Appends a token to every sequence, after the prefill.
  ///   Shapes  tokens [sequences] int64, the same on all ranks; gives, order and errors as prefill's
  ///   Cost    one row of every product a sequence, and one read of its keys and values
  at::Tensor step(const at::Tensor& tokens);

 private:
  // All linear products of inference are these two.
  /// x W^T with the rows of W that this rank has.
  at::Tensor column_product(std::size_t weight, const at::Tensor& x) const;
  /// x W^T with the columns of W that this rank has, summed over the ranks.
  at::Tensor row_product(std::size_t weight, const at::Tensor& x) const;

  /// counts: new tokens of each sequence.
  at::Tensor run(const at::Tensor& tokens, const std::vector<std::int64_t>& counts);
  at::Tensor attend_to_prompts(const at::Tensor& heads,
                               const std::vector<std::int64_t>& counts) const;
  at::Tensor attend_to_cache(const at::Tensor& heads, const at::Tensor& cache) const;

  const Transformer& model_;
  std::int64_t max_length_;
  std::vector<std::int64_t> lengths_;  // of the sequences
  RotaryTable rotary_;
  // Of each layer: the keys of all query groups, then their values, [2 G, sequences * max_length, d]; 0 until filled.
  std::vector<at::Tensor> caches_;
  at::Tensor mask_;  // [sequences, max_length]: 0 where there is a token, else minus infinity
};

}  // namespace braid
