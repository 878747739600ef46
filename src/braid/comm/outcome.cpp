// Finds the cause among the ends of the ranks.
#include "braid/comm/outcome.h"

#include <fmt/format.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

namespace braid {
namespace {

constexpr int kCallersError = 2;  // a rank's exit code

/// What the rank left with report_to_launcher; empty if nothing.
std::string report_of(c10d::Store* store, int rank) {
  const auto key = report_key(rank);
  return store != nullptr && store->check({key}) ? store->get_to_str(key) : std::string();
}

}  // namespace

std::string report_key(int rank) { return fmt::format("braid/report/{}", rank); }

int RankEnd::exit_code() const { return WIFEXITED(status) ? WEXITSTATUS(status) : -1; }

bool RankEnd::killed_by_us() const {
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && ending_with == SIGKILL;
}

bool RankEnd::killed_by_others() const {
  return WIFSIGNALED(status) && WTERMSIG(status) != ending_with &&
         !(ending_with == SIGKILL && WTERMSIG(status) == SIGTERM);
}

void to_json(nlohmann::json& json, const RankEnd& end) {
  json = {end.rank, end.host, end.pid, end.status, end.ending_with};
}
void from_json(const nlohmann::json& json, RankEnd& end) {
  end = {json.at(0), json.at(1), json.at(2), json.at(3), json.at(4)};
}

void to_json(nlohmann::json& json, const Outcome& outcome) {
  json = {{"code", outcome.code}, {"lines", outcome.lines}};
}
void from_json(const nlohmann::json& json, Outcome& outcome) {
  json.at("code").get_to(outcome.code);
  json.at("lines").get_to(outcome.lines);
}

Outcome outcome_of(const std::vector<RankEnd>& ended, int num_hosts,
                   const std::vector<std::string>& lost_hosts, c10d::Store* store,
                   int interrupted) {
  Outcome outcome;
  const auto say = [&](std::string text) { outcome.lines.push_back(std::move(text)); };
  const auto name = [&](const RankEnd& end) {
    return num_hosts > 1 ? fmt::format("rank {} (pid {} on host {})", end.rank, end.pid, end.host)
                         : fmt::format("rank {} (pid {})", end.rank, end.pid);
  };
  const auto first = [&](auto is_cause) -> const RankEnd* {
    const auto i = std::find_if(ended.begin(), ended.end(), is_cause);
    return i == ended.end() ? nullptr : &*i;
  };
  // Each text that a rank left, once.
  const auto say_reports = [&] {
    std::vector<std::string> said{""};
    for (const auto& end : ended) {
      const auto text = report_of(store, end.rank);
      if (std::find(said.begin(), said.end(), text) != said.end()) continue;
      said.push_back(text);
      say(fmt::format("rank {}: {}", end.rank, text));
    }
  };
  const auto* killed = first(
      [](const RankEnd& end) { return end.killed_by_others() && WTERMSIG(end.status) != SIGPIPE; });
  if (killed == nullptr && lost_hosts.empty() && !ended.empty() && ended[0].killed_by_others())
    return {128 + SIGPIPE, {}};  // nobody reads its output any more: an end, and no error
  if (killed != nullptr && interrupted == 0) {
    say_reports();
    const int signal = WTERMSIG(killed->status);
    say(fmt::format("{} was killed by signal {} ({}); the run has ended", name(*killed), signal,
                    strsignal(signal)));
    outcome.code = 1;
    return outcome;
  }
  if (!lost_hosts.empty() && interrupted == 0) {
    say_reports();
    for (const auto& host : lost_hosts) say(fmt::format("lost {}; the run has ended", host));
    outcome.code = 1;
    return outcome;
  }
  if (const auto* end = first([](const auto& one) { return one.exit_code() == kCallersError; })) {
    const auto text = report_of(store, end->rank);
    std::set<int> hosts;  // that say it
    for (const auto& other : ended)
      if (report_of(store, other.rank) == text) hosts.insert(other.host);
    const bool of_all = static_cast<int>(hosts.size()) == num_hosts;
    say(!text.empty()
            ? (of_all ? text : fmt::format("{}: {}", name(*end), text))
            : fmt::format("{} exited with code {}; the run has ended", name(*end), kCallersError));
    outcome.code = kCallersError;
    return outcome;
  }
  if (const auto* end = first([](const auto& one) { return one.exit_code() > 0; })) {
    say_reports();
    for (const auto& other : ended) {
      if (other.killed_by_us() && report_of(store, other.rank).empty())
        say(fmt::format("{} did not react (it was frozen, or hangs) and was killed", name(other)));
    }
    say(fmt::format("{} exited with code {}; the run has ended", name(*end), end->exit_code()));
    outcome.code = end->exit_code();
    return outcome;
  }
  const bool all_succeeded =
      std::all_of(ended.begin(), ended.end(), [](const auto& end) { return end.status == 0; });
  outcome.code = interrupted == 0 || all_succeeded ? 0 : 128 + interrupted;
  return outcome;
}

}  // namespace braid
