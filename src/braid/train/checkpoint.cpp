// Opening, checking and loading checkpoints.
#include "braid/train/checkpoint.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/hash.h>
#include <fmt/ranges.h>

#include <charconv>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "braid/core/check.h"
#include "braid/ops/tuner.h"
#include "braid/train/checkpoint_files.h"

namespace braid {
namespace checkpoint_files {

std::vector<PartPlace> places_of(const std::vector<Parameter>& parameters) {
  std::vector<PartPlace> places;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    std::int64_t row = 0;
    for (const Part& part : parameters[i].parts) {
      const std::int64_t num_rows = part.dim == 0 ? part.length : part.shape.at(0);
      places.push_back({i, &part, row, num_rows});
      row += num_rows;
    }
    TORCH_INTERNAL_ASSERT(row <= parameters[i].value.size(0), "the parts of ", parameters[i].name,
                          " have ", row, " rows, its value ", parameters[i].value.size(0));
  }
  return places;
}

}  // namespace checkpoint_files

namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using namespace checkpoint_files;  // NOLINT: their names

constexpr const char* kOutput = "lm_head.weight";  // absent where it is tied to the embedding

std::string read_text(const fs::path& path) {
  std::error_code ignored;
  BRAID_CHECK(fs::exists(path, ignored), path.string(), " does not exist");
  BRAID_CHECK(fs::is_regular_file(path, ignored), path.string(), " is not a file");
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  BRAID_CHECK(file.good(), "can't read ", path.string());
  return text.str();
}

json read_json(const fs::path& path) {
  json value;
  try {
    value = json::parse(read_text(path));
  } catch (const json::exception& error) {
    BRAID_CHECK(false, path.string(), " is damaged: ", error.what());
  }
  BRAID_CHECK(value.is_object(), path.string(), " is damaged: it holds a ", value.type_name(),
              ", expected an object");
  return value;
}

template <class T>
T number(const json& object, const char* key, const fs::path& path) {
  const auto found = object.find(key);
  BRAID_CHECK(found != object.end(), path.string(), " lacks ", key);
  BRAID_CHECK(found->is_number_unsigned() && found->get<std::uint64_t>() <= INT64_MAX,
              path.string(), ": ", key, " is ", found->dump(), ", expected a whole number");
  return found->get<T>();
}

TrainerState parse_state(const json& object, const fs::path& path) {
  const int version = number<int>(object, "format_version", path);
  BRAID_CHECK(version == kFormatVersion, path.string(), " has format version ", version,
              ", this braid reads version ", kFormatVersion);
  TrainerState state;
  state.iteration = number<std::int64_t>(object, "iteration", path);
  state.consumed_samples = number<std::int64_t>(object, "consumed_samples", path);
  state.seed = number<std::uint64_t>(object, "seed", path);
  if (object.contains("data_tokens"))
    state.data_tokens = number<std::int64_t>(object, "data_tokens", path);
  for (auto [key, target] :
       {std::pair("config", &state.config), std::pair("tuner", &state.tuner)}) {
    BRAID_CHECK(object.contains(key), path.string(), " lacks ", key);
    *target = object[key];
  }
  try {
    tuner::check_choices(state.tuner);
  } catch (const c10::ValueError& error) {
    BRAID_CHECK(false, path.string(), ": ", error.what_without_backtrace());
  }
  return state;
}

// The folder that `path` stands for.
fs::path find_folder(const fs::path& path) {
  std::error_code ignored;
  BRAID_CHECK(fs::exists(path, ignored), "no checkpoint: ", path.string(), " does not exist");
  BRAID_CHECK(fs::is_directory(path, ignored), "no checkpoint: ", path.string(),
              " is not a folder");
  if (const fs::path latest = path / kLatestIteration; fs::exists(latest, ignored)) {
    const std::string text = read_text(latest);
    std::int64_t iteration = -1;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), iteration);
    const bool is_number =
        error == std::errc{} &&
        text.find_first_not_of(" \t\r\n", static_cast<std::size_t>(end - text.data())) ==
            std::string::npos;
    BRAID_CHECK(is_number && iteration >= 0, latest.string(),
                " is damaged: it does not hold an iteration");
    const fs::path folder = path / iteration_folder(iteration);
    BRAID_CHECK(fs::is_directory(folder, ignored), latest.string(), " names iteration ", iteration,
                ", but ", folder.string(), " does not exist");
    return folder;
  }
  if (fs::is_directory(path / kLatestLink, ignored)) return path / kLatestLink;
  for (const char* name : {kState, kModel, kModelIndex}) {
    if (fs::exists(path / name, ignored)) return path;
  }
  const fs::path below = path / "checkpoint";
  BRAID_CHECK(false, "no checkpoint in ", path.string(), ": neither ", kLatestIteration, " nor ",
              kModel, fs::exists(below, ignored) ? ". HINT: there is " + below.string() : "");
}

