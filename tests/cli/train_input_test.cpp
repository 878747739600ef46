// Every wrong flag, value, combination and file of `braid train`: one line that names the flag and
// the values, exit code 2, nothing made or overwritten, no rank started.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cstddef>
#include <map>

#include "tests/cli/train_program.h"

namespace braid {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::StartsWith;

/// From now on this process can start threads, but no process: what tries to start a rank fails.
void forbid_processes() {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 4, 0),  // glibc falls back to clone
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 0, 2),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args)),
      BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, CLONE_VM, 0, 2),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
  };
  const sock_fprog filter{sizeof program / sizeof program[0], program};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0)
    ::_exit(125);
}

/// Root meets the permissions of files, too.
void respect_permissions() {
  ::prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE);
  ::prctl(PR_CAPBSET_DROP, CAP_DAC_READ_SEARCH);
}

/// Every path below the folder with type, size, time of change and content.
std::map<std::string, std::string> snapshot(const fs::path& folder) {
  std::map<std::string, std::string> found;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    struct stat status {};
    ::lstat(entry.path().c_str(), &status);
    std::string& text = found[entry.path()];
    text = std::to_string(status.st_mode) + " " + std::to_string(status.st_mtim.tv_sec) + "." +
           std::to_string(status.st_mtim.tv_nsec);
    if (S_ISREG(status.st_mode) && status.st_size < 1 << 20) text += test::read_text(entry.path());
  }
  return found;
}

/// Runs braid with these words where it can't start a process; expects one line with all `texts` and
/// an untouched folder.
void expect_refused(
    const fs::path& folder, const test::Words& words, const std::vector<std::string>& texts,
    const std::function<void()>& prepare = [] {}) {
  std::string shown;
  for (const auto& word : words) shown += word + " ";
  SCOPED_TRACE(shown);
  const auto before = snapshot(folder);
  test::Program program(folder, words, [&] {
    forbid_processes();
    prepare();
  });
  EXPECT_EQ(program.wait(), 2);
  const std::string error = program.error();
  EXPECT_EQ(program.out(), "");
  EXPECT_THAT(error, StartsWith("braid: error: "));
  EXPECT_EQ(std::count(error.begin(), error.end(), '\n'), 1) << error;
  for (const auto& text : texts) EXPECT_THAT(error, HasSubstr(text));
  EXPECT_EQ(before, snapshot(folder));
}

struct Case {
  test::Words more;  // after the words of a good run on two ranks
  std::vector<std::string> texts;
};

class TrainInput : public testing::Test {
 protected:
  void refuse_all(const std::vector<Case>& cases) const {
    for (const Case& c : cases) refuse(c.more, c.texts);
  }
  void refuse(
      const test::Words& more, const std::vector<std::string>& texts,
      const std::function<void()>& prepare = [] {}) const {
    test::Words words = test::TrainFolder::train({"--nproc", "2"});
    words.insert(words.end(), more.begin(), more.end());
    expect_refused(folder_.path(), words, texts, prepare);
  }
  test::TrainFolder folder_;
};

TEST_F(TrainInput, TheGoodRunIsGood) {
  folder_.run({"--nproc", "2", "--train-iters", "1"});
  // The same where no process can be started: the tests below would see a launcher that tries.
  test::Program program(folder_.path(),
                        test::TrainFolder::train({"--nproc", "2", "--output-dir", "none"}),
                        forbid_processes);
  EXPECT_EQ(program.wait(), 1);
  EXPECT_THAT(program.error(), HasSubstr("can't start a process"));
}

TEST_F(TrainInput, Flags) {
  refuse_all({
      {{"--num-layer", "2"}, {"--num-layer", "--num-layers?"}},
      {{"--no-such-thing"}, {"unknown flag --no-such-thing"}},
      {{"-v"}, {"unknown flag -v"}},
      {{"words.txt"}, {"unexpected argument 'words.txt'"}},
      {{"--use-coc=maybe"}, {"--use-coc", "maybe"}},
      {{"--seq-length"}, {"--seq-length"}},
      {{"--save=", "--seed", "1"}, {"--save=", "no value"}},
      {{"--nproc", "4294967296"}, {"--nproc is '4294967296'", "below 4096"}},
      {{"--num-layers", "2147483646"}, {"--num-layers 2147483646", "GB"}},
  });
  expect_refused(folder_.path(), {"train"}, {"--num-layers", "--data-path", "--lr"});
  expect_refused(folder_.path(), {"train", "--nproc", "2"},
                 {"--num-layers", "--data-path", "--lr"});
}

