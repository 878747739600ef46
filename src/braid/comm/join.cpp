// Connects a rank to its run's store and compares the ranks there.
#include "braid/comm/join.h"

#include <ATen/Version.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <future>
#include <random>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "braid/comm/cores.h"
#include "braid/comm/reach.h"
#include "braid/comm/spawn.h"
#include "braid/core/build.h"
#include "braid/core/check.h"
#include "braid/core/env.h"
#include "braid/core/log.h"

namespace braid {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using StorePointer = c10::intrusive_ptr<c10d::Store>;

constexpr auto kAnswer =
    30s;  // of a store that is reached; libtorch asks name servers for addresses' names first
constexpr auto kFarewell =
    2s;  // for the others to read why the run ends, where this rank hosts the store

// The store's keys.
constexpr auto kOtherHost = "braid/other host";  // the address of a host that is not MASTER_ADDR's
std::string rank_key(int rank) { return fmt::format("braid/rank/{}", rank); }
std::string cpu_key(int rank) { return fmt::format("braid/cpu/{}", rank); }

/// This process, as no other one names itself.
const std::string& name_of_process() {
  static const std::string name = [] {
    char host[256] = "";
    (void)::gethostname(host, sizeof host - 1);
    return fmt::format("pid {} on {} ({:08x})", ::getpid(), host, std::random_device()());
  }();
  return name;
}

std::string text_of_run(const Place& place) {
  return fmt::format("{}{}{} ranks", place.run, place.run.empty() ? "" : ", ", place.world_size);
}

/// Errors: DistBackendError unless the store is this run's and no other process is this rank there.
void check_owner(c10d::Store& store, const Place& place, const std::string& where) {
  const auto run = text_of_run(place);
  const std::string owner = store.compareSet(kRunKey, std::string(), run);
  TORCH_CHECK_WITH(DistBackendError, owner == run, where, " belongs to another run: ", owner,
                   " there, ", run, " here");
  const std::string& self = name_of_process();
  const std::string first = store.compareSet(rank_key(place.rank), std::string(), self);
  TORCH_CHECK_WITH(
      DistBackendError, first == self, where,
      " belongs to another run, or to a program that ran before, or RANK is given twice: rank ",
      place.rank, " is ", first, " there, ", self, " here");
}

/// What is at a port of this host that can't be listened on.
std::string occupant(int port) {
  try {
    const auto store = open_store("127.0.0.1", port, Clock::now() + 1s);
    if (store->check({kRunKey})) return "another run's store: " + store->get_to_str(kRunKey);
    return "another program's store";
  } catch (const c10::Error&) {
    return "another program";
  }
}

void check_interface(const Place& place) {
  const std::string& interface = env().interface;
  if (interface.empty()) return;
  const std::string address = own_address(interface);
  BRAID_CHECK(!address.empty(), "BRAID_INTERFACE is '", interface,
              "', which is no network interface and no address of this host");
  BRAID_CHECK(place.on_one_host() || !is_loopback(address), "BRAID_INTERFACE is '", interface,
              "', which other hosts can't reach, and the run has ", place.world_size, " ranks, ",
              place.local_world_size, " of them on this host");
}

std::string text_of_missing_ranks(const std::vector<int>& ranks, const Place& place,
                                  std::chrono::milliseconds timeout) {
  constexpr std::ptrdiff_t kMost = 8;
  const auto shown = std::min(std::ssize(ranks), kMost), more = std::ssize(ranks) - shown;
  return fmt::format("rank{} {}{} of {} did not come within {} s", ranks.size() == 1 ? "" : "s",
                     fmt::join(ranks.begin(), ranks.begin() + shown, ", "),
                     more > 0 ? fmt::format(" and {} more", more) : "", place.world_size,
                     static_cast<double>(timeout.count()) / 1000.0);
}

[[noreturn]] void throw_store_gone(const Place& place, const std::exception& error) {
  C10_THROW_ERROR(DistBackendError,
                  fmt::format("store of the run at {}:{} (rank {}) is gone: {}", place.master_addr,
                              place.master_port, place.rank, text_of(error)));
}

/// One comparison of all ranks, at keys of its own. Rank 0 judges, so that all say the same.
class Comparison {
 public:
  Comparison(const Place& place, c10d::Store& store, const std::string& topic,
             std::chrono::milliseconds timeout)
      : place_(place), store_(store), topic_(topic), timeout_(timeout) {}

