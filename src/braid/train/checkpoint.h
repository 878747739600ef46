// Checkpoints of a training run, which transformers reads and which any tensor-parallel degree loads.
//
// NOTE [checkpoint folder]
//   <dir>/iter_0000020/          one complete checkpoint:
//     model.safetensors          the weights, whole tensors under transformers' names
//     config.json                as transformers' LlamaForCausalLM reads it
//     optimizer.safetensors      exp_avg.<name>, exp_avg_sq.<name>, and main.<name> unless the
//                                model is f32; all f32
//     trainer_state.json         TrainerState and the format's version
//   <dir>/latest                 link to the newest of them
//   <dir>/model.safetensors      links into latest, so that from_pretrained(<dir>) reads the newest
//   <dir>/config.json
//   <dir>/latest_checkpointed_iteration.txt   "20": the one that --load <dir> takes
//
// A save writes into <dir>/.partial, flushes it to disk and renames it; then it switches `latest`,
// then the text, each by one rename. So a reader finds the old checkpoint or the new one, never a
// mixture, and after a failure, a full disk or a kill at any moment the last one is in use. What a
// killed save left in .partial goes at the next save or by discard_partial_checkpoint(). Older
// checkpoints are kept.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "braid/comm/group.h"
#include "braid/layers/parameter.h"
#include "braid/train/optimizer.h"
#include "braid/train/safetensors.h"

namespace braid {

/// What of a run is not a tensor.
struct TrainerState {
  std::int64_t iteration = 0;         // done
  std::int64_t consumed_samples = 0;  // over all ranks
  std::uint64_t seed = 0;
  std::int64_t data_tokens = 0;                      // of the corpus; 0: not known
  nlohmann::json config = nlohmann::json::object();  // the trainer's settings
  nlohmann::json tuner = nlohmann::json::object();   // its choices
};

/// Writes <dir>/iter_<iteration> and makes it the latest; see NOTE [checkpoint folder].
///   config_json  the model's config.json
///   Order   collective over all ranks: the tp groups gather tensor by tensor (one whole tensor in
///           memory at a time); only tp rank 0 of dp rank 0 writes
///   Errors  c10::Error, the same on every rank: folder or file, and the system's reason; nothing of
///           this save is left
void save_checkpoint(const std::string& dir, const Group& tp, const Group& dp,
                     const std::vector<Parameter>& parameters, const AdamW& optimizer,
                     const TrainerState& state, const nlohmann::json& config_json);

/// Checks, without writing, that checkpoints can be saved in `dir`: it is or can become a writable
/// folder, and holds no foreign file where a save puts a link (a pretrained model's weights are not
/// overwritten). Errors: ValueError naming it.
void check_save_folder(const std::string& dir);

/// Removes what a killed save left in `dir`, unless a save is going on. Never throws.
void discard_partial_checkpoint(const std::string& dir) noexcept;

/// Whole tensors by transformers' names.
using TensorShapes = std::map<std::string, std::vector<std::int64_t>>;
/// The whole tensors that the parameters are slices of.
TensorShapes whole_tensors(const std::vector<Parameter>& parameters);

/// A checkpoint to load. Nothing here communicates: each rank maps the files and copies its own slices.
class Checkpoint {
 public:
  /// Opens a folder of save_checkpoint() (its latest iteration), one of its iter_ folders, or a
  /// plain transformers folder (config.json and model.safetensors, or shards with
  /// model.safetensors.index.json). Errors: ValueError naming folder or file: missing, damaged,
  /// another format version.
  explicit Checkpoint(const std::string& path);

  /// Where the files are.
  const std::string& folder() const { return folder_; }
  const nlohmann::json& config_json() const { return config_json_; }
  /// generation_config.json beside it, where there is one. Errors: ValueError naming it: it is no JSON object.
  std::optional<nlohmann::json> generation_config_json() const;
  /// Of the weights' files.
  std::int64_t num_tensors() const { return std::ssize(file_index_); }
  /// Tells it from others: iteration and a hash of samples of all tensors. The same on every host that has its files.
  std::string fingerprint() const;
  /// Nothing for a plain transformers folder.
  const std::optional<TrainerState>& state() const { return state_; }

  /// Checks the model, given as its whole tensors, against the checkpoint's weights and moments.
  /// Errors: ValueError: missing and unexpected tensors by name; tensor,
  /// file and both shapes where they differ.
  void check(const TensorShapes& model) const;

  /// Checks, then copies this rank's slices into value and main of each parameter and, where the
  /// run's state is there and `optimizer` is given, into its moments and number of steps. Weights
  /// are converted to the parameters' types. Errors: as check(), before anything is changed.
  void load(std::vector<Parameter>& parameters, AdamW* optimizer) const;

 private:
  bool is_tied() const;
  bool has_main(const std::string& name) const;  // f32 weights apart from the model's
  const SafetensorsFile& file_of(const std::string& name) const;

  std::string folder_;
  nlohmann::json config_json_;
  std::optional<TrainerState> state_;
  std::int64_t optimizer_steps_ = 0;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, std::size_t> file_index_;  // of the weights, by tensor name
  std::optional<SafetensorsFile> optimizer_;
};

}  // namespace braid
