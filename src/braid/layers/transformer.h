// A Llama-style decoder over the tensor-parallel ranks: parameters, forward to the mean loss, logits.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "braid/comm/collectives.h"
#include "braid/layers/attention.h"
#include "braid/layers/parallel_linear.h"
#include "braid/layers/parameter.h"
#include "braid/ops/collective_matmul.h"

namespace braid {

struct LlamaConfig {
  std::int64_t hidden_size = 0;
  std::int64_t num_layers = 0;
  std::int64_t ffn_hidden_size = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_query_groups = 0;  // key and value heads
  std::int64_t kv_channels = 0;       // features of a head
  std::int64_t vocab_size = 0;
  double rotary_base = 10000.0;
  double norm_epsilon = 1e-5;
  // False: the output layer uses the embedding's table.
  bool untie_embeddings_and_output_weights = true;
  double init_method_std = 0.02;
};

enum class RecomputeMethod : std::uint8_t {
  none,
  uniform,  // every `num_layers` layers are one block; only the blocks' inputs are kept
  block,    // the first `num_layers` layers, each for itself; the rest keep their activations
};

struct TransformerOptions {
  std::shared_ptr<Group> group;  // the tensor-parallel ranks; null: a group of one
  bool sequence_parallel = false;
  MatmulOptions matmul;
  bool keep_gathered = false;  // see LinearOptions
  // Of parameters' values and activations: f32 or bf16; the loss is f32.
  at::ScalarType dtype = at::kFloat;
  RecomputeMethod recompute_method = RecomputeMethod::none;
  std::int64_t recompute_num_layers = 1;
  std::uint64_t seed = 1234;
  // False, for inference: weights are 0 until they are loaded, there are neither gradients nor main
  // weights apart from the values.
  bool trainable = true;
};

/// Query groups, feed-forward features and vocabulary rows are split over the ranks by split_rows
/// (unevenly where they don't divide); query, key and value are one weight, gate and up another.
/// All gradients go to Parameter::main_grad.
class Transformer {
 public:
  /// Every rank holds its slices of the same whole weights, whatever the number of ranks: each
  /// whole tensor is drawn from the seed and its name. Errors: ValueError: a size is not positive,
  /// heads don't divide by query groups, more ranks than query groups, feed-forward features or
  /// vocabulary rows, kv_channels odd, dtype neither f32 nor bf16.
  Transformer(const LlamaConfig& config, const TransformerOptions& options);

  /// Mean cross-entropy over all tokens, a scalar f32 to call backward() on.
  ///   Shapes  tokens, labels [s, b] int64, the same on all ranks; labels are the next tokens, not
  ///           shifted here
  ///   Order   collective, backward too
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& labels);
  /// Whole logits on every rank, without gradient.
  ///   Shapes  tokens [s, b]   returns [s, b, V]
  ///   Order   collective
  at::Tensor logits(const at::Tensor& tokens);

  std::vector<Parameter>& parameters() { return parameters_; }
  const LlamaConfig& config() const { return config_; }

  /// Replaces the weights of the linear layers by int8, with a scale for each channel of this rank's part: for
  /// CachedDecoder alone, forward() and logits() refuse from then on. Not for trainable models.
  void quantize_weights();

  /// The mode of the tensor-parallel matmuls from now on; to be set between a step's backward and
  /// the next forward.
  const MatmulOptions& matmul() const { return options_.matmul; }
  void set_matmul(const MatmulOptions& matmul) { options_.matmul = matmul; }

 private:
  friend class CachedDecoder;
  struct Layer {  // positions in parameters_
    std::size_t input_norm, qkv, o, post_norm, gate_up, down;
  };
  /// What flows between layers: the residual stream, and the last block's output not yet added to it.
  struct Stream {
    at::Tensor x, delta;
  };

  void check() const;
  std::size_t add(std::string name, std::vector<Part> parts, bool is_norm);
  at::Tensor whole_weight(const Part& part) const;

  LinearOptions linear_options(const Parameter& weight, std::int64_t num_tokens) const;
  NormOptions norm_options(const Parameter& weight) const;
  Stream run_layer(const Layer& layer, const Stream& in, std::int64_t s, std::int64_t b) const;
  Stream run_layers(std::size_t begin, std::size_t end, Stream stream, std::int64_t s,
                    std::int64_t b) const;
  Stream run_recomputed(std::size_t begin, std::size_t end, const Stream& in, std::int64_t s,
                        std::int64_t b) const;
  at::Tensor sharded_logits(const at::Tensor& tokens);

  LlamaConfig config_;
  TransformerOptions options_;
  std::vector<Parameter> parameters_;
  std::map<std::size_t, Int8Weight> int8_weights_;  // by position in parameters_
  std::vector<Layer> layers_;
  std::size_t embedding_ = 0, final_norm_ = 0, output_ = 0;
  RowRange heads_, groups_, ffn_, vocab_;
  RotaryTable rotary_;  // for as many positions as were seen
};

}  // namespace braid
