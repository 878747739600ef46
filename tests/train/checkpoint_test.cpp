// Checkpoints: every tp degree loads what another wrote; what does not fit is named before anything
// changes; a failed save is the same error on every rank and leaves the last checkpoint in use.
#include "braid/train/checkpoint.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <fstream>
#include <mutex>
#include <optional>

#include "tests/support/errors.h"
#include "tests/support/folders.h"
#include "tests/support/limits.h"
#include "tests/train/toy_model.h"

namespace braid {
namespace {

namespace fs = std::filesystem;
using test::error_of;
using test::run_ranks;
using test::TemporaryFolder;
using test::ToyModel;
using test::ToyShape;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

void save(const std::string& dir, int num_ranks, std::int64_t iteration,
          at::ScalarType dtype = at::kFloat, ToyShape shape = {}) {
  run_ranks(num_ranks, [&](const std::shared_ptr<Group>& tp) {
    ToyModel model(tp->rank(), num_ranks, dtype, shape);
    model.fill();
    test::save_toy(dir, *tp, model, iteration);
  });
}

std::vector<std::string> wrong_after_load(const std::string& path, int rank, int num_ranks,
                                          at::ScalarType dtype = at::kFloat, ToyShape shape = {}) {
  ToyModel model(rank, num_ranks, dtype, shape);
  Checkpoint(path).load(model.parameters(), &model.optimizer());
  return model.wrong();
}

std::string check_error(const std::string& path, ToyShape shape) {
  ToyModel model(0, 1, at::kFloat, shape);
  const std::string error = error_of<c10::ValueError>(
      [&] { Checkpoint(path).load(model.parameters(), &model.optimizer()); });
  for (const Parameter& parameter : model.parameters()) {
    EXPECT_TRUE(parameter.value.eq(-1).all().item<bool>())
        << "changed before the error: " << parameter.name;
  }
  EXPECT_EQ(error.find('\n'), std::string::npos) << error;
  return error;
}

TEST(Checkpoint, EveryTensorParallelDegreeLoadsWhatAnotherWrote) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const int writers : {1, 2, 4}) {
      const TemporaryFolder dir;
      save(dir.path(), writers, 20, dtype);
      for (const int readers : {1, 2, 4}) {
        for (int rank = 0; rank < readers; ++rank) {
          EXPECT_THAT(wrong_after_load(dir.path(), rank, readers, dtype), IsEmpty())
              << dtype << " " << writers << " -> " << rank << "/" << readers;
        }
      }
    }
  }
}

TEST(Checkpoint, FilesAreTheSameWhateverTheDegree) {
  const TemporaryFolder one, four;
  save(one.path(), 1, 20);
  save(four.path(), 4, 20);
  for (const char* name :
       {"model.safetensors", "optimizer.safetensors", "config.json", "trainer_state.json"}) {
    EXPECT_EQ(test::read_text(one / ("iter_0000020/" + std::string(name))),
              test::read_text(four / ("iter_0000020/" + std::string(name))))
        << name;
  }
}

TEST(Checkpoint, FingerprintIsOfIterationAndContents) {
  const TemporaryFolder one, four, later;
  save(one.path(), 1, 20);
  save(four.path(), 4, 20);
  save(later.path(), 1, 40);
  const std::string fingerprint = Checkpoint(one.path()).fingerprint();
  EXPECT_THAT(fingerprint, testing::StartsWith("iteration 20, hash "));
  EXPECT_EQ(Checkpoint(four.path()).fingerprint(), fingerprint);
  EXPECT_THAT(Checkpoint(later.path()).fingerprint(), testing::StartsWith("iteration 40, hash "));

  std::fstream file(one / "iter_0000020/model.safetensors",
                    std::ios::in | std::ios::out | std::ios::binary);
  std::uint64_t header_bytes = 0;
  file.read(reinterpret_cast<char*>(&header_bytes), sizeof header_bytes);
  file.seekg(static_cast<std::streamoff>(sizeof header_bytes + header_bytes));
  const auto byte = static_cast<char>(file.get() ^ 1);
  file.seekp(static_cast<std::streamoff>(sizeof header_bytes + header_bytes));
  file.put(byte);
  file.close();
  EXPECT_NE(Checkpoint(one.path()).fingerprint(), fingerprint);
}

