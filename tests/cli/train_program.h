// The program `braid` as a process of its own, and a small training run for it.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/folders.h"
#include "tests/support/pids.h"
#include "tests/support/text.h"

namespace braid::test {

using Words = std::vector<std::string>;

/// `braid` with these words, in `folder`; killed at the end, its ranks with it.
class Program {
 public:
  /// `prepare` runs in the new process before braid does; only async-signal-safe calls.
  Program(
      const std::filesystem::path& folder, Words words,
      const std::function<void()>& prepare = [] {}) {
    words.insert(words.begin(), BRAID_PROGRAM);
    std::vector<char*> argv;
    for (auto& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ != 0) return;
    if (::chdir(folder.c_str()) != 0) ::_exit(126);
    ::dup2(out_.fd, STDOUT_FILENO);
    ::dup2(error_.fd, STDERR_FILENO);
    prepare();
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  ~Program() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  pid_t pid() const { return pid_; }
  void kill(int signal) const { ::kill(pid_, signal); }
  std::string out() const { return out_.text(); }
  std::string error() const { return error_.text(); }

  /// Its ranks, once all `count` are there: rank r is element r.
  std::vector<pid_t> ranks(std::size_t count) const {
    std::vector<pid_t> found(count);
    EXPECT_TRUE(holds_within(std::chrono::seconds(30), [&] {
      std::size_t num_found = 0;
      for (const pid_t pid : children_of(pid_)) {
        const std::string variables = read_text("/proc/" + std::to_string(pid) + "/environ");
        const auto at = variables.find(std::string("\0RANK=", 6));
        if (at == std::string::npos) continue;  // before its exec
        found.at(std::stoul(variables.substr(at + 6))) = pid;
        ++num_found;
      }
      return num_found == count;
    })) << error();
    return found;
  }

  /// Waits for its end: the exit code, 128 + signal where one ended it, -1 at the limit.
  int wait(std::chrono::milliseconds limit = std::chrono::seconds(120)) {
    int status = 0;
    if (!holds_within(limit, [&] { return ::waitpid(pid_, &status, WNOHANG) != 0; })) return -1;
    pid_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

 private:
  struct File {
    int fd = ::memfd_create("output", MFD_CLOEXEC);
    ~File() { ::close(fd); }
    std::string text() const {
      std::string all(static_cast<std::size_t>(::lseek(fd, 0, SEEK_END)), ' ');
      [[maybe_unused]] const auto n = ::pread(fd, all.data(), all.size(), 0);
      return all;
    }
  };
  File out_, error_;
  pid_t pid_ = -1;
};

/// A folder with words.txt in it, for runs of `braid train`.
class TrainFolder : public TemporaryFolder {
 public:
  TrainFolder() { write("words.txt", words(60000)); }

  /// The words of a run of 10 iterations into the folder runs/train, followed by `more`, which wins.
  static Words train(const Words& more = {}) {
    Words all{"train", "--num-layers",          "2",         "--hidden-size",
              "64",    "--num-attention-heads", "4",         "--seq-length",
              "32",    "--micro-batch-size",    "2",         "--global-batch-size",
              "4",     "--train-iters",         "10",        "--lr",
              "1e-2",  "--data-path",           "words.txt", "--split",
              "9,1",   "--eval-iters",          "2"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  /// Runs it and expects success.
  void run(const Words& more = {}) const {
    Program program(path(), train(more));
    EXPECT_EQ(program.wait(), 0) << program.error();
  }
  /// metrics.jsonl of an output folder.
  std::vector<nlohmann::json> metrics(const std::string& output_dir = "runs/train") const {
    std::ifstream file(path() / output_dir / "metrics.jsonl");
    std::vector<nlohmann::json> lines;
    for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
    return lines;
  }
};

}  // namespace braid::test
