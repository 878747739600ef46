// braid bench step: a training step with random tokens, and how much of its communication is hidden.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "braid/cli/bench.h"
#include "braid/cli/output.h"
#include "braid/comm/collectives.h"
#include "braid/train/run.h"
#include "braid/train/trainer.h"

namespace braid::cli {
namespace {

constexpr double kLeastComm = 0.03;  // of a serial step: less is within what equal steps differ by

std::string mode_of(const TrainConfig& config) {
  const MatmulOptions options = matmul_options(config);
  switch (options.mode) {
    case Mode::serial:
      return "serial";
    case Mode::chunked:
      return fmt::format("chunked{}", options.num_chunks);
    case Mode::fused:
      return "fused";
    case Mode::automatic:
      return "auto";
  }
  TORCH_INTERNAL_ASSERT(false, "no such mode");
}

}  // namespace

Trainer::BatchSource random_batches(const TrainConfig& config, int dp_rank) {
  return [=](std::int64_t iteration, std::int64_t micro_batch) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(
        static_cast<std::uint64_t>((iteration * 1000 + micro_batch) * 1000 + dp_rank));
    const at::Tensor text =
        at::randint(config.vocab_size, {config.seq_length + 1, config.micro_batch_size}, generator,
                    at::TensorOptions(at::kLong));
    return Batch{text.narrow(0, 0, config.seq_length).contiguous(),
                 text.narrow(0, 1, config.seq_length).contiguous()};
  };
}

void bench_step(const TrainConfig& config, const Place& place, bool json) {
  const Mesh mesh = start_training(config, place);
  const int tp = mesh.tp->size();
  // The same shards without their communication: what is left of a step when every transfer is free.
  Mesh alone{{}, Group::create_stub("tp", mesh.tp->rank(), tp), Group::create_stub("dp", 0, 1)};
  // The same ranks over the process group's own collectives.
  GroupOptions engine_options;
  engine_options.engine_collectives = true;
  engine_options.timeout = timeout_of(config);
  engine_options.store_rank = place.store_rank();
  const Mesh engine = make_mesh(c10::make_intrusive<c10d::PrefixStore>("gloo", mesh.store),
                                place.rank, place.world_size, tp, engine_options);
  const Trainer::BatchSource batch = random_batches(config, mesh.dp->rank());
  Trainer trainer(config, mesh, batch);
  std::map<std::string, trace::Totals> measured, serial;
  std::int64_t iteration = 0;
  const int rounds = static_cast<int>(config.train_iters);
  const auto run = [&](bool is_serial, std::map<std::string, trace::Totals>& sums) {
    trainer.set_serial(is_serial);
    for (const auto& [op, totals] : trainer.step(iteration).totals)
      if (iteration >= 2) sums[op] += totals;  // the first of each kind warms up
    ++iteration;
  };
  std::vector<Candidate> candidates{{"step", [&] { run(false, measured); }},
                                    {"serial", [&] { run(true, serial); }}};
  std::optional<Trainer> stub, gloo;
  if (place.world_size > 1) {
    TrainConfig without_file = config;
    without_file.tuner_file.clear();
    TrainConfig own_part = without_file;
    own_part.global_batch_size /= mesh.dp->size();  // as many micro-batches
    stub.emplace(own_part, alone, batch);
    stub->model().set_matmul({Mode::fused});
    candidates.push_back({"no_comm", [&] { (void)stub->step(iteration); }});
    without_file.overlap_grad_reduce = false;
    gloo.emplace(without_file, engine, batch);
    gloo->set_serial(true);
    candidates.push_back({"serial_gloo", [&] { (void)gloo->step(iteration); }});
  }
  // All kinds in every round, so that the machine's moods meet all; the first round warms up.
  const auto times = time_interleaved(*mesh.world, candidates, rounds);
  if (place.rank != 0) return;
  const auto rows = overlap_by_operation(measured, rounds, serial, rounds);
  Overlap overlap = total_overlap(rows);
  overlap.compute_s = std::max(0.0, times[0] - overlap.exposed_s);
  nlohmann::json line{
      {"step_s", times[0]},
      {"compute_s", overlap.compute_s},
      {"comm_s", overlap.comm_s},
      {"hidden_comm_s", overlap.hidden_s},
      {"exposed_comm_s", overlap.exposed_s},
      {"serial_step_s", times[1]},
      {"tokens_per_s", static_cast<double>(trainer.tokens_per_step()) / times[0]},
      {"tflop_s_per_rank", trainer.flops_per_step() / times[0] / place.world_size * 1e-12},
      {"ranks", place.world_size},
      {"tensor_model_parallel_size", config.tensor_model_parallel_size},
      {"sequence_parallel", config.sequence_parallel},
      {"overlap_grad_reduce", config.overlap_grad_reduce},
      {"mode", mode_of(config)},
      {"shared_memory", mesh.world->on_one_host()},
      {"num_layers", config.num_layers},
      {"hidden_size", config.hidden_size},
      {"seq_length", config.seq_length},
      {"dtype", config.bf16 ? "bf16" : "f32"}};
  // The share that is hidden, by the spans and from whole steps; they should tell the same.
  std::string doubt;
  if (stub) {
    const double by_spans = overlap.comm_s > 0 ? overlap.hidden_s / overlap.comm_s : 0;
    line["no_comm_step_s"] = times[2];
    line["serial_gloo_step_s"] = times[3];
    line["hidden_by_spans"] = by_spans;
    line["hidden_by_steps"] = nullptr;
    line["shares_agree"] = nullptr;
    const double comm_s = times[1] - times[2];
    if (comm_s < kLeastComm * times[1]) {
      doubt = fmt::format(
          "hidden_by_steps can't be told: a step without communication takes {:.1f} % less than a "
          "serial one, at least {:.0f} % are needed.\n",
          100 * comm_s / times[1], 100 * kLeastComm);
    } else {
      const double by_steps = 1 - (times[0] - times[2]) / comm_s;
      const bool agree = std::abs(by_spans - by_steps) <= 0.05;
      line["hidden_by_steps"] = by_steps;
      line["shares_agree"] = agree;
      if (!agree)
        doubt = fmt::format(
            "The spans' hidden share ({:.2f}) and the steps' ({:.2f}) differ by more than 0.05: "
            "ranks wait for each other's compute, or the machine was not quiet.\n",
            by_spans, by_steps);
    }
  }
  if (json) {
    print("{}\n", line.dump());
    return;
  }
  for (const auto& [name, value] : line.items())
    print("{:<28} {}\n", name,
          value.is_number_float() ? fmt::format("{:.4g}", value.get<double>())
          : value.is_string()     ? value.get<std::string>()
                                  : value.dump());
  print("{}{}", overlap_table(rows), doubt);
}

}  // namespace braid::cli
