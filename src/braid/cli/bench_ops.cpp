// braid bench ops: an operation in every mode, beside the matmul alone and the communication alone.
#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "braid/cli/bench.h"
#include "braid/cli/output.h"
#include "braid/comm/collectives.h"
#include "braid/comm/join.h"
#include "braid/comm/shared_memory.h"
#include "braid/comm/timing.h"
#include "braid/core/check.h"
#include "braid/ops/collective_matmul.h"
#include "braid/ops/tuner.h"

namespace braid::cli {
namespace {

/// rows: of all ranks' shards, for what gathers.
using Op = at::Tensor (*)(const Group&, const at::Tensor&, const at::Tensor&, const MatmulOptions&,
                          const std::vector<std::int64_t>& rows);

at::Tensor run_all_gather_matmul(const Group& group, const at::Tensor& x, const at::Tensor& w,
                                 const MatmulOptions& options,
                                 const std::vector<std::int64_t>& rows) {
  return all_gather_matmul(group, x, w, {}, options, rows);
}
at::Tensor run_matmul_reduce_scatter(const Group& group, const at::Tensor& x, const at::Tensor& w,
                                     const MatmulOptions& options,
                                     const std::vector<std::int64_t>&) {
  return matmul_reduce_scatter(group, x, w, {}, options);
}
at::Tensor run_matmul_all_reduce(const Group& group, const at::Tensor& x, const at::Tensor& w,
                                 const MatmulOptions& options, const std::vector<std::int64_t>&) {
  return matmul_all_reduce(group, x, w, {}, options);
}

const std::map<std::string, Op> kOps{{"all_gather_matmul", run_all_gather_matmul},
                                     {"matmul_reduce_scatter", run_matmul_reduce_scatter},
                                     {"matmul_all_reduce", run_matmul_all_reduce}};

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

at::Tensor random(at::IntArrayRef shape, at::ScalarType dtype) {
  return at::randn(shape).to(dtype);
}

/// What is timed at once takes about this long or longer, seconds.
constexpr double kShortest = 20e-3;
/// A plan this much slower than the best one at the first look is not timed further, if even that takes long.
constexpr double kHopeless = 2, kLong = 50e-3;

MatmulOptions options_of(const Plan& plan) {
  MatmulOptions options;
  options.mode = plan.num_chunks == 0   ? Mode::fused
                 : plan.num_chunks == 1 ? Mode::serial
                                        : Mode::chunked;
  options.num_chunks = plan.num_chunks;
  options.ring = plan.ring;
  options.native = plan.native;
  return options;
}

/// "fused ring native" as a name in JSON: fused_ring_native.
std::string name_of(const Plan& plan) {
  std::string name = to_text(plan);
  std::replace(name.begin(), name.end(), ' ', '_');
  return name;
}

struct Way {
  std::string name;
  double s;
};

struct OpTimes {
  double gemm, automatic, auto_again, serial_gloo;
  std::vector<Way> plans, communication;
  std::string auto_mode;
  std::size_t shared_memory_bytes;  // of this rank, up to here
  double comm_cpu;  // all threads' seconds of the collective alone, mean of the ranks

