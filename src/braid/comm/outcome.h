// What a run comes to: how its ranks ended, told in a few lines and an exit code.
#pragma once

#include <sys/types.h>

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace braid {

/// How a rank ended.
struct RankEnd {
  int rank = 0, host = 0;
  pid_t pid = 0;
  int status = 0;       // as waitpid gives it
  int ending_with = 0;  // the last signal that its launcher sent

  int exit_code() const;  // -1: a signal ended it
  bool killed_by_us() const;
  bool killed_by_others() const;
};
void to_json(nlohmann::json& json, const RankEnd& end);
void from_json(const nlohmann::json& json, RankEnd& end);

struct Outcome {
  int code = 0;                    // of the launchers
  std::vector<std::string> lines;  // errors, to be said
};
void to_json(nlohmann::json& json, const Outcome& outcome);
void from_json(const nlohmann::json& json, Outcome& outcome);

/// Tells the cause before its consequences: a rank that was killed, a host that was lost, a caller's mistake (exit code
/// 2), another exit code.
///   ended        of all ranks that are known of, in this order
///   num_hosts    where there are several, ranks are named with theirs
///   lost_hosts   as they are to be named
///   store        where ranks left their reports; null: they can't be read
///   interrupted  the signal that ended the run; 0: none
Outcome outcome_of(const std::vector<RankEnd>& ended, int num_hosts,
                   const std::vector<std::string>& lost_hosts, c10d::Store* store, int interrupted);

/// Where a rank leaves the text of its error in the store.
std::string report_key(int rank);

}  // namespace braid
