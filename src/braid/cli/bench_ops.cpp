// braid bench ops: an operation in every mode, beside the matmul alone and the communication alone.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "braid/cli/bench.h"
#include "braid/comm/collectives.h"
#include "braid/core/check.h"
#include "braid/ops/collective_matmul.h"

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

/// The collective as torch.distributed's users have it: c10d's own over Gloo, whole and blocking.
void c10d_collective(const Group& gloo, const std::string& op, at::Tensor out, at::Tensor in) {
  std::vector<at::Tensor> message{out};
  const auto work = op == "all_gather_matmul"       ? gloo.backend()._allgather_base(out, in)
                    : op == "matmul_reduce_scatter" ? gloo.backend()._reduce_scatter_base(out, in)
                                                    : gloo.backend().allreduce(message);
  work->wait();
}

at::Tensor random(at::IntArrayRef shape, at::ScalarType dtype) {
  return at::randn(shape).to(dtype);
}

/// What is timed at once takes about this long or longer, seconds.
constexpr double kShortest = 20e-3;

/// As --dtype has it.
const char* name_of(at::ScalarType dtype) {
  return dtype == at::kFloat ? "f32" : dtype == at::kHalf ? "fp16" : "bf16";
}

nlohmann::json as_json(const OpCase& c, int ranks, const std::vector<Candidate>& candidates,
                       const std::vector<double>& times, double fused_per_gemm, double efficiency,
                       const char* serial) {
  nlohmann::json line{
      {"op", c.op},    {"m", c.m}, {"n", c.n}, {"k", c.k}, {"dtype", name_of(c.dtype)},
      {"ranks", ranks}};
  for (std::size_t i = 0; i < candidates.size(); ++i) line[candidates[i].name + "_s"] = times[i];
  line["fused_per_gemm"] = fused_per_gemm;
  line["overlap_efficiency"] = efficiency;
  line["serial"] = serial;  // what the efficiency is against
  return line;
}

}  // namespace

std::vector<double> time_interleaved(const Group& group, const std::vector<Candidate>& candidates,
                                     int rounds, int calls) {
  const auto num = static_cast<std::int64_t>(candidates.size());
  at::Tensor seconds = at::zeros({num, rounds}, at::kDouble);
  std::vector<std::int64_t> order(candidates.size());
  std::iota(order.begin(), order.end(), 0);
  std::mt19937 same_on_all_ranks(1);
  for (int round = -1; round < rounds; ++round) {
    std::shuffle(order.begin(), order.end(), same_on_all_ranks);
    for (const std::int64_t c : order) {
      barrier(group);
      const auto begin = std::chrono::steady_clock::now();
      for (int call = 0; call < calls; ++call) candidates[static_cast<std::size_t>(c)].run();
      const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
      if (round >= 0) seconds[c][round] = elapsed.count() / calls;
    }
  }
  const at::Tensor medians =
      std::get<0>(all_reduce(group, seconds, ReduceOp::max).median(1)).contiguous();
  return {medians.const_data_ptr<double>(), medians.const_data_ptr<double>() + num};
}