TEST(Checkpoint, FolderHoldsTheNewestAndKeepsTheOld) {
  const TemporaryFolder parent;
  const std::string dir = parent / "runs/demo/checkpoint";
  save(dir, 2, 20);
  save(dir, 2, 40);
  EXPECT_THAT(test::names_in(dir),
              ElementsAre("config.json", "iter_0000020", "iter_0000040", "latest",
                          "latest_checkpointed_iteration.txt", "model.safetensors"));
  EXPECT_THAT(test::names_in(dir + "/iter_0000040"),
              ElementsAre("config.json", "model.safetensors", "optimizer.safetensors",
                          "trainer_state.json"));
  EXPECT_EQ(test::read_text(dir + "/latest_checkpointed_iteration.txt"), "40\n");
  EXPECT_EQ(fs::canonical(dir + "/model.safetensors"),
            fs::canonical(dir + "/iter_0000040/model.safetensors"));
  EXPECT_EQ(fs::canonical(dir + "/config.json"), fs::canonical(dir + "/iter_0000040/config.json"));
  fs::rename(parent / "runs/demo", parent / "moved");  // the links are relative
  EXPECT_EQ(Checkpoint(parent / "moved/checkpoint").state()->iteration, 40);
  EXPECT_EQ(Checkpoint(parent / "moved/checkpoint/iter_0000020").state()->iteration, 20);
  EXPECT_TRUE(fs::exists(parent / "moved/checkpoint/model.safetensors"));
}

TEST(Checkpoint, StateIsReadBack) {
  const TemporaryFolder dir;
  save(dir.path(), 1, 20);
  const Checkpoint checkpoint(dir.path());
  const TrainerState expected = test::toy_state(20);
  ASSERT_TRUE(checkpoint.state().has_value());
  EXPECT_EQ(checkpoint.state()->iteration, 20);
  EXPECT_EQ(checkpoint.state()->consumed_samples, 160);
  EXPECT_EQ(checkpoint.state()->seed, 77u);
  EXPECT_EQ(checkpoint.state()->config, expected.config);
  EXPECT_EQ(checkpoint.state()->tuner, expected.tuner);
  EXPECT_EQ(checkpoint.config_json()["hidden_size"], 16);
  ToyModel model(0, 1);
  checkpoint.load(model.parameters(), nullptr);
  EXPECT_EQ(model.optimizer().num_steps(), 0);
  checkpoint.load(model.parameters(), &model.optimizer());
  EXPECT_EQ(model.optimizer().num_steps(), 19);
}

TEST(Checkpoint, AnIterationIsSavedAgainOverTheOld) {
  const TemporaryFolder dir;
  save(dir.path(), 1, 20);
  save(dir.path(), 1, 40);
  test::write_text(dir / "latest_checkpointed_iteration.txt", "20");
  test::write_text(dir / "iter_0000040/stale", "");
  save(dir.path(), 1, 40);
  EXPECT_FALSE(fs::exists(dir / "iter_0000040/stale"));
  EXPECT_FALSE(fs::exists(dir / ".partial"));
  EXPECT_EQ(Checkpoint(dir.path()).state()->iteration, 40);
}

TEST(Checkpoint, DataParallelRanksWriteOnce) {
  const TemporaryFolder dir;
  auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(4, [&](const std::shared_ptr<Group>& world) {
    const int tp_rank = world->rank() % 2, dp_rank = world->rank() / 2;
    const auto tp = Group::create(store, fmt::format("write_once_tp{}", dp_rank), tp_rank, 2);
    const auto dp = Group::create(store, fmt::format("write_once_dp{}", tp_rank), dp_rank, 2);
    ToyModel model(tp_rank, 2);
    if (dp_rank == 0) model.fill();  // the others' values must not matter
    save_checkpoint(dir.path(), *tp, *dp, model.parameters(), model.optimizer(),
                    test::toy_state(20), model.config_json());
    EXPECT_TRUE(
        fs::exists(dir / "latest_checkpointed_iteration.txt"));  // for every rank once it returns
  });
  EXPECT_THAT(wrong_after_load(dir.path(), 0, 1), IsEmpty());
}

