// Activations that are computed again in backward instead of being kept.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <vector>

namespace braid {

using Block = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// Runs block(inputs) and keeps only the inputs; backward runs it again. The block must give the
/// same values both times.
///   anchor  a tensor that requires grad if any weight used by the block does (its own gradient is
///           not touched): without it a block whose inputs need no gradient would have no backward
///   Grad    of the inputs; weights take theirs inside (main_grad or .grad), only by a backward(),
///           not by grad(inputs)
std::vector<at::Tensor> recomputed(const Block& block, std::vector<at::Tensor> inputs,
                                   const at::Tensor& anchor);

}  // namespace braid
