// Reads, checks and merges files of choices.
#include "braid/ops/tuner_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <sstream>
#include <vector>

#include "braid/comm/texts.h"
#include "braid/core/check.h"
#include "braid/core/file.h"
#include "braid/core/log.h"
#include "braid/ops/tuner.h"

namespace braid::tuner {
namespace {

using nlohmann::json;
using Words = std::vector<std::string>;

constexpr const char* kCpu = "cpu";
constexpr const char* kChoices = "choices";

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const auto colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

/// One field of a key: what it begins with, and whether the rest can be of an operation.
struct Field {
  std::string begin, expected;
  std::function<bool(const std::string&)> fits;
};

Field one_of(const Words& words) {
  return {"", fmt::format("{}", fmt::join(words, ", ")), [words](const std::string& text) {
            return std::find(words.begin(), words.end(), text) != words.end();
          }};
}

Field number(const std::string& begin, bool is_power_of_two = false) {
  return {begin, begin + (is_power_of_two ? "a power of two (rows are rounded up)" : "a number"),
          [is_power_of_two](const std::string& text) {
            std::int64_t value = 0;
            const auto* last = text.data() + text.size();
            const auto [end, error] = std::from_chars(text.data(), last, value);
            return error == std::errc{} && end == last &&
                   (value > 0 ? text[0] != '0' : text == "0") &&
                   (!is_power_of_two || std::has_single_bit(static_cast<std::uint64_t>(value)));
          }};
}

const std::vector<Field>& fields() {
  static const std::vector<Field> all{
      one_of({"all_gather_matmul", "all_gather_matmul_v2", "matmul_reduce_scatter",
              "matmul_all_reduce", "matmul_all_reduce_int8", "all_gather_wgrad",
              "all_gather_matmul_backward", "all_gather_matmul_backward_dx",
              "all_gather_matmul_backward_dw"}),
      number("m=", /*is_power_of_two=*/true),
      number("n="),
      number("k="),
      one_of({dtype_name(at::kFloat), dtype_name(at::kBFloat16), dtype_name(at::kHalf),
              dtype_name(at::kDouble)}),
      number("ranks="),
      one_of({"host", "network"})};
  return all;
}

/// Errors: ValueError naming the key and the field when no operation's key is, or matches, this one.
void check_key(const std::string& key) {
  std::istringstream in(key);
  const Words words{std::istream_iterator<std::string>(in), {}};
  BRAID_CHECK(fmt::format("{}", fmt::join(words, " ")) == key, "the key '", key,
              "' has blanks beside the one between two fields");
  BRAID_CHECK(words.size() == fields().size(), "the key '", key, "' has ", words.size(),
              " fields, expected ", fields().size(),
              ": OPERATION m=M n=N k=K TYPE ranks=RANKS host or network; * for any");
  for (std::size_t i = 0; i < words.size(); ++i) {
    const auto& [begin, expected, fits] = fields()[i];
    const std::string& word = words[i];
    if (word == "*" || word == begin + "*") continue;
    BRAID_CHECK(word.starts_with(begin) && fits(word.substr(begin.size())), "the key '", key,
                "' has the field '", word, "', expected ", expected, " or *");
  }
}

/// What a file holds; nothing where there is none. Errors: ValueError naming the file.
struct Contents {
  json choices = json::object();
  std::string cpu;  // empty: none is said

  explicit Contents(const std::string& path) {
    const auto wrong = [&](const std::string& what) {
      BRAID_CHECK(false, path, " is not a file of the tuner's choices: ", what);
    };
    std::error_code ignored;
    if (!std::filesystem::exists(path, ignored)) return;
    if (!std::filesystem::is_regular_file(path, ignored)) wrong("it is not a regular file");
    std::ifstream in(path, std::ios::binary);
    if (!in) wrong(std::strerror(errno));
    const auto file = json::parse(in, nullptr, /*allow_exceptions=*/false);
    if (!file.is_object() || !file.contains(kChoices)) wrong("it is not {\"choices\": {...}}");
    choices = file[kChoices];
    try {
      check_choices(choices);
      for (const auto& [key, plan] : choices.items()) check_key(key);
    } catch (const c10::ValueError& error) {
      wrong(error.what_without_backtrace());
    }
    if (const auto found = file.find(kCpu); found != file.end())
      cpu = found->is_string() ? found->get<std::string>() : found->dump();
  }

  bool is_of_other_cpu() const { return !cpu.empty() && cpu != cpu_name(); }
  /// What this CPU can use.
  json usable() const {
    json result = choices;
    for (auto it = result.begin(); it != result.end() && is_of_other_cpu();)
      it = is_pin(it.key()) ? std::next(it) : result.erase(it);
    return result;
  }
};

}  // namespace

void read_choices(const Group& group, const std::string& path) {
  json mine;
  if (group.rank() == 0) {
    try {
      const Contents file(path);
      if (file.is_of_other_cpu())
        warn(fmt::format("{} was measured on another CPU ({}; this is {}): only its pins are used",
                         path, file.cpu, cpu_name()));
      mine = {{kChoices, file.usable()}};
    } catch (const c10::ValueError& error) {
      mine = {{"error", error.what_without_backtrace()}};
    }
  }
  constexpr auto kReplace = json::error_handler_t::replace;
  const auto shared = json::parse(broadcast_text(group, mine.dump(-1, ' ', false, kReplace), 0));
  BRAID_CHECK(!shared.contains("error"), shared.value("error", ""));
  set_choices(shared.at(kChoices));
}

void write_choices(const std::string& path, const json& measured) {
  std::error_code ignored;
  if (measured.empty() && std::filesystem::exists(path, ignored)) return;
  const FileLock lock(path);
  remove_partials(path);
  json all = Contents(path).usable();
  all.update(measured);
  replace_file(path, json{{kCpu, cpu_name()}, {kChoices, all}}.dump(1) + "\n");
}

void warn_of_unused_pins(const std::string& path) {
  constexpr std::ptrdiff_t kMost = 3;
  auto pins = unused_pins();
  const auto num = std::ssize(pins);
  if (num == 0) return;
  pins.resize(static_cast<std::size_t>(std::min(num, kMost)));
  warn(fmt::format("--tuner-file {}: no operation of this run went by {}: '{}'{}", path,
                   num == 1 ? "a pin" : fmt::format("{} pins", num), fmt::join(pins, "', '"),
                   num > kMost ? ", ..." : ""));
}

}  // namespace braid::tuner
