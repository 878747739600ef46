// Connects the launchers of a run's hosts and passes on what they have to say.
#include "braid/comm/launchers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <random>

#include "braid/comm/join.h"
#include "braid/core/build.h"
#include "braid/core/check.h"

namespace braid {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono_literals::operator""s;
using nlohmann::json;

constexpr auto kPort = "braid/launchers";  // in the store: where host 0's launcher listens, or:
constexpr auto kBegun = "begun";
constexpr auto kAtOnce = 5s;  // for what needs no waiting for anybody to start

std::string host_name() {
  char name[256] = "";
  (void)::gethostname(name, sizeof name - 1);
  return name;
}

json refusal(const std::string& why, bool is_callers_mistake) {
  return {{"refused", why}, {"is_callers_mistake", is_callers_mistake}};
}

[[noreturn]] void throw_refusal(const json& message) {
  const auto why = message.at("refused").get<std::string>();
  BRAID_CHECK(!message.at("is_callers_mistake").get<bool>(), why);
  C10_THROW_ERROR(DistBackendError, why);
}

}  // namespace

Launchers::Launchers(const Nodes& hosts, int num_ranks, std::chrono::milliseconds timeout)
    : hosts_(hosts), num_ranks_(num_ranks), timeout_(timeout) {
  if (is_first())
    gather();
  else
    come();
  received_ = Clock::now();
}

json Launchers::facts() const {
  return {{"braid", build_text()}, {"--nnodes", hosts_.num}, {"--nproc", num_ranks_}};
}

std::string Launchers::name_of(int host) const {
  const std::string address = host == 0 ? hosts_.master_addr : all_.at(host).wire.address();
  return fmt::format("host {} ({})", host, address);
}

void Launchers::refuse_all(const json& message) {
  for (auto& [_, host] : all_) host.wire.send(message);
  for (auto& [_, host] : all_) host.wire.finish(Clock::now() + 1s);
  throw_refusal(message);
}

void Launchers::gather() {
  run_ = fmt::format("braid launch, pid {} on {} ({:08x})", ::getpid(), host_name(),
                     std::random_device()());
  const auto deadline = Clock::now() + timeout_;
  store_ =
      host_store(hosts_.master_port, fmt::format("{}, {} ranks", run_, hosts_.num * num_ranks_));
  std::string seen;
  try {
    seen = open_store(hosts_.master_addr, hosts_.master_port, Clock::now() + kAtOnce)
               ->get_to_str(kRunKey);
  } catch (const c10::DistStoreError&) {
    seen = "there is the store of another program";
  } catch (const c10::Error& error) {
    seen = error.what_without_backtrace();
  }
  BRAID_CHECK(seen == store_->get_to_str(kRunKey), "--master-addr ", hosts_.master_addr,
              " does not lead to this host, which has --node-rank 0: ", seen);
  const Descriptor listener = listen_tcp(0, Listening::everywhere);
  store_->set(kPort, std::to_string(port_of(listener)));
  all_[0];
  while (static_cast<int>(all_.size()) < hosts_.num) {
    std::vector<pollfd> entries{{listener.get(), POLLIN, 0}};
    for (const int socket : sockets()) entries.push_back({socket, POLLIN, 0});
    const int left = left_ms(deadline);
    if (left == 0) {
      std::vector<int> missing;
      for (int host = 0; host < hosts_.num; ++host)
        if (!all_.contains(host)) missing.push_back(host);
      refuse_all(
          refusal(fmt::format("host{} {} of {} (--node-rank) did not come to {}:{} within {} s",
                              missing.size() == 1 ? "" : "s", fmt::join(missing, ", "), hosts_.num,
                              hosts_.master_addr, hosts_.master_port,
                              static_cast<double>(timeout_.count()) / 1000.0),
                  false));
    }
    ::poll(entries.data(), entries.size(), left);
    for (auto& [_, host] : all_) (void)host.wire.next();
    // One that has gone may come again.
    std::erase_if(all_,
                  [](const auto& one) { return one.first > 0 && !one.second.wire.is_open(); });
    if ((entries[0].revents & POLLIN) != 0)
      greet(LineSocket(Descriptor(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)),
                       timeout_));
  }
  store_->set(kPort, kBegun);
  for (auto& [_, host] : all_) host.wire.send({{"welcome", run_}});
}

void Launchers::greet(LineSocket wire) {
  const auto hello = wire.wait(Clock::now() + 2s);
  if (!hello || !hello->value("hello", json()).is_number_unsigned()) return;  // a stranger
  const int number = hello->at("hello");
  const auto theirs = hello->value("facts", json::object());
  const bool is_there = all_.contains(number);
  const auto name =
      is_there ? name_of(number) : fmt::format("host {} ({})", number, wire.address());
  if (is_there) {
    wire.send(refusal(fmt::format("--node-rank {} has come already: {}. It is given twice, or the "
                                  "run at {}:{} is another one",
                                  number, name, hosts_.master_addr, hosts_.master_port),
                      true));
    return;
  }
  all_[number].wire = std::move(wire);
  const json own = facts();
  for (const auto& [what, mine] : own.items())
    if (mine != theirs.value(what, json()))
      refuse_all(refusal(fmt::format("{} of host 0 is {}, of {} {}", what, mine.dump(), name,
                                     theirs.value(what, json()).dump()),
                         true));
}

