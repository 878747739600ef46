// Measures and remembers choices.
#include "braid/ops/tuner.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <set>
#include <sstream>
#include <string_view>
#include <tuple>
#include <vector>

#include "braid/comm/shared_memory.h"
#include "braid/comm/texts.h"
#include "braid/comm/timing.h"
#include "braid/core/check.h"
#include "braid/ops/tile_matmul.h"

namespace braid::tuner {
namespace {

// A candidate this much slower than the best one is not measured further.
constexpr double kHopeless = 1.5, kClose = 1.06;
// Between hosts, what differs by less is noise, and of such plans the one with the fewest tiles is chosen.
constexpr double kEqual = 1.01;
constexpr int kRounds = 5;
constexpr double kShortest = 4e-3;  // seconds that are timed at once, at least
constexpr double kSeconds = 2;      // of a key, for telling apart what is close
// Below this many rows a rank, cutting the matmul costs more than it hides (measured: docs/design.md).
constexpr std::int64_t kFewRows = 128;

struct Pin {
  Plan plan;
  bool used = false;
};

thread_local std::map<std::string, Plan> table;
thread_local std::set<std::string> measured_keys;  // of the table: here, and not set
thread_local std::map<std::string, Pin> pins;      // keys with *
// A group's id, and a key with its m rounded up: looked up at every call, so without texts.
using InGroup = std::tuple<std::uint64_t, std::string_view, std::int64_t, std::int64_t,
                           std::int64_t, at::ScalarType>;
// What the ranks of a group run with: what rank 0 knew, or they measured together.
thread_local std::map<InGroup, Plan> agreed;
// Rules of thumb for keys that are not measured while another operation is in flight.
thread_local std::map<InGroup, Plan> in_flight_rules;
thread_local bool live = true;

std::int64_t rounded_up(std::int64_t m) {
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(m)));
}

std::string text_of(const Group& group, const Key& key) {
  return fmt::format("{} m={} n={} k={} {} ranks={} {}", key.op, rounded_up(key.m), key.n, key.k,
                     dtype_name(key.dtype), group.size(), group.on_one_host() ? "host" : "network");
}

bool matches(const std::string& pin, const std::string& key) {
  std::istringstream pin_words(pin), key_words(key);
  std::string a, b;
  while (key_words >> b) {
    if (!(pin_words >> a)) return false;
    const bool any = a == "*" || (a.ends_with("=*") && b.starts_with(a.substr(0, a.size() - 1)));
    if (!any && a != b) return false;
  }
  return !(pin_words >> a);
}

const Plan* known(const std::string& key) {
  Pin* best = nullptr;
  std::ptrdiff_t fewest = 0;
  for (auto& [text, pin] : pins) {
    const auto stars = std::count(text.begin(), text.end(), '*');
    if ((best == nullptr || stars < fewest) && matches(text, key)) {
      best = &pin;
      fewest = stars;
    }
  }
  if (best != nullptr) {
    best->used = true;
    return &best->plan;
  }
  const auto found = table.find(key);
  return found == table.end() ? nullptr : &found->second;
}

/// What rank 0 knows for a key, as text, or "": ranks may know different choices, from other groups
/// or files. Errors: ValueError, the same on all ranks, when their keys differ.
std::string first_choice(const Group& group, const Key& key) {
  const Plan* known_here = known(text_of(group, key));
  const std::string mine =
      fmt::format("m={} n={} k={} {}\n{}", key.m, key.n, key.k, dtype_name(key.dtype),
                  known_here == nullptr ? "" : to_text(*known_here));
  const auto all = gather_texts(group, mine);
  const auto key_of = [](const std::string& text) { return text.substr(0, text.find('\n')); };
  for (std::size_t rank = 1; rank < all.size(); ++rank)
    BRAID_CHECK(key_of(all[rank]) == key_of(all[0]), key.op, ": ranks 0 and ", rank, " of group ",
                group.name(), " disagree in the whole product: ", key_of(all[0]), " and ",
                key_of(all[rank]), ". HINT: whole_features where the ranks' shares differ");
  return all[0].substr(all[0].find('\n') + 1);
}