// At most five of the names.
std::string listed(const std::vector<std::string>& names) {
  std::string text = fmt::format(
      "{}", fmt::join(names.begin(), names.begin() + std::min<std::ptrdiff_t>(5, std::ssize(names)),
                      ", "));
  if (names.size() > 5) text += fmt::format(" and {} more", names.size() - 5);
  return text;
}

void check_tensor(const SafetensorsFile& file, const std::string& name,
                  const std::vector<std::int64_t>& shape) {
  const auto found = file.tensors().find(name);
  BRAID_CHECK(found != file.tensors().end(), file.path(), " lacks the tensor ", name);
  const TensorInfo& info = found->second;
  BRAID_CHECK(at::isFloatingType(info.dtype), file.path(), ": tensor ", name, " has the dtype ",
              info.dtype, ", expected a floating type");
  BRAID_CHECK(info.shape == shape, file.path(), ": tensor ", name, " has shape ",
              at::IntArrayRef(info.shape), ", the model's has ", at::IntArrayRef(shape));
}

}  // namespace

Checkpoint::Checkpoint(const std::string& path) : folder_(find_folder(path)) {
  const fs::path folder(folder_);
  std::error_code ignored;
  const bool has_state = fs::exists(folder / kState, ignored);
  BRAID_CHECK(has_state || !fs::exists(folder / kOptimizer, ignored), folder.string(), " has ",
              kOptimizer, " but no ", kState);
  const json state = has_state ? read_json(folder / kState) : json::object();
  if (has_state && !state.contains("global_step")) {  // else it is of transformers' Trainer
    state_ = parse_state(state, folder / kState);
    optimizer_steps_ = number<std::int64_t>(state, "optimizer_steps", folder / kState);
    optimizer_.emplace(folder / kOptimizer);
  }
  config_json_ = read_json(folder / kConfig);
  if (fs::exists(folder / kModel, ignored) || !fs::exists(folder / kModelIndex, ignored)) {
    files_.emplace_back(folder / kModel);
    for (const auto& [name, info] : files_[0].tensors()) file_index_[name] = 0;
    return;
  }
  const fs::path index_path = folder / kModelIndex;
  const json index = read_json(index_path);
  BRAID_CHECK(index.contains("weight_map") && index["weight_map"].is_object(), index_path.string(),
              " lacks weight_map");
  std::map<std::string, std::size_t> opened;
  for (const auto& [name, file] : index["weight_map"].items()) {
    BRAID_CHECK(file.is_string(), index_path.string(), ": the file of ", name, " is a ",
                file.type_name());
    const std::string file_name = file;
    BRAID_CHECK(fs::path(file_name).filename() == file_name && !file_name.empty(),
                index_path.string(), ": the file of ", name, " is ", file_name,
                ", expected a name in the same folder");
    const auto [found, is_new] = opened.try_emplace(file_name, files_.size());
    if (is_new) files_.emplace_back(folder / file_name);
    BRAID_CHECK(files_[found->second].tensors().count(name) == 1, index_path.string(),
                " says that ", name, " is in ", file_name, ", which lacks it");
    file_index_[name] = found->second;
  }
}

bool Checkpoint::is_tied() const {
  const auto found = config_json_.find("tie_word_embeddings");
  return found != config_json_.end() && found->is_boolean() && found->get<bool>();
}

const SafetensorsFile& Checkpoint::file_of(const std::string& name) const {
  return files_[file_index_.at(name)];
}

TensorShapes whole_tensors(const std::vector<Parameter>& parameters) {
  TensorShapes shapes;
  for (const Parameter& parameter : parameters)
    for (const Part& part : parameter.parts) shapes[part.name] = part.shape;
  return shapes;
}

