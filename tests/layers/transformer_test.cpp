// The whole decoder against transformers' LlamaForCausalLM of the same weights: logits, loss, every gradient.
#include "braid/layers/transformer.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/layers/support.h"

namespace braid::test {
namespace {

constexpr double kTolerance = 1e-4;

/// What llama_reference.py wrote for one case.
struct Reference {
  explicit Reference(const std::string& name) {
    const std::string path = std::string(BRAID_LLAMA_REFERENCE) + "/" + name;
    std::ifstream json_file(path + ".json");
    BRAID_CHECK(json_file, "no ", path, ".json: run the test layers.llama_reference first");
    const auto json = nlohmann::json::parse(json_file);
    std::ifstream data_file(path + ".bin", std::ios::binary);
    const std::string data{std::istreambuf_iterator<char>(data_file), {}};
    for (const auto& [key, entry] : json.at("tensors").items()) {
      const auto shape = entry.at("shape").get<std::vector<std::int64_t>>();
      const auto dtype = entry.at("dtype") == "torch.int64" ? at::kLong : at::kFloat;
      auto tensor = at::empty(shape, dtype);
      std::memcpy(tensor.data_ptr(), data.data() + entry.at("offset").get<std::size_t>(),
                  tensor.nbytes());
      tensors[key] = tensor;
    }
    const auto& c = json.at("case");
    config.hidden_size = c.at("hidden");
    config.num_layers = c.at("layers");
    config.ffn_hidden_size = c.at("ffn");
    config.num_attention_heads = c.at("heads");
    config.num_query_groups = c.at("groups");
    config.kv_channels = c.at("head_dim");
    config.vocab_size = c.at("vocab");
    config.untie_embeddings_and_output_weights = !c.at("tied").get<bool>();
  }
  const at::Tensor& operator[](const std::string& key) const { return tensors.at(key); }