TEST(Checkpoint, AModelOfAnotherShapeIsRefusedBeforeAnythingChanges) {
  const TemporaryFolder dir;
  save(dir.path(), 2, 20);
  const std::string file = dir / "iter_0000020/model.safetensors";
  EXPECT_THAT(check_error(dir.path(), {.ffn = 32}),
              HasSubstr(file + ": tensor model.layers.0.mlp.down_proj.weight has shape [16, 24], "
                               "the model's has [16, 32]"));
  EXPECT_THAT(check_error(dir.path(), {.layers = 3}),
              HasSubstr("it lacks model.layers.2.input_layernorm.weight, "));
  EXPECT_THAT(check_error(dir.path(), {.layers = 3}), HasSubstr("and 4 more"));
  EXPECT_THAT(check_error(dir.path(), {.layers = 1}),
              HasSubstr("it has model.layers.1.input_layernorm.weight, "));
  EXPECT_THAT(check_error(dir.path(), {.tied = true}),
              HasSubstr("it has lm_head.weight, which the model does not have"));
  // The optimizer's file is checked too.
  fs::remove(dir / "iter_0000020/optimizer.safetensors");
  SafetensorsWriter(dir / "iter_0000020/optimizer.safetensors", {}).commit();
  EXPECT_THAT(check_error(dir.path(), {}),
              HasSubstr("optimizer.safetensors lacks the tensor exp_avg.lm_head.weight"));
}

TEST(Checkpoint, DamagedFoldersAreOneErrorNamingTheFile) {
  const auto error = [](const std::string& path) {
    const std::string text = error_of<c10::ValueError>([&] { Checkpoint checkpoint(path); });
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    return text;
  };
  const TemporaryFolder dir;
  save(dir.path(), 1, 20);
  const std::string folder = dir / "iter_0000020";
  EXPECT_THAT(error(dir / "none"), HasSubstr("none does not exist"));
  EXPECT_THAT(error(folder + "/config.json"), HasSubstr("is not a folder"));
  fs::create_directories(dir / "empty");
  EXPECT_THAT(error(dir / "empty"), HasSubstr("no checkpoint in " + (dir / "empty")));
  fs::create_directories(dir / "run");
  fs::create_directory_symlink(dir.path(), dir / "run/checkpoint");
  EXPECT_THAT(error(dir / "run"), HasSubstr("HINT: there is " + (dir / "run/checkpoint")));

  const auto damage = [&](const std::string& path, const std::string& text) {
    const std::string before = test::read_text(path);
    test::write_text(path, text);
    const std::string result = error(dir.path());
    test::write_text(path, before);
    EXPECT_THAT(result, HasSubstr(path));
    return result;
  };
  fs::remove(dir / "latest_checkpointed_iteration.txt");  // its save was killed just before
  EXPECT_EQ(Checkpoint(dir.path()).state()->iteration, 20);
  test::write_text(dir / "latest_checkpointed_iteration.txt", "20\n");
  const std::string pointer = dir / "latest_checkpointed_iteration.txt",
                    state = folder + "/trainer_state.json";
  EXPECT_THAT(damage(pointer, "release"), HasSubstr("does not hold an iteration"));
  EXPECT_THAT(damage(pointer, ""), HasSubstr("does not hold an iteration"));
  EXPECT_THAT(damage(pointer, "21"), HasSubstr("names iteration 21"));
  EXPECT_THAT(damage(state, "{"), HasSubstr("is damaged"));
  EXPECT_THAT(damage(state, "[]"), HasSubstr("holds a array"));
  EXPECT_THAT(damage(state, "{}"), HasSubstr("lacks format_version"));
  EXPECT_THAT(damage(state, R"({"format_version": 2})"),
              HasSubstr("has format version 2, this braid reads version 1"));
  EXPECT_THAT(damage(state, R"({"format_version": 1, "iteration": -1})"),
              HasSubstr("iteration is -1"));
  EXPECT_THAT(damage(folder + "/config.json", "x"), HasSubstr("is damaged"));
  EXPECT_THAT(damage(folder + "/model.safetensors", "x"), HasSubstr("it has 1 bytes"));
  EXPECT_THAT(damage(folder + "/optimizer.safetensors", ""), HasSubstr("it has 0 bytes"));
  EXPECT_THAT(error(dir.path()), IsEmpty());
  fs::remove(folder + "/optimizer.safetensors");
  EXPECT_THAT(error(dir.path()), HasSubstr("optimizer.safetensors: No such file"));
}