/// Seconds of each candidate, of the slowest rank, by round.
std::vector<std::vector<double>> time(const Group& group, const std::vector<Plan>& plans,
                                      int rounds, int calls,
                                      const std::function<void(const Plan&)>& trial) {
  std::vector<std::function<void()>> ways;
  for (const Plan& plan : plans) ways.emplace_back([&] { trial(plan); });
  const at::Tensor seconds = time_interleaved(group, ways, rounds, calls);
  std::vector<std::vector<double>> result;
  for (std::int64_t p = 0; p < seconds.size(0); ++p) {
    const auto* row = seconds.const_data_ptr<double>() + p * rounds;
    result.emplace_back(row, row + rounds);
  }
  return result;
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Candidates with what they took so far.
struct Contest {
  std::vector<Plan> plans;
  std::vector<std::vector<double>> seconds;  // [plan][round]

  void add(const std::vector<std::vector<double>>& more) {
    seconds.resize(plans.size());
    for (std::size_t p = 0; p < plans.size(); ++p)
      seconds[p].insert(seconds[p].end(), more[p].begin(), more[p].end());
  }
  /// Keeps the plans within a factor of the best one, by the medians of what they took in relation to
  /// the first plan in the same round: so the machine's moods meet all of them.
  void keep(double within) {
    std::vector<double> medians;
    for (const auto& each : seconds) {
      std::vector<double> ratios;
      for (std::size_t round = 0; round < each.size(); ++round)
        ratios.push_back(each[round] / seconds[0][round]);
      medians.push_back(median(std::move(ratios)));
    }
    const double best = *std::min_element(medians.begin(), medians.end());
    std::size_t kept = 0;
    for (std::size_t p = 0; p < plans.size(); ++p) {
      if (medians[p] > within * best) continue;
      plans[kept] = plans[p];
      std::swap(seconds[kept++], seconds[p]);
    }
    plans.resize(kept);
    seconds.resize(kept);
  }
  double fastest() const {
    double fastest = seconds[0][0];
    for (const auto& each : seconds)
      fastest = std::min(fastest, *std::min_element(each.begin(), each.end()));
    return fastest;
  }
};

/// The plans that this host has the memory for, by trying them: who lacks it tells all ranks.
/// Errors: c10::OutOfMemoryError when there is none.
std::vector<Plan> possible(const std::vector<Plan>& plans,
                           const std::function<void(const Plan&)>& trial) {
  std::vector<Plan> result;
  for (const Plan& plan : plans) {
    try {
      trial(plan);
      result.push_back(plan);
    } catch (const c10::OutOfMemoryError&) {
      if (result.empty() && plan == plans.back()) throw;
    }
  }
  return result;
}

/// The fastest plan: all are tried once to warm up and once more, and the hopeless ones go; what is
/// close to the best after kRounds rounds gets as many more as fit into kSeconds.
Plan measure(const Group& group, const std::vector<Plan>& plans,
             const std::function<void(const Plan&)>& trial) {
  Contest contest{possible(plans, trial), {}};
  const auto run = [&](int rounds, int calls) {
    return time(group, contest.plans, rounds, calls, trial);
  };
  contest.add(run(1, 1));
  contest.keep(kHopeless);
  const double fastest = contest.fastest();
  const int calls = static_cast<int>(std::clamp(std::ceil(kShortest / fastest), 1.0, 100.0));
  contest.seconds.clear();
  contest.add(run(kRounds, calls));
  contest.keep(kClose);
  if (contest.plans.size() > 1) {
    const double round_s = fastest * calls * static_cast<double>(contest.plans.size());
    contest.add(run(static_cast<int>(std::clamp(kSeconds / round_s, 5.0, 40.0)), calls));
    contest.keep(group.on_one_host() ? 1.0 : kEqual);
  }
  return contest.plans[0];
}

Plan by_rule(const Group& group, const Key& key) {
  const std::int64_t m = rounded_up(key.m);
  Plan plan{.num_chunks = m < kFewRows * group.size() ? 1 : group.on_one_host() ? 0 : 4};
  plan.native = key.has_native && is_native(key.dtype, m);
  return plan;
}

/// A plan without what this operation or this group cannot have.
Plan without_impossible(const Group& group, const Key& key, Plan plan) {
  plan.ring = plan.ring && plan.num_chunks == 0 && key.reduces && group.on_one_host();
  plan.native = plan.native && key.has_native && !plan.ring;
  return plan;
}

/// As the caller's options say; mode automatic aside.
Plan as_asked(const Group& group, const Key& key, const MatmulOptions& options) {
  Plan plan = by_rule(group, key);
  plan.native = options.native.value_or(plan.native);
  plan.ring = options.ring;
  plan.num_chunks = options.mode == Mode::serial ? 1 : options.num_chunks;
  if (options.mode == Mode::chunked) {
    BRAID_CHECK(options.num_chunks >= 1, key.op, ": num_chunks is ", options.num_chunks,
                ", at least 1 is needed");
  } else if (options.mode == Mode::fused) {
    plan.num_chunks = 0;
  }
  return without_impossible(group, key, plan);
}

}  // namespace

