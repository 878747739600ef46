// Embedding and cross-entropy over a vocabulary that is split over the tensor-parallel ranks: rank
// r holds split_rows(V, R)[r] rows, in rank order, without padding.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>

#include "braid/comm/group.h"

namespace braid {

struct EmbeddingOptions {
  std::shared_ptr<Group> group;    // the tensor-parallel ranks; null: a group of one
  bool sequence_parallel = false;  // the output holds this rank's rows only
  // f32, the weight's shape: takes dW by addition, and no gradient is returned
  at::Tensor main_grad;
};

/// Rows of the whole table by token.
///   Shapes  tokens [t] int64, the same on all ranks   weight [V_r, h]
///           returns [t, h], with sequence parallelism [split_rows(t, R)[rank], h]
///   Grad w  dy's rows added to the rows of their tokens
///   Cost    an all-reduce of t rows; with sequence parallelism an all-to-all of t rows in all, each from the
///           rank that has it to the one whose token it is, and the same back
///   Order   collective, backward too: the weight requires grad on all ranks or on none
///   Errors  ValueError: shapes or dtypes; a token outside 0..V-1 is an error on every rank; tokens that differ
///           between ranks are not looked for: wrong rows, or with sequence parallelism an all-to-all whose rows differ
at::Tensor vocab_parallel_embedding(const at::Tensor& tokens, const at::Tensor& weight,
                                    std::int64_t vocab_size, const EmbeddingOptions& options);

/// Mean over the tokens of -log softmax(logits)[label], from logits that are split by columns.
///   Shapes  logits [t, V_r] f32 or bf16   labels [t] int64, the same on all ranks
///           returns a scalar, f32
///   Cost    two all-reduces of t and 2 t values; one pass over the logits
///   Saved   logits: backward OVERWRITES them with their gradient, so that no copy is ever made
///           (autograd reports any other use of them in a backward)
///   Errors  ValueError: shapes or dtypes; a label outside 0..V-1 is an error on every rank
at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& labels,
                                        std::int64_t vocab_size,
                                        const std::shared_ptr<Group>& group);

}  // namespace braid