void write_plain(const std::string& path,
                 const std::vector<std::pair<std::string, std::vector<std::int64_t>>>& tensors,
                 at::ScalarType dtype) {
  std::vector<TensorInfo> infos;
  for (const auto& [name, shape] : tensors) infos.push_back({name, dtype, shape});
  SafetensorsWriter writer(path, infos);
  for (const auto& [name, shape] : tensors)
    writer.write(name, test::whole_values(name, shape, 0).to(dtype));
  writer.commit();
}

std::vector<std::pair<std::string, std::vector<std::int64_t>>> toy_tensors(ToyModel& model) {
  std::vector<std::pair<std::string, std::vector<std::int64_t>>> tensors;
  for (const Parameter& parameter : model.parameters()) {
    for (const Part& part : parameter.parts) tensors.emplace_back(part.name, part.shape);
  }
  return tensors;
}

// Weights as they should be; moments as they were.
void expect_plain_load(const std::string& path, ToyModel& model, at::ScalarType stored) {
  const Checkpoint checkpoint(path);
  EXPECT_FALSE(checkpoint.state().has_value());
  checkpoint.load(model.parameters(), &model.optimizer());
  for (const Parameter& parameter : model.parameters()) {
    std::vector<at::Tensor> parts;
    for (const Part& part : parameter.parts) {
      const at::Tensor whole = test::whole_values(part.name, part.shape, 0).to(stored);
      parts.push_back(part.dim < 0 ? whole : whole.narrow(part.dim, part.begin, part.length));
    }
    const at::Tensor expected = at::cat(parts);
    EXPECT_TRUE(at::equal(parameter.value.narrow(0, 0, expected.size(0)),
                          expected.to(parameter.value.scalar_type())))
        << parameter.name;
    EXPECT_TRUE(at::equal(parameter.main.narrow(0, 0, expected.size(0)), expected.to(at::kFloat)))
        << parameter.name;
  }
  for (const at::Tensor& moment : model.optimizer().exp_avg())
    EXPECT_TRUE(moment.eq(-1).all().item<bool>());
}

TEST(Checkpoint, PlainTransformersFoldersGiveTheirWeights) {
  for (const auto stored : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      const TemporaryFolder dir;
      ToyModel model(1, 2, dtype);
      test::write_text(dir / "config.json", model.config_json().dump());
      auto tensors = toy_tensors(model);
      tensors.emplace_back("model.layers.0.self_attn.rotary_emb.inv_freq",
                           std::vector<std::int64_t>{2});
      write_plain(dir / "model.safetensors", tensors, stored);
      expect_plain_load(dir.path(), model, stored);
    }
  }
}

TEST(Checkpoint, ShardsWithAnIndexGiveTheirWeights) {
  const TemporaryFolder dir;
  ToyModel model(1, 2);
  test::write_text(dir / "config.json", model.config_json().dump());
  const auto tensors = toy_tensors(model);
  const auto middle = tensors.begin() + 7;
  write_plain(dir / "model-00001-of-00002.safetensors", {tensors.begin(), middle}, at::kFloat);
  write_plain(dir / "model-00002-of-00002.safetensors", {middle, tensors.end()}, at::kFloat);
  nlohmann::json index;
  for (auto i = tensors.begin(); i != tensors.end(); ++i) {
    index["weight_map"][i->first] =
        fmt::format("model-0000{}-of-00002.safetensors", i < middle ? 1 : 2);
  }
  const auto with_index = [&](const nlohmann::json& json) {
    test::write_text(dir / "model.safetensors.index.json", json.dump());
    return error_of<c10::ValueError>([&] { Checkpoint checkpoint(dir.path()); });
  };
  EXPECT_THAT(with_index(index), IsEmpty());
  expect_plain_load(dir.path(), model, at::kFloat);
  const std::string name = tensors[0].first;
  index["weight_map"][name] = "model-00002-of-00002.safetensors";
  EXPECT_THAT(
      with_index(index),
      HasSubstr("says that " + name + " is in model-00002-of-00002.safetensors, which lacks it"));
  index["weight_map"][name] = "../model.safetensors";
  EXPECT_THAT(with_index(index), HasSubstr("expected a name in the same folder"));
  index["weight_map"][name] = "none.safetensors";
  EXPECT_THAT(with_index(index), HasSubstr("none.safetensors: No such file"));
  EXPECT_THAT(with_index({{"weight_map", 1}}), HasSubstr("lacks weight_map"));
}