std::vector<Plan> candidates(const Group& group, const Key& key) {
  std::vector<Plan> plans;
  const bool on_host = group.on_one_host();
  for (const int num_chunks :
       on_host ? std::vector<int>{1, 0, 2} : std::vector<int>{1, 0, 2, 4, 6, 8, 16}) {
    plans.push_back({.num_chunks = num_chunks});
    if (key.has_native) plans.push_back({.num_chunks = num_chunks, .native = true});
    if (num_chunks == 0 && on_host && key.reduces && group.size() > 2)
      plans.push_back({.num_chunks = 0, .ring = true});
  }
  return plans;
}

Plan choose(const Group& group, const Key& key, const MatmulOptions& options,
            const std::function<void(const Plan&)>& trial) {
  if (options.mode != Mode::automatic) return as_asked(group, key, options);
  if (key.m == 0) return {};
  const InGroup in_group(group.id(), key.op, rounded_up(key.m), key.n, key.k, key.dtype);
  if (const auto found = agreed.find(in_group); found != agreed.end()) return found->second;
  // Trials would come round to the entries of operations in flight (kEntries).
  const bool in_flight = group.memory() != nullptr && group.memory()->num_in_flight() > 0;
  const auto rule = in_flight_rules.find(in_group);
  if (in_flight && rule != in_flight_rules.end()) return rule->second;
  const std::string text = text_of(group, key);
  const std::string first = first_choice(group, key);
  Plan plan;
  if (!first.empty()) {
    plan = without_impossible(group, key, plan_from_text(first));
  } else if (live && in_flight) {
    return in_flight_rules[in_group] = by_rule(group, key);
  } else if (live) {
    plan = table[text] = measure(group, candidates(group, key), trial);
    measured_keys.insert(text);
  } else {
    plan = by_rule(group, key);
  }
  return agreed[in_group] = plan;
}

const char* dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "f32";
    case at::kBFloat16:
      return "bf16";
    case at::kHalf:
      return "fp16";
    default:
      return c10::toString(dtype);
  }
}

void allow_live(bool on) { live = on; }

nlohmann::json choices(bool with_pins) {
  nlohmann::json result = nlohmann::json::object();
  for (const auto& [key, plan] : table) result[key] = to_text(plan);
  if (with_pins)
    for (const auto& [key, pin] : pins) result[key] = to_text(pin.plan);
  return result;
}

std::vector<Plan> plans_in_use() {
  std::vector<Plan> plans;
  for (const auto* used : {&agreed, &in_flight_rules})
    for (const auto& [key, plan] : *used) plans.push_back(plan);
  return plans;
}

void forget_measured() { measured_keys.clear(); }

nlohmann::json measured() {
  nlohmann::json result = nlohmann::json::object();
  for (const auto& key : measured_keys) result[key] = to_text(table.at(key));
  return result;
}

bool is_pin(const std::string& key) { return key.find('*') != std::string::npos; }

std::vector<std::string> unused_pins() {
  std::vector<std::string> unused;
  for (const auto& [key, pin] : pins)
    if (!pin.used) unused.push_back(key);
  return unused;
}

void forget_choices() {
  table.clear();
  measured_keys.clear();
  pins.clear();
  agreed.clear();
  in_flight_rules.clear();
}

void check_choices(const nlohmann::json& choices) {
  BRAID_CHECK(choices.is_object(), "tuner choices are ", choices.type_name(),
              ", expected an object");
  for (const auto& [key, plan] : choices.items()) {
    BRAID_CHECK(plan.is_string(), "the tuner's choice for '", key, "' is ", plan.dump(),
                ", expected a plan such as \"fused\"");
    try {
      (void)plan_from_text(plan.get<std::string>());
    } catch (const c10::ValueError& error) {
      BRAID_CHECK(false, "the tuner's choice for '", key, "': ", error.what_without_backtrace());
    }
  }
}

void set_choices(const nlohmann::json& choices) {
  check_choices(choices);
  agreed.clear();
  in_flight_rules.clear();
  for (const auto& [key, plan] : choices.items()) {
    const Plan value = plan_from_text(plan.get<std::string>());
    if (is_pin(key))
      pins[key].plan = value;
    else
      table[key] = value;
  }
}

}  // namespace braid::tuner