TEST_F(TrainInput, Numbers) {
  refuse_all({
      {{"--num-layers", "0"}, {"--num-layers", "'0'", "at least 1"}},
      {{"--num-layers", "-3"}, {"--num-layers", "'-3'", "at least 1"}},
      {{"--num-layers", "two"}, {"--num-layers", "'two'", "an integer"}},
      {{"--num-layers", "2.5"}, {"--num-layers", "'2.5'", "an integer"}},
      {{"--num-layers", "99999999999999999999"}, {"--num-layers", "'99999999999999999999'"}},
      {{"--num-layers", ""}, {"--num-layers", "''"}},
      {{"--vocab-size", "1"}, {"--vocab-size", "'1'", "at least 2"}},
      {{"--lr", "0"}, {"--lr", "'0'", "above 0"}},
      {{"--lr", "-1e-3"}, {"--lr", "'-1e-3'", "above 0"}},
      {{"--lr", "nan"}, {"--lr", "'nan'"}},
      {{"--lr", "inf"}, {"--lr", "'inf'"}},
      {{"--lr", "1e-3x"}, {"--lr", "'1e-3x'", "a number"}},
      {{"--weight-decay", "-1"}, {"--weight-decay", "'-1'", "at least 0"}},
      {{"--adam-beta1", "1"}, {"--adam-beta1", "'1'", "below 1"}},
      {{"--seed", "-1"}, {"--seed", "'-1'", "at least 0"}},
      {{"--nproc", "0"}, {"--nproc", "'0'", "at least 1"}},
      {{"--nproc", "two"}, {"--nproc", "'two'"}},
      {{"--tensor-model-parallel-size", "0"}, {"--tensor-model-parallel-size", "'0'"}},
      {{"--coc-parallel-num", "0"}, {"--coc-parallel-num", "'0'", "at least 1"}},
      {{"--coc-mode", "fast"}, {"--coc-mode", "'fast'", "{auto,serial,chunked,fused}"}},
      {{"--lr-decay-style", "step"}, {"--lr-decay-style", "'step'", "{linear,cosine,constant}"}},
      {{"--split", "words"}, {"--split", "'words'"}},
      {{"--split", "1,2,3,4"}, {"--split", "'1,2,3,4'"}},
      {{"--split", "0,1"}, {"--split", "'0,1'", "training"}},
      {{"--split", "-9,1"}, {"--split", "'-9,1'"}},
      {{"--split", ""}, {"--split", "''"}},
      {{"--output-dir", ""}, {"--output-dir", "''"}},
  });
}

