// Sets environment variables for the length of a test.
#pragma once

#include <cstdlib>
#include <map>
#include <optional>
#include <string>

namespace braid::test {

/// Sets the given variables (empty: unsets them) and restores the old values in the end.
class ScopedEnvironment {
 public:
  explicit ScopedEnvironment(const std::map<std::string, std::string>& values) {
    for (const auto& [name, value] : values) {
      const char* old = std::getenv(name.c_str());
      old_.emplace(name, old == nullptr ? std::nullopt : std::optional<std::string>(old));
      set(name, value.empty() ? std::nullopt : std::optional(value));
    }
  }
  ~ScopedEnvironment() {
    for (const auto& [name, value] : old_) set(name, value);
  }
  ScopedEnvironment(const ScopedEnvironment&) = delete;
  ScopedEnvironment& operator=(const ScopedEnvironment&) = delete;

 private:
  static void set(const std::string& name, const std::optional<std::string>& value) {
    if (value) {
      ::setenv(name.c_str(), value->c_str(), 1);
    } else {
      ::unsetenv(name.c_str());
    }
  }
  std::map<std::string, std::optional<std::string>> old_;
};

}  // namespace braid::test