void bench_op(const OpCase& c, const Place& place) {
  const auto store = connect_store(place, env().timeout);
  share_cores(place, *store);
  const int ranks = place.world_size;
  const auto group = Group::create(store, "tp", place.rank, ranks);
  GroupOptions no_memory;
  no_memory.shared_memory = false;
  const auto gloo = Group::create(store, "gloo", place.rank, ranks, no_memory);
  const Op op = kOps.at(c.op);
  const std::vector<std::int64_t> rows = split_rows(c.m, ranks);
  const bool gathers = c.op == "all_gather_matmul";

  const auto share = [&](std::int64_t whole) {
    return split_rows(whole, ranks)[static_cast<std::size_t>(place.rank)];
  };
  const at::Tensor x =
      gathers ? random({share(c.m), c.k}, c.dtype) : random({c.m, share(c.k)}, c.dtype);
  const at::Tensor w =
      gathers ? random({share(c.n), c.k}, c.dtype) : random({c.n, share(c.k)}, c.dtype);
  // The matmul alone: this rank's share, uncut, into memory that is there.
  const at::Tensor x_whole = gathers ? random({c.m, c.k}, c.dtype) : x;
  at::Tensor y = at::empty({c.m, w.size(0)}, x.options());
  const at::Tensor partial = random({c.m, c.n}, c.dtype);
  const bool even = c.m % ranks == 0;  // what c10d's collectives ask for
  at::Tensor gathered = at::empty({c.m, c.k}, x.options()),
             scattered = at::empty({c.m / ranks, c.n}, x.options());
  const auto c10d_alone = [&] {
    if (gathers)
      c10d_collective(*gloo, c.op, gathered, x);
    else if (c.op == "matmul_reduce_scatter")
      c10d_collective(*gloo, c.op, scattered, partial);
    else
      c10d_collective(*gloo, c.op, partial, partial);
  };
  const auto c10d_serial = [&] {  // with results of its own, as a layer makes them
    if (gathers) {
      const at::Tensor full = at::empty_like(gathered);
      c10d_collective(*gloo, c.op, full, x);
      (void)at::mm(full, w.t());
    } else {
      const at::Tensor product = at::mm(x, w.t());
      c10d_collective(*gloo, c.op,
                      c.op == "matmul_reduce_scatter" ? at::empty_like(scattered) : product,
                      product);
    }
  };
  const auto communicate = [&](const Group& over) {
    if (gathers)
      (void)all_gather(over, x);
    else if (c.op == "matmul_reduce_scatter")
      (void)reduce_scatter(over, partial);
    else
      (void)all_reduce(over, partial);
  };
  const auto in_mode = [&](const std::shared_ptr<Group>& over, MatmulOptions options) {
    return [&, over, options] { (void)op(*over, x, w, options, rows); };
  };
  std::vector<Candidate> candidates{{"gemm", [&] { at::mm_out(y, x_whole, w.t()); }},
                                    {"fused", in_mode(group, {Mode::fused})},
                                    {"auto", in_mode(group, {Mode::automatic})},
                                    {"serial_shm", in_mode(group, {Mode::serial})}};
  for (const int chunks : {2, 4, 8})
    candidates.push_back(
        {fmt::format("chunked{}", chunks), in_mode(group, {Mode::chunked, chunks})});
  candidates.push_back({"comm_shm", [&] { communicate(*group); }});
  candidates.push_back({"serial_p2p", in_mode(gloo, {Mode::serial})});
  candidates.push_back({"comm_p2p", [&] { communicate(*gloo); }});
  if (even) {
    candidates.push_back({"serial_gloo", c10d_serial});
    candidates.push_back({"comm_gloo", c10d_alone});
  }
  const double gemm_alone = time_interleaved(*group, {candidates[0]}, 3)[0];
  const int calls = static_cast<int>(std::ceil(std::min(kShortest / gemm_alone, 100.0)));
  const std::vector<double> times = time_interleaved(*group, candidates, c.rounds, calls);
  if (place.rank != 0) return;

  const auto time_of = [&](const std::string& name) {
    const auto found = std::find_if(candidates.begin(), candidates.end(),
                                    [&](const auto& x2) { return x2.name == name; });
    return times[static_cast<std::size_t>(found - candidates.begin())];
  };
  const char* baseline = even ? "serial_gloo" : "serial_p2p";
  const double gemm = time_of("gemm"), serial = time_of(baseline);
  const auto efficiency = [&](double t) { return 1 - (t - gemm) / (serial - gemm); };
  if (c.json) {
    fmt::print("{}\n", as_json(c, ranks, candidates, times, time_of("fused") / gemm,
                               efficiency(time_of("fused")), baseline)
                           .dump());
    return;
  }
  fmt::print("{} m {} n {} k {} {}, {} ranks, median of {} rounds; E against {}\n", c.op, c.m, c.n,
             c.k, name_of(c.dtype), ranks, c.rounds, baseline);
  fmt::print("{:<12} {:>10} {:>8} {:>8}\n", "", "ms", "/ gemm", "E");
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const bool is_part = candidates[i].name == "gemm" || candidates[i].name.starts_with("comm");
    fmt::print("{:<12} {:>10.3f} {:>8.3f} {:>8}\n", candidates[i].name, 1e3 * times[i],
               times[i] / gemm, is_part ? "" : fmt::format("{:.3f}", efficiency(times[i])));
  }
  fmt::print(
      "gemm: this rank's matmul alone, uncut. comm: the collective alone. shm: over shared memory; "
      "gloo: c10d's own\ncollective; p2p: braid's over c10d's messages. E: overlap efficiency, 1 - "
      "(T - gemm) / (serial - gemm).\n");
}

}  // namespace braid::cli