TEST_F(TrainInput, WhatDoesNotFit) {
  refuse_all({
      {{"--tensor-model-parallel-size", "3"}, {"--tensor-model-parallel-size 3", "ranks 2"}},
      {{"--tensor-model-parallel-size", "2", "--nproc", "3"},
       {"--tensor-model-parallel-size 2", "ranks 3"}},
      {{"--tensor-model-parallel-size", "2", "--num-attention-heads", "3", "--hidden-size", "66"},
       {"--tensor-model-parallel-size 2", "--num-attention-heads 3"}},
      {{"--tensor-model-parallel-size", "2", "--num-query-groups", "1"},
       {"--tensor-model-parallel-size 2", "--num-query-groups 1"}},
      {{"--tensor-model-parallel-size", "2", "--group-query-attention"},
       {"--tensor-model-parallel-size 2", "--num-query-groups 1"}},
      {{"--tensor-model-parallel-size", "2", "--hidden-size", "65", "--kv-channels", "16"},
       {"--tensor-model-parallel-size 2", "--hidden-size 65"}},
      {{"--tensor-model-parallel-size", "2", "--ffn-hidden-size", "99"},
       {"--tensor-model-parallel-size 2", "--ffn-hidden-size 99"}},
      {{"--tensor-model-parallel-size", "2", "--sequence-parallel", "--seq-length", "33"},
       {"--tensor-model-parallel-size 2", "--seq-length 33", "--sequence-parallel"}},
      {{"--num-query-groups", "3"}, {"--num-query-groups 3", "--num-attention-heads 4"}},
      {{"--num-attention-heads", "5"}, {"--num-attention-heads 5", "--hidden-size 64"}},
      {{"--kv-channels", "15"}, {"--kv-channels 15", "odd"}},
      {{"--max-position-embeddings", "31"}, {"--seq-length 32", "--max-position-embeddings 31"}},
      {{"--global-batch-size", "6"},
       {"--global-batch-size 6", "--micro-batch-size 2", "2 data-parallel ranks"}},
      {{"--min-lr", "0.1"}, {"--min-lr 0.1", "--lr 0.01"}},
      {{"--lr-warmup-iters", "10"}, {"--lr-warmup-iters 10", "--lr-decay-iters 10"}},
      {{"--coc-parallel-num", "4"}, {"--coc-parallel-num is 4", "--use-coc is off"}},
      {{"--coc-fused-kernel"}, {"--coc-fused-kernel", "--use-coc is off"}},
      {{"--coc-mode", "fused"}, {"--coc-mode is fused", "--use-coc is off"}},
      {{"--use-coc", "--coc-mode", "serial", "--coc-fused-kernel"},
       {"--coc-mode serial", "--coc-fused-kernel"}},
      {{"--use-coc", "--coc-mode", "serial", "--coc-parallel-num", "4"},
       {"--coc-mode serial", "--coc-parallel-num 4"}},
      {{"--recompute-method", "block"}, {"--recompute-method is block", "--recompute-granularity"}},
      {{"--recompute-num-layers", "1"}, {"--recompute-num-layers is 1", "--recompute-granularity"}},
      {{"--recompute-granularity", "selective"}, {"--recompute-granularity selective", "HINT"}},
      {{"--recompute-granularity", "full", "--recompute-num-layers", "3"},
       {"--recompute-num-layers 3", "--num-layers 2"}},
      {{"--use-coc", "--optimize-recompute-communication-level", "1"},
       {"--optimize-recompute-communication-level 1", "--use-coc"}},
      {{"--use-ascend-coc", "--use-ascend-mc2"}, {"--use-ascend-mc2", "--use-coc"}},
      {{"--pipeline-model-parallel-size", "2"}, {"--pipeline-model-parallel-size 2"}},
      {{"--fp16"}, {"--fp16", "--bf16"}},
  });
}

TEST_F(TrainInput, Data) {
  folder_.write("empty.txt", "");
  folder_.write("short.txt", std::string(33, 'a'));
  folder_.write("binaries/a.bin", std::string("a\0b", 3));
  fs::create_directories(folder_ / "nothing");
  folder_.write("secret.txt", "text");
  fs::permissions(folder_ / "secret.txt", fs::perms::none);
  ASSERT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  std::string shard("BRAIDTOK\1\0\0\0\2\0\0\0\xe8\3\0\0\0\0\0\0\0\2\0\0\0\0\0\0",
                    32);  // 1000 of 512
  folder_.write("cut.tok", shard + std::string(1998, 'a'));
  std::string whole = shard;
  for (int i = 0; i < 1000; ++i) whole += {static_cast<char>(i), static_cast<char>(i % 2)};
  folder_.write("whole.tok", whole);
  shard[8] = 7;
  folder_.write("newer.tok", shard + std::string(2000, '\1'));
  refuse_all({
      {{"--data-path", "missing.txt"}, {"--data-path missing.txt", "no such"}},
      {{"--data-path", "empty.txt"}, {"empty.txt", "no token"}},
      {{"--data-path", "nothing"}, {"nothing", "no token"}},
      {{"--data-path", "binaries"}, {"binaries", "no token", "1 unreadable or binary"}},
      {{"--data-path", "pipe"}, {"pipe", "neither a file nor a folder"}},
      {{"--data-path", "short.txt"}, {"training data has 30 tokens", "--seq-length 32", "33"}},
      {{"--data-path", "words.txt", "--split", "9999,1"},
       {"validation data has 6 tokens", "--seq-length 32", "33"}},
      {{"--vocab-size", "255"}, {"tokens go up to 255", "--vocab-size is 255"}},
      {{"--data-path", "whole.tok"}, {"tokens go up to 511", "--vocab-size is 256"}},
      {{"--data-path", "cut.tok"}, {"cut.tok", "declares 1000 tokens", "1998 bytes"}},
      {{"--data-path", "newer.tok"}, {"newer.tok", "version 7", "version 1"}},
  });
  refuse({"--data-path", "secret.txt"}, {"--data-path secret.txt", "no permission"},
         respect_permissions);
}