void Launchers::come() {
  const auto deadline = Clock::now() + timeout_;
  const auto where =
      fmt::format("store of the run at {}:{}", hosts_.master_addr, hosts_.master_port);
  auto& first = all_[0].wire;
  all_[hosts_.rank];
  std::string port, run;
  const char* hint = ". HINT: braid launch with --node-rank 0 on that host";
  try {
    const auto store = open_store(hosts_.master_addr, hosts_.master_port, deadline);
    hint = "";
    store->setTimeout(2 * kAtOnce);  // host 0 first looks whether it finds itself
    port = store->get_to_str(kPort);
    run = store->get_to_str(kRunKey);
    if (port != kBegun)
      first = LineSocket(connect_tcp(hosts_.master_addr, std::stoi(port), deadline), timeout_);
  } catch (const c10::DistStoreError&) {
    C10_THROW_ERROR(DistBackendError, where + " belongs to another run: not of braid launch");
  } catch (const c10::Error& error) {
    const std::string why = error.what_without_backtrace();
    const bool refused = why.find("nothing listens there") != std::string::npos;
    C10_THROW_ERROR(DistBackendError, fmt::format("{} can't be reached within {} s: {}{}", where,
                                                  static_cast<double>(timeout_.count()) / 1000.0,
                                                  why, refused ? hint : ""));
  }
  TORCH_CHECK_WITH(DistBackendError, port != kBegun, where,
                   " belongs to another run, which has begun with all its hosts: ", run);
  first.send({{"hello", hosts_.rank}, {"facts", facts()}});
  // Host 0 may have begun to wait later.
  const auto answer = first.wait(Clock::now() + timeout_ + kAtOnce);
  TORCH_CHECK_WITH(DistBackendError, answer, "lost ", name_of(0), " before the run began");
  if (!answer->contains("welcome")) throw_refusal(*answer);
  run_ = answer->at("welcome");
}

std::vector<int> Launchers::sockets() const {
  std::vector<int> open;
  for (const auto& [_, host] : all_)
    if (host.wire.is_open()) open.push_back(host.wire.socket());
  return open;
}

void Launchers::begin_end(int host, int signal) {
  if (std::find(order_.begin(), order_.end(), host) == order_.end()) order_.push_back(host);
  if (!end_) end_ = signal;
}

void Launchers::receive() {
  // A launcher that was stopped and goes on has not listened meanwhile.
  const auto now = Clock::now();
  const auto passed = std::min<Clock::duration>(now - std::exchange(received_, now), 1s);
  for (auto& [number, host] : all_) {
    if (!host.wire.is_open()) continue;
    host.silent += passed;
    while (const auto message = host.wire.next()) {
      host.silent = {};
      if (message->contains("end")) begin_end(number, message->at("end"));
      if (message->contains("ended")) host.ended = message->at("ended").get<std::vector<RankEnd>>();
      if (message->contains("outcome")) outcome_ = message->at("outcome").get<Outcome>();
    }
    if (host.silent > std::max<Clock::duration>(timeout_, 2s)) host.wire.close();
    if (!host.wire.is_open() && !host.ended && !outcome_) begin_end(number, 0);
  }
  if (now - told_ < timeout_ / 4) return;
  told_ = now;
  for (auto& [_, host] : all_) host.wire.send({{"alive", true}});
}

void Launchers::end_others(int signal) {
  if (std::exchange(has_told_, true)) return;
  begin_end(hosts_.rank, signal);
  for (auto& [_, host] : all_) host.wire.send({{"end", signal}});
}

void Launchers::report(const std::vector<RankEnd>& ended) {
  all_[hosts_.rank].ended = ended;
  if (!is_first()) all_[0].wire.send({{"ended", ended}});
}

bool Launchers::is_complete() const {
  if (!is_first()) return outcome_ || !all_.at(0).wire.is_open();
  return std::all_of(all_.begin(), all_.end(), [](const auto& one) {
    return one.second.ended || (one.first > 0 && !one.second.wire.is_open());
  });
}

Outcome Launchers::outcome(int interrupted) {
  if (outcome_) return *outcome_;
  std::vector<int> order = order_;
  std::vector<std::string> lost;
  for (const auto& [number, host] : all_) {
    order.push_back(number);
    if (!host.ended) lost.push_back(name_of(number));
  }
  std::vector<RankEnd> ended;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const auto& host = all_.at(order[i]);
    if (host.ended && std::find(order.begin(), order.begin() + i, order[i]) == order.begin() + i)
      ended.insert(ended.end(), host.ended->begin(), host.ended->end());
  }
  const auto outcome = outcome_of(ended, hosts_.num, lost, store_.get(), interrupted);
  if (is_first()) {
    for (auto& [_, host] : all_) host.wire.send({{"outcome", outcome}});
    for (auto& [_, host] : all_) host.wire.finish(Clock::now() + 1s);
  }
  return outcome;
}

}  // namespace braid