std::optional<json> Checkpoint::generation_config_json() const {
  const fs::path path = fs::path(folder_) / kGenerationConfig;
  std::error_code ignored;
  return fs::exists(path, ignored) ? std::optional(read_json(path)) : std::nullopt;
}

std::string Checkpoint::fingerprint() const {
  constexpr std::int64_t kSamples = 8, kBytes = 64;  // of a tensor
  std::size_t hash = 0;
  const auto add = [&](std::string_view bytes) { hash = c10::get_hash(hash, bytes); };
  const auto add_file = [&](const SafetensorsFile& file) {
    for (const auto& [name, _] : file.tensors()) {
      const at::Tensor tensor = file.tensor(name);
      const auto* data = static_cast<const char*>(tensor.const_data_ptr());
      const auto size = static_cast<std::int64_t>(tensor.nbytes());
      add(name);
      for (std::int64_t i = 0; i < kSamples; ++i) {
        const std::int64_t begin = size / kSamples * i;
        add({data + begin, static_cast<std::size_t>(std::min(kBytes, size - begin))});
      }
    }
  };
  for (const SafetensorsFile& file : files_) add_file(file);
  if (optimizer_) add_file(*optimizer_);
  return fmt::format("{}hash {:08x}",
                     state_ ? fmt::format("iteration {}, ", state_->iteration) : "",
                     hash & 0xffffffffU);
}

void Checkpoint::check(const TensorShapes& model) const {
  std::vector<std::string> missing, unexpected;
  for (const auto& [name, shape] : model) {
    if (file_index_.count(name) == 0) missing.push_back(name);
  }
  for (const auto& [name, file] : file_index_) {
    const bool is_harmless =
        name.ends_with(".rotary_emb.inv_freq") || (name == kOutput && is_tied());
    if (model.count(name) == 0 && !is_harmless) unexpected.push_back(name);
  }
  BRAID_CHECK(
      missing.empty() && unexpected.empty(), "the checkpoint ", folder_,
      " is of another model: it ", missing.empty() ? "" : "lacks " + listed(missing),
      missing.empty() || unexpected.empty() ? "" : "; it ",
      unexpected.empty() ? "" : "has " + listed(unexpected) + ", which the model does not have");
  for (const auto& [name, shape] : model) {
    check_tensor(file_of(name), name, shape);
    if (!optimizer_) continue;
    check_tensor(*optimizer_, kFirstMomentPrefix + name, shape);
    check_tensor(*optimizer_, kSecondMomentPrefix + name, shape);
    if (has_main(name)) check_tensor(*optimizer_, kMainPrefix + name, shape);
  }
}

bool Checkpoint::has_main(const std::string& name) const {
  return optimizer_ && optimizer_->tensors().count(kMainPrefix + name) == 1;
}

void Checkpoint::load(std::vector<Parameter>& parameters, AdamW* optimizer) const {
  check(whole_tensors(parameters));
  const SafetensorsFile* moments = optimizer != nullptr && optimizer_ ? &*optimizer_ : nullptr;

  const at::NoGradGuard no_grad;
  if (moments != nullptr) optimizer->set_num_steps(optimizer_steps_);
  for (const PartPlace& place : places_of(parameters)) {
    const Part& part = *place.part;
    const Parameter& parameter = parameters[place.parameter];
    const auto copy = [&](const at::Tensor& target, const SafetensorsFile& file,
                          const std::string& name) {
      const at::Tensor whole = file.tensor(name);
      place.slice(target).copy_(part.dim < 0 ? whole
                                             : whole.narrow(part.dim, part.begin, part.length));
    };
    if (moments != nullptr && has_main(part.name)) {
      copy(parameter.main, *moments, kMainPrefix + part.name);
    } else {
      copy(parameter.main, file_of(part.name), part.name);
    }
    if (!parameter.value.is_alias_of(parameter.main))
      copy(parameter.value, file_of(part.name), part.name);
    if (moments == nullptr) continue;
    copy(optimizer->exp_avg()[place.parameter], *moments, kFirstMomentPrefix + part.name);
    copy(optimizer->exp_avg_sq()[place.parameter], *moments, kSecondMomentPrefix + part.name);
  }
}

}  // namespace braid
