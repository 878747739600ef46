// What saving and loading of checkpoints share: names in the folder, and where each part of a parameter lies.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <vector>

#include "braid/layers/parameter.h"

namespace braid::checkpoint_files {

constexpr int kFormatVersion = 1;
constexpr const char* kModel = "model.safetensors";
constexpr const char* kModelIndex = "model.safetensors.index.json";
constexpr const char* kConfig = "config.json";
constexpr const char* kGenerationConfig = "generation_config.json";
constexpr const char* kOptimizer = "optimizer.safetensors";
constexpr const char* kState = "trainer_state.json";
constexpr const char* kLatestLink = "latest";
constexpr const char* kLatestIteration = "latest_checkpointed_iteration.txt";
constexpr const char* kPartial = ".partial";

// Before the names of the weights, in kOptimizer.
constexpr const char* kFirstMomentPrefix = "exp_avg.";
constexpr const char* kSecondMomentPrefix = "exp_avg_sq.";
constexpr const char* kMainPrefix = "main.";

inline std::string iteration_folder(std::int64_t iteration) {
  return fmt::format("iter_{:07}", iteration);
}

/// A part, and its rows in the value of the parameter that it belongs to.
struct PartPlace {
  std::size_t parameter;
  const Part* part;
  std::int64_t row, num_rows;

  /// This rank's slice, in a tensor of the parameter's shape: its value, its main weight or a moment.
  at::Tensor slice(const at::Tensor& tensor) const {
    return tensor.detach().narrow(0, row, num_rows);
  }
};

/// The parts of all parameters in order. A value may have more rows than its parts (a padded vocabulary).
std::vector<PartPlace> places_of(const std::vector<Parameter>& parameters);

}  // namespace braid::checkpoint_files