TEST(Checkpoint, TiedEmbeddings) {
  const TemporaryFolder dir;
  const ToyShape tied{.tied = true};
  save(dir.path(), 2, 20, at::kFloat, tied);
  EXPECT_EQ(SafetensorsFile(dir / "model.safetensors").tensors().count("lm_head.weight"), 0u);
  EXPECT_THAT(wrong_after_load(dir.path(), 1, 2, at::kFloat, tied), IsEmpty());
  EXPECT_THAT(check_error(dir.path(), {}), HasSubstr("it lacks lm_head.weight"));
  // Some files hold the tied weights twice.
  const TemporaryFolder plain;
  ToyModel model(0, 1, at::kFloat, tied);
  auto tensors = toy_tensors(model);
  tensors.emplace_back("lm_head.weight", std::vector<std::int64_t>{10, 16});
  write_plain(plain / "model.safetensors", tensors, at::kFloat);
  test::write_text(plain / "config.json", model.config_json().dump());
  expect_plain_load(plain.path(), model, at::kFloat);
}

TEST(Checkpoint, AnF32RunGoesOnFromABf16RunsMainWeights) {
  const TemporaryFolder dir;
  save(dir.path(), 1, 20, at::kBFloat16);
  ToyModel model(0, 1);
  Checkpoint(dir.path()).load(model.parameters(), &model.optimizer());
  const at::Tensor norm = model.parameters()[1].value;
  EXPECT_TRUE(
      at::equal(norm, test::whole_values("model.layers.0.input_layernorm.weight", {16}, 3)));
}

// Saves iteration 40 with two ranks while `limit` bytes is the largest file; the errors of both.
std::vector<std::string> errors_with_file_limit(const std::string& dir, std::uint64_t limit) {
  std::vector<std::string> errors(2);
  run_ranks(2, [&](const std::shared_ptr<Group>& tp) {
    ToyModel model(tp->rank(), 2);
    std::optional<test::FileSizeLimit> small;
    barrier(*tp);
    if (tp->rank() == 0) small.emplace(limit);
    errors[static_cast<std::size_t>(tp->rank())] =
        error_of<c10::Error>([&] { test::save_toy(dir, *tp, model, 40); });
    barrier(*tp);  // the groups stay usable
  });
  return errors;
}

TEST(Checkpoint, AFullDiskIsTheSameErrorOnEveryRankAndLeavesTheLastCheckpoint) {
  const TemporaryFolder dir;
  save(dir.path(), 2, 20);
  const auto names = test::names_in(dir.path());
  const auto model_bytes = fs::file_size(dir / "model.safetensors");
  // In the header, in the middle of the weights, and in the optimizer's file.
  for (const auto& [limit, file] : {std::pair<std::uint64_t, std::string>{100, "model.safetensors"},
                                    {model_bytes / 2, "model.safetensors"},
                                    {model_bytes + 100, "optimizer.safetensors"}}) {
    const auto errors = errors_with_file_limit(dir.path(), limit);
    EXPECT_EQ(errors[0], errors[1]);
    EXPECT_THAT(errors[0], HasSubstr(fmt::format("can't write {}/.partial/{}: File too large",
                                                 dir.path().string(), file)));
    EXPECT_EQ(test::names_in(dir.path()), names);
    EXPECT_EQ(Checkpoint(dir.path()).state()->iteration, 20);
    EXPECT_THAT(wrong_after_load(dir.path(), 0, 1), IsEmpty());
  }
}