  /// Throws what check_same does.
  void run(const nlohmann::json& facts) {
    store_.set(key_of(place_.rank), facts.dump());
    // One text, "differs" or "missing"; empty: all is well.
    nlohmann::json verdict = nlohmann::json::object();
    if (place_.rank == 0) {
      verdict = judge(facts);
      store_.set(key("verdict"), verdict.dump());
      if (!verdict.empty()) part(place_, store_, topic_, place_.world_size - std::ssize(missing()));
    } else {
      if (comes(key("verdict")))
        verdict = nlohmann::json::parse(store_.get_to_str(key("verdict")));
      else
        verdict["missing"] = text_of_missing();
      if (!verdict.empty()) part(place_, store_, topic_, 0);
    }
    if (verdict.contains("missing"))
      C10_THROW_ERROR(DistBackendError, verdict["missing"].get<std::string>());
    if (verdict.contains("differs"))
      C10_THROW_ERROR(ValueError, verdict["differs"].get<std::string>());
  }

 private:
  std::string key(const std::string& name) const {
    return fmt::format("braid/{}/{}", topic_, name);
  }
  std::string key_of(int rank) const { return key(std::to_string(rank)); }

  bool comes(const std::string& wanted) {
    try {
      store_.wait({wanted}, std::chrono::milliseconds(std::max(left_ms(deadline_), 1)));
      return true;
    } catch (const c10::DistStoreError&) {  // the time-out
      return false;
    }
  }

  nlohmann::json judge(const nlohmann::json& facts) {
    std::string differs;
    for (int rank = 1; rank < place_.world_size; ++rank) {
      if (!comes(key_of(rank))) return {{"missing", text_of_missing()}};
      if (!differs.empty()) continue;
      const auto other = nlohmann::json::parse(store_.get_to_str(key_of(rank)));
      for (const auto& [name, value] : facts.items()) {
        const auto theirs = other.value(name, nlohmann::json());
        if (value != theirs)
          differs += fmt::format("{}{} of rank 0 is {}, of rank {} {}", differs.empty() ? "" : "; ",
                                 name, value.dump(), rank, theirs.dump());
      }
    }
    if (differs.empty()) return nlohmann::json::object();
    return {{"differs", differs}};
  }

  std::vector<int> missing() {
    std::vector<int> ranks;
    for (int rank = 0; rank < place_.world_size; ++rank)
      if (!store_.check({key_of(rank)})) ranks.push_back(rank);
    return ranks;
  }

  std::string text_of_missing() {
    const auto ranks = missing();
    return text_of_missing_ranks(ranks, place_, timeout_);
  }

  const Place& place_;
  c10d::Store& store_;
  std::string topic_;
  std::chrono::milliseconds timeout_;
  Deadline deadline_ = Clock::now() + timeout_;
};

void warn_of_other_cpus(const Place& place, c10d::Store& store) {
  const std::string mine = store.get_to_str(cpu_key(0));
  for (int rank = 1; rank < place.world_size; ++rank) {
    const std::string other = store.get_to_str(cpu_key(rank));
    if (other == mine) continue;
    return warn(
        fmt::format("ranks 0 and {} have CPUs of other instruction sets ({}, {}): the last bits of "
                    "their sums differ",
                    rank, mine, other));
  }
}

std::string libtorch_version() {
  const std::string config = at::show_config(), name = "TORCH_VERSION=";
  const auto begin = config.find(name);
  if (begin == std::string::npos) return "unknown";
  return config.substr(begin + name.size(), config.find(',', begin) - begin - name.size());
}

}  // namespace

StorePointer host_store(int port, const std::string& run) {
  try {
    auto store = HostedStore(port).start();
    store->set(kRunKey, run);
    return store;
  } catch (const c10::DistBackendError& error) {
    C10_THROW_ERROR(
        DistBackendError,
        fmt::format("the run's store can't be hosted: {}; there is {}. HINT: another port",
                    text_of(error), occupant(port)));
  }
}

StorePointer open_store(const std::string& address, int port, Deadline deadline) {
  (void)connect_tcp(address, port, deadline);
  const auto limit =
      std::max<std::chrono::milliseconds>(std::chrono::milliseconds(left_ms(deadline)), 1000ms);
  const auto wait = std::min<std::chrono::milliseconds>(limit, kAnswer);
  // libtorch's constructor has no limit for the answer of something that takes its connection and is no store;
  // the thread is left to it then.
  auto opened = std::make_shared<std::promise<StorePointer>>();
  auto result = opened->get_future();
  std::thread([=] {
    try {
      c10d::TCPStoreOptions options;
      options.port = static_cast<std::uint16_t>(port);
      options.waitWorkers = false;
      options.timeout = wait;
      opened->set_value(c10::make_intrusive<c10d::TCPStore>(address, options));
    } catch (...) {
      opened->set_exception(std::current_exception());
    }
  }).detach();
  std::string why = fmt::format("it does not answer within {} s", wait.count() / 1000.0);
  if (result.wait_for(wait) == std::future_status::ready) {
    try {
      return result.get();
    } catch (const std::exception& error) {
      why = text_of(error);
    }
  }
  C10_THROW_ERROR(DistBackendError, "what listens there is no store: " + why);
}