TEST_F(TrainInput, OutputFolders) {
  folder_.write("a_file", "kept");
  folder_.write("old/metrics.jsonl", "{}");
  folder_.write("pretrained/model.safetensors", "kept");
  folder_.write("taken/metrics.jsonl/x", "kept");
  fs::create_directories(folder_ / "locked");
  fs::permissions(folder_ / "locked", fs::perms::owner_read | fs::perms::owner_exec);
  refuse_all({
      {{"--output-dir", "a_file"}, {"--output-dir a_file", "a_file is not a folder"}},
      {{"--output-dir", "a_file/run"}, {"--output-dir a_file/run", "a_file is not a folder"}},
      {{"--output-dir", "taken"}, {"metrics.jsonl", "folder"}},
      {{"--save", "a_file"}, {"--save a_file", "not a folder"}},
      {{"--save", "pretrained"}, {"pretrained/model.safetensors", "overwritten"}},
      {{"--trace", "pretrained"}, {"--trace pretrained", "is a folder"}},
      {{"--trace", "a_file/x.json"}, {"--trace", "a_file is not a folder"}},
      {{"--trace", "words.txt"}, {"--trace words.txt", "is a file, and no trace"}},
      {{"--trace", "runs/train/metrics.jsonl"}, {"--trace", "metrics file of --output-dir"}},
      {{"--data-path", "old/metrics.jsonl", "--output-dir", "old"},
       {"--data-path old/metrics.jsonl", "which the run writes"}},
  });
  refuse({"--output-dir", "locked/run"}, {"--output-dir locked/run", "no permission"},
         respect_permissions);
  refuse({"--output-dir", "locked"}, {"--output-dir locked", "no permission"}, respect_permissions);
  refuse({"--save", "locked/x"}, {"--save locked/x", "no permission"}, respect_permissions);
}