  /// The fastest plan whose name begins so, or null.
  const Way* best(const char* prefix) const {
    const Way* best = nullptr;
    for (const Way& way : plans)
      if (way.name.starts_with(prefix) && (best == nullptr || way.s < best->s)) best = &way;
    return best;
  }
  /// Share of what serial costs beyond the matmul that `t` hides.
  double efficiency(double t) const { return 1 - (t - gemm) / (serial_gloo - gemm); }
};

nlohmann::json as_json(const OpCase& c, int ranks, const OpTimes& t) {
  nlohmann::json line{{"op", c.op},
                      {"m", c.m},
                      {"n", c.n},
                      {"k", c.k},
                      {"dtype", tuner::dtype_name(c.dtype)},
                      {"ranks", ranks},
                      {"gemm_s", t.gemm},
                      {"serial_gloo_s", t.serial_gloo},
                      {"auto_s", t.automatic},
                      {"auto_again_s", t.auto_again},
                      {"auto_mode", t.auto_mode},
                      {"best_mode", t.best("")->name},
                      {"serial_s", t.best("serial")->s}};
  if (const Way* fused = t.best("fused")) line["fused_s"] = fused->s;
  for (const Way& way : t.plans) line["plans_s"][way.name] = way.s;
  for (const Way& way : t.communication) line[way.name + "_s"] = way.s;
  line["shared_memory_bytes"] = t.shared_memory_bytes;
  line["comm_cpu_s"] = t.comm_cpu;
  return line;
}

void print_table(const OpCase& c, int ranks, const OpTimes& t) {
  print("{} m {} n {} k {} {}, {} ranks; auto chose {}\n{:<18} {:>10} {:>8} {:>8}\n", c.op, c.m,
        c.n, c.k, tuner::dtype_name(c.dtype), ranks, t.auto_mode, "", "ms", "/ gemm", "E");
  const auto row = [&](const Way& way, bool is_part) {
    print("{:<18} {:>10.3f} {:>8.3f} {:>8}\n", way.name, 1e3 * way.s, way.s / t.gemm,
          is_part ? "" : fmt::format("{:.3f}", t.efficiency(way.s)));
  };
  row({"gemm", t.gemm}, true);
  for (const Way& way : t.plans) row(way, false);
  row({"auto", t.automatic}, false);
  row({"auto again", t.auto_again}, false);
  row({"serial_gloo", t.serial_gloo}, false);
  for (const Way& way : t.communication) row(way, true);
  print(
      "gemm: this rank's matmul alone, uncut. comm: the collective alone. gloo: c10d's own "
      "collectives.\nE: overlap efficiency, 1 - "
      "(T - gemm) / (serial_gloo - gemm).\n");
}

}  // namespace

std::vector<double> time_interleaved(const Group& group, const std::vector<Candidate>& candidates,
                                     int rounds, int calls) {
  std::vector<std::function<void()>> ways;
  for (const Candidate& candidate : candidates) ways.push_back(candidate.run);
  (void)braid::time_interleaved(group, ways, 1, calls);
  const at::Tensor medians =
      std::get<0>(braid::time_interleaved(group, ways, rounds, calls).median(1)).contiguous();
  return {medians.const_data_ptr<double>(), medians.const_data_ptr<double>() + medians.numel()};
}

namespace {

OpTimes measure_op(const OpCase& c, const Group& group, const Group& gloo, int rounds,
                   bool more_chunks) {
  const int ranks = group.size();
  const Op op = kOps.at(c.op);
  const std::vector<std::int64_t> rows = split_rows(c.m, ranks);
  const bool gathers = c.op == "all_gather_matmul";
  const auto share = [&](std::int64_t whole) {
    return split_rows(whole, ranks)[static_cast<std::size_t>(group.rank())];
  };
  const at::Tensor x =
      gathers ? random({share(c.m), c.k}, c.dtype) : random({c.m, share(c.k)}, c.dtype);
  const at::Tensor w =
      gathers ? random({share(c.n), c.k}, c.dtype) : random({c.n, share(c.k)}, c.dtype);
  // The matmul alone: this rank's share, uncut, into memory that is there.
  const at::Tensor x_whole = gathers ? random({c.m, c.k}, c.dtype) : x;
  at::Tensor y = at::empty({c.m, w.size(0)}, x.options());
  const at::Tensor partial = random({c.m, c.n}, c.dtype);
  const auto communicate = [&](const Group& over) {
    if (gathers)
      (void)all_gather(over, x);
    else if (c.op == "matmul_reduce_scatter")
      (void)reduce_scatter(over, partial);
    else
      (void)all_reduce(over, partial);
  };
  const auto in_mode = [&](const Group& over, MatmulOptions options) {
    options.whole_features = gathers ? c.n : c.k;
    return [&, options] { (void)op(over, x, w, options, rows); };
  };

  tuner::forget_choices();
  in_mode(group, {Mode::automatic})();
  OpTimes result{};
  const auto choices = tuner::choices();
  result.auto_mode = name_of(plan_from_text(choices.begin().value()));

  std::vector<Candidate> candidates{{"gemm", [&] { at::mm_out(y, x_whole, w.t()); }},
                                    {"auto", in_mode(group, {Mode::automatic})},
                                    {"auto again", in_mode(group, {Mode::automatic})}};
  candidates.push_back({"serial_gloo", in_mode(gloo, {Mode::serial})});
  const std::size_t first_plan = candidates.size();
  std::vector<Plan> plans = tuner::candidates(
      group, {c.op.c_str(), c.m, c.n, c.k, c.dtype, !gathers, at::isReducedFloatingType(c.dtype)});
  if (more_chunks && group.on_one_host())
    for (const int chunks : {4, 8}) plans.push_back({.num_chunks = chunks});
  for (const Plan& plan : plans)
    candidates.push_back({name_of(plan), in_mode(group, options_of(plan))});
  const std::size_t first_communication = candidates.size();
  candidates.push_back({"comm", [&] { communicate(group); }});
  candidates.push_back({"comm_gloo", [&] { communicate(gloo); }});

  const double gemm_alone = time_interleaved(group, {candidates[0]}, 3)[0];
  std::vector<double> times = time_interleaved(group, candidates, 1);
  const double best =
      *std::min_element(times.begin() + static_cast<std::ptrdiff_t>(first_plan),
                        times.begin() + static_cast<std::ptrdiff_t>(first_communication));
  std::vector<Candidate> contenders;
  std::vector<std::size_t> places;
  double once = 0;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const bool is_plan = i >= first_plan && i < first_communication;
    if (is_plan && best > kLong && times[i] > kHopeless * best) continue;
    contenders.push_back(candidates[i]);
    places.push_back(i);
    once += times[i];
  }
  const int calls = static_cast<int>(std::ceil(std::min(kShortest / gemm_alone, 50.0)));
  constexpr double kCaseSeconds = 5;
  rounds = std::min(rounds, std::max(5, static_cast<int>(kCaseSeconds / (once * calls))));
  const std::vector<double> medians = time_interleaved(group, contenders, rounds, calls);
  for (std::size_t i = 0; i < places.size(); ++i) times[places[i]] = medians[i];
  if (group.memory() != nullptr) result.shared_memory_bytes = group.memory()->bytes();
  constexpr int kCpuCalls = 5;
  const double cpu_before = cpu_seconds();
  for (int i = 0; i < kCpuCalls; ++i) communicate(group);
  const at::Tensor cpu = at::scalar_tensor(cpu_seconds() - cpu_before, at::kDouble);
  result.comm_cpu = all_reduce(group, cpu).item<double>() / kCpuCalls / ranks;
  result.gemm = times[0];
  result.automatic = times[1];
  result.auto_again = times[2];
  result.serial_gloo = times[3];
  for (std::size_t i = first_plan; i < times.size(); ++i)
    (i < first_communication ? result.plans : result.communication)
        .push_back({candidates[i].name, times[i]});
  return result;
}

}  // namespace