TEST(Checkpoint, AFullFileSystemLeavesTheLastCheckpoint) {
  const TemporaryFolder dir;
  const test::SmallFileSystem disk(dir.path(), "256k");
  if (!disk.is_mounted()) GTEST_SKIP() << "may not mount";
  std::vector<std::string> errors(2);
  save(dir.path(), 2, 20);
  {
    std::ofstream filler(dir / "filler");
    filler << std::string(256 * 1024, 'x');
  }
  run_ranks(2, [&](const std::shared_ptr<Group>& tp) {
    ToyModel model(tp->rank(), 2);
    errors[static_cast<std::size_t>(tp->rank())] =
        error_of<c10::Error>([&] { test::save_toy(dir.path(), *tp, model, 40); });
  });
  EXPECT_EQ(errors[0], errors[1]);
  EXPECT_THAT(errors[0], HasSubstr("No space left on device"));
  EXPECT_EQ(Checkpoint(dir.path()).state()->iteration, 20);
  EXPECT_FALSE(fs::exists(dir / ".partial"));
  fs::remove(dir / "filler");
  save(dir.path(), 2, 40);
  EXPECT_THAT(wrong_after_load(dir.path(), 0, 1), IsEmpty());
}

TEST(Checkpoint, AFolderThatCantBeSavedIntoIsRefused) {
  const TemporaryFolder dir;
  test::write_text(dir / "file", "");
  const std::string under_file = dir / "file/checkpoint";
  EXPECT_THAT(
      error_of<c10::ValueError>([&] { check_save_folder(under_file); }),
      HasSubstr("can't save into " + under_file + ": " + (dir / "file") + " is not a folder"));
  std::vector<std::string> errors(2);
  run_ranks(2, [&](const std::shared_ptr<Group>& tp) {
    ToyModel model(tp->rank(), 2);
    errors[static_cast<std::size_t>(tp->rank())] =
        error_of<c10::Error>([&] { test::save_toy(under_file, *tp, model, 40); });
  });
  EXPECT_EQ(errors[0], errors[1]);
  EXPECT_THAT(errors[0], HasSubstr("is not a folder"));

  // The weights that a user put there are not overwritten.
  test::write_text(dir / "model.safetensors", "precious");
  EXPECT_THAT(error_of<c10::ValueError>([&] { check_save_folder(dir.path()); }),
              HasSubstr((dir / "model.safetensors") + " is not a link"));
  EXPECT_THAT(error_of<c10::Error>([&] { save(dir.path(), 1, 20); }), HasSubstr("is not a link"));
  EXPECT_EQ(test::read_text(dir / "model.safetensors"), "precious");
  EXPECT_THAT(error_of<c10::ValueError>([&] { check_save_folder(dir / "new/folder"); }), IsEmpty());
  EXPECT_FALSE(fs::exists(dir / "new"));
}

TEST(Checkpoint, TwoRunsDoNotSaveIntoOneFolderAtOnce) {
  const TemporaryFolder dir;
  save(dir.path(), 1, 20);
  const int lock = open(dir.path().c_str(), O_RDONLY | O_DIRECTORY);
  ASSERT_EQ(flock(lock, LOCK_EX), 0);
  fs::create_directory(dir / ".partial");
  EXPECT_THAT(error_of<c10::Error>([&] { save(dir.path(), 1, 40); }),
              HasSubstr("another run is saving there"));
  discard_partial_checkpoint(dir.path());
  EXPECT_TRUE(fs::exists(dir / ".partial"));
  close(lock);
  discard_partial_checkpoint(dir.path());
  EXPECT_FALSE(fs::exists(dir / ".partial"));
  discard_partial_checkpoint(dir / "none");
}

TEST(Checkpoint, WhatAKilledSaveLeftDoesNotDisturb) {
  const TemporaryFolder dir;
  save(dir.path(), 1, 20);
  fs::create_directory(dir / ".partial");
  test::write_text(dir / ".partial/model.safetensors", "half");
  fs::create_symlink("iter_0000040", dir / ".latest.7.0.partial");
  EXPECT_EQ(Checkpoint(dir.path()).state()->iteration, 20);
  save(dir.path(), 1, 40);
  EXPECT_THAT(test::names_in(dir.path()), Not(testing::Contains(testing::EndsWith(".partial"))));
  EXPECT_EQ(Checkpoint(dir.path()).state()->iteration, 40);
}

}  // namespace
}  // namespace braid