TEST_F(TrainInput, Checkpoints) {
  folder_.run({"--train-iters", "2", "--output-dir", "good"});
  const fs::path good = folder_.path() / "good/checkpoint/iter_0000002";
  const auto damaged = [&](const std::string& name, const std::string& file,
                           const std::function<std::string(std::string)>& damage) {
    fs::copy(good, folder_.path() / name);
    const std::string text = test::read_text(good / file);
    fs::remove(folder_.path() / name / file);
    if (damage) test::write_text(folder_.path() / name / file, damage(text));
  };
  const auto cut = [](std::string text) { return text.substr(0, text.size() - 100); };
  const auto replaced = [](const std::string& from, const std::string& to) {
    return [=](std::string text) {
      const auto at = text.find(from);
      EXPECT_NE(at, std::string::npos) << from;
      return text.replace(at, from.size(), to);
    };
  };
  damaged("cut_weights", "model.safetensors", cut);
  damaged("cut_moments", "optimizer.safetensors", cut);
  damaged("no_moments", "optimizer.safetensors", nullptr);
  damaged("no_config", "config.json", nullptr);
  damaged("bad_config", "config.json", cut);
  damaged("bad_state", "trainer_state.json", cut);
  damaged("newer", "trainer_state.json",
          replaced("\"format_version\": 1", "\"format_version\": 9"));
  damaged("renamed", "model.safetensors",
          replaced("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.xp_proj.weight"));
  damaged("reshaped", "model.safetensors", replaced("\"shape\":[256,64]", "\"shape\":[64,256]"));
  damaged("reshaped_moments", "optimizer.safetensors",
          replaced("\"shape\":[256,64]", "\"shape\":[64,256]"));
  damaged("tuner", "trainer_state.json", replaced("\"tuner\": {}", "\"tuner\": {\"a\": -1}"));
  folder_.write("lost/latest_checkpointed_iteration.txt", "7\n");
  folder_.write("garbled/latest_checkpointed_iteration.txt", "seven\n");
  fs::create_directories(folder_ / "nothing");
  refuse_all({
      {{"--load", "missing"}, {"--load missing", "no such"}},
      {{"--load", "words.txt"}, {"--load words.txt", "not a folder"}},
      {{"--load", "nothing"}, {"no checkpoint in nothing"}},
      {{"--load", "good"}, {"no checkpoint in good", "HINT", "good/checkpoint"}},
      {{"--load", "lost"}, {"lost", "iteration 7", "iter_0000007", "does not exist"}},
      {{"--load", "garbled"}, {"garbled", "does not hold an iteration"}},
      {{"--load", "cut_weights"}, {"cut_weights/model.safetensors"}},
      {{"--load", "cut_moments"}, {"cut_moments/optimizer.safetensors"}},
      {{"--load", "no_moments"}, {"no_moments/optimizer.safetensors"}},
      {{"--load", "no_config"}, {"no_config/config.json", "does not exist"}},
      {{"--load", "bad_config"}, {"bad_config/config.json", "damaged"}},
      {{"--load", "bad_state"}, {"bad_state/trainer_state.json", "damaged"}},
      {{"--load", "newer"}, {"newer/trainer_state.json", "version 9", "version 1"}},
      {{"--load", "renamed"}, {"renamed", "up_proj", "xp_proj"}},
      {{"--load", "reshaped"}, {"reshaped", "[64, 256]", "[256, 64]"}},
      {{"--load", "reshaped_moments"}, {"reshaped_moments", "[64, 256]", "[256, 64]"}},
      {{"--load", "tuner"}, {"tuner", "-1"}},
  });
  const auto other_model = [&](const test::Words& more, const std::vector<std::string>& texts) {
    test::Words words{"--load", "good/checkpoint"};
    words.insert(words.end(), more.begin(), more.end());
    refuse(words, texts);
  };
  other_model({"--num-layers", "3"}, {"--num-layers is 3", "num_hidden_layers 2"});
  other_model({"--hidden-size", "128"}, {"--hidden-size is 128", "hidden_size 64"});
  other_model({"--ffn-hidden-size", "256"}, {"--ffn-hidden-size is 256", "intermediate_size 128"});
  other_model({"--num-attention-heads", "2"}, {"--num-attention-heads is 2", "heads 4"});
  other_model({"--num-query-groups", "2"}, {"--num-query-groups is 2", "heads 4"});
  other_model({"--vocab-size", "300"}, {"--vocab-size is 300", "vocab_size 256"});
  other_model({"--rotary-base", "5000"}, {"--rotary-base is 5000", "rope_theta 10000"});
  other_model({"--norm-epsilon", "1e-3"}, {"--norm-epsilon is 0.001", "rms_norm_eps 1e-05"});
  other_model({"--untie-embeddings-and-output-weights"},
              {"--untie-embeddings-and-output-weights is on", "tie_word_embeddings true"});

  // Ranks that another launcher has started check for themselves, and compare their flags.
  test::Program different(folder_.path(),
                          {"launch",
                           "--nproc",
                           "2",
                           "--",
                           "sh",
                           "-c",
                           "exec \"$0\" \"$@\" --lr 1e-$RANK --output-dir different",
                           BRAID_PROGRAM,
                           "train",
                           "--num-layers",
                           "2",
                           "--hidden-size",
                           "64",
                           "--num-attention-heads",
                           "4",
                           "--seq-length",
                           "32",
                           "--micro-batch-size",
                           "2",
                           "--train-iters",
                           "1",
                           "--data-path",
                           "words.txt"});
  EXPECT_EQ(different.wait(), 2);
  EXPECT_EQ(different.error(), "braid: error: --lr of rank 0 is 1.0, of rank 1 0.1\n");
  EXPECT_FALSE(fs::exists(folder_ / "different"));
  test::Words words{"launch", "--nproc", "2", "--", BRAID_PROGRAM};
  const auto train =
      test::TrainFolder::train({"--load", "good/checkpoint", "--norm-epsilon", "1e-3"});
  words.insert(words.end(), train.begin(), train.end());
  test::Program program(folder_.path(), words);
  EXPECT_EQ(program.wait(), 2);
  EXPECT_THAT(program.error(), StartsWith("braid: error: --norm-epsilon is 0.001, but "));
}

TEST_F(TrainInput, Environment) {
  const auto with = [&](const char* name, const char* value,
                        const std::vector<std::string>& texts) {
    refuse({}, texts, [&] { ::setenv(name, value, 1); });
  };
  with("BRAID_TIMEOUT_S", "soon", {"BRAID_TIMEOUT_S", "'soon'"});
  with("BRAID_TIMEOUT_S", "-1", {"BRAID_TIMEOUT_S", "'-1'"});
  with("BRAID_SLOT_BYTES", "12", {"BRAID_SLOT_BYTES", "'12'", "4096"});
  with("RANK", "1", {"WORLD_SIZE"});
  // Under torchrun the ranks are there already.
  refuse({}, {"--nproc is 2", "torchrun", "1 ranks"}, [] {
    for (const char* name : {"RANK", "LOCAL_RANK"}) ::setenv(name, "0", 1);
    for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) ::setenv(name, "1", 1);
  });
}

}  // namespace
}  // namespace braid