std::vector<OpCase> standing_sweep() {
  std::vector<OpCase> cases;
  for (const auto& [op, _] : kOps)
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf})
      for (const auto& [n, k] : {std::pair(1024, 1024), {4096, 1024}, {1024, 4096}, {4096, 4096}})
        for (const int m : {1, 16, 128, 1024, 4096}) cases.push_back({op, m, n, k, dtype});
  return cases;
}

void bench_ops(const std::vector<OpCase>& cases, int rounds, bool json, const Place& place) {
  const auto store = join_run(place, env().timeout);
  nlohmann::json asked{{"--rounds", rounds}};
  for (const OpCase& c : cases)
    asked["the operations"].push_back({c.op, c.m, c.n, c.k, c10::toString(c.dtype)});
  check_same(place, *store, "bench", asked, env().timeout);
  const int ranks = place.world_size;
  GroupOptions options{.store_rank = place.store_rank()};
  const auto group = Group::create(store, "tp", place.rank, ranks, options);
  GroupOptions engine = options;
  engine.engine_collectives = true;
  const auto gloo = Group::create(store, "gloo", place.rank, ranks, engine);
  for (const OpCase& c : cases) {
    const OpTimes times = measure_op(c, *group, *gloo, rounds, cases.size() == 1);
    if (place.rank != 0) continue;
    if (json)
      print("{}\n", as_json(c, ranks, times).dump());
    else
      print_table(c, ranks, times);
  }
}

}  // namespace braid::cli