StorePointer connect_store(const Place& place, std::chrono::milliseconds timeout) {
  if (place.world_size == 1 && !place.store_hosted) return c10::make_intrusive<c10d::HashStore>();
  check_interface(place);
  const auto deadline = Clock::now() + timeout;
  const auto where = fmt::format("store of the run at {}:{} (rank {})", place.master_addr,
                                 place.master_port, place.rank);
  const bool hosts = place.rank == 0 && !place.store_hosted;
  StorePointer store = hosts ? host_store(place.master_port, text_of_run(place)) : nullptr;
  StorePointer as_others;  // the same as the other ranks see it
  try {
    as_others = open_store(place.master_addr, place.master_port,
                           hosts ? std::min(deadline, Clock::now() + kAnswer) : deadline);
  } catch (const c10::DistBackendError& error) {
    C10_THROW_ERROR(
        DistBackendError,
        hosts ? fmt::format("{}, which this host has, can't be reached by that address: {}", where,
                            text_of(error))
              : fmt::format("{} can't be reached within {} s: {}", where, timeout.count() / 1000.0,
                            text_of(error)));
  }
  if (!hosts) store = as_others;
  store->setTimeout(timeout);
  if (!place.on_one_host())
    if (const auto mine = address_towards(place.master_addr); !is_loopback(mine))
      store->set(kOtherHost, mine);
  if (place.attempt > 0)
    store = c10::make_intrusive<c10d::PrefixStore>(fmt::format("attempt {}", place.attempt), store);
  check_owner(*store, place, where);
  if (hosts) check_owner(*as_others, place, where);
  return store;
}

void check_same(const Place& place, c10d::Store& store, const std::string& topic,
                const nlohmann::json& facts, std::chrono::milliseconds timeout) {
  if (place.world_size == 1) return;
  try {
    Comparison(place, store, topic, timeout).run(facts);
  } catch (const c10::DistNetworkError& error) {
    throw_store_gone(place, error);
  }
}

StorePointer join_run(const Place& place, std::chrono::milliseconds timeout) {
  auto store = connect_store(place, timeout);
  if (place.world_size > 1) store->set(cpu_key(place.rank), at::get_cpu_capability());
  check_same(place, *store, "code", {{"braid", build_text()}, {"libtorch", libtorch_version()}},
             timeout);
  if (place.world_size > 1 && place.rank == 0) warn_of_other_cpus(place, *store);
  // Ranks that braid has started on one host reach it by loopback.
  if (place.world_size > 1 && !(place.launched && place.on_one_host())) check_reach(place, store);
  share_cores(place, *store);
  return store;
}

void part(const Place& place, c10d::Store& store, const std::string& topic,
          std::int64_t num_ranks) {
  const auto heard = fmt::format("braid/{}/heard", topic);
  if (place.rank == 0) {
    for (const auto until = Clock::now() + kFarewell;
         store.add(heard, 0) < num_ranks - 1 && Clock::now() < until;)
      std::this_thread::sleep_for(5ms);
    return;
  }
  try {
    store.add(heard, 1);
  } catch (const c10::DistNetworkError&) {  // rank 0 has gone, with the store
  }
}

std::string said_by(const Place& place, c10d::Store& store, const std::string& key, int rank) {
  try {
    return store.get_to_str(key);
  } catch (const c10::DistStoreError&) {
    part(place, store, key, place.world_size - 1);
    C10_THROW_ERROR(DistBackendError, text_of_missing_ranks({rank}, place, store.getTimeout()));
  } catch (const c10::DistNetworkError& error) {
    throw_store_gone(place, error);
  }
}

std::string listening_address(const Place& place, const StorePointer& store) {
  if (!env().interface.empty()) return own_address(env().interface);
  if (place.on_one_host()) return "127.0.0.1";
  auto address = address_towards(place.master_addr);
  if (is_loopback(address)) {  // on MASTER_ADDR's host
    auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
    const auto root = prefixed != nullptr ? prefixed->getUnderlyingNonPrefixStore() : store;
    if (root->check({kOtherHost})) address = address_towards(root->get_to_str(kOtherHost));
  }
  TORCH_CHECK_WITH(DistBackendError, !address.empty(), "rank ", place.rank,
                   ": no address of this host is known to lead to the others (MASTER_ADDR is ",
                   place.master_addr,
                   "). HINT: BRAID_INTERFACE, a network interface or an address");
  return address;
}

}  // namespace braid