  LlamaConfig config;
  std::map<std::string, at::Tensor> tensors;
};

/// Calls fn(part, rows of the parameter that hold it) for each part.
template <class Fn>
void for_parts(const Parameter& parameter, const Fn& fn) {
  std::int64_t row = 0;
  for (const auto& part : parameter.parts) {
    const auto rows = part.dim == 0 ? part.length : part.shape.at(0);
    fn(part, row, rows);
    row += rows;
  }
}

at::Tensor slice_of(const Part& part, const at::Tensor& whole) {
  return part.dim < 0 ? whole : whole.narrow(part.dim, part.begin, part.length);
}

void load(Transformer& model, const Reference& reference) {
  const at::NoGradGuard no_grad;
  std::size_t num_parts = 0;
  for (auto& parameter : model.parameters()) {
    for_parts(parameter, [&](const Part& part, std::int64_t row, std::int64_t rows) {
      parameter.value.narrow(0, row, rows).copy_(slice_of(part, reference["weight." + part.name]));
      ++num_parts;
    });
  }
  std::size_t num_weights = 0;
  for (const auto& [key, tensor] : reference.tensors)
    num_weights += key.starts_with("weight.") ? 1 : 0;
  EXPECT_EQ(num_parts, num_weights);
}

void check_gradients(Transformer& model, const Reference& reference, const Group& group,
                     const std::string& what, double tolerance = kTolerance) {
  for (auto& parameter : model.parameters()) {
    EXPECT_FALSE(parameter.value.grad().defined());
    auto gradient = parameter.main_grad;
    if (parameter.grad_partial_over_tp) gradient = all_reduce(group, gradient);
    for_parts(parameter, [&](const Part& part, std::int64_t row, std::int64_t rows) {
      expect_close(gradient.narrow(0, row, rows), slice_of(part, reference["grad." + part.name]),
                   tolerance, what + " gradient of " + part.name);
    });
  }
}

struct Variant {
  int num_ranks;
  bool sequence_parallel;
  Mode mode;
  RecomputeMethod recompute = RecomputeMethod::none;
  std::int64_t recompute_num_layers = 1;
  bool keep_gathered = false;
};

void check(const Reference& reference, const Variant& v) {
  run_ranks(v.num_ranks, [&](const std::shared_ptr<Group>& group) {
    const std::string what = "ranks " + std::to_string(v.num_ranks) + " sp " +
                             std::to_string(v.sequence_parallel) + " mode " +
                             std::to_string(static_cast<int>(v.mode));
    TransformerOptions options;
    options.group = group;
    options.sequence_parallel = v.sequence_parallel;
    options.matmul = {v.mode, 2};
    options.recompute_method = v.recompute;
    options.recompute_num_layers = v.recompute_num_layers;
    options.keep_gathered = v.keep_gathered;
    Transformer model(reference.config, options);
    load(model, reference);
    expect_close(model.logits(reference["tokens"]), reference["logits"], kTolerance,
                 what + " logits");
    const auto loss = model.forward(reference["tokens"], reference["labels"]);
    expect_close(loss, reference["loss"], kTolerance, what + " loss");
    loss.backward();
    check_gradients(model, reference, *group, what);
  });
}

TEST(Transformer, EqualsTransformersLlama) {
  for (const char* name : {"grouped", "tied"}) {
    const Reference reference(name);
    for (const int num_ranks : {1, 2, 4}) {
      for (const bool sequence_parallel : {false, true}) {
        check(reference, {num_ranks, sequence_parallel, Mode::serial});
        check(reference, {num_ranks, sequence_parallel, Mode::fused});
        check(reference, {num_ranks, sequence_parallel, Mode::automatic});
      }
    }
    check(reference, {3, true, Mode::chunked});
    check(reference, {2, true, Mode::fused, RecomputeMethod::none, 1, true});
  }
}

TEST(Transformer, RecomputationChangesNothing) {
  const Reference reference("grouped");
  for (const std::int64_t num_layers : {1, 2, 5}) {
    check(reference, {2, true, Mode::fused, RecomputeMethod::uniform, num_layers});
    check(reference, {1, false, Mode::serial, RecomputeMethod::block, num_layers});
  }
}

TEST(Transformer, FrozenWeightsTakeNoGradient) {
  const Reference reference("grouped");
  for (const auto method : {RecomputeMethod::none, RecomputeMethod::uniform}) {
    run_ranks(2, [&](const std::shared_ptr<Group>& group) {
      TransformerOptions options;
      options.group = group;
      options.sequence_parallel = true;
      options.recompute_method = method;
      Transformer model(reference.config, options);
      load(model, reference);
      // Everything below layer 1's feed-forward is frozen: the first block's inputs need no
      // gradient at all.
      for (auto& parameter : model.parameters()) {
        if (parameter.name.find("layers.1.mlp") == std::string::npos)
          parameter.value.set_requires_grad(false);
      }
      model.forward(reference["tokens"], reference["labels"]).backward();
      for (auto& parameter : model.parameters()) {
        if (!parameter.value.requires_grad()) {
          EXPECT_EQ(parameter.main_grad.abs().max().item<float>(), 0) << parameter.name;
          continue;
        }
        for_parts(parameter, [&](const Part& part, std::int64_t row, std::int64_t rows) {
          expect_close(parameter.main_grad.narrow(0, row, rows),
                       slice_of(part, reference["grad." + part.name]), kTolerance, part.name);
        });
      }
    });
  }
}

TEST(Transformer, Bf16StaysNearF32) {
  const Reference reference("grouped");
  for (const int num_ranks : {1, 2}) {
    run_ranks(num_ranks, [&](const std::shared_ptr<Group>& group) {
      TransformerOptions options;
      options.group = group;
      options.sequence_parallel = true;
      options.dtype = at::kBFloat16;
      Transformer model(reference.config, options);
      load(model, reference);
      const auto loss = model.forward(reference["tokens"], reference["labels"]);
      EXPECT_EQ(loss.scalar_type(), at::kFloat);
      expect_close(loss, reference["loss"], 2e-2, "loss");
      loss.backward();
      check_gradients(model, reference, *group, "bf16", 3e-2);
    });
  }
}

TEST(Transformer, EveryDegreeGetsTheSameWeights) {
  const auto config = Reference("grouped").config;
  Transformer whole(config, {});
  for (const int num_ranks : {2, 4}) {
    run_ranks(num_ranks, [&](const std::shared_ptr<Group>& group) {
      TransformerOptions options;
      options.group = group;
      Transformer model(config, options);
      for (std::size_t i = 0; i < model.parameters().size(); ++i) {
        const auto &mine = model.parameters()[i], &all = whole.parameters()[i];
        ASSERT_EQ(mine.parts.size(), all.parts.size());
        std::int64_t row = 0, whole_row = 0;
        for (std::size_t j = 0; j < mine.parts.size(); ++j) {
          const auto& part = mine.parts[j];
          const auto rows = part.dim == 0 ? part.length : part.shape[0];
          const auto expected = slice_of(part, all.main.narrow(0, whole_row, part.shape[0]));
          EXPECT_TRUE(at::equal(mine.main.narrow(0, row, rows), expected)) << part.name;
          row += rows;
          whole_row += part.shape[0];
        }
      }
    });
  }
  TransformerOptions other;
  other.seed = 99;
  EXPECT_FALSE(
      at::equal(Transformer(config, other).parameters()[0].main, whole.parameters()[0].main));
}

TEST(Transformer, CallersMistakes) {
  auto config = Reference("tied").config;
  const auto refused = [](const LlamaConfig& c) {
    EXPECT_THROW(Transformer(c, {}), c10::ValueError);
  };
  auto c = config;
  c.num_query_groups = 3;
  refused(c);
  c = config;
  c.kv_channels = 7;
  refused(c);
  c = config;
  c.vocab_size = 0;
  refused(c);
  run_ranks(3, [&](const std::shared_ptr<Group>& group) {
    auto narrow = config;
    narrow.num_query_groups = 2;
    TransformerOptions options;
    options.group = group;
    EXPECT_THROW(Transformer(narrow, options), c10::ValueError);
  });
}

}  // namespace
}  // namespace braid::test
