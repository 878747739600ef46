// Processes by their numbers: whether they run, and when they have ended.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

namespace braid::test {

using Clock = std::chrono::steady_clock;

/// Whether the process runs: neither gone nor a zombie that nobody has reaped yet.
inline bool runs(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const auto end_of_name = text.rfind(')');
  return end_of_name != std::string::npos && text.at(end_of_name + 2) != 'Z';
}

/// Calls `is_so` until it holds; false at the limit.
template <class Condition>
bool holds_within(std::chrono::milliseconds limit, Condition is_so) {
  for (const auto deadline = Clock::now() + limit; !is_so();) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

/// Processes whose parent is `pid`.
inline std::vector<pid_t> children_of(pid_t pid) {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream file(entry.path() / "stat");
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    const auto end_of_name = text.rfind(')');
    if (end_of_name == std::string::npos) continue;
    if (std::stoi(text.substr(end_of_name + 4)) == pid) found.push_back(std::stoi(name));
  }
  return found;
}

}  // namespace braid::test
